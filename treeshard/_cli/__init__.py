"""The command line: its arguments and exit codes.

Each command loads its own module, by name: importing those of all commands, and with them what
reads checkpoints, would take longer than most commands run.
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

# Exit codes. 0: all is well. 1: what the command looks for is there, such as a plan that does not
# fit; each command's help says what. `argparse` exits with 2 too.
_INVALID = 2
_INTERRUPTED = 130  # as shells do for SIGINT: 128 + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not have every letter
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
        if error.name is not None:  # Python's own, which does not say what to install
            raise
        message = str(error)
    print(f"treeshard: error: {printable(message)}", file=sys.stderr)
    return _INVALID


# ------------------------------------------------------------------ arguments

_PLAN = """\
  treeshard plan --shapes run --rules rules.toml --mesh data=2,fsdp=64 --memory 80GB

shapes, as JSON, or as a checkpoint or safetensors (only the header is read):
  {"layers/0/attn/q": {"shape": [1024, 1024], "dtype": "bfloat16"}}

rules, as TOML; the first pattern that matches decides:
  min_size = 16384                    # leaves with fewer elements stay replicated
  [[rules]]
  pattern = "norm|bias"
  action = "None"                     # replicate
  [[rules]]
  pattern = "attn/(q|k|v)$"
  action = "P('fsdp', 'tensor')"      # a spec, or a tuple of logical names
  [[rules]]
  pattern = ".*"
  action = "fsdp('fsdp', min_size=0)" # a tactic, as in Python
  [logical]
  batch = ["data", "fsdp"]            # mesh axes of a logical name

exit code: 0, or 1 if the plan has errors or exceeds --memory, or 2 if the input is invalid
"""
_PATH = """\
PATH is a checkpoint, a directory of checkpoints by step (reads the latest, or --step), a
safetensors file, the index of several, or a directory with one of these.
"""
_INSPECT = f"""\
{_PATH}
  treeshard inspect run               # the latest step, and a list of all steps
  treeshard inspect run --step 200
  treeshard inspect model.safetensors --json

exit code: 0, or 2 if nothing can be read
"""
_VERIFY = """\
  treeshard verify run                # the latest step
  treeshard verify run --step 200

PATH is as in `treeshard inspect`. safetensors files have no checksums: their headers, index and
sizes are checked.

exit code: 0, or 1 if something is damaged, or 2 if nothing can be read
"""
_EXPORT = """\
  treeshard export run model.safetensors --only '^model/' --rename '^model/=>' --rename '/=>.'
  treeshard export run/100 model.safetensors --max-file-size 5GB --metadata format=pt

Reads, verifies and writes one leaf at a time. The file gets its name when it is complete, and
replaces an existing one. The format cannot hold numbers, strings, PRNG keys and int4. If such
leaves are selected, the export fails; --skip leaves them out.

exit code: 0, or 2 if the export failed
"""
_RENAME = "replace what the regular expression matches; NEW may have \\1; applied in order"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("treeshard", description="Decides and explains sharding.")
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

    what = "decide from shapes alone how a tree is sharded, and explain why"
    add = command("plan", "plan:run_plan", what, _PLAN)
    add("--shapes", type=Path, required=True, metavar="FILE", help="path -> shape and dtype")
    add("--rules", type=Path, required=True, metavar="FILE", help="patterns and actions")
    add("--mesh", required=True, metavar="AXES", help='such as "data=8,fsdp=64,tensor=8"')
    add("--memory", metavar="BYTES", help="of a device, such as 80GB: say whether the plan fits")
    add("--json", action="store_true", help="print the plan and its findings as JSON")

    what = "list the leaves of a checkpoint or safetensors"
    add = command("inspect", "files:run_inspect", what, _INSPECT)
    _add_path(add)
    add("--json", action="store_true", help="print every leaf as JSON")

    what = "read every leaf of a checkpoint, and compare checksums"
    _add_path(command("verify", "files:run_verify", what, _VERIFY))

    add = command("export", "files:run_export", "write arrays to safetensors", _EXPORT)
    _add_path(add)
    add("out", metavar="OUT", help="such as model.safetensors, or a folder without the suffix")
    add("--only", metavar="REGEX", help="export leaves whose path has a match")
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--rename", **several, metavar="REGEX=>NEW", help=_RENAME)
    add("--skip", action="store_true", help="leave out leaves that safetensors cannot hold")
    add("--max-file-size", metavar="BYTES", help="such as 5GB: split what is larger into files")
    add("--metadata", **several, metavar="KEY=TEXT", help="for the header of the file")
    return parser


def _add_path(add: Callable[..., Any]) -> None:
    add("path", metavar="PATH")
    add("--step", type=int, metavar="N", help="a step of a directory of checkpoints")
