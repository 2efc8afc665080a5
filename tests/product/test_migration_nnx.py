"""docs/migrate.md: the lines of flax.nnx, and ours. Flax is asked itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same
from jax.sharding import PartitionSpec as P
from migration import check_init, check_step, table

import treeshard as ts

row = table("From flax.nnx", "fsdp=4,tensor=2")


def linear(*names: str | None) -> Any:
    """The state of a layer whose kernel carries names."""
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    with nnx.use_eager_sharding(False):
        return nnx.state(nnx.Linear(64, 128, kernel_init=kernel, rngs=nnx.Rngs(0)))


def specs_of(state: Any) -> dict[str, P]:
    leaves = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
    return dict(zip(ts.leaf_paths(state), leaves, strict=True))


def given(plan: ts.Plan) -> dict[str, P]:
    return {leaf.path: leaf.given for leaf in plan.leaves}


@row('nnx.with_partitioning(init, (None, "fsdp"))', "nnx.get_partition_spec(state)")
def test_specs_of_a_model(rules, placed) -> None:
    state = linear(None, "fsdp")
    assert given(rules(state=linear())) == specs_of(state)
    kernel = placed(state=state, nnx=nnx)["kernel"]
    assert kernel.get_value().sharding.spec == P(None, "fsdp")
    with pytest.raises(ts.UnknownAxisError, match="kernel: .* no axis 'fdsp'"):
        placed(state=linear(None, "fdsp"), nnx=nnx)


@row('nnx.with_partitioning(init, ("embed", "mlp"))')
def test_logical_names(ours) -> None:
    state, names = linear("embed", "mlp"), [("embed", "fsdp"), ("mlp", "tensor")]
    with nnx.logical_axis_rules(names):
        old = specs_of(state)["kernel"]
    assert given(ours(state=state, names=names))["kernel"] == old == P("fsdp", "tensor")


@row('nnx.get_partition_spec(state)["kernel"]')
def test_a_plan_by_specs(ours) -> None:
    state = linear(None, "fsdp")
    plan = ours(state=state, nnx=nnx)
    assert given(plan) == specs_of(state)
    assert ts.shard(state, plan)["kernel"].get_value().sharding.spec == P(None, "fsdp")


@row(
    'nnx.with_partitioning(init, (None, "tensor"), optimizer_sharding=("fsdp", "tensor"))',
)
def test_optimizer_sharding(ours) -> None:
    names = (None, "tensor")
    kernel = nnx.with_partitioning(
        nnx.initializers.lecun_normal(), names, optimizer_sharding=("fsdp", "tensor")
    )
    with nnx.use_eager_sharding(False):
        model = nnx.Linear(64, 128, kernel_init=kernel, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(
            model, optax.adafactor(1e-3, min_dim_size_to_factor=8), wrt=nnx.Param
        )
        moments = nnx.state(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    state, mesh = nnx.state(model), row.mesh
    plan = ts.plan(state, [(".*", ts.logical_partitioning())], mesh, min_size=0)
    by_specs = ts.plan(state, nnx.get_partition_spec(state), mesh)
    assert given(plan)["kernel"] == P(None, "tensor")
    # The state of the nnx optimizer, and optax's own, whose leaves are variables too.
    expected = given(ours(state=state, opt_state=moments))
    assert expected == specs_of(moments)
    assert expected["opt_state/0/mu/kernel"] == P("fsdp", "tensor")
    assert given(by_specs.follow(moments)) == expected
    own = given(plan.follow(optax.adam(1e-3).init(state)))
    assert own["0/nu/kernel"] == P("fsdp", "tensor")
    # Factors keep the axes of their dims.
    factored = given(plan.follow(nnx.state(optimizer)))
    assert factored["opt_state/0/v_row/kernel"] == P("fsdp")
    assert factored["opt_state/0/v_col/kernel"] == P("tensor")
    # Rules that do not read the annotations decide the optimizer state as well.
    by_rules = ts.plan(state, [(".*", ts.fsdp("fsdp"))], mesh, min_size=0)
    assert given(by_rules.follow(moments))["opt_state/0/mu/kernel"] == given(by_rules)["kernel"]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 512, rngs=rngs)
        self.down = nnx.Linear(512, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(x)))


def make(key: jax.Array) -> Any:
    model = Net(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def init(key: jax.Array) -> Any:
    return nnx.state(make(key))


def update(model: Net, optimizer: Any, batch: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch) - batch) ** 2))(model)
    optimizer.update(model, grads)
    return loss


KEY = jax.random.key(0)
RULES = [("bias", None), (".*", ts.fsdp("fsdp"))]


@row("create_sharded_model()")
def test_init(ours) -> None:
    made = ours(init=init, key=KEY, rules=RULES)
    assert given(made[1])["0/up/kernel"] == P(None, "fsdp")
    check_init(made, jax.jit(init)(KEY), [*given(made[1]).values()])


# As there, nothing gathers the weights: the compiler gathers the rows of the batch instead.
@row("nnx.jit(update)(model, optimizer, batch)")
def test_step(ours) -> None:
    graph = nnx.graphdef(nnx.eval_shape(make, KEY))

    def train_step(state: Any, batch: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = update(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    def old(state: Any, batch: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = nnx.jit(update)(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    plan = ts.plan(init(KEY), RULES, ts.make_mesh("fsdp=8"))
    batch = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
    check_step(ours(train_step=train_step, plan=plan), plan, old, init(KEY), batch)


@row("checkpointer.save(path, state)")
def test_checkpoint(ours, tmp_path) -> None:
    plan = ts.plan(init(KEY), RULES, row.mesh)
    state = ts.shard(init(KEY), plan)
    ours(path=tmp_path / "state", state=state)
    restored = ts.checkpoint.restore(tmp_path / "state", plan.on(ts.make_mesh("fsdp=8")))
    assert_same(ts.gather(restored), ts.gather(state))
