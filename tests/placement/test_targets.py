"""Tuples of logical names work wherever specs do."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts

RULES = [("batch", ("data", "absent")), ("embed", "fsdp")]
TREE = {"x": np.ones((8, 8), "float32"), "y": np.ones(8, "float32")}
NAMES = {"x": ("batch", "embed"), "y": ("embed",)}
SPECS = {"x": P("data", "fsdp"), "y": P("fsdp")}


def specs_of(tree):
    return jax.tree.map(lambda x: x.sharding.spec, tree)


@pytest.mark.parametrize("place", [ts.shard, ts.reshard], ids=["shard", "reshard"])
def test_logical_names_in_shard_and_reshard(place, mesh) -> None:
    with ts.logical_axis_rules(RULES):
        assert specs_of(place(TREE, NAMES, mesh)) == SPECS
        assert specs_of(place(TREE["x"], ("batch", "embed"), mesh)) == P("data", "fsdp")
        with jax.set_mesh(mesh):
            assert specs_of(place(TREE, NAMES)) == SPECS


def test_logical_names_in_functions_per_leaf(mesh) -> None:
    with ts.logical_axis_rules(RULES):
        shard_fns, gather_fns = ts.make_shard_and_gather_fns(NAMES, mesh)
    placed = jax.tree.map(lambda f, x: f(x), shard_fns, TREE)  # outside the rules
    assert specs_of(placed) == SPECS
    back = jax.tree.map(lambda f, x: f(x), gather_fns, placed)
    assert back["x"].tolist() == TREE["x"].tolist()


@pytest.mark.parametrize("use", [ts.shard, lambda tree, *rest: ts.make_shard_and_gather_fns(*rest)])
def test_logical_names_without_rules(use, mesh) -> None:
    with pytest.raises(ts.SpecError) as raised:
        use(TREE, NAMES, mesh)
    assert str(raised.value).splitlines()[0] == "2 entries of the specs are not specs:"
    assert "x: ('batch', 'embed') is a tuple of logical names, and no rules are in" in str(
        raised.value
    )


def test_logical_names_that_do_not_divide_a_dim(mesh) -> None:
    with ts.logical_axis_rules(RULES), pytest.raises(ts.SpecError, match="6 is not divisible"):
        ts.shard(np.ones((8, 6), "float32"), ("batch", "embed"), mesh)


def test_logical_names_of_a_batch(mesh) -> None:
    state = {"w": np.ones((8, 8), "float32")}
    plan = ts.plan(state, [("w", P("fsdp"))], mesh, min_size=0)
    with ts.logical_axis_rules([("batch", ("data", "fsdp"))]):
        step = ts.training.jit_step(lambda s, x: (s, x * 2), plan, batch=("batch", None))
    _, doubled = step(ts.shard(state, plan), np.ones((8, 2), "float32"))  # outside the rules
    assert doubled.sharding.spec == P(("data", "fsdp"))
    with pytest.raises(ts.SpecError, match="no rules are in force"):
        ts.training.jit_step(lambda s, x: (s, x), plan, batch=("batch",))
