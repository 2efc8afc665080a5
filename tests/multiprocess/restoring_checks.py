"""Four processes restore what two have saved."""

from pathlib import Path

import jax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.checkpoint_checks import TENSOR, assert_is_the_state, structs
from tests.multiprocess.worker import Context
from treeshard.checkpoint import restore, save


def check_shapes_and_rules_are_enough(context: Context) -> None:
    mesh = ts.make_mesh("data=4,tensor=2")
    again = restore(Path(context.args[0]), structs(), rules=TENSOR, mesh=mesh)
    assert_is_the_state(again)
    assert again["layers"][0].weight.sharding.spec == P("tensor", "data")
    assert len(again["layers"][0].weight.addressable_shards) == 2


def check_a_mesh_over_some_processes(context: Context) -> None:
    mesh = ts.make_mesh("data=2,tensor=2", devices=jax.devices()[:4])
    again = restore(Path(context.args[0]), structs(), rules=[(".*", P())], mesh=mesh)
    assert_is_the_state(again)
    assert again["wide"].sharding.device_set == set(jax.devices()[:4])
    assert len(again["wide"].addressable_shards) == (2 if context.index < 2 else 0)
    save(context.directory / "again", again)
    assert_is_the_state(restore(context.directory / "again", again))


def check_arrays_without_a_shard_on_process_0(context: Context) -> None:
    mesh = ts.make_mesh("data=4", devices=jax.devices()[4:])
    again = restore(Path(context.args[0]), structs(), rules=[(".*", P())], mesh=mesh)
    assert len(again["wide"].addressable_shards) == (0 if context.index < 2 else 2)
    save(context.directory / "elsewhere", again)
    assert_is_the_state(restore(context.directory / "elsewhere", again))
