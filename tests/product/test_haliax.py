"""haliax: arrays and fields with named axes are sharded by an axis mapping, without other rules."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.deprecations import tolerated
from treeshard._core.specs import with_entries
from treeshard.checkpoint import inspect, restore, save
from treeshard.training import init_sharded, jit_step

with tolerated("haliax"):
    import haliax as hax
    from haliax.partitioning import pspec_for

    CALLS_OF_HALIAX = hasattr(jax.core, "is_constant_dim")

pytestmark = pytest.mark.usefixtures("standard_promotion", "quick_compiles")

Embed, Mlp, Heads, Layers = hax.make_axes(embed=16, mlp=32, heads=4, layers=3)
HeadDim, Vocab, Pos = hax.make_axes(head_dim=8, vocab=24, position=8)
MAPPING = {"embed": "data", "mlp": "model", "heads": "model"}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Block(eqx.Module):
    q: hax.nn.Linear
    out: hax.nn.Linear
    up: hax.nn.Linear
    down: hax.nn.Linear
    norm: hax.nn.LayerNorm

    @staticmethod
    def init(*, key: Any) -> "Block":
        keys = jax.random.split(key, 4)
        return Block(
            hax.nn.Linear.init(Embed, (Heads, HeadDim), key=keys[0], use_bias=False),
            hax.nn.Linear.init((Heads, HeadDim), Embed, key=keys[1]),
            hax.nn.Linear.init(Embed, Mlp, key=keys[2]),
            hax.nn.Linear.init(Mlp, Embed, key=keys[3]),
            hax.nn.LayerNorm.init(Embed),
        )

    def __call__(self, x: Any) -> Any:
        y = self.norm(x)
        q = self.q(y)
        weights = hax.nn.softmax(hax.dot(q, q.rename({"position": "keys"}), axis=HeadDim), "keys")
        mixed = hax.dot(weights, q.rename({"position": "keys"}), axis="keys")
        x = x + self.out(mixed)
        return x + self.down(hax.nn.gelu(self.up(x)))


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


def test_a_named_array_is_one_leaf() -> None:
    tree = {"named": hax.zeros((Embed, Mlp)), "plain": np.zeros(3)}
    assert ts.leaf_paths(tree) == ["named", "plain"]
    assert ts.named_tree_map(lambda path, x: path, tree)["named"].array == "named"
    plan = ts.plan(tree, [("^named$", P("data")), ("plain$", None)], "data=4", min_size=0)
    plan.check()
    assert [(leaf.path, leaf.given) for leaf in plan.leaves] == [
        ("named", P("data")),
        ("plain", P()),
    ]


@pytest.mark.skipif(not CALLS_OF_HALIAX, reason="haliax 1.4 calls what JAX 0.12 does not have")
@tolerated("haliax")
def test_an_axis_mapping_plans_trains_and_restores(tmp_path: Any) -> None:
    mesh, key = ts.make_mesh("data=4,model=2"), jax.random.key(0)
    with hax.axis_mapping(MAPPING):
        rules = [(".*", ts.logical_partitioning())]
        state, plan = init_sharded(init, key, rules=rules, mesh=mesh, min_size=0)

    # The specs are those of haliax itself.
    structs = eqx.filter_eval_shape(init, key)
    own = pspec_for(eqx.filter(structs, lambda x: hasattr(x, "dtype")), MAPPING)
    expected = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, P))
    assert len(expected) == len(plan.leaves)
    for leaf, spec in zip(plan.leaves, expected, strict=True):
        assert leaf.given == with_entries(spec, tuple(spec)), leaf.path  # without trailing `None`
    given = {leaf.path: leaf.given for leaf in plan.leaves}
    assert given["model/embed"] == P(None, "data")
    assert given["model/head"] == P("data")
    assert given["model/blocks/stacked/q/weight"] == P(None, "model", None, "data")
    assert given["opt_state/0/trace/blocks/stacked/q/weight"] == P(None, "model", None, "data")
    assert given["opt_state/0/trace/head"] == P("data")
    assert given["model/scale"] == P()
    assert plan.on(mesh) == plan
    assert not [x for x in plan.findings if x.severity == "error"]

    # A step gives the updates of one device.
    tokens = np.random.default_rng(0).integers(0, Vocab.size, (8, Pos.size)).astype("int32")
    on_one = eqx.filter_jit(train)(eqx.filter_jit(init)(key), tokens)[1]
    state, updates = jit_step(train, plan, batch=P("data"))(state, tokens)
    assert_close(updates, on_one, 1e-4)

    # The state is restored to the bit on another mesh, by its names.
    save(tmp_path / "state", state)
    assert "model/embed" in [leaf.path for leaf in inspect(tmp_path / "state").leaves]
    with hax.axis_mapping(MAPPING):
        other = {"rules": rules, "mesh": ts.make_mesh("data=2,model=4"), "min_size": 0}
        assert_same(restore(tmp_path / "state", plan, **other), state)


def test_names_of_another_array_are_not_used() -> None:
    params = {"w": hax.zeros((Embed, Mlp))}
    state = jax.eval_shape(optax.scale_by_factored_rms(min_dim_size_to_factor=4).init, params)
    by_names = ts.logical_partitioning(list(MAPPING.items()))
    specs = ts.plan(state, [("", by_names)], "data=4,model=2", min_size=0).specs
    # A tree map keeps the axes of `w` for its row and its column.
    assert (specs.v_row["w"].array, specs.v_col["w"].array) == (P(), P())
    decided = ts.plan(params, [("", by_names)], "data=4,model=2", min_size=0)
    follows = decided.follow(state).specs
    assert (follows.v_row["w"].array, follows.v_col["w"].array) == (P("data"), P("model"))


def test_names_without_rules_in_force() -> None:
    tree, rules = {"named": hax.zeros((Embed, Mlp))}, [("", ts.logical_partitioning())]
    with pytest.raises(ts.ShardingRuleError, match=r"named: .*no rules are in force"):
        ts.plan(tree, rules, "data=4", min_size=0)
