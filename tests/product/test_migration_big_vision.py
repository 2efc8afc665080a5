"""docs/migrate.md: big_vision's lines, and ours.

What the old ops do was read in big_vision's `sharding.py`, and is written down here anew.
"""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import short, table

import treeshard as ts
from treeshard.compat._big_vision import _ops

TABLE = table("From big_vision")
row = TABLE.row

MIB = 2**20


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("data=8")


def test_every_row_has_a_test() -> None:
    TABLE.check()


@row("mesh = jax.sharding.Mesh(mesh_utils.create_device_mesh(mesh_size), mesh_axes)")
def test_mesh(ours) -> None:
    assert dict(ours(config_mesh=[("data", -1)]).shape) == {"data": 8}
    assert dict(ours(config_mesh=[("data", 2), ("model", 4)]).shape) == {"data": 2, "model": 4}


# ------------------------------------------------------------------ what the old ops do

Entries = tuple[Any, ...]


def old_fsdp(now: Entries, leaf: Any, axis: str, size: int, floor: float = 4) -> Entries:
    """The longest free dim that divides, the last of equals, of leaves of more than `floor` MiB."""
    if np.prod(leaf.shape) * leaf.dtype.itemsize <= floor * MIB:
        return now
    free = [i for i, d in enumerate(leaf.shape) if d % size == 0 and now[i] is None]
    if not free:
        return now
    chosen = max(free, key=lambda i: (leaf.shape[i], i))
    return tuple(axis if i == chosen else entry for i, entry in enumerate(now))


def old_shard_dim(now: Entries, leaf: Any, axis: str, dim: int, ignore: bool = False) -> Entries:
    """One dim, whether or not it divides; `-ndim` is out of bounds."""
    if abs(dim) >= len(now):
        if ignore:
            return now
        raise ValueError(f"Cannot shard_dim({axis}, {dim})")
    chosen = dim % len(now)
    if now[chosen] is not None:
        raise ValueError("Already sharded")
    return tuple(axis if i == chosen else entry for i, entry in enumerate(now))


def old_infer(tree: Any, strategy: list[tuple[str, list[Any]]]) -> Any:
    """The first pattern that matches all of a path decides; without one a leaf is replicated."""

    def spec(path: str, leaf: Any) -> P:
        now: Entries = (None,) * len(leaf.shape)
        for pattern, ops in strategy:
            if re.fullmatch(pattern, path):
                for op in ops:
                    now = op(now, leaf)
                break
        return P(*now)

    return short(ts.named_tree_map(spec, tree))


FSDP = lambda now, leaf: old_fsdp(now, leaf, "data", 8)  # noqa: E731
LAST = lambda now, leaf: old_shard_dim(now, leaf, "data", -1)  # noqa: E731

TREE = {
    "img": {"kernel": struct(1024, 1032), "bias": struct(1032), "square": struct(2048, 2048)},
    "head": {"kernel": struct(1024, 1024), "wide": struct(3, 2**20), "odd": struct(1025, 1027)},
    "half": [struct(1024, 2048, dtype="bfloat16"), struct(1024, 2056, dtype="bfloat16")],
    "step": struct(),
}


@row("infer_sharding(tree, strategy, mesh)")
def test_infer_sharding(ours, mesh) -> None:
    strategy = [
        ("head/kernel", "replicate"),
        ("half/1", "shard_dim('data', -1)"),
        ("img", "replicate"),  # in full, it matches nothing
        (".*", "fsdp('data')"),
    ]
    # There, to replicate is to leave a leaf as it is.
    old = [("head/kernel", []), ("half/1", [LAST]), ("img", []), (".*", [FSDP])]
    found = ours(tree=TREE, strategy=strategy, mesh=mesh)
    assert short(found) == old_infer(TREE, old)
    assert all(isinstance(x, NamedSharding) for x in jax.tree.leaves(found))
    # Unmatched: replicated, with a word.
    with pytest.warns(ts.ShardingWarning, match=r"(?s)head/kernel.*head/wide"):
        found = ours(tree=TREE, strategy=[("img/.*", "fsdp('data')")], mesh=mesh)
    assert short(found) == old_infer(TREE, [("img/.*", [FSDP])])
    assert ours(tree={"n": 3}, strategy=strategy, mesh=mesh)["n"].spec == P()
    with pytest.raises(ts.ShardingRuleError, match="fdsp is not a tactic. Did you mean 'fsdp'"):
        ours(tree=TREE, strategy=[(".*", "fdsp('data')")], mesh=mesh)
    with pytest.raises(ts.UnknownAxisError, match="Did you mean 'data'"):
        ours(tree=TREE, strategy=[(".*", "fsdp('date')")], mesh=mesh)


@row("""("kernel", "fsdp('data')")""")
def test_fsdp(ours, mesh) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 3, 7, 8, 64, 512, 1000, 1024, 4096]
    shapes = [tuple(rng.choice(sizes, rng.integers(1, 4))) for _ in range(200)]
    # One more and one less than, and exactly, 4 MiB.
    shapes += [(1024, 1024), (1024, 1032), (1024, 1016), (2**20,), (2**20 + 8,)]
    leaves = [struct(*map(int, shape)) for shape in shapes]
    old = [short(P(*FSDP((None,) * len(x.shape), x))) for x in leaves]
    assert len(set(map(str, old))) == 4  # whole, and each of three dims
    found = [short(ours(tree={"kernel": x}, mesh=mesh)["kernel"]) for x in leaves]
    assert found == old
    odd = ts.plan({"kernel": struct(1025, 1027)}, [("kernel", ts.fsdp("data"))], mesh)
    assert [x.code for x in odd.findings] == ["left-whole"]


@row("""(".*/kernel", "fsdp('data', min_size_to_shard_mb=4)")""")
def test_fsdp_as_a_rule(ours, mesh) -> None:
    tree = {"img": {"kernel": struct(1024, 1032)}, "head": {"kernel": struct(1024, 1024)}}
    old = old_infer(tree, [(".*/kernel", [FSDP])])
    found = ours(tree=tree, mesh=mesh).specs
    assert found["img"] == old["img"] == {"kernel": P(None, "data")}
    assert old["head"] == {"kernel": P()}  # exactly 4 MiB
    assert found["head"] == {"kernel": P(None, "data")}
    halves = {"img": {"kernel": struct(1024, 1032, dtype="bfloat16")}}
    assert old_infer(halves, [(".*/kernel", [FSDP])]) == {"img": {"kernel": P()}}
    assert ours(tree=halves, mesh=mesh).specs == {"img": {"kernel": P(None, "data")}}


@row("""("kernel", "shard_dim('data', -1)")""")
def test_shard_dim(ours, mesh) -> None:
    for shape in [(16, 24), (3, 4, 8), (5, 64)]:
        leaf = struct(*shape)
        old = short(P(*LAST((None,) * len(shape), leaf)))
        assert short(ours(tree={"kernel": leaf}, mesh=mesh)) == {"kernel": old}
    assert LAST((None, None), struct(16, 15)) == (None, "data")
    with pytest.raises(ts.ShardingRuleError, match="15 is not divisible"):
        ours(tree={"kernel": struct(16, 15)}, mesh=mesh)
    # A matrix has a dim -2; and vectors have none.
    with pytest.raises(ValueError, match="Cannot shard_dim"):
        old_shard_dim((None, None), struct(16, 8), "data", -2)
    first = [("kernel", "shard_dim('data', -2)")]
    found = ts.infer_sharding({"kernel": struct(16, 8)}, first, mesh)
    assert short(found) == {"kernel": P("data")}
    vector = {"kernel": struct(16)}
    with pytest.raises(ts.ShardingRuleError, match="has no dim -2"):
        ts.infer_sharding(vector, first, mesh)
    found = ts.infer_sharding(vector, [("kernel", "shard_dim('data', -2, True)")], mesh)
    assert short(found) == {"kernel": P()}
    assert old_shard_dim((None,), struct(16), "data", -2, ignore=True) == (None,)
    with pytest.raises(ValueError, match="Cannot shard_dim"):
        LAST((None,), struct(16))
    assert short(ours(tree=vector, mesh=mesh)) == {"kernel": P("data")}


@row("""("kernel", "logical_partitioning()")""")
def test_logical_partitioning(ours, mesh) -> None:
    names = ("embed", "mlp")
    tree = {"kernel": nn.LogicallyPartitioned(struct(1024, 4096), names)}
    rules = [("mlp", "data"), ("embed", None)]
    with nn.logical_axis_rules(rules):
        old = short(nn.logical_to_mesh_axes(names))
        assert short(ours(tree=tree, mesh=mesh)) == {"kernel": old} == {"kernel": P(None, "data")}
    with ts.logical_axis_rules(rules):
        assert short(ours(tree=tree, mesh=mesh)) == {"kernel": old}
    two = ts.make_mesh("data=4,model=2")
    with nn.logical_axis_rules([("mlp", "model"), ("embed", None)]):
        both = [("kernel", "logical_partitioning() | fsdp('data')")]
        assert short(ts.infer_sharding(tree, both, two)) == {"kernel": P("data", "model")}


@row('@Registry.register("shardings.last")')
def test_an_op_of_ones_own(ours, mesh) -> None:
    def last(axis):
        def update(spec, mesh, path, leaf):
            assert len(spec) == leaf.ndim
            assert isinstance(spec, P)
            return (*spec[:-1], axis)

        return update

    try:
        ours(last=last)
        found = ts.infer_sharding({"w": struct(4, 5, 16)}, [("w", "last('data')")], mesh)
        assert short(found) == {"w": P(None, None, "data")}
    finally:
        _ops.pop("last", None)


@row('infer_sharding({"params": params, "opt": opt}, strategy, mesh)')
def test_optimizer_state(ours, mesh) -> None:
    params = {"img": {"kernel": struct(1024, 1032)}, "head": {"kernel": struct(8, 8)}}
    opt = jax.eval_shape(optax.adam(1e-3).init, params)
    state = {"params": params, "opt": opt}
    strategy = [("params/.*", "fsdp('data')"), (".*", "replicate")]
    old = old_infer(state, [("params/.*", [FSDP]), (".*", [])])
    assert short(ts.infer_sharding(state, strategy, mesh)) == old
    assert old["params"]["img"]["kernel"] == P(None, "data")
    assert old["opt"][0].mu["img"]["kernel"] == P()
    found = ours(params=params, opt=opt, rules=[("kernel", ts.fsdp("data"))], mesh=mesh).specs
    assert found[0].mu == found[0].nu == old["params"]
    assert found[0].count == P()


@row("u.reshard(tree, shardings)")
def test_reshard(ours, mesh, compiles) -> None:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(mesh, P("data"))
    placed = ours(tree={"a": x, "b": jax.device_put(x, sharding)}, shardings=sharding)
    assert [y.sharding for y in placed.values()] == [sharding, sharding]
    np.testing.assert_array_equal(placed["a"], x)
    assert ours(tree=placed, shardings=sharding)["a"] is placed["a"]
    assert not compiles
    with pytest.raises(ts.SpecError, match=r"(?s)a: .*b: "):
        ours(tree={"a": x[:7], "b": x[:6], "c": x}, shardings=sharding)


@row("u.load_checkpoint_ts(path, tree=train_state_sharding, shardings=train_state_sharding)")
def test_restore(ours, mesh, tmp_path) -> None:
    state = {"params": {"kernel": np.arange(32, dtype=np.float32).reshape(8, 4)}}
    ts.checkpoint.save(tmp_path / "state", state)
    rules = [("kernel", P("data"))]
    found = ours(path=tmp_path / "state", plan=ts.plan(state, rules, mesh, min_size=0))
    assert found["params"]["kernel"].sharding.spec == P("data")
    np.testing.assert_array_equal(found["params"]["kernel"], state["params"]["kernel"])
    other = ts.plan({"params": {"kernel": struct(8, 4, dtype="bfloat16")}}, rules, mesh)
    with pytest.raises(ts.MismatchError, match="saved as float32.*, requested as bfloat16"):
        ours(path=tmp_path / "state", plan=other)


# ------------------------------------------------------------------ a loop

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def init(rng: jax.Array) -> dict[str, Any]:
    params = {"kernel": jax.random.normal(rng, (16, 8)), "wide": jnp.zeros((1024, 1032))}
    return {"params": params, "opt": OPTIMIZER.init(params)}


@row("jax.jit(init, out_shardings=train_state_sharding)(rng)")
def test_init(ours, mesh) -> None:
    rng = jax.random.key(0)
    state, plan = ours(init=init, rng=rng, mesh=mesh)
    shapes = jax.eval_shape(init, rng)
    old = old_infer(shapes, [(".*", [FSDP])])
    assert plan.specs == ts.get_partition_spec(state) == old
    assert old["opt"][0].trace == {"kernel": P(), "wide": P(None, "data")}
    np.testing.assert_array_equal(state["params"]["kernel"], jax.jit(init)(rng)["params"]["kernel"])


@row("jax.jit(update_fn, donate_argnums=(0,), out_shardings=(train_state_sharding, repl_sharding))")
def test_step(ours, mesh) -> None:
    def update_fn(state: Any, batch: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - grad}, {"training_loss": loss}

    state = {"w": jax.random.normal(jax.random.key(0), (8, 16))}
    plan = ts.plan(state, [("w", P(None, "data"))], mesh, min_size=0)
    batch = np.ones((8, 8), np.float32)
    expected, _ = update_fn(state, jnp.asarray(batch))
    step = ours(update_fn=update_fn, plan=plan)
    out, _ = step(ts.shard(state, plan), batch)
    assert ts.get_partition_spec(out) == plan.specs
    np.testing.assert_allclose(out["w"], expected["w"], rtol=1e-5)
    with pytest.raises(ts.SpecError, match="w: sharded as .* Place the state"):
        step(ts.shard(state, P("data"), mesh), batch)
