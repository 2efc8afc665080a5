"""Runs the code of a page, block by block.

A page's ```python blocks run in order, in one namespace. A ```text block is what the block before
it prints, warnings and a last error included, as a reader would see them; `...` in it stands for
anything. A block inside an HTML comment runs too, and readers do not see it. In a ```console block,
each line `$ treeshard ...` runs treeshard's command line.

    python tools/pages.py docs/index.md   # writes what the blocks print into the page
"""

import contextlib
import doctest
import io
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

import treeshard as ts

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(
    r"^( *)```(python|console|text)\b[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A block of code, and what the page says that it prints; `None` if it says nothing."""

    line: int
    code: str
    printed: str | None
    span: tuple[int, int]  # of what it prints, in the page


def pages() -> list[Path]:
    """Every page that has code."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if blocks(page.read_text())]


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        body = textwrap.dedent(match[3])
        if match[2] == "console":
            body = re.sub(r"^\$ treeshard (.*)$", _to_python, body, flags=re.MULTILINE)
        if match[2] != "text":
            found.append(Block(line, body, None, (0, 0)))
        elif found and found[-1].printed is None:
            found[-1] = found[-1]._replace(printed=body, span=match.span(3))
    return found


def _to_python(command: re.Match[str]) -> str:
    """A command line as Python, on its own line."""
    return f"__import__('treeshard._cli')._cli.main({shlex.split(command[1])})"


@contextlib.contextmanager
def _forgotten(folder: str) -> Iterator[None]:
    """Afterwards modules of a folder are not loaded, such as a page's `train.py`."""
    try:
        yield
    finally:
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(folder):
                del sys.modules[name]


def run(page: Path) -> Iterator[tuple[Block, str]]:
    """Runs a page in an empty directory; yields each block with what it printed.

    Raises what a block raises, with the page's lines in the traceback; but where the page shows
    that error as the last of what is printed, it goes on.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    text = page.read_text()
    with (
        tempfile.TemporaryDirectory() as empty,
        contextlib.chdir(empty),
        _forgotten(empty),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        for block in blocks(text):
            code = compile("\n" * block.line + block.code, page, "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                if block.printed is not None:
                    # What a reader sees of them on the terminal.
                    warnings.simplefilter("always", ts.ShardingWarning)
                    warnings.showwarning = lambda what, kind, *_: print(f"{kind.__name__}: {what}")
                try:
                    exec(code, names)
                except Exception as error:
                    kind = type(error).__name__
                    if f"{kind}: " not in (block.printed or ""):
                        raise
                    print(f"{kind}: {error}")
            yield block, _trim(printed.getvalue())


def as_printed(block: Block, printed: str) -> bool:
    """Whether a block printed what its page says."""
    if block.printed is None:
        return True
    same = doctest.OutputChecker().check_output
    return same(_trim(block.printed) + "\n", printed + "\n", doctest.ELLIPSIS)


def _trim(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def write(page: Path) -> None:
    """Runs a page and writes into it what its blocks print, where it says something else."""
    text = page.read_text()
    for block, printed in reversed(list(run(page))):
        if not as_printed(block, printed):
            start, end = block.span
            printed = re.sub(rf"\S*{page.name}:\d+", "...", printed)  # a reader's file is another
            text = f"{text[:start]}{printed}\n{text[end:]}"
    page.write_text(text)


def error_on_two_processes(script: str) -> str:
    """The line of the error that a script, `train.py PORT PROCESS`, raises on process 0 of two."""
    Path("train.py").write_text(script.strip("\n") + "\n")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "train.py", port, process],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in "01"
    ]
    printed = [process.communicate()[1] for process in started]
    errors = [line for line in printed[0].splitlines() if "Error: " in line]
    return errors[0].rpartition("treeshard.errors.")[2]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for `examples`, as in a clone
    ts.simulate_devices(8)
    for name in sys.argv[1:]:
        write(Path(name))
