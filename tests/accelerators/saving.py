"""Saves step after step until it is killed: python -m tests.accelerators.saving DIRECTORY MIB

It takes the devices that JAX prefers, as its tests do.
"""

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import Checkpoints

LEAVES = 8


def state_at(step: int, mib: int, mesh: jax.sharding.Mesh) -> Any:
    """Arrays in the memory of the devices that differ from leaf to leaf and step to step."""
    rows = mib * 2**20 // LEAVES // 4 // 1024
    sharding = jax.sharding.NamedSharding(mesh, P("fsdp"))
    fill = jax.jit(
        lambda start: start + jnp.arange(rows * 1024.0).reshape(rows, 1024), out_shardings=sharding
    )
    return {f"w{i}": fill(jnp.float32(step * LEAVES + i)) for i in range(LEAVES)}


def main(directory: str, mib: str) -> None:
    if os.environ.get("TREESHARD_ACCELERATORS") == "cpu":
        jax.config.update("jax_platforms", "cpu")
    mesh = ts.make_mesh("fsdp=-1")
    with Checkpoints(Path(directory), keep=2) as checkpoints:
        for step in range(1, 1_000):
            state = state_at(step, int(mib), mesh)
            print(f"saving {step}", flush=True)
            checkpoints.save(step, state)
            checkpoints.wait()
            print(f"saved {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
