"""The command line: its arguments and exit codes.

Each command imports its own module when it runs. Importing all of them, and TensorStore with them,
would take longer than most commands run.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treeshard.errors import TreeShardError, printable

# Exit codes. 0: success. 1: the command has found a problem, such as a plan that does not fit. The
# help of each command says which problem. `argparse` exits with 2 too.
_INVALID = 2
_INTERRUPTED = 130  # as shells do for SIGINT: 128 + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed, as `>&-` does
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process exits
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # some terminals cannot show every letter
    try:
        module, _, function = options.run.partition(":")
        command = getattr(importlib.import_module(f"treeshard._cli.{module}"), function)
        text, code = command(options)
        if text:
            print(printable(text))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, stopped
        # Python flushes standard output once more as it exits, and would print the error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (TreeShardError, OSError) as error:
        message = str(error)
    except ImportError as error:
        if error.name is not None:  # Python's message does not say what to install
            raise
        message = str(error)
    print(f"treeshard: error: {printable(message)}", file=sys.stderr)
    return _INVALID


# ------------------------------------------------------------------ arguments

_PLAN = """\
  treeshard plan --shapes run --rules rules.toml --mesh data=2,fsdp=64 --memory 80GB

The shapes are a checkpoint, safetensors (headers are enough), or JSON:
  {"layers/0/attn/q": {"shape": [1024, 1024], "dtype": "bfloat16"}}

The rules are TOML. The first pattern that matches a path decides:
  min_size = 16384                    # replicate leaves with fewer elements
  [[rules]]
  pattern = "norm|bias"
  action = "None"                     # replicate
  [[rules]]
  pattern = "attn/(q|k|v)$"
  action = "P('fsdp', 'tensor')"      # a spec; a tuple holds logical names
  [[rules]]
  pattern = ".*"
  action = "fsdp('fsdp', min_size=0)" # a tactic, as in Python
  [logical]
  batch = ["data", "fsdp"]            # the mesh axes of a logical name

Exit code: 0 on success, 1 if the plan has errors or exceeds --memory, 2 if the input is invalid.
"""
_PATH = """\
PATH is a checkpoint, a directory of checkpoints by step, a safetensors file, the index of several
files, or a directory with safetensors.
"""
_INSPECT = f"""\
{_PATH}
  treeshard inspect run               # lists all steps, and reads the latest
  treeshard inspect run --step 200
  treeshard inspect model.safetensors --json

Exit code: 0 on success, 2 if PATH cannot be read.
"""
_VERIFY = """\
  treeshard verify run                # the latest step
  treeshard verify run --step 200

PATH is as in `treeshard inspect`. Safetensors have no checksums, so only their headers, index and
sizes are checked.

Exit code: 0 on success, 1 if a leaf or file is damaged, 2 if PATH cannot be read.
"""
_EXPORT = """\
  treeshard export run model.safetensors --only '^model/' --rename '^model/=>' --rename '/=>.'
  treeshard export run/100 model.safetensors --max-file-size 5GB --metadata format=pt

Each leaf is read, verified and written before the next one. The export is atomic, and replaces
existing files. Safetensors cannot hold Python numbers, strings, PRNG keys and int4. If such leaves
are selected, the export fails. --skip leaves them out.

Exit code: 0 on success, 2 if the export failed.
"""
_RENAME = "replace the matches of a regular expression by NEW, which may contain \\1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "treeshard", description="Plan shardings, and read checkpoints."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: str, what: str, epilog: str) -> Callable[..., Any]:
        parser = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=run)
        return parser.add_argument

    what = "plan how a tree is sharded, from its shapes, and explain each decision"
    add = command("plan", "plan:run_plan", what, _PLAN)
    add("--shapes", type=Path, required=True, metavar="FILE", help="the shapes, by path")
    add("--rules", type=Path, required=True, metavar="FILE", help="the rules")
    add("--mesh", required=True, metavar="AXES", help='axes and sizes, such as "data=8,fsdp=64"')
    add("--memory", metavar="BYTES", help="memory of a device, such as 80GB, to check")
    add("--json", action="store_true", help="print JSON")

    what = "list the leaves of a checkpoint or of safetensors"
    add = command("inspect", "files:run_inspect", what, _INSPECT)
    _add_path(add)
    add("--json", action="store_true", help="print JSON")

    what = "read every leaf, and compare its checksum"
    _add_path(command("verify", "files:run_verify", what, _VERIFY))

    add = command("export", "files:run_export", "export arrays to safetensors", _EXPORT)
    _add_path(add)
    add("out", metavar="OUT", help="a .safetensors file, or a folder")
    add("--only", metavar="REGEX", help="export only leaves whose path matches")
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--rename", **several, metavar="REGEX=>NEW", help=_RENAME)
    add("--skip", action="store_true", help="skip leaves that safetensors cannot hold")
    add("--max-file-size", metavar="BYTES", help="split the export into files of, for example, 5GB")
    add("--metadata", **several, metavar="KEY=TEXT", help="add metadata to the header")
    return parser


def _add_path(add: Callable[..., Any]) -> None:
    add("path", metavar="PATH", help="a checkpoint, a directory of checkpoints, or safetensors")
    add("--step", type=int, metavar="N", help="the step to read; by default the latest")
