"""The command line: `python -m treeshard plan`. It starts no backend and needs no devices."""

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from treeshard._describe import human_bytes
from treeshard._errors import ShardingRuleError, TreeShardError
from treeshard._logical import logical_axis_rules
from treeshard._make_mesh import abstract_mesh
from treeshard._plan import Plan, plan
from treeshard._plan_files import parse_bytes, read_rules_file, read_shapes
from treeshard._rules import read_rules

# How long one pattern may take over all paths. Real ones take milliseconds.
PATTERN_SECONDS = 5.0

_FORMATS = """\
shapes, as JSON (or a file that ends in .safetensors, whose header is read):
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; 2 for wrong input."""
    options = _parser().parse_args(argv)
    try:
        code = _plan(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (TreeShardError, OSError) as error:
        print(f"treeshard: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("treeshard", description="Sharding, decided and explained.")
    command = parser.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "plan",
        help="decide how a tree is sharded, from its shapes, and say why",
        description="Decides how a tree is sharded, from its shapes alone, and says why.",
        epilog=_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
    add("--shapes", type=Path, required=True, metavar="FILE", help="path -> shape and dtype")
    add("--rules", type=Path, required=True, metavar="FILE", help="patterns and actions")
    add("--mesh", required=True, metavar="AXES", help='such as "data=8,fsdp=64,tensor=8"')
    add("--min-size", type=int, metavar="N", help="instead of the rules' own, in elements")
    add("--memory", metavar="BYTES", help="what a device has, such as 80GB: say whether it fits")
    add("--json", action="store_true", help="plan and findings for other programs")
    return parser


def _plan(options: argparse.Namespace) -> int:
    memory = None if options.memory is None else parse_bytes(options.memory)
    mesh = abstract_mesh(options.mesh)
    shapes = read_shapes(options.shapes)
    rules, min_size, logical = read_rules_file(options.rules)
    min_size = min_size if options.min_size is None else options.min_size
    _check_patterns(rules, shapes)
    with nullcontext() if logical is None else logical_axis_rules(logical):
        decided = plan(shapes, rules, mesh, min_size=min_size)
    fits = None if memory is None else decided.bytes_per_device() <= memory
    print(_as_json(decided, memory) if options.json else _as_text(decided, memory))
    errors = any(finding.severity == "error" for finding in decided.findings)
    return int(errors or fits is False)


def _as_text(decided: Plan, memory: int | None) -> str:
    parts = [str(decided)]
    if decided.findings:
        parts.append("\n" + "\n".join(map(str, decided.findings)))
    if memory is not None:
        held = decided.bytes_per_device()
        verb = "It fits" if held <= memory else "It does NOT fit"
        parts.append(f"\n{verb}: {human_bytes(held)} of {human_bytes(memory)} on a device.")
    return "\n".join(parts)


def _as_json(decided: Plan, memory: int | None) -> str:
    held = decided.bytes_per_device()
    report: dict[str, Any] = {
        "plan": json.loads(decided.to_json()),
        "findings": [finding._asdict() for finding in decided.findings],
        "bytes_per_device": held,
    }
    if memory is not None:
        report |= {"memory": memory, "fits": held <= memory}
    return json.dumps(report)


# ------------------------------------------------------------------ patterns without end


def _check_patterns(rules: Sequence[tuple[Any, Any]], paths: Iterable[str]) -> None:
    """Tries every pattern on every path, on a clock: some regular expressions take years."""
    for index, (pattern, _) in enumerate(read_rules(rules)):
        path = ""
        try:
            with _at_most(PATTERN_SECONDS):
                for path in paths:
                    pattern.search(path)
        except TimeoutError:
            raise ShardingRuleError(
                f"rule {index}: the pattern {pattern.pattern!r} takes more than"
                f" {PATTERN_SECONDS:g} s, on the path {path!r}. Avoid repeats inside of repeats,"
                " such as (a+)+."
            ) from None


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` when the time is over, even inside of `re`, which heeds signals.
    (Windows and other threads have none, and there is no limit there.)"""
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def expire(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
