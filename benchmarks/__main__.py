"""Runs every benchmark, each in a fresh process: python -m benchmarks

    python -m benchmarks                    # tables on the terminal
    python -m benchmarks --json             # a line of JSON each
    python -m benchmarks --only bench_rules bench_import --rounds 3
    python -m benchmarks --save             # and what came out to benchmarks/results and the pages

One that fails shows what it wrote to stderr; the others still run, and the exit status is 1.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import page

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> int:
    there = sorted(path.stem for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Runs every benchmark, each in a fresh process.",
        epilog="Other options go to the benchmarks: --rounds 3, --json.",
    )
    parser.add_argument("--only", nargs="+", default=there, metavar="NAME", help="some of them")
    parser.add_argument("--save", action="store_true", help="write results, and pages from them")
    chosen, rest = parser.parse_known_args(argv)
    for name in chosen.only:
        if name not in there:
            near = difflib.get_close_matches(name, there, n=1)
            ask = f" Did you mean {near[0]!r}?" if near else ""
            parser.error(f"there is no benchmark {name!r}.{ask} There are: {', '.join(there)}")
    failed = run(chosen.only, rest, page.RESULTS if chosen.save else None)
    if chosen.save:
        page.write()
    if failed:
        print(f"\n{len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(names: list[str], options: list[str], results: Path | None = None) -> list[str]:
    """Runs benchmarks, which write to `results` if it is given; returns those that failed."""
    failed: list[str] = []
    for name in names:
        head = sys.stderr if "--json" in options else sys.stdout
        print(f"\n== python -m benchmarks.{name}", file=head, flush=True)
        save = [f"--save={results / f'{name}.json'}"] if results else []
        with tempfile.TemporaryFile() as stderr:
            command = [sys.executable, "-m", f"benchmarks.{name}", *options, *save]
            if subprocess.run(command, stderr=stderr).returncode:
                failed.append(name)
                stderr.seek(0)
                print(stderr.read().decode(errors="replace"), file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
