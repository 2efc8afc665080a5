"""A function of the user is traced once, whatever of treeshard it uses first."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("trace_counts.py")


def test_a_first_use_inside_a_trace_does_not_make_jax_trace_again() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) > 20
    assert counts == {use: [1, 1, 1] for use in counts}
