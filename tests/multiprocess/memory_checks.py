"""What moving, restoring and exporting a tree takes of the memory of each process.

On the simulated devices of a process arrays are in its own memory, so a result counts too.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import peak_of
from tests.helpers import arange, assert_same
from tests.multiprocess.worker import Context
from treeshard._core import hosts
from treeshard._core.processes import exchange
from treeshard._placement import transport
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import load_safetensors, save_safetensors

LEAF, TREE = 16, 128  # MiB
# What is in flight (chunks, packets, buffers of files), and what the allocator keeps of it.
IN_FLIGHT = 24
SIDE = 2048
SPECS = {f"{i:02}": P("fsdp") if i % 2 else P(None, "fsdp") for i in range(TREE // LEAF)}
STRUCTS = {name: jax.ShapeDtypeStruct((SIDE, SIDE), "float32") for name in SPECS}
packets: list[int] = []
_permute, _gather_packets = transport._permute, transport._gather_packets


def counting_pairs(packet: Any, devices: Any, pairs: Any) -> Any:
    packets.extend(packet.size for sender, _ in pairs if sender == jax.process_index())
    return _permute(packet, devices, pairs)


def counting_all(packet: Any, devices: Any) -> Any:
    packets.append(packet.size)
    return _gather_packets(packet, devices)


transport._permute, transport._gather_packets = counting_pairs, counting_all


def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    rows, columns = (np.arange(i.start, i.stop, dtype=np.float32) for i in index)
    return rows[:, None] * SIDE + columns


def place() -> dict[str, jax.Array]:
    return jax.block_until_ready(ts.shard(STRUCTS, SPECS, ts.make_mesh("fsdp=8"), read=read))


placed = cache(place)


def assert_adds(call: Callable[[], Any], most: float, least: float = -np.inf) -> None:
    """Asserts how many MiB a call adds at its peak.

    It is measured again if it is too much: what connects, compiles, or runs beside it only adds.
    """
    peak = np.inf
    for attempt in range(3):
        peak = min(peak, peak_of(call)[1])
        # All processes make the call again, or none of them.
        if not exchange(f"attempt {attempt}", b"too much" if peak > most else b"").combined:
            break
    assert least < peak <= most, (least, peak, most)


def check_gather_takes_the_receiver_one_tree_and_iter_gather_one_leaf(context: Context) -> None:
    """That these are seen in the measurement, too."""

    def go_through() -> None:
        for _, x in ts.iter_gather(tree, to=0):
            del x

    tree, receives = placed(), context.index == 0
    for distances in (transport.MAX_DISTANCES, 0):  # 0: as among many processes
        with mock.patch.object(transport, "MAX_DISTANCES", distances):
            if receives:
                assert_same(ts.gather(tree, to=0), dict.fromkeys(SPECS, arange(SIDE, SIDE)))
                most = 1.05 * TREE + LEAF + IN_FLIGHT
                assert_adds(lambda: ts.gather(tree, to=0), most, 0.9 * TREE)
                assert_adds(go_through, LEAF + IN_FLIGHT, 0.9 * LEAF)
            else:
                ts.gather(tree, to=0)
                assert_adds(lambda: ts.gather(tree, to=0), IN_FLIGHT)
                assert_adds(go_through, IN_FLIGHT)


def check_between_meshes_every_byte_is_sent_once(context: Context) -> None:
    """From the devices of a trainer to those of a sampler."""
    devices, half = jax.devices(), len(jax.devices()) // 2
    trainer = ts.make_mesh("fsdp=-1", devices=devices[:half])
    sampler = ts.make_mesh("tensor=-1", devices=devices[half:])
    before = ts.plan(STRUCTS, [(".*", P("fsdp"))], trainer, min_size=0)
    rules = [("[02468]$", P("tensor")), (".*", P(None, "tensor"))]
    after = ts.plan(STRUCTS, rules, sampler, min_size=0)
    tree = jax.block_until_ready(ts.shard(STRUCTS, before, read=read))
    packets.clear()
    moved = ts.reshard(tree, after)
    total = sum(x.nbytes for x in jax.tree.leaves(tree))
    training = {d.process_index for d in trainer.devices.flat}
    assert before.diff(after).bytes == total // sampler.size
    mine = total // len(training) if context.index in training else 0
    assert sum(packets) == mine, (sum(packets), mine)
    for x in jax.tree.leaves(moved):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, arange(SIDE, SIDE)[shard.index])
    del moved
    part = sum(d.process_index == context.index for d in sampler.devices.flat) / sampler.size
    most = part * TREE + 2 * part * LEAF + IN_FLIGHT
    assert_adds(lambda: jax.block_until_ready(ts.reshard(tree, after)), most)
    replicas = ts.shard(arange(16, 8), P("fsdp"), ts.make_mesh({"data": context.count, "fsdp": -1}))
    packets.clear()
    assert_same(ts.gather(replicas), arange(16, 8))
    assert not packets  # each process has all of it


def check_placing_restoring_and_exporting_take_the_own_shards(context: Context) -> None:
    """Restoring twice of them; saving and exporting no copy; importing the largest leaf beside."""
    tree, own = placed(), TREE / context.count
    step, file = (context.directory / name for name in ("step", "x.safetensors"))
    host = {name: arange(SIDE, SIDE) for name in SPECS}
    assert_adds(lambda: ts.shard(host, SPECS, ts.make_mesh("fsdp=8")), 1.05 * own + IN_FLIGHT)
    assert_adds(place, 1.05 * own + IN_FLIGHT)
    assert_adds(lambda: save(step, tree), IN_FLIGHT)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    assert_adds(lambda: restore(step, like), 2 * own + IN_FLIGHT)
    assert_adds(lambda: save_safetensors(file, tree), IN_FLIGHT)
    assert_adds(lambda: load_safetensors(file, tree), 1.05 * own + LEAF + IN_FLIGHT)


def save_in_background(path: Path, tree: Any) -> None:
    with Checkpoints(path) as checkpoints:
        checkpoints.save(1, tree)


def check_the_processes_of_a_host_need_its_memory_together(context: Context) -> None:
    """Each would have enough if it were alone."""
    tree, free = placed(), 100 * 2**20
    step, file, new = (context.directory / name for name in ("step", "x.safetensors", "new"))
    calls: list[tuple[Callable[[], Any], type[ts.TreeShardError], str]] = [
        (lambda: save_in_background(new, tree), ts.CheckpointError, "128.0 MiB"),
        (lambda: restore(step, tree), ts.CheckpointError, ""),
        (lambda: load_safetensors(file, tree), ts.CheckpointError, ""),
        (lambda: ts.gather(tree), ts.DoesNotFitError, "512.0 MiB"),
        (lambda: ts.iter_gather(tree), ts.DoesNotFitError, "128.0 MiB"),
    ]
    before, hosts.shared_memory = hosts.shared_memory, lambda: free
    try:
        for call, error, needed in calls:
            with pytest.raises(error) as told:
                call()
            fact = (
                f"{needed} of host memory in {context.count} processes of one host, and 100.0 MiB"
            )
            assert fact in str(told.value), told.value
        assert ts.gather({"w": tree["00"]}, to=0)["w"].shape == (SIDE, SIDE)  # one of them receives
    finally:
        hosts.shared_memory = before
    assert not (new / "1").exists()
