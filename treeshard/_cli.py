"""The command line: what can be said on it. Each command is in a module that is loaded for it."""

import argparse
import importlib
import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treeshard._errors import TreeShardError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; 2 for wrong input."""
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="backslashreplace")  # not every terminal has every letter
    try:
        text, code = _command(options.run)(options)
        print(_printable(text))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (TreeShardError, OSError) as error:
        message = str(error)
    except ImportError as error:
        message = _missing(error)
    print(f"treeshard: error: {_printable(message)}", file=sys.stderr)
    return 2


def _command(name: str) -> Callable[[argparse.Namespace], tuple[str, int]]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"treeshard.{module}"), function)


def _missing(error: ImportError) -> str:
    if error.name is None:  # it was raised to say what to install
        return str(error)
    if error.name.partition(".")[0] not in ("etils", "orbax"):
        raise error
    return "this needs Orbax. Install it with `pip install 'treeshard[checkpoint]'`."


def _printable(text: str) -> str:
    """Names in files may hold what would command the terminal."""
    return "".join(
        c if c == "\n" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text
    )


# ------------------------------------------------------------------ what can be said

_PLAN = """\
shapes, as JSON, or a checkpoint, or safetensors, whose header is read:
  {"layers/0/attn/q": {"shape": [1024, 1024], "dtype": "bfloat16"}, "norm": [[1024], "float32"]}

rules, as TOML, the first pattern that matches decides:
  min_size = 16384                    # leaves with fewer elements stay whole
  [[rules]]
  pattern = "norm|bias"
  action = "None"                     # replicate
  [[rules]]
  pattern = "attn/(q|k|v)$"
  action = "P('fsdp', 'tensor')"      # a spec, or a tuple of logical names
  [[rules]]
  pattern = ".*"
  action = "fsdp('fsdp', min_size=0)" # tactics; without min_size, fsdp keeps up to 4 MiB whole
  [logical]
  batch = ["data", "fsdp"]            # axes of logical names

exit code: 0, or 1 if the plan has errors or exceeds --memory, or 2 if the input is wrong
"""
_PATH = """\
PATH is a checkpoint, a directory of checkpoints by step (the latest is taken, or --step), a
safetensors file, the index of several, or a directory with one of these.
"""
_INSPECT = f"""\
{_PATH}
  treeshard inspect run               # the latest step, and which others there are
  treeshard inspect run --step 200
  treeshard inspect model.safetensors --json

exit code: 0, or 2 if there is nothing that can be read
"""
_VERIFY = f"""\
{_PATH}
Of a checkpoint every leaf is read, and its checksum compared with the one that was saved. Tensors
of safetensors files have none: there the headers, the index and the sizes of the files are checked.

exit code: 0, or 1 if something is damaged, or 2 if there is nothing that can be read
"""
_EXPORT = """\
  treeshard export run model.safetensors --only '^model/' --rename '^model/=>' --rename '/=>.'
  treeshard export run/100 model.safetensors --max-file-size 5GB --metadata format=pt

One leaf after the other is read, verified, and written. The file has its name once it is whole, and
replaces one that has it already. The format has arrays alone, of whole bytes: where other leaves
(numbers, strings, PRNG keys, int4) are among those to export, nothing is, unless --skip leaves them
out. With --max-file-size there are several files, and an index that says what is where.

exit code: 0, or 2 if it cannot be exported
"""
_IMPORT = """\
  treeshard import model.safetensors pretrained --rename '\\.=>/'

IN is a file, the index of several, or a directory with one of these. All of it is in memory. The
leaves of the checkpoint have the names of the tensors as their paths.

exit code: 0, or 2 if it cannot be imported
"""
_DIFF = """\
  treeshard diff run/100 run/200
  treeshard diff run model.safetensors --rename '/=>.'

A and B are checkpoints, directories of them by step (the latest is taken), or safetensors. Arrays
differ where their bits do; those with the same checksum are not read. A relative difference is
relative to the larger of two numbers. What is NaN or infinite is counted, and has no difference.

exit code: 0 if nothing differs, or 1, or 2 if there is something that cannot be read
"""
_RENAME = "what matches the regular expression becomes the other, which may have \\1; in turn"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("treeshard", description="Sharding, decided and explained.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: str, what: str, epilog: str) -> Callable[..., Any]:
        made = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        return made.add_argument

    what = "decide how a tree is sharded, from its shapes alone, and say why"
    add = command("plan", "_cli_plan:run_plan", what, _PLAN)
    add("--shapes", type=Path, required=True, metavar="FILE", help="path -> shape and dtype")
    add("--rules", type=Path, required=True, metavar="FILE", help="patterns and actions")
    add("--mesh", required=True, metavar="AXES", help='such as "data=8,fsdp=64,tensor=8"')
    add("--min-size", type=int, metavar="N", help="instead of the rules' own, in elements")
    add("--memory", metavar="BYTES", help="what a device has, such as 80GB: say whether it fits")
    add("--json", action="store_true", help="plan and findings for other programs")

    what = "show what a checkpoint or safetensors holds"
    add = command("inspect", "_cli_look:run_inspect", what, _INSPECT)
    _add_path(add)
    add("--json", action="store_true", help="every leaf, for other programs")

    what = "read all of a checkpoint, and compare checksums"
    _add_path(command("verify", "_cli_look:run_verify", what, _VERIFY))

    add = command("export", "_cli_export:run_export", "write arrays to safetensors", _EXPORT)
    _add_path(add)
    add("out", metavar="OUT", help="such as model.safetensors")
    add("--only", metavar="REGEX", help="leaves whose path has a match")
    add("--rename", action="append", default=[], metavar="REGEX=>NEW", help=_RENAME)
    add("--skip", action="store_true", help="leave out what safetensors does not have")
    add("--max-file-size", metavar="BYTES", help="such as 5GB: more is spread over several files")
    add("--metadata", action="append", default=[], metavar="KEY=TEXT", help="for the file's head")

    what = "make a checkpoint of safetensors"
    add = command("import", "_cli_import:run_import", what, _IMPORT)
    add("source", metavar="IN", help="such as model.safetensors")
    add("out", metavar="CHECKPOINT", help="the directory to make")
    add("--rename", action="append", default=[], metavar="REGEX=>NEW", help=_RENAME)

    what = "say in what two checkpoints or safetensors differ, and by how much"
    add = command("diff", "_cli_look:run_diff", what, _DIFF)
    add("a", metavar="A")
    add("b", metavar="B")
    add("--rename", action="append", default=[], metavar="REGEX=>NEW", help=f"of A: {_RENAME}")
    add("--json", action="store_true", help="every difference, for other programs")
    return parser


def _add_path(add: Callable[..., Any]) -> None:
    add("path", metavar="PATH")
    add("--step", type=int, metavar="N", help="which one of a directory of checkpoints")
