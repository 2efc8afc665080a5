"""States that processes save and restore, each of another step."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.processes import exchange

AXES = "fsdp=4"
RULES = [("^w|half", P("fsdp")), (".*", None)]


def host_state(step: int) -> dict[str, Any]:
    """The state after a step, the same on every process."""
    draw = np.random.default_rng(step)
    return {
        "w": draw.normal(size=(512, 512)).astype(np.float32),
        "half": draw.normal(size=(64, 64)).astype(ml_dtypes.bfloat16),
        "int4": draw.integers(-8, 8, (8, 16)).astype(ml_dtypes.int4),
        "own": np.full(5, step, np.int32),
        "step": step,
        "name": f"after step {step}",
        "none": None,
    }


def state_at(step: int, axes: str = AXES, rules: Any = RULES) -> dict[str, Any]:
    """The state after a step on the devices of all processes, but for what each has alone."""
    host = host_state(step)
    plan = ts.plan(host, rules, ts.make_mesh(axes), min_size=0)
    return ts.shard(host, plan) | {"own": host["own"]}


def like() -> dict[str, Any]:
    state = host_state(0)
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) if name in ("w", "half", "int4") else x
        for name, x in state.items()
    }


def differing(state: dict[str, Any], step: int) -> list[str]:
    """The leaves whose shards on this process are not bit for bit those of a step."""
    return [name for name, x in host_state(step).items() if not _is_same(state[name], x)]


def _is_same(x: Any, whole: Any) -> bool:
    if not isinstance(whole, np.ndarray):
        return type(x) is type(whole) and x == whole
    pieces = [(s.data, whole[s.index]) for s in getattr(x, "addressable_shards", [])]
    pairs = [(x, whole)] if isinstance(x, np.ndarray) else pieces
    return (x.shape, x.dtype) == (whole.shape, whole.dtype) and all(
        np.asarray(piece).tobytes() == part.tobytes() for piece, part in pairs
    )


def left_in(directory: Path) -> list[str]:
    """The names that this process sees in a directory, while all wait."""
    exchange(f"look into {directory}", b"", channel="of the test")
    names = sorted(path.name for path in directory.iterdir())
    exchange(f"looked into {directory}", b"", channel="of the test")
    return names
