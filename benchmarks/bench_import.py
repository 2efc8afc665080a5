"""What `import treeshard` costs, beside `import jax`: python -m benchmarks.bench_import"""

import compileall
import importlib.util
import subprocess
import sys
from pathlib import Path

import treeshard
from benchmarks._harness import Figure, Row, options, report, shuffled

PEERS = ["equinox", "scalax.sharding", "flax.nnx", "eformer.escale"]
JAX = "import jax"
# Names load on first touch, so what a program uses counts, and not `import treeshard` alone.
OURS = {
    "import treeshard": "import jax, treeshard",
    "... and plan, shard, gather": "from treeshard import fsdp, gather, make_mesh, plan, shard",
    "the README's first lines": (
        "import jax; import treeshard as ts; from jax.sharding import PartitionSpec as P;"
        " from treeshard.training import init_sharded, jit_step"
    ),
}


def seconds(statement: str) -> float:
    """What one import costs in a fresh interpreter, by its own clock."""
    code = (
        f"import time; start = time.perf_counter();{statement}; print(time.perf_counter() - start)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def backend_started() -> bool:
    code = (
        "import treeshard, treeshard.training; from jax._src import xla_bridge;"
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def main() -> None:
    # As pip does when it installs: a checkout that was never imported has no bytecode yet.
    compileall.compile_dir(str(Path(treeshard.__file__).parent), quiet=2)
    peers = [name for name in PEERS if importlib.util.find_spec(name.split(".")[0])]
    statements = {"jax": JAX, **OURS, **{name: f"import {name}" for name in peers}}
    times: dict[str, list[float]] = {name: [] for name in statements}
    for round_ in range(options().rounds + 1):
        for name in shuffled(statements, round_):
            took = seconds(statements[name])
            if round_:  # the first round warms the disk
                times[name].append(took)
    ratio = {name: Figure(times[name]) / Figure(times["jax"]) for name in statements}
    vs = {name: ratio[name] for name in peers}
    first, *others = OURS
    rows = [
        Row("import treeshard, x import jax", ratio[first], "<= 1.06", vs),
        *(Row(f"{name}, x import jax", ratio[name], "") for name in others),
        Row("backends that it starts", float(backend_started()), "0"),
    ]
    report("What importing costs", rows, ("jax", "equinox", "flax", "scalax", "eformer"))


if __name__ == "__main__":
    main()
