"""A tree goes from a trainer's mesh to a sampler's: every byte once, in little memory."""

from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import arange, assert_same
from tests.multiprocess.memory_checks import IN_FLIGHT, mib_of
from tests.multiprocess.worker import Context
from treeshard._placement import transport

SIDE, COUNT = 2048, 8  # float32 leaves of 16 MiB
LEAF, TREE = 16, 128  # MiB


def mesh_on(devices: list[Any], axis: str) -> Mesh:
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


def meshes(overlap: int = 0) -> tuple[Mesh, Mesh]:
    """The trainer's devices and the sampler's, of which some may be the same."""
    devices, half = jax.devices(), len(jax.devices()) // 2
    return mesh_on(devices[: half + overlap], "fsdp"), mesh_on(devices[half - overlap :], "tensor")


def plans(trainer: Mesh, sampler: Mesh) -> tuple[ts.Plan, ts.Plan]:
    rules = [("even", P("tensor")), ("odd", P(None, "tensor"))]
    before = ts.plan(structs(), [(".*", P("fsdp"))], trainer, min_size=0)
    return before, ts.plan(structs(), rules, sampler, min_size=0)


packets: list[int] = []
_permute = transport._permute


def counting(packet: Any, devices: Any, pairs: Any) -> Any:
    packets.extend(packet.size for sender, _ in pairs if sender == jax.process_index())
    return _permute(packet, devices, pairs)


transport._permute = counting


def structs() -> dict[str, Any]:
    struct = jax.ShapeDtypeStruct((SIDE, SIDE), "float32")
    return {f"{'even' if i % 2 else 'odd'}/{i}": struct for i in range(COUNT)}


def placed(plan: ts.Plan) -> Any:
    def read(path: str, index: Any) -> Any:
        rows = np.arange(index[0].start, index[0].stop, dtype="float32")[:, None]
        return rows * SIDE + np.arange(index[1].start, index[1].stop, dtype="float32")

    return jax.block_until_ready(ts.shard(structs(), plan, read=read))


@cache
def start() -> tuple[ts.Plan, ts.Plan, Any]:
    """The plans of both, and the tree as the trainer has it."""
    before, after = plans(*meshes())
    return before, after, placed(before)


def check_every_byte_is_sent_once_as_the_plan_says(context: Context) -> None:
    before, after, tree = start()
    diff = before.diff(after)
    packets.clear()
    moved = ts.reshard(tree, after)
    total = sum(x.nbytes for x in jax.tree.leaves(tree))
    training = {d.process_index for d in before.mesh.devices.flat}
    minimum = 0 if context.count == 1 else total  # a process has no part of what it samples from
    assert diff.sent == minimum
    assert diff.bytes == total // after.mesh.size
    mine = minimum // len(training) if context.index in training else 0
    assert sum(packets) == mine, (sum(packets), mine)  # x 1.0
    whole = arange(SIDE, SIDE)
    for x in jax.tree.leaves(moved):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])


def check_the_peak_is_within_two_shards_of_the_result(context: Context) -> None:
    _, after, tree = start()
    own = sum(d.process_index == context.index for d in after.mesh.devices.flat)
    part = own / after.mesh.size
    peak = mib_of(lambda: jax.block_until_ready(ts.reshard(tree, after)))
    assert peak <= part * TREE + 2 * part * LEAF + IN_FLIGHT, (peak, part)
    start.cache_clear()


def check_meshes_that_share_devices(context: Context) -> None:
    tree = {"even": {"w": arange(24, 24)}, "key": jax.random.split(jax.random.key(5), 24)}
    specs = {"even": P("fsdp"), "key": P("fsdp")}
    for overlap in (0, 2, len(jax.devices()) // 2):
        trainer, sampler = meshes(overlap)
        if 24 % trainer.size:
            continue
        source = ts.shard(tree, specs, trainer)
        moved = ts.reshard(source, P("tensor"), sampler)
        assert moved["key"].sharding.mesh == sampler
        back = ts.reshard(moved, specs, trainer)
        gathered = ts.gather(back, to=0)
        if context.index == 0:
            assert_same(gathered, tree)


def check_a_shard_that_a_device_has_stays_there(context: Context) -> None:
    devices = jax.devices()
    one, two = mesh_on(devices, "fsdp"), mesh_on(devices[:2] + devices[2:][::-1], "fsdp")
    x = ts.shard(arange(8, 4), P("fsdp"), one)
    diff = ts.plan(x, [("", P("fsdp"))], one, min_size=0).diff(
        ts.plan(x, [("", P("fsdp"))], two, min_size=0)
    )
    assert diff.bytes == 16  # a row, for those that change places
    moved = ts.reshard(x, P("fsdp"), two)
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), arange(8, 4)[shard.index])
