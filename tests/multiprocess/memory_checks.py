"""What moving, restoring and exporting a tree takes of the memory of each process.

On the simulated devices of a process arrays are in its own memory, so a result counts too.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import peak_of
from tests.multiprocess.worker import Context
from treeshard.checkpoint import restore, save
from treeshard.interchange import load_safetensors, save_safetensors

LEAF, TREE = 16, 128  # MiB
# What is in flight (chunks, packets, buffers of files), and what the allocator keeps of it.
IN_FLIGHT = 24
SPECS = {f"{i:02}": P("fsdp") if i % 2 else P(None, "fsdp") for i in range(TREE // LEAF)}
STRUCTS = {name: jax.ShapeDtypeStruct((2048, 2048), "float32") for name in SPECS}


def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    return np.full([i.stop - i.start for i in index], int(path), np.float32)


def placed() -> dict[str, jax.Array]:
    return jax.block_until_ready(ts.shard(STRUCTS, SPECS, ts.make_mesh("fsdp=8"), read=read))


def mib_of(call: Callable[[], Any]) -> float:
    """The MiB that a call adds at its peak, after one that connected and compiled.

    The least of two: what else the process does in the meantime only adds.
    """
    call()
    return min(peak_of(call)[1] for _ in range(2))


def check_gather_takes_the_receiver_one_tree_and_iter_gather_one_leaf(context: Context) -> None:
    """That these are seen in the measurement, too."""

    def go_through() -> None:
        for _, x in ts.iter_gather(tree, to=0):
            del x

    tree = placed()
    peak = mib_of(lambda: ts.gather(tree, to=0))
    assert peak <= (1.05 * TREE + LEAF if context.index == 0 else 0) + IN_FLIGHT, peak
    assert peak > 0.9 * TREE or context.index != 0, peak
    peak = mib_of(go_through)
    assert peak <= (LEAF if context.index == 0 else 0) + IN_FLIGHT, peak
    assert peak > 0.9 * LEAF or context.index != 0, peak


def check_placing_and_reading_take_the_own_shards(context: Context) -> None:
    mesh = ts.make_mesh("fsdp=8")
    tree = {name: np.full((2048, 2048), int(name), np.float32) for name in SPECS}
    peak = mib_of(lambda: ts.shard(tree, SPECS, mesh))
    assert peak <= 1.05 * TREE / context.count + IN_FLIGHT, peak
    peak = mib_of(placed)
    assert peak <= 1.05 * TREE / context.count + IN_FLIGHT, peak


def check_restoring_takes_twice_the_own_shards(context: Context) -> None:
    tree, step = placed(), context.directory / "step"
    save(step, tree)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    del tree
    peak = mib_of(lambda: restore(step, like))
    assert peak <= 2 * TREE / context.count + IN_FLIGHT, peak


def check_exporting_and_importing_take_no_copy_of_the_tree(context: Context) -> None:
    tree, file = placed(), context.directory / "x.safetensors"
    peak = mib_of(lambda: save_safetensors(file, tree))
    assert peak <= IN_FLIGHT, peak
    peak = mib_of(lambda: load_safetensors(file, tree))
    assert peak <= 1.05 * TREE / context.count + LEAF + IN_FLIGHT, peak
