"""docs/migrate.md: big_vision's lines, and ours."""

import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import longest_dim, mebibytes, short, table

import treeshard as ts
from treeshard.compat._big_vision import _ops

row = table("From big_vision", "data=8")


test_mesh = row.makes_mesh(
    "mesh = jax.sharding.Mesh(mesh_utils.create_device_mesh(mesh_size), mesh_axes)",
    {"config_mesh": [("data", 2), ("model", -1)]},
    data=2,
    model=4,
)
test_init = row.makes_state(
    "jax.jit(init, out_shardings=train_state_sharding)(rng)", None, P(None, "data")
)
test_step = row.steps(
    "jax.jit(update_fn, donate_argnums=(0,), out_shardings=(train_state_sharding, repl_sharding))",
    P(None, "data"),
)
test_restore = row.restores(
    "u.load_checkpoint_ts(path, tree=train_state_sharding, shardings=train_state_sharding)",
    P("data"),
)


def old_fsdp(leaf: Any) -> P:
    """Leaves of more than 4 MiB are split."""
    return longest_dim(leaf.shape, "data", 8) if mebibytes(leaf) > 4 else P()


def old_infer(tree: Any, strategy: list[tuple[str, Any]]) -> Any:
    """The first pattern that matches all of a path decides; without one a leaf is replicated."""

    def spec(path: str, leaf: Any) -> P:
        for pattern, op in strategy:
            if re.fullmatch(pattern, path):
                return op(leaf)
        return P()

    return ts.named_tree_map(spec, tree)


def replicated(leaf: Any) -> P:
    return P()


TREE = {
    "img": {"kernel": struct(1024, 1032), "bias": struct(1032), "square": struct(2048, 2048)},
    "head": {"kernel": struct(1024, 1024), "wide": struct(3, 2**20), "odd": struct(1025, 1027)},
    "half": [struct(1024, 2048, dtype="bfloat16"), struct(1024, 2056, dtype="bfloat16")],
    "step": struct(),
}


@row("infer_sharding(tree, strategy, mesh)")
def test_infer_sharding(ours) -> None:
    strategy = [
        ("head/kernel", "replicate"),
        ("half/1", "shard_dim('data', -1)"),
        ("img", "replicate"),  # in full, it matches nothing
        (".*", "fsdp('data')"),
    ]
    old = [
        ("head/kernel", replicated),
        ("half/1", lambda leaf: P(None, "data")),
        ("img", replicated),
        (".*", old_fsdp),
    ]
    found = ours(tree=TREE, strategy=strategy)
    assert short(found) == old_infer(TREE, old)
    assert all(isinstance(x, NamedSharding) for x in jax.tree.leaves(found))
    with pytest.warns(ts.ShardingWarning, match=r"(?s)head/kernel.*head/wide"):
        found = ours(tree=TREE, strategy=[("img/.*", "fsdp('data')")])
    assert short(found) == old_infer(TREE, [("img/.*", old_fsdp)])
    with pytest.raises(ts.ShardingRuleError, match="fsdpp is not a tactic. Did you mean 'fsdp'"):
        ours(tree=TREE, strategy=[(".*", "fsdpp('data')")])
    wrong = [
        ("img/kernel", "shard_dim('data', 0) | replicate"),
        ("img/.*", "shard_dim('data', 1)"),
        ("step", "shard_dim('data', 0, ignore_ndim_error=True)"),
        (".*", "replicate"),
    ]
    with pytest.raises(ts.ShardingRuleError) as caught:
        ours(tree=TREE, strategy=wrong)
    assert isinstance(caught.value, ValueError)
    assert "img/kernel: shape (1024, 1032)" in str(caught.value)
    assert "an earlier tactic sharded it as P('data',), so it cannot be" in str(caught.value)
    assert "shape (1032,) has no dim 1" in str(caught.value)
    assert "step" not in str(caught.value)


def test_fsdp() -> None:
    strategy = [("kernel", "fsdp('data')")]
    rng = np.random.default_rng(0)
    sizes = [1, 3, 7, 8, 64, 512, 1000, 1024, 4096]
    shapes = [tuple(rng.choice(sizes, rng.integers(1, 4))) for _ in range(200)]
    # One more and one less than, and exactly, 4 MiB.
    shapes += [(1024, 1024), (1024, 1032), (1024, 1016), (2**20,), (2**20 + 8,)]
    leaves = [struct(*map(int, shape)) for shape in shapes]
    old = [old_fsdp(x) for x in leaves]
    assert len(set(map(str, old))) == 4  # whole, and each of three dims
    found = [ts.infer_sharding({"kernel": x}, strategy, row.mesh)["kernel"] for x in leaves]
    assert [short(x) for x in found] == old


@row("""(".*/kernel", "fsdp('data', min_size_to_shard_mb=4)")""")
def test_fsdp_as_a_rule(ours) -> None:
    tree = {"img": {"kernel": struct(1024, 1032)}, "head": {"kernel": struct(1024, 1024)}}
    old = old_infer(tree, [(".*/kernel", old_fsdp)])
    found = ours(tree=tree).specs
    assert found["img"] == old["img"] == {"kernel": P(None, "data")}
    assert old["head"] == {"kernel": P()}  # exactly 4 MiB
    assert found["head"] == {"kernel": P(None, "data")}
    half = struct(1024, 1032, dtype="bfloat16")  # of fewer bytes, and as many elements
    assert old_fsdp(half) == P()
    assert ours(tree={"img": {"kernel": half}}).specs == {"img": {"kernel": P(None, "data")}}


@row("""("kernel", "shard_dim('data', -1)")""")
def test_shard_dim(ours) -> None:
    """There `abs(dim)` must be less than the number of dims, and a dim may be indivisible."""
    for shape in [(16,), (16, 24), (3, 4, 8)]:
        found = short(ours(tree={"kernel": struct(*shape)}))
        assert found == {"kernel": P(*[None] * (len(shape) - 1), "data")}
    with pytest.raises(ts.ShardingRuleError, match="15 is not divisible"):
        ours(tree={"kernel": struct(16, 15)})
    found = ts.infer_sharding(
        {"kernel": struct(16, 8)}, [("kernel", "shard_dim('data', -2)")], row.mesh
    )
    assert short(found) == {"kernel": P("data")}


def test_logical_partitioning() -> None:
    by_names = [("kernel", "logical_partitioning()")]
    names = ("embed", "mlp")
    tree = {"kernel": nn.LogicallyPartitioned(struct(1024, 4096), names)}
    rules = [("mlp", "data"), ("embed", None)]
    with nn.logical_axis_rules(rules):
        old = short(nn.logical_to_mesh_axes(names))
        found = short(ts.infer_sharding(tree, by_names, row.mesh))
        assert found == {"kernel": old} == {"kernel": P(None, "data")}
    with ts.logical_axis_rules(rules):
        assert short(ts.infer_sharding(tree, by_names, row.mesh)) == {"kernel": old}
    two = ts.make_mesh("data=4,model=2")
    with nn.logical_axis_rules([("mlp", "model"), ("embed", None)]):
        both = [("kernel", "logical_partitioning() | fsdp('data')")]
        assert short(ts.infer_sharding(tree, both, two)) == {"kernel": P("data", "model")}


@row('@Registry.register("shardings.last")')
def test_an_op_of_ones_own(ours) -> None:
    def last(axis):
        def update(spec, mesh, path, leaf):
            assert isinstance(spec, P)
            assert len(spec) == leaf.ndim
            return (*spec[:-1], axis)

        return update

    try:
        ours(last=last)
        found = ts.infer_sharding({"w": struct(4, 5, 16)}, [("w", "last('data')")], row.mesh)
        assert short(found) == {"w": P(None, None, "data")}
    finally:
        _ops.pop("last", None)


@row('infer_sharding({"params": params, "opt": opt}, strategy, mesh)')
def test_optimizer_state(ours) -> None:
    params = {"img": {"kernel": struct(1024, 1032)}, "head": {"kernel": struct(8, 8)}}
    opt = jax.eval_shape(optax.adam(1e-3).init, params)
    state = {"params": params, "opt": opt}
    strategy = [("params/.*", "fsdp('data')"), (".*", "replicate")]
    old = old_infer(state, [("params/.*", old_fsdp)])
    assert short(ts.infer_sharding(state, strategy, row.mesh)) == old
    assert old["params"]["img"]["kernel"] == P(None, "data")
    assert old["opt"][0].mu["img"]["kernel"] == P()
    found = ours(params=params, opt=opt, rules=[("kernel", ts.fsdp("data"))]).specs
    assert found[0].mu == found[0].nu == old["params"]
    assert found[0].count == P()


@row("u.reshard(tree, shardings)")
def test_reshard(ours) -> None:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(row.mesh, P("data"))
    placed = ours(tree={"a": x, "b": jax.device_put(x, sharding)}, shardings=sharding)
    assert [y.sharding for y in placed.values()] == [sharding, sharding]
    np.testing.assert_array_equal(placed["a"], x)
    with pytest.raises(ts.SpecError, match=r"(?s)a: .*b: "):
        ours(tree={"a": x[:7], "b": x[:6], "c": x}, shardings=sharding)
