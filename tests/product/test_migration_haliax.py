"""docs/migrate.md: the lines of haliax, and ours. haliax is asked itself."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same
from jax.sharding import PartitionSpec as P
from migration import PAGE, check_init, short, table

import treeshard as ts
from tests.deprecations import tolerated
from treeshard.checkpoint import inspect, restore, save
from treeshard.training import jit_step

with tolerated("haliax"):
    import haliax as hax
    from haliax.partitioning import pspec_for

    CALLS_OF_HALIAX = hasattr(jax.core, "is_constant_dim")

pytestmark = pytest.mark.usefixtures("standard_promotion", "quick_compiles")
calls_haliax = pytest.mark.skipif(
    not CALLS_OF_HALIAX, reason="haliax 1.4 calls what JAX 0.12 does not have"
)

row = table("From haliax and levanter", "data=4,model=2")

Embed, Mlp, Layers, Vocab = hax.make_axes(embed=16, mlp=32, layers=3, vocab=24)
MAPPING = {"embed": "data", "mlp": "model"}
KEY = jax.random.key(0)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Block(eqx.Module):
    norm: hax.nn.LayerNorm
    up: hax.nn.Linear
    down: hax.nn.Linear

    @staticmethod
    def init(*, key: Any) -> "Block":
        keys = jax.random.split(key)
        up = hax.nn.Linear.init(Embed, Mlp, key=keys[0])
        down = hax.nn.Linear.init(Mlp, Embed, key=keys[1])
        return Block(hax.nn.LayerNorm.init(Embed), up, down)

    def __call__(self, x: Any) -> Any:
        return x + self.down(hax.nn.gelu(self.up(self.norm(x))))


class Model(eqx.Module):
    embed: hax.NamedArray
    blocks: hax.nn.Stacked
    head: jax.Array = hax.field(axis_names=("embed", "vocab"))
    scale: jax.Array
    act: Any

    @staticmethod
    def init(key: Any) -> "Model":
        keys = jax.random.split(key, 3)
        blocks = hax.nn.Stacked.init(Layers, Block)(key=jax.random.split(keys[1], Layers.size))
        head = jax.random.normal(keys[2], (Embed.size, Vocab.size)) / 4
        embed = hax.random.normal(keys[0], (Vocab, Embed))
        return Model(embed, blocks, head, jnp.ones(Vocab.size), jnp.tanh)

    def __call__(self, tokens: Any) -> Any:
        x = self.blocks.fold(self.embed.take("vocab", tokens))
        logits = x.rearrange(("batch", "position", "embed")).array @ self.head
        return self.act(logits) * self.scale[None, None]


def init(key: Any) -> Any:
    model = Model.init(key)
    return {"model": model, "opt_state": OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))}


def train(state: Any, tokens: Any) -> Any:
    def loss_fn(model: Model) -> Any:
        logits = model(hax.named(tokens, ("batch", "position")))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    grads = eqx.filter_grad(loss_fn)(state["model"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    return {"model": eqx.apply_updates(state["model"], updates), "opt_state": opt_state}, updates


def theirs(init: Any) -> list[P]:
    structs = eqx.filter(eqx.filter_eval_shape(init, KEY), lambda x: hasattr(x, "dtype"))
    return short(jax.tree.leaves(pspec_for(structs, MAPPING)))


@calls_haliax
@row("pspec_for(model, mapping)", "hax.shard(model, mapping)")
@tolerated("haliax")
def test_plan_and_shard(planned, shard) -> None:
    model = Model.init(KEY)
    plan = planned(model=model, mapping=MAPPING)
    assert [leaf.given for leaf in plan.leaves] == theirs(Model.init)
    assert {leaf.path: leaf.given for leaf in plan.leaves} == {
        "embed": P(None, "data"),
        "blocks/stacked/norm/weight": P(None, "data"),
        "blocks/stacked/norm/bias": P(None, "data"),
        "blocks/stacked/up/weight": P(None, "model", "data"),
        "blocks/stacked/up/bias": P(None, "model"),
        "blocks/stacked/down/weight": P(None, "data", "model"),
        "blocks/stacked/down/bias": P(None, "data"),
        "head": P("data"),
        "scale": P(),
    }
    placed = shard(model=model, plan=plan)
    with jax.set_mesh(row.mesh):
        expected = hax.shard(model, MAPPING)
    assert placed.embed.array.sharding == expected.embed.array.sharding
    odd = planned(model=model, mapping=MAPPING, mesh="data=3,model=2").findings
    assert "indivisible" in {finding.code for finding in odd}


@calls_haliax
@row("hax.named_jit(init, axis_resources=mapping)(key)")
@tolerated("haliax")
def test_init_step_and_restore(ours, tmp_path: Any) -> None:
    with hax.axis_mapping(MAPPING):
        state, plan = ours(init=init, key=KEY)
    on_one = eqx.filter_jit(init)(KEY)
    check_init((state, plan), on_one, theirs(init))

    # A step gives the updates of one device.
    tokens = np.random.default_rng(0).integers(0, Vocab.size, (8, 8)).astype("int32")
    _, expected = eqx.filter_jit(train)(on_one, tokens)
    state, updates = jit_step(train, plan, batch=P("data"))(state, tokens)
    assert_close(updates, expected, 1e-4)

    # The state is restored to the bit on another mesh, by its names.
    save(tmp_path / "state", state)
    assert "model/embed" in [leaf.path for leaf in inspect(tmp_path / "state").leaves]
    by_names = [(".*", ts.logical_partitioning())]
    with hax.axis_mapping(MAPPING):
        other = {"rules": by_names, "mesh": ts.make_mesh("data=2,model=4"), "min_size": 0}
        assert_same(restore(tmp_path / "state", plan, **other), state)


def test_names_of_another_array_are_not_used() -> None:
    params = {"w": hax.zeros((Embed, Mlp))}
    state = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=4).init, params)
    by_names = ts.logical_partitioning(list(MAPPING.items()))
    specs = ts.plan(state, [("", by_names)], row.mesh, min_size=0).specs
    # A tree map keeps the axes of `w` for its row and its column.
    assert (specs.v_row["w"].array, specs.v_col["w"].array) == (P(), P())
    decided = ts.plan(params, [("", by_names)], row.mesh, min_size=0)
    follows = decided.follow(state).specs
    assert (follows.v_row["w"].array, follows.v_col["w"].array) == (P("data"), P("model"))


def test_names_without_rules_in_force() -> None:
    tree, rules = {"named": hax.zeros((Embed, Mlp))}, [("", ts.logical_partitioning())]
    with pytest.raises(ts.ShardingRuleError, match=r"named: .*no rules are in force"):
        ts.plan(tree, rules, row.mesh, min_size=0)


def test_specs_have_the_structure_of_the_model() -> None:
    model = ts.shard({"up": hax.zeros((Embed, Mlp))}, P("data"), row.mesh)
    specs = ts.plan(model, [("up", P("data"))], row.mesh, min_size=0).specs
    assert jax.tree.structure(specs) == jax.tree.structure(model)
    assert specs["up"].array == P("data")
    assert ts.get_partition_spec(model)["up"] == P("data")
    sentence = "`ts.get_partition_spec(model)` has specs instead of `NamedArray`s"
    assert sentence in PAGE.read_text()
