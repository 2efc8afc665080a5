"""Several processes restore what one has saved."""

from pathlib import Path

import jax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.checkpoint_checks import TENSOR, assert_is_the_state, structs
from tests.multiprocess.worker import Context
from treeshard.checkpoint import restore, save


def check_shapes_and_rules_are_enough(context: Context) -> None:
    again = restore(Path(context.args[0]), structs(), rules=TENSOR, mesh="data=4,tensor=2")
    assert_is_the_state(again)
    assert again["w"].sharding.spec == P("tensor", "data")
    assert len(again["w"].addressable_shards) == 2


def check_a_mesh_over_some_processes(context: Context) -> None:
    devices = jax.devices()
    for name, some in {"first": devices[:4], "last": devices[4:]}.items():
        mesh = ts.make_mesh("data=2,tensor=2", devices=some)
        again = restore(Path(context.args[0]), structs(), rules=[(".*", P())], mesh=mesh)
        assert_is_the_state(again)
        assert again["half"].sharding.device_set == set(some)
        mine = [d for d in some if d.process_index == context.index]
        assert len(again["half"].addressable_shards) == len(mine)
        save(context.directory / name, again)
        assert_is_the_state(restore(context.directory / name, again))
