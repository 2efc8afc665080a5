"""Writes docs/reference/command-line.md from the parsers: `python tools/command_line.py`."""

import argparse
import re

from pages import ROOT

from treeshard._cli import _parser

PAGE = ROOT / "docs" / "reference" / "command-line.md"
MARK = "<!-- Below: python tools/command_line.py -->\n"


def commands() -> str:
    """A section for each command: what it does, its arguments and its notes."""
    parser = _parser()
    [action] = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return "\n".join(_section(name, one) for name, one in action.choices.items())


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    arguments = [one for one in parser._actions if not isinstance(one, argparse._HelpAction)]
    about = parser.description or ""
    rows = [f"| `{_word(one)}` | {_about(one)} |" for one in arguments]
    parts = [f"## `treeshard {name}`\n", f"{about}\n"]
    parts += ["| argument | |\n|---|---|", "\n".join(rows) + "\n"]
    if parser.epilog:
        notes = re.sub(r"^(?=.)", "    ", parser.epilog.strip("\n"), flags=re.MULTILINE)
        parts += [notes + "\n"]
    return "\n".join(parts)


def _word(one: argparse.Action) -> str:
    """An argument as it is typed: `--step N`, `PATH`."""
    value = one.metavar if one.nargs != 0 else None
    return " ".join(str(part) for part in (*one.option_strings[-1:], value) if part)


def _about(one: argparse.Action) -> str:
    text = one.help or ""
    if one.required and one.option_strings:
        text += "; required"
    if isinstance(one, argparse._AppendAction):
        text += "; may be repeated"
    return text.replace("%%", "%").replace("|", "\\|")


def page(old: str) -> str:
    """The page: what stands above the mark, and the commands."""
    return old.partition(MARK)[0] + MARK + "\n" + commands()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
