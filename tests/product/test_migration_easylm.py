"""docs/migrate.md: EasyLM's and eformer's lines, and ours.

What eformer does was observed on 0.0.101; what EasyLM does, read in its `jax_utils`.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import legacy, struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import table

import treeshard as ts

TABLE = table("From EasyLM, EasyDeL and eformer")
row = TABLE.row

PARAMS = {
    "wte": {"embedding": struct(64, 16)},
    "h": [{"attn": {"wq": {"kernel": struct(16, 16)}}, "norm": {"kernel": struct(16)}}] * 2,
    "temperature": struct(),
}
RULES = [("wte/embedding", P("mp", "fsdp")), ("attn/wq", P("fsdp", "mp")), ("norm", P(None))]


def old_rules(rules: Any, tree: Any) -> Any:
    """What EasyLM's function of that name decides."""

    def spec(path: str, leaf: Any) -> P:
        if np.prod(leaf.shape) == 1:  # of no dims, or of one element
            return P()
        for pattern, given in rules:
            if re.search(pattern, path):
                return given
        raise ValueError(f"no rule for {path}")

    return ts.named_tree_map(spec, tree)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("dp=1,fsdp=4,mp=2")


def test_every_row_has_a_test() -> None:
    TABLE.check()


@row('get_jax_mesh("1,-1,2", ("dp", "fsdp", "mp"))')
def test_mesh(ours) -> None:
    mesh = ours()
    assert tuple(mesh.shape.values()) == np.arange(8).reshape(1, -1, 2).shape
    assert list(mesh.shape) == ["dp", "fsdp", "mp"]
    with pytest.raises(ts.MeshError, match="dp=3, fsdp=-1 multiplies to 3, .* devices, 8"):
        ts.make_mesh("dp=3,fsdp=-1")


@row("match_partition_rules(rules, params)")
def test_rules(ours) -> None:
    assert ours(rules=RULES, params=PARAMS) == old_rules(RULES, PARAMS)
    # A leaf of one element: EasyLM keeps it whole, eformer and we do not.
    one = {"norm": struct(1)}
    rules = [("norm", P("fsdp"))]
    assert old_rules(rules, one) == {"norm": P()}
    assert ours(rules=rules, params=one) == {"norm": P("fsdp")}
    assert ts.match_partition_rules(rules, one, min_size=2) == {"norm": P()}
    # Without min_size, everything here is small.
    with pytest.warns(ts.ShardingWarning, match="3 leaves are not sharded as their rules say"):
        assert set(jax.tree.leaves(ts.match_partition_rules(RULES, PARAMS))) == {P()}
    with pytest.raises(ValueError, match=r"(?s)h/0/attn/wq/kernel.*h/1/attn/wq/kernel"):
        ours(rules=[("wte|norm", P())], params=PARAMS)


@row("match_partition_rules(rules, params, strict=True)")
def test_rules_with_a_mesh(ours, mesh) -> None:
    params = {"odd": struct(7, 8), "typo": struct(8, 8), "bias": struct(8)}
    rules = [("typo", P("fdsp")), (".*", P("fsdp", "mp"))]
    # eformer's, without a word: the last is cut to P("fsdp"). EasyLM's has it whole.
    old = {"odd": P("fsdp", "mp"), "typo": P("fdsp"), "bias": P("fsdp", "mp")}
    assert old_rules(rules, params) == old
    with pytest.raises(ts.ShardingRuleError) as caught:
        ours(rules=rules, params=params, mesh=mesh)
    for fact in ("odd: shape (7, 8)", "no axis 'fdsp'", "Did you mean 'fsdp'", "bias: shape (8,)"):
        assert fact in str(caught.value)
    with pytest.warns(ts.ShardingWarning, match="bias"):
        kept = ts.match_partition_rules(rules, params, mesh, min_size=0, strict=False)
    assert kept == {"odd": P(None, "mp"), "typo": P(), "bias": P("fsdp")}


@row("match_partition_rules(rules, opt_state)")
def test_optimizer_state(ours, mesh) -> None:
    params = {"w": struct(64, 16), "b": struct(16)}
    rules = [("w", P("fsdp", "mp")), ("b", P("mp"))]
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = ours(params=params, rules=rules, opt_state=state, mesh=mesh).specs
    assert found == old_rules(rules, state)
    # Anchored patterns: theirs find nothing there.
    anchored = [("^w$", P("fsdp", "mp")), ("^b$", P("mp"))]
    with pytest.raises(ValueError, match="no rule for 0/mu/b"):
        old_rules(anchored, state)
    assert ours(params=params, rules=anchored, opt_state=state, mesh=mesh).specs == found
    # Factored moments: theirs get the spec of the whole parameter.
    state = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=8).init, params)
    assert old_rules(rules, state).v_row["w"] == P("fsdp", "mp")
    assert state.v_row["w"].ndim == 1
    found = ours(params=params, rules=rules, opt_state=state, mesh=mesh).specs
    shapes = {state.v_row["w"].shape: found.v_row["w"], state.v_col["w"].shape: found.v_col["w"]}
    assert shapes == {(64,): P("fsdp"), (16,): P("mp")}


@row("make_shard_and_gather_fns(specs, mesh)")
def test_shard_and_gather_fns(ours, mesh, compiles) -> None:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    shard_fns, gather_fns = ours(specs={"w": P("fsdp", "mp")}, mesh=mesh)
    placed = shard_fns["w"](x)
    assert placed.sharding.spec == P("fsdp", "mp")  # eformer: a numpy array still
    back = gather_fns["w"](placed)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, x)
    assert not compiles
    with pytest.raises(ts.SpecError, match=r"w: .*\[7,4\].* 7 is not divisible"):
        shard_fns["w"](np.ones((7, 4), np.float32))  # eformer: as P(None, "mp")


@row("tree_apply(shard_fns, params)")
def test_shard(ours, mesh) -> None:
    params = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
    specs = {"w": P("fsdp", "mp"), "b": P("mp")}
    placed = ours(params=params, specs=specs, mesh=mesh)
    shard_fns, _ = ts.make_shard_and_gather_fns(specs, mesh)
    one_by_one = jax.tree.map(lambda f, x: f(x), shard_fns, params)
    assert ts.get_partition_spec(placed) == ts.get_partition_spec(one_by_one) == specs
    params = {"w": np.ones((7, 4), np.float32), "b": np.ones(3, np.float32)}
    with pytest.raises(ts.SpecError, match=r"(?s)b: .*w: "):
        ours(params=params, specs=specs, mesh=mesh)


@row("tree_apply(gather_fns, params)")
def test_gather(ours, mesh, compiles) -> None:
    params = {"w": np.ones((8, 4), np.float32)}
    back = ours(params=ts.shard(params, P("fsdp", "mp"), mesh))
    assert type(back["w"]) is np.ndarray
    assert not compiles  # a whole copy on the devices would be a program


@row('with_sharding_constraint(x, PS(("dp", "fsdp"), "mp"))')
def test_constraint(ours, mesh) -> None:
    x = jnp.ones((8, 6))
    assert ours(x=x) is x  # no mesh
    with jax.set_mesh(mesh):
        assert ours(x=x).sharding.spec == P(("dp", "fsdp"), "mp")
    with legacy(mesh):
        assert ours(x=x).sharding.spec == P(("dp", "fsdp"), "mp")
    # Both of these leave dim 0 whole there.
    with jax.set_mesh(ts.make_mesh("dp=4,mp=2")):
        assert ours(x=x).sharding.spec == P("dp", "mp")
    with (
        jax.set_mesh(ts.make_mesh("dp=2,fsdp=4")),
        pytest.warns(ts.ShardingWarning, match="4 is not divisible"),
    ):
        assert ours(x=jnp.ones((4, 6))).sharding.spec == P("dp")
    with jax.set_mesh(mesh):
        split = ours(x=x)
        assert ts.with_sharding_constraint(split, P()).sharding.spec == P()  # eformer: `split`
        with pytest.raises(ts.SpecError, match="2 entries, but shape"):
            ours(x=jnp.ones(8))  # eformer: as P(("dp", "fsdp"))


@row("get_incontext_mesh(False)")
def test_mesh_in_force(ours, mesh) -> None:
    assert ours() is None
    assert not ts.names_in_current_mesh("dp")
    with pytest.raises(ts.NoMeshError) as caught:
        ts.get_incontext_mesh()
    assert isinstance(caught.value, RuntimeError)
    with jax.set_mesh(mesh):
        assert ours() == mesh
        assert ts.names_in_current_mesh("dp", "mp")
        assert not ts.names_in_current_mesh("dp", "tp")


@row("get_names_from_partition_spec(specs)")
def test_names(ours, mesh) -> None:
    specs = {"a": P(None, ("mp", "dp")), "b": P("fsdp", "mp"), "c": NamedSharding(mesh, P("dp"))}
    assert ours(specs=specs) == ["mp", "dp", "fsdp"]


def old_named_tree_map(f: Any, tree: Any) -> Any:
    """EasyLM's: names are looked up by object, and of two places the last one has it."""
    leaves = zip(ts.leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    names = {id(x): path for path, x in leaves}
    return jax.tree.map(lambda x: f(names[id(x)], x), tree)


@row('named_tree_map(f, params, sep="/")')
def test_named_tree_map(ours) -> None:
    different = {"a": struct(1), "b": [struct(2), struct(3)]}
    name_of = lambda path, x: path  # noqa: E731
    assert ours(f=name_of, params=different) == old_named_tree_map(name_of, different)
    tied = struct(4)
    assert old_named_tree_map(name_of, {"embed": tied, "head": tied})["embed"] == "head"
    found = ours(f=name_of, params={"embed": tied, "head": tied})
    assert found == {"embed": "embed", "head": "head"}


@row("PartitionManager(paxis).resolve([BATCH, LENGTH, HEAD, EMBED], MODE_TRAIN)")
def test_partition_axis(ours, mesh) -> None:
    old = P(("fsdp", "dp"), "sp", "tp", "tp")
    with pytest.raises(Exception, match="duplicate entries"):
        NamedSharding(ts.make_mesh("dp=1,fsdp=2,tp=2,sp=2"), old)
    assert ours() == P(("fsdp", "dp"), "sp", "tp", None)
    axes = ts.PartitionAxis()
    # eformer 0.0.101 has decode_batch_axis = ("fsdp", "dp").
    assert axes.generation_batch_axis is None
    assert axes.resolve("query_sequence", "head", mode="generation") == P(None, "tp")
    with pytest.raises(ts.SpecError, match="'kv_head' is not a logical name"):
        axes.resolve("kv_head")


@row('paxis.resolve_axis([BATCH, "_", (LENGTH, HEAD)], MODE_TRAIN)')
def test_dims_that_are_not_sharded(ours) -> None:
    assert ours() == P(("fsdp", "dp"), None, ("sp", "tp"))
    axes = ts.PartitionAxis()
    with pytest.raises(ts.SpecError, match="'_' is not a logical name of PartitionAxis"):
        axes.resolve("batch", "_")
    with pytest.raises(ts.SpecError, match="'tp' is not a logical name of PartitionAxis"):
        axes.resolve(("sequence", "tp"))


@row('PartitionAxis.register("cache", "sp")')
def test_names_of_your_own(ours) -> None:
    @dataclasses.dataclass(frozen=True)
    class Axes(ts.PartitionAxis):
        cache_axis: str = "sp"

    assert ours() == Axes().resolve("batch", "cache") == P(("fsdp", "dp"), "sp")


@row('create_pattern_based_partition_spec("attn->fsdp.tp", mesh)')
def test_pattern_string(ours) -> None:
    assert ours()("h/0/attn/wq", struct(8, 8)) == P("fsdp", "tp")
    assert ours()("h/0/mlp/up", struct(8, 8)) == P()
    # There: P("fsdp", "None").
    by_name = ts.create_pattern_based_partition_spec("a->None.fsdp, b->dp+fsdp")
    assert by_name("a", struct(8, 8)) == P(None, "fsdp")
    assert by_name("b", struct(8, 8)) == P(("dp", "fsdp"))


# ------------------------------------------------------------------ on disk


@row("checkpointer.save_all(train_state, gather_fns)")
def test_save(ours, mesh, tmp_path) -> None:
    state = {"params": {"w": np.ones((8, 4), np.float32)}, "opt": {"mu": np.zeros(4, np.float32)}}
    ours(path=tmp_path / "state", train_state=ts.shard(state, P("fsdp"), mesh))
    found = ts.checkpoint.restore(tmp_path / "state")
    assert ts.leaf_paths(found) == ["opt/mu", "params/w"]
    np.testing.assert_array_equal(found["params"]["w"], state["params"]["w"])


@row(
    'checkpointer.load_trainstate_checkpoint(f"trainstate::{path}", train_state_shapes, shard_fns)'
)
def test_restore(ours, mesh, tmp_path) -> None:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    ts.checkpoint.save(tmp_path / "state", ts.shard({"w": x}, P("fsdp", "mp"), mesh))
    other = ts.make_mesh("data=8")
    plan = ts.plan({"w": struct(8, 4)}, [("w", P("data"))], other, min_size=0)
    found = ours(path=tmp_path / "state", plan=plan)
    assert found["w"].sharding == NamedSharding(other, P("data"))
    np.testing.assert_array_equal(found["w"], x)
    asked = {"w": struct(8, 5), "v": struct(8)}
    plan = ts.plan(asked, [(".*", P("data"))], other, min_size=0)
    with pytest.raises(ts.MismatchError, match=r"(?s)w: saved as float32\[8,4\].*v: not in"):
        ours(path=tmp_path / "state", plan=plan)


# ------------------------------------------------------------------ a loop

TRAIN_RULES = [("w", P("fsdp", "mp")), ("key|step", None)]


def init_fn(rng: jax.Array) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(rng, (8, 4)), "key": rng, "step": jnp.int32(0)}


def train_step(state: dict[str, jax.Array], batch: jax.Array) -> Any:
    key, noise = jax.random.split(state["key"])
    x = batch + jax.random.normal(noise, batch.shape)
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - grad, "key": key, "step": state["step"] + 1}, loss


@row("pjit(init_fn, in_shardings=PS(), out_shardings=partition)(rng)")
def test_init(ours, mesh) -> None:
    key = jax.random.key(0)
    state, plan = ours(init_fn=init_fn, rng=key, rules=TRAIN_RULES, mesh=mesh)
    # Their way, in today's words.
    specs = old_rules(TRAIN_RULES, jax.eval_shape(init_fn, key)) | {"key": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    old = jax.jit(init_fn, out_shardings=shardings)(key)
    assert plan.specs == ts.get_partition_spec(state) == ts.get_partition_spec(old)
    np.testing.assert_array_equal(state["w"], old["w"])


@row(
    "pjit(train_step, in_shardings=(partition, PS(), PS()),"
    " out_shardings=(partition, PS(), PS()), donate_argnums=(0, 1))"
)
def test_step(ours, mesh) -> None:
    state = init_fn(jax.random.key(0))
    plan = ts.plan(state, TRAIN_RULES, mesh, min_size=0)
    batch = np.ones((8, 8), np.float32)
    expected, loss = train_step(state, jnp.asarray(batch))
    step = ours(train_step=train_step, plan=plan)
    placed = ts.shard(state, plan)
    out, found = step(placed, batch)
    assert placed["w"].is_deleted()  # donated, as there
    assert ts.get_partition_spec(out) == plan.specs
    np.testing.assert_allclose(out["w"], expected["w"], rtol=1e-5)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    (_, (data,)), _ = step.lower(plan.structs, batch).compile().input_shardings
    assert data.is_equivalent_to(NamedSharding(mesh, P(("dp", "fsdp"))), 2)
