"""Gates the steps of the examples: `python tools/gate.py`, and with `--write` to lock them anew.

Other arguments are passed on to `treeshard gate`, such as `--github`.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The functions of examples/gated.py, with their meshes.
STEPS = {
    "llama": "fsdp=8",
    "transformer": "data=2,fsdp=4",
    "transformer_explicit": "data=2,fsdp=4",
    "by_hand": "data=8",
}
# In the names of locks, with the options that choose the devices.
TARGETS = {"cpu": [], "v5e-2x4": ["--topology", "v5e:2x4"]}


def arguments(step: str, target: str) -> list[str]:
    """The arguments of `treeshard gate` for one lock."""
    lock = f"examples/locks/{step}.{target}.lock"
    return [f"examples.gated:{step}", "--mesh", STEPS[step], *TARGETS[target], "--against", lock]


def main() -> int:
    """Gates every step for every target; returns the worst exit code."""
    worst = 0
    for step in STEPS:
        for target in TARGETS:
            command = [sys.executable, "-m", "treeshard", "gate", *arguments(step, target)]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run([*command, *sys.argv[1:]], cwd=ROOT, env=environment, check=False)
            worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
