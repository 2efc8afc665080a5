"""docs/migrate.md: the lines of scalax, observed on 0.2.6, and ours."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import short, table

import treeshard as ts

TABLE = table("From scalax")
row = TABLE.row


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return ts.make_mesh("dp=2,fsdp=4")


def test_every_row_has_a_test() -> None:
    TABLE.check()


@row('mesh = MeshShardingHelper([2, -1], ["dp", "fsdp"])')
def test_mesh(ours) -> None:
    assert dict(ours().shape) == {"dp": 2, "fsdp": 4}
    assert type(ours()) is jax.sharding.Mesh


def old_fsdp(shape: tuple[int, ...], size: int, least: int) -> P:
    """The first of the longest dims that the axis divides, of leaves that are large enough."""
    divisible = [dim for dim in shape if dim % size == 0]
    if np.prod(shape) < least or not divisible:
        return P()
    return P(*[None] * shape.index(max(divisible)), "fsdp")


@row('FSDPShardingRule(fsdp_axis_name="fsdp", fsdp_axis_size=4, min_fsdp_size=2**20)')
def test_fsdp(ours, mesh) -> None:
    rules = ours()
    shapes = [(1024, 1024), (1024, 1023), (2048, 1024), (1024, 2048), (8, 4100, 40), (4099, 4098)]
    shapes += [(1023, 1024), (2**20,), (2**20 - 4,), ()]
    found = ts.plan([struct(*shape) for shape in shapes], rules, mesh).specs
    old = [old_fsdp(shape, 4, 2**20) for shape in shapes]
    assert old[0] == P("fsdp")  # observed, as all of `old_fsdp`: P("fsdp", None)
    assert found[0] == P(None, "fsdp")
    assert found[1:] == old[1:]
    assert P() in old[1:]
    assert P(None, "fsdp") in old


@row("FSDPShardingRule(min_fsdp_size=64)")
def test_fsdp_without_a_size(ours, mesh) -> None:
    # Observed there: P("fsdp", None) for (8, 33) and (96, 16), where the axis divides; and ...
    tree = {"w": struct(8, 33), "v": struct(96, 16), "odd": struct(9, 25), "long": struct(2, 1000)}
    plan = ts.plan(tree, ours(), mesh)
    assert plan.specs == {"w": P("fsdp"), "v": P("fsdp"), "odd": P(), "long": P(None, "fsdp")}
    old = jax.jit(lambda: jnp.ones((9, 25)), out_shardings=NamedSharding(mesh, P("fsdp", None)))
    with pytest.raises(ValueError, match="should evenly divide the shape"):
        old()  # ... this for `odd`
    assert "no-dim fsdp" in str(plan)


def old_rules(rules: Any, tree: Any, strict: bool = True) -> Any:
    def spec(path: str, leaf: Any) -> P:
        if np.prod(leaf.shape) == 1:
            return P()
        for pattern, given in rules:
            if re.search(pattern, path):
                return given
        if strict:
            raise ValueError(f"Partition rule not found for param: {path}")
        return P()

    return ts.named_tree_map(spec, tree)


@row("TreePathShardingRule(*rules, strict=True)")
def test_rules(ours) -> None:
    rules = [("w", P("fsdp")), ("b", P())]
    tree = {"w": struct(8, 8), "b": struct(8), "w1": struct(1, 1), "w0": struct()}
    assert ours(rules=rules, tree=tree) == old_rules(rules, tree)
    more = tree | {"x": struct(8), "y": struct(8)}
    with pytest.raises(ValueError, match="for param: x"):
        old_rules(rules, more)
    with pytest.raises(ValueError, match=r"(?s)x: shape.*y: shape"):
        ours(rules=rules, tree=more)
    found = ts.match_partition_rules(rules, more, min_size=2, strict=False)
    assert found == old_rules(rules, more, strict=False)
    assert ours(rules=rules, tree={"w": 3}) == {"w": P()}  # there: no attribute 'shape'


@row("PolicyShardingRule(policy)")
def test_policy(ours) -> None:
    policy = lambda path, leaf: P("fsdp") if "w" in path else P()  # noqa: E731
    tree = {"w": struct(8, 8), "b": struct(8), "step": struct()}
    old = ts.named_tree_map(policy, tree)
    assert ts.match_partition_rules(ours(policy=policy), tree, min_size=0) == old
    assert ts.match_partition_rules(ours(policy=policy), tree)["w"] == P()
    asked: list[str] = []

    def noting(path: str, leaf: Any) -> P:
        asked.append(path)
        return P()

    ts.match_partition_rules(ours(policy=noting), tree, min_size=0)
    assert asked == ["b", "w"]


@row('mesh.match_sharding_rule({"a": rule, "b": PS("dp")}, tree)')
def test_a_tree_of_rules(ours, mesh) -> None:
    tree = {"a": {"w": struct(8, 16)}, "b": [struct(8), struct(4, 3)]}
    found = ours(tree=tree, mesh=mesh)
    assert all(isinstance(x, NamedSharding) for x in jax.tree.leaves(found))
    assert short(found) == {"a": {"w": P(None, "fsdp")}, "b": [P("dp"), P("dp")]}
    rules = [("^a/", ts.fsdp("fsdp")), ("^b/", P("dp"))]
    odd = ts.plan({"b": [struct(7)]}, rules, mesh, min_size=0)
    assert "indivisible: b/0" in str(odd.findings[0])


@row("mesh.local_data_to_global_array(batch)")
def test_batch(ours, mesh) -> None:
    batch = {"x": np.ones((16, 2), np.float32)}
    # Observed there, with one process: P(("dp", "fsdp")).
    assert ours(batch=batch, mesh=mesh)["x"].sharding.spec == P(("dp", "fsdp"))
    with pytest.raises(ts.SpecError, match="x: .* 12 is not divisible"):
        ours(batch={"x": np.ones((12, 2), np.float32)}, mesh=mesh)


# ------------------------------------------------------------------ a loop

RULES = [("w", P("fsdp")), ("b", None)]


def init(key: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros(4)}


def train(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    return jax.tree.map(lambda x: x + batch.mean(), state), batch.sum()


@row("mesh.sjit(init, out_shardings=rule)(key)")
def test_init(ours, mesh) -> None:
    state, plan = ours(init=init, key=jax.random.key(0), rules=RULES, mesh=mesh)
    assert ts.get_partition_spec(state) == plan.specs == {"w": P("fsdp"), "b": P()}
    with pytest.raises(ts.ShardingRuleError, match=r"w: shape \(9,\), .* 9 is not divisible"):
        ours(init=lambda key: {"w": jnp.ones(9)}, key=None, rules=RULES, mesh=mesh)
    with pytest.raises(ValueError, match="should evenly divide") as caught:
        jax.jit(lambda: {"w": jnp.ones(9)}, out_shardings=NamedSharding(mesh, P("fsdp")))()
    assert "w:" not in str(caught.value)


@row(
    "mesh.sjit(step, in_shardings=(rule, PS()), out_shardings=(rule, PS()),"
    ' args_sharding_constraint=(rule, PS("dp")), donate_argnums=(0,))'
)
def test_step(ours, mesh) -> None:
    state = init(jax.random.key(0))
    plan = ts.plan(state, RULES, mesh, min_size=0)
    batch = np.arange(8, dtype=np.float32)
    expected, total = train(state, jnp.asarray(batch))
    step = ours(step=train, plan=plan)
    placed = ts.shard(state, plan)
    out, found = step(placed, batch)
    assert placed["w"].is_deleted()
    assert ts.get_partition_spec(out) == plan.specs
    np.testing.assert_allclose(out["w"], expected["w"], rtol=1e-6)
    assert found == total
    (_, (data,)), _ = step.lower(plan.structs, batch).compile().input_shardings
    assert data.is_equivalent_to(NamedSharding(mesh, P(("dp", "fsdp"))), 1)
    with pytest.raises(ts.SpecError, match="v: the plan has no such array"):
        step(out | {"v": jnp.ones(4)}, batch)


@row('with_sharding_constraint(x, PS("dp"))')
def test_constraint(ours, mesh) -> None:
    x = jnp.ones(8)
    assert ours(x=x) is x
    with jax.set_mesh(mesh):
        assert ours(x=x).sharding.spec == P("dp")
        with pytest.warns(ts.ShardingWarning, match="7 is not divisible"):
            odd = jax.jit(lambda x: ours(x=x))(jnp.ones(7))
        assert odd.sharding.is_fully_replicated
        silent = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("dp")))(jnp.ones(7))
        assert silent.sharding.is_fully_replicated
    assert ts.with_sharding_constraint(x, P("tp"), mesh).sharding.spec == P()


@row('with_sharding_annotation(x, "activation")')
def test_annotation(ours, mesh) -> None:
    x = jnp.ones((8, 4))
    with ts.logical_axis_rules([("batch", "dp")]):
        assert ours(x=x, mesh=mesh).sharding.spec == P("dp", None)
    with pytest.raises(ts.SpecError, match="no rules are in force"):
        ours(x=x, mesh=mesh)


@row("mesh.make_shard_and_gather_fns(tree, rule)")
def test_shard_and_gather_fns(ours, mesh, compiles) -> None:
    tree = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    shard_fns, gather_fns = ours(plan=ts.plan(tree, RULES, mesh, min_size=0))
    placed = jax.tree.map(lambda f, x: f(x), shard_fns, tree)
    assert ts.get_partition_spec(placed) == {"w": P("fsdp"), "b": P()}
    back = jax.tree.map(lambda f, x: f(x), gather_fns, placed)
    np.testing.assert_array_equal(back["w"], tree["w"])
    assert not compiles
