"""docs/migrate.md: the lines of flax.nnx, and ours. Flax is asked itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from migration import table

import treeshard as ts

TABLE = table("From flax.nnx")
row = TABLE.row


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("fsdp=4,tensor=2")


def test_every_row_has_a_test() -> None:
    TABLE.check()


def linear(mesh: Mesh, names: tuple[str | None, ...]) -> Any:
    """The state of a layer whose kernel carries names."""
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    with nnx.use_eager_sharding(False):
        return nnx.state(nnx.Linear(64, 128, kernel_init=kernel, rngs=nnx.Rngs(0)))


def specs_of(state: Any) -> dict[str, P]:
    leaves = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, P))
    return dict(zip(ts.leaf_paths(state), leaves, strict=True))


@row('nnx.with_partitioning(init, (None, "fsdp"))')
def test_specs_of_a_model_as_rules(ours, mesh) -> None:
    plan = ours(state=linear(mesh, ()), mesh=mesh)
    assert {leaf.path: leaf.given for leaf in plan.leaves} == specs_of(linear(mesh, (None, "fsdp")))


@row("nnx.get_partition_spec(state)")
def test_metadata_is_taken_as_it_is(ours, mesh) -> None:
    state = linear(mesh, (None, "fsdp"))
    placed = ours(state=state, nnx=nnx, mesh=mesh)
    assert placed["kernel"].get_value().sharding.spec == P(None, "fsdp")
    with pytest.raises(ts.UnknownAxisError, match="kernel: .* no axis 'fdsp'"):
        ours(state=linear(mesh, (None, "fdsp")), nnx=nnx, mesh=mesh)


@row('nnx.with_partitioning(init, ("embed", "mlp"))')
def test_logical_names(ours, mesh) -> None:
    state, names = linear(mesh, ("embed", "mlp")), [("embed", "fsdp"), ("mlp", "tensor")]
    plan = ours(state=state, names=names, mesh=mesh)
    assert {leaf.path: leaf.given for leaf in plan.leaves}["kernel"] == P("fsdp", "tensor")
    with nnx.logical_axis_rules(names):
        assert specs_of(state)["kernel"] == P("fsdp", "tensor")
    plan = ours(state=state, names=names[:1], mesh=mesh)
    assert {leaf.path: leaf.given for leaf in plan.leaves}["kernel"] == P("fsdp")


# ------------------------------------------------------------------ a program


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


def assert_equal(tree: Any, expected: Any) -> None:
    """Compares each leaf, some of which are zeros."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), tree, expected)


KEY = jax.random.key(0)
RULES = [("bias", None), (".*", ts.fsdp("fsdp"))]


@row("create_sharded_model()")
def test_init(ours, mesh) -> None:
    state, plan = ours(init=init, key=KEY, rules=RULES, mesh=mesh)
    assert {leaf.path: leaf.given for leaf in plan.leaves}["0/up/kernel"] == P(None, "fsdp")
    assert_equal(ts.gather(state), init(KEY))


# As there, nothing gathers the weights: the compiler gathers the rows of the batch instead.
@row("nnx.jit(update)(model, optimizer, batch)")
def test_step(ours) -> None:
    graph = nnx.graphdef(nnx.eval_shape(make, KEY))

    def train_step(state: Any, batch: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss = update(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    model, optimizer = make(KEY)
    plan = ts.plan(init(KEY), RULES, ts.make_mesh("fsdp=8"))
    batch = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
    state, loss = ours(train_step=train_step, plan=plan)(ts.shard(init(KEY), plan), batch)
    assert float(loss) == pytest.approx(float(nnx.jit(update)(model, optimizer, batch)), rel=1e-5)
    assert_equal(ts.gather(state), nnx.state((model, optimizer)))


@row("nnx.update(model, state)")
def test_the_model_of_a_state(ours) -> None:
    graph, state = nnx.split(Net(nnx.Rngs(1)))
    model = ours(nnx=nnx, graph=graph, state=state)
    other = Net(nnx.Rngs(2))
    nnx.update(other, state)
    x = jnp.ones((2, 64))
    np.testing.assert_array_equal(model(x), other(x))


@row("checkpointer.save(path, state)")
def test_checkpoint(ours, mesh, tmp_path) -> None:
    plan = ts.plan(init(KEY), RULES, mesh)
    ours(path=tmp_path / "state", state=ts.shard(init(KEY), plan))
    restored = ts.checkpoint.restore(tmp_path / "state", plan.on(ts.make_mesh("fsdp=8")))
    assert_equal(ts.gather(restored), init(KEY))
