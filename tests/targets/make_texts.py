"""Compiles the programs of `programs.py` for TPUs and GPUs, and keeps their texts for tests.

    python tests/targets/make_texts.py v5e:2x4 mlp_bf16 adamw

needs `treeshard[tpu,cuda]`, but no such device. Without names it compiles all of them.
"""

import gzip
import re
import sys
from importlib.metadata import version
from pathlib import Path

import programs

import treeshard as ts

ROOT = Path(__file__).parents[2]
TEXTS = ROOT / "tests" / "targets" / "texts"


def keep(name: str, topology: str, text: str) -> None:
    """Writes a program's text without what no reader needs."""
    compiler = "libtpu" if topology.startswith("v") else "jax-cuda12-plugin"
    head = f"// {name} on {topology}; jax {version('jax')}, {compiler} {version(compiler)}\n"
    path = TEXTS / f"{name}.{topology.replace(':', '_').replace('*', '_times_')}.txt.gz"
    path.write_bytes(gzip.compress((head + trim_spec(text)).encode(), mtime=0))


def trim_spec(text: str) -> str:
    """Of `backend_config` stay the trips of loops, whether an op is synchronous, and what a matrix
    product contracts; of paths, what is below the repository or the packages."""
    text = re.sub(r'"[^"]*(?=/site-packages/)', '"', text).replace(f"{ROOT}/", "")
    kept = r'"known_trip_count":\{"n":"\d+"\}|"is_sync":\w+|"lhs_contracting_dimensions":\[[^\]]*\]'
    return re.sub(
        r"backend_config=\{.*\}",
        lambda match: f"backend_config={{{','.join(re.findall(kept, match[0]))}}}",
        text,
    )


def main(topology: str, *names: str) -> None:
    for name in names or programs.CASES:
        program = programs.case_of(name, topology).lower().compile()
        keep(name, topology, program.as_text())


if __name__ == "__main__":
    ts.simulate_devices(8)
    main(*sys.argv[1:])
