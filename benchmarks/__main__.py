"""Runs every benchmark, each in a fresh process: `python -m benchmarks`."""

import subprocess
import sys
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("bench_*.py")):
    print(f"\n== python -m benchmarks.{path.stem}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{path.stem}", *sys.argv[1:]], check=True)
