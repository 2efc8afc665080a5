"""Optimizers with more in their state than moments: planned, stepped, saved, restored elsewhere."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import assert_same
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.training import init_sharded, jit_step

pytestmark = pytest.mark.usefixtures("standard_promotion", "quick_compiles")

RULES = [
    ("experts/.*", ts.shard_dim("expert", 0)),
    ("kernel", P("data", "expert")),
    ("out", P(None, "data")),
    (".*", None),
]
SPECS = {
    "experts/up": P("expert"),
    "experts/bias": P("expert"),
    "q/kernel": P("data", "expert"),
    "out": P(None, "data"),
    "norm": P(),
}


def params_of(key: Any) -> Any:
    keys = jax.random.split(key, 3)
    return {
        "experts": {
            "up": jax.random.normal(keys[0], (4, 16, 8)) / 4,
            "bias": jnp.full((4, 8), 0.1),
        },
        "norm": jnp.ones(8),
        "out": jax.random.normal(keys[1], (8, 8)) / 3,
        "q": {"kernel": jax.random.normal(keys[2], (8, 16)) / 3},
    }


def loss_of(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["q"]["kernel"])
    experts = jnp.einsum("bi,eio->beo", hidden, params["experts"]["up"])
    mean = (experts + params["experts"]["bias"][None]).mean(1) * params["norm"][None]
    return jnp.mean((mean @ params["out"] - 1) ** 2)


def of_matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


contrib = optax.contrib
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "prodigy": contrib.prodigy,  # copies of the parameters, and scalars
    "muon": lambda: contrib.muon(0.1),  # another for matrices than for vectors
    "lbfgs": lambda: optax.lbfgs(memory_size=8),  # stacks of updates, which the axes divide
    "clipped, masked and accumulated": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, mask=of_matrices)), 2
    ),
}


def step_with(optimizer: Any, name: str) -> Callable[[Any, Any], Any]:
    """A step that also returns the updates, before they are applied."""

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return loss_of(params, batch)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        extra: dict[str, Any] = {}
        if name == "lbfgs":
            extra = {"value": loss, "grad": grads, "value_fn": loss_fn}
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"], **extra)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, updates

    return step


def expected_spec(path: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> P:
    """That of the parameter whose path ends this one, if the array is a copy or a stack of it."""
    of = next((name for name in shapes if path.endswith(f"/{name}")), None)
    if of is None or shape[len(shape) - len(shapes[of]) :] != shapes[of]:
        return P()
    return P(*[None] * (len(shape) - len(shapes[of])), *SPECS[of]) if SPECS[of] else P()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_follows_steps_as_on_one_device_and_is_restored(name: str, tmp_path: Any) -> None:
    optimizer = OPTIMIZERS[name]()

    def init(key: Any) -> Any:
        params = params_of(key)
        return {"params": params, "opt_state": optimizer.init(params)}

    key, mesh = jax.random.key(0), ts.make_mesh("data=2,expert=4")
    state, plan = init_sharded(init, key, rules=RULES, mesh=mesh, min_size=0)
    params = ts.plan(plan.structs["params"], RULES, mesh, min_size=0)
    follows = params.follow(plan.structs["opt_state"])

    # Each array has the spec of its parameter, by rules and by `follow`.
    shapes = {leaf.path: leaf.shape for leaf in params.leaves}
    for leaf, followed in zip(plan.leaves, [*follows.leaves, *params.leaves], strict=True):
        assert leaf.given == expected_spec(leaf.path, leaf.shape, shapes), leaf.path
        assert leaf.given == followed.given, leaf.path

    # Two steps give the updates of one device.
    step = step_with(optimizer, name)
    sharded = jit_step(step, plan, batch=P("data"))
    alone = jax.jit(step)
    on_one = jax.device_put(ts.gather(state), jax.devices()[0])
    for seed in range(2):
        batch = np.random.default_rng(seed).normal(size=(16, 8)).astype("float32")
        state, updates = sharded(state, batch)
        on_one, expected = alone(on_one, batch)
        for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-6)

    # The state is restored to the bit, on the same mesh and on another.
    save(tmp_path / "state", state)
    for like in (plan, plan.on(ts.make_mesh("expert=2,data=2", devices=jax.devices()[:4]))):
        restored = restore(tmp_path / "state", like)
        assert_same(restored, state)
        assert not ts.testing.diff_shardings(restored, like)


def test_a_memory_of_updates_is_split_as_its_parameter_and_says_why() -> None:
    state = {"params": {"w": jnp.ones((8, 6))}, "opt_state": None}
    state["opt_state"] = optax.lbfgs(memory_size=4).init(state["params"])
    plan = ts.plan(state, [("w$", P("expert")), (".*", None)], "data=2,expert=4", min_size=0)
    given = {leaf.path: leaf.given for leaf in plan.leaves}
    assert given["params/w"] == P("expert")
    assert given["opt_state/0/diff_params_memory/w"] == P(None, "expert")
    text = str(ts.plan(state["params"], [("w", None)], "data=8").follow(state["opt_state"]))
    (line,) = [line for line in text.splitlines() if "weights_memory" in line]
    assert line.endswith("no counterpart")


def test_a_stack_that_is_not_a_memory_has_its_own_rule() -> None:
    tree = {
        "enc": {"w": jnp.ones((8, 16))},
        "dec": {"x": {"w": jnp.ones((4, 8, 16))}},
        "mu": {"dec": {"x": {"w": jnp.ones((4, 8, 16))}}},
    }
    plan = ts.plan(tree, [("w", P("fsdp"))], "fsdp=4", min_size=0)
    assert {leaf.given for leaf in plan.leaves} == {P("fsdp")}
