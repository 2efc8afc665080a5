"""A tree goes from a trainer's mesh to a sampler's: every byte once, in little memory."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import arange, assert_same
from tests.multiprocess.memory_checks import IN_FLIGHT, LEAF, TREE, mib_of
from tests.multiprocess.worker import Context
from treeshard._placement import transport

SIDE, COUNT = 2048, 8  # float32 leaves of 16 MiB
packets: list[int] = []
_permute = transport._permute


def counting(packet: Any, devices: Any, pairs: Any) -> Any:
    packets.extend(packet.size for sender, _ in pairs if sender == jax.process_index())
    return _permute(packet, devices, pairs)


transport._permute = counting


def meshes(overlap: int = 0) -> tuple[Mesh, Mesh]:
    """The trainer's devices and the sampler's, of which some may be the same."""
    devices, half = jax.devices(), len(jax.devices()) // 2
    trainer, sampler = devices[: half + overlap], devices[half - overlap :]
    return ts.make_mesh("fsdp=-1", devices=trainer), ts.make_mesh("tensor=-1", devices=sampler)


def structs() -> dict[str, Any]:
    struct = jax.ShapeDtypeStruct((SIDE, SIDE), "float32")
    return {f"{'even' if i % 2 else 'odd'}/{i}": struct for i in range(COUNT)}


def placed(plan: ts.Plan) -> Any:
    def read(path: str, index: Any) -> Any:
        rows = np.arange(index[0].start, index[0].stop, dtype="float32")[:, None]
        return rows * SIDE + np.arange(index[1].start, index[1].stop, dtype="float32")

    return jax.block_until_ready(ts.shard(structs(), plan, read=read))


def check_every_byte_is_sent_once_in_little_memory(context: Context) -> None:
    trainer, sampler = meshes()
    before = ts.plan(structs(), [(".*", P("fsdp"))], trainer, min_size=0)
    rules = [("even", P("tensor")), ("odd", P(None, "tensor"))]
    after = ts.plan(structs(), rules, sampler, min_size=0)
    tree = placed(before)
    diff = before.diff(after)
    packets.clear()
    moved = ts.reshard(tree, after)
    total = sum(x.nbytes for x in jax.tree.leaves(tree))
    training = {d.process_index for d in before.mesh.devices.flat}
    assert diff.sent == total  # no process has a part of what it samples from
    assert diff.bytes == total // after.mesh.size
    mine = total // len(training) if context.index in training else 0
    assert sum(packets) == mine, (sum(packets), mine)
    whole = arange(SIDE, SIDE)
    for x in jax.tree.leaves(moved):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index])
    del moved
    own = sum(d.process_index == context.index for d in after.mesh.devices.flat)
    part = own / after.mesh.size
    peak = mib_of(lambda: jax.block_until_ready(ts.reshard(tree, after)))
    assert peak <= part * TREE + 2 * part * LEAF + IN_FLIGHT, (peak, part)


def check_meshes_that_share_devices(context: Context) -> None:
    tree = {"even": {"w": arange(24, 24)}, "key": jax.random.split(jax.random.key(5), 24)}
    specs = {"even": P("fsdp"), "key": P("fsdp")}
    for overlap in (2, 4):
        trainer, sampler = meshes(overlap)
        source = ts.shard(tree, specs, trainer)
        moved = ts.reshard(source, P("tensor"), sampler)
        assert moved["key"].sharding.mesh == sampler
        back = ts.reshard(moved, specs, trainer)
        gathered = ts.gather(back, to=0)
        if context.index == 0:
            assert_same(gathered, tree)
