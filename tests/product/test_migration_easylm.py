"""docs/migrate.md: EasyLM's and eformer's lines, and ours. eformer is 0.0.101."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import legacy, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import first_match, table

import treeshard as ts

row = table("From EasyLM, EasyDeL and eformer", "dp=1,fsdp=4,mp=2")

PARAMS = {
    "wte": {"embedding": struct(64, 16)},
    "h": [{"attn": {"wq": {"kernel": struct(16, 16)}}, "norm": {"kernel": struct(16)}}] * 2,
    "temperature": struct(),
}
CONSTANTS = {"BATCH": "__BATCH__", "LENGTH": "__LENGTH__", "HEAD": "__HEAD__", "EMBED": "__EMBED__"}
CONSTANTS["MODE_TRAIN"] = "__train__"
RULES = [("wte/embedding", P("mp", "fsdp")), ("attn/wq", P("fsdp", "mp")), ("norm", P(None))]


test_mesh = row.makes_mesh('get_jax_mesh("1,-1,2", ("dp", "fsdp", "mp"))', dp=1, fsdp=4, mp=2)
test_init = row.makes_state(
    "pjit(init_fn, in_shardings=PS(), out_shardings=partition)(rng)",
    [("w", P("fsdp", "mp")), (".*", None)],
    P("fsdp", "mp"),
)
test_step = row.steps(
    "pjit(train_step, in_shardings=(partition, PS(), PS()),"
    " out_shardings=(partition, PS(), PS()), donate_argnums=(0, 1))",
    P("fsdp", "mp"),
)
test_save = row.saves("checkpointer.save_all(train_state, gather_fns)", P("fsdp"))
test_restore = row.restores(
    'checkpointer.load_trainstate_checkpoint(f"trainstate::{path}", train_state_shapes, shard_fns)',
    P("fsdp", "mp"),
)


@row("match_partition_rules(rules, params)")
def test_rules(ours) -> None:
    assert ours(rules=RULES, params=PARAMS) == first_match(RULES, PARAMS)
    # A leaf of one element: EasyLM keeps it whole, eformer and we do not.
    one, rules = {"norm": struct(1)}, [("norm", P("fsdp"))]
    assert first_match(rules, one) == {"norm": P()}
    assert ours(rules=rules, params=one) == {"norm": P("fsdp")}
    assert ts.match_partition_rules(rules, one, min_size=2) == {"norm": P()}
    with pytest.raises(ValueError, match=r"(?s)h/0/attn/wq/kernel.*h/1/attn/wq/kernel"):
        ours(rules=[("wte|norm", P())], params=PARAMS)


def test_rules_whose_specs_are_trimmed() -> None:
    """A bias is matched by the rule of its matrix in most models."""
    params = {"wq": {"kernel": struct(16, 16), "bias": struct(16)}, "norm": struct(16)}
    rules = [("wq", P("fsdp", "mp")), (".*", P(None, None))]
    with pytest.warns(ts.ShardingWarning, match="^wq/bias: shape") as told:
        specs = ts.match_partition_rules(rules, params, min_size=0)
    assert specs == {"wq": {"kernel": P("fsdp", "mp"), "bias": P("fsdp")}, "norm": P()}
    assert len(told) == 1


@row("match_partition_rules(rules, opt_state)")
def test_optimizer_state(ours) -> None:
    params = {"w": struct(64, 16), "b": struct(16)}
    rules = [("w", P("fsdp", "mp")), ("b", P("mp"))]
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    old = first_match(rules, state)
    assert ours(params=params, rules=rules, opt_state=state).specs == old
    anchored = [("^w$", P("fsdp", "mp")), ("^b$", P("mp"))]
    with pytest.raises(ValueError, match="no rule for 0/mu/b"):
        first_match(anchored, state)
    assert ours(params=params, rules=anchored, opt_state=state).specs == old
    state = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=8).init, params)
    assert first_match(rules, state).v_row["w"] == P("fsdp", "mp")
    found = ours(params=params, rules=rules, opt_state=state).specs
    shapes = {state.v_row["w"].shape: found.v_row["w"], state.v_col["w"].shape: found.v_col["w"]}
    assert shapes == {(64,): P("fsdp"), (16,): P("mp")}


@row(
    "make_shard_and_gather_fns(specs, mesh)",
    "tree_apply(shard_fns, params)",
    "tree_apply(gather_fns, params)",
)
def test_shard_and_gather(functions, shard, gather, compiles) -> None:
    params = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.ones(4, np.float32)}
    specs = {"w": P("fsdp", "mp"), "b": P("mp")}
    shard_fns, gather_fns = functions(specs=specs)
    one_by_one = jax.tree.map(lambda f, x: f(x), shard_fns, params)
    placed = shard(params=params, specs=specs)
    assert ts.get_partition_spec(placed) == ts.get_partition_spec(one_by_one) == specs
    for back in (gather(params=placed), jax.tree.map(lambda f, x: f(x), gather_fns, placed)):
        assert type(back["w"]) is np.ndarray
        np.testing.assert_array_equal(back["w"], params["w"])
    assert not compiles  # a whole copy on the devices would be a program


@row('with_sharding_constraint(x, PS(("dp", "fsdp"), "mp"))')
def test_constraint(ours) -> None:
    x = jnp.ones((8, 6))
    assert ours(x=x) is x  # no mesh
    with jax.set_mesh(row.mesh):
        assert ours(x=x).sharding.spec == P(("dp", "fsdp"), "mp")
    with legacy(row.mesh):
        assert ours(x=x).sharding.spec == P(("dp", "fsdp"), "mp")
    with jax.set_mesh(ts.make_mesh("dp=4,mp=2")):
        assert ours(x=x).sharding.spec == P("dp", "mp")  # there dim 0 is whole


def test_replicating_constraint() -> None:
    constrain = lambda x: ts.with_sharding_constraint(x, P())  # noqa: E731
    with jax.set_mesh(row.mesh):
        x = ts.shard(jnp.ones((8, 6)), P("fsdp", "mp"))
        assert constrain(x).sharding.is_fully_replicated
        assert jax.jit(constrain)(x).sharding.is_fully_replicated


@row('with_sharding_constraint(batch, PS(("dp", "fsdp"), "mp"))')
def test_constraint_of_a_batch(ours) -> None:
    batch = {"ids": jnp.ones((8, 16), int), "labels": jnp.ones(8, int), "step": jnp.int32(1)}
    specs = {"ids": P(("dp", "fsdp"), "mp"), "labels": P(("dp", "fsdp")), "step": P()}
    with jax.set_mesh(row.mesh):
        for placed in (ours(batch=batch), jax.jit(lambda batch: ours(batch=batch))(batch)):
            ts.testing.assert_trees_sharded_as(placed, specs)
        with pytest.raises(ts.SpecError, match="has 2 entries, but shape"):
            ours(batch=batch["labels"])


@row("get_incontext_mesh(False)")
def test_mesh_in_force(ours) -> None:
    assert ours() is None
    assert not ts.names_in_current_mesh("dp")
    with pytest.raises(ts.NoMeshError):
        ts.get_incontext_mesh()
    with jax.set_mesh(row.mesh):
        assert ours() == row.mesh
        assert ts.names_in_current_mesh("dp", "mp")
        assert not ts.names_in_current_mesh("dp", "tp")


def test_settings(monkeypatch) -> None:
    for size, words in {"7": "true yes 1 on", "16384": "false no 0 off"}.items():
        monkeypatch.setenv("MIN_SHARDING_SIZE", size)
        for word in words.split():
            monkeypatch.setenv("LOG_SHARDING_MOVE", word)
            assert int(size) == ts.MIN_SHARDING_SIZE
            assert (word in ("true", "yes", "1", "on")) == ts.LOG_SHARDING_MOVE


def test_names() -> None:
    named = NamedSharding(row.mesh, P("dp"))
    specs = {"a": P(None, ("mp", "dp")), "b": P("fsdp", "mp"), "c": named}
    assert ts.get_names_from_partition_spec(specs) == ["mp", "dp", "fsdp"]


def test_named_tree_map() -> None:
    """EasyLM looks names up by object, and of two places the last one has it."""
    tied = struct(4)
    tree = {"embed": tied, "h": [struct(2), struct(3)], "head": tied}
    found = ts.named_tree_map(lambda path, x: path, tree, sep="/")
    assert found == {"embed": "embed", "h": ["h/0", "h/1"], "head": "head"}


@row("PartitionManager(paxis).resolve([BATCH, LENGTH, HEAD, EMBED], MODE_TRAIN)")
def test_partition_axis(ours) -> None:
    """There `tp` is given to two dims, which JAX refuses."""
    assert ours(**CONSTANTS) == P(("fsdp", "dp"), "sp", "tp", None)
    axes = ts.PartitionAxis()
    assert axes.generation_batch_axis is None
    assert axes.resolve("query_sequence", "head", mode="generation") == P(None, "tp")
    with pytest.raises(ts.SpecError, match="'kv_head' is not a logical name"):
        axes.resolve("kv_head")


@row("pmag.resolve(ColumnWise)")
def test_specs_of_rules(ours) -> None:
    class ColumnWise:
        axes = (["__FULLY_SHARDED_DATA_PARALLEL__", "__SEQUENCE_PARALLEL__"], "__TENSOR_PARALLEL__")
        mode = "__train__"

    assert ours(ColumnWise=ColumnWise) == P(("fsdp", "sp"), "tp")


@row("apply_logical_sharding(x, dynamic_axes=HiddenStateSharding, partition_manager=manager)")
def test_constraint_by_names(ours) -> None:
    hidden = SimpleNamespace(axes=["__BATCH__", "__QUERY_LENGTH__", "__EMBED__"], mode=1)
    manager = ts.compat.PartitionManager(ts.PartitionAxis())
    with jax.set_mesh(ts.make_mesh("fsdp=4,tp=2")):
        x = ours(x=jnp.ones((8, 1, 4)), HiddenStateSharding=hidden, manager=manager)
    assert x.sharding.spec == P("fsdp", None, "tp")


@row("@auto_pytree")
def test_classes_that_are_trees(ours) -> None:
    class Cache:
        keys: jax.Array
        layout: str | None = None

    cache = ours()(Cache)(jnp.ones(4), "bhd")
    assert len(jax.tree.leaves(cache)) == 1
    assert cache.replace(layout="bld").layout == "bld"


@row('paxis.resolve_axis([BATCH, "_", (LENGTH, HEAD)], MODE_TRAIN)')
def test_dims_that_are_not_sharded(ours) -> None:
    assert ours() == P(("fsdp", "dp"), None, ("sp", "tp"))


@row('PartitionAxis.register("cache", "sp")')
def test_names_of_your_own(ours) -> None:
    axes = ours()
    assert axes.resolve("batch", "cache") == P(("fsdp", "dp"), "sp")
    manager = ts.compat.PartitionManager(axes)
    assert manager.resolve(["__BATCH__", "cache"], "__insert__") == P(("fsdp", "dp"), "sp")
    with pytest.raises(ts.ShardingRuleError, match="Give its mesh axes"):
        ts.PartitionAxis(custom={"cache": "head_axis"})


def test_the_axes_of_decoding() -> None:
    """eformer takes the fields of training, and `PartitionAxis` those of EasyDeL's older class."""
    letters = {name: name.upper() for name in ("batch", "head", "query_sequence", "key_sequence")}
    given = {f"{name}_axis": letters[name] for name in letters}
    axes = ts.PartitionAxis(**given, attention_dim_axis="D", expert_axis="E")
    manager = ts.compat.PartitionManager(axes)
    ours = {
        "batch": None,
        "query_sequence": None,
        "key_sequence": axes.sequence_parallel_axis,
        "head": axes.tensor_parallel_axis,
        "attention_dim": None,
        "expert": axes.expert_axis,
    }
    for name, axis in ours.items():
        as_training = getattr(axes, f"{name}_axis")
        assert manager.resolve([name], "__autoregressive__") == P(as_training), name
        assert axes.resolve(name, mode="generation") == P(axis), name


@row('create_pattern_based_partition_spec("attn->fsdp.tp", mesh)')
def test_pattern_string(ours) -> None:
    assert ours()("h/0/attn/wq", struct(8, 8)) == P("fsdp", "tp")
    assert ours()("h/0/mlp/up", struct(8, 8)) == P()
    by_name = ts.create_pattern_based_partition_spec("a->None.fsdp, b->dp+fsdp")
    assert by_name("a", struct(8, 8)) == P(None, "fsdp")
    assert by_name("b", struct(8, 8)) == P(("dp", "fsdp"))
