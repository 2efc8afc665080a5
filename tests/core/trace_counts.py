"""Counts how often JAX traces the user's functions, in a new process that has loaded nothing yet.

What loads on first use loads inside a trace here. Prints a JSON object: a use -> the number of
traces after each of three equal calls.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts

ts.simulate_devices(4)
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
PARAMS = {"w": np.arange(16, dtype="float32").reshape(4, 4)}
COUNTS: dict[str, list[int]] = {}


def count(name: str, use: Callable[..., Any], *args: Any, jit: bool = True) -> None:
    """Calls `use` three times, by `jax.jit` or as it is, in a function of the user."""
    traces = []

    def user(*args: Any) -> Any:
        traces.append(1)
        return use(*args)

    # Without `jit`, `use` gets a jitted function of the user to call.
    function = jax.jit(user) if jit else lambda *args: use(jax.jit(user_part), *args)
    user_part = lambda w: (traces.append(1), w * 2)[1]  # noqa: E731
    COUNTS[name] = []
    for _ in range(3):
        jax.block_until_ready(function(*args))
        COUNTS[name].append(len(traces))


w = jax.device_put(PARAMS["w"], jax.sharding.NamedSharding(MESH, P("fsdp")))
other: list[int] = []
other_function = jax.jit(lambda x: (other.append(1), x + 1)[1])
other_function(w)

# ------------------------------------------------------------------ inside `jax.jit`


def constrain_by_names(w: Any) -> Any:
    with ts.logical_axis_rules([("embed", "fsdp")]):
        return ts.with_sharding_constraint(w, ("embed", None), MESH)


def accumulate(w: Any) -> Any:
    def grads_of(rows: Any, key: Any) -> Any:
        return jax.grad(lambda w: (rows @ w).sum())(w), 0.0

    return ts.training.accumulate_gradients(grads_of, w, 2)


count("nothing", lambda w: w + 1, w)
count("lookup", lambda w: ts.lookup(w, jnp.arange(2)), w)
count("matmul", ts.matmul, w, w)
count("current mesh", lambda w: (ts.get_incontext_mesh(raise_error=False), w)[1], w)
count("resolve", lambda w: (ts.PartitionAxis().resolve("batch", mesh="dp=1"), w)[1], w)
count("constraint", lambda w: ts.with_sharding_constraint(w, P("fsdp"), MESH), w)
count("constraint by names", constrain_by_names, w)
count("match_partition_rules", lambda w: (ts.match_partition_rules([(".*", None)], w), w)[1], w)
count("plan", lambda w: (ts.plan({"w": w}, [(".*", None)], MESH).leaves, w)[1], w)
count(
    "infer_sharding", lambda w: (ts.infer_sharding({"w": w}, [(".*", "replicate")], MESH), w)[1], w
)
count("unshard by specs", lambda w: ts.unshard(w, P("fsdp"), "fsdp", MESH), w)

# ------------------------------------------------------------------ inside `jax.shard_map`


def by_hand(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.shard_map(use, mesh=MESH, in_specs=P("fsdp"), out_specs=P("fsdp"))


def gather_by_hand(w: Any) -> Any:
    return ts.manual.vary(ts.gather_params(w, "fsdp", P("fsdp")), "fsdp")


def differentiate_by_hand(w: Any) -> Any:
    return ts.manual.value_and_grad(lambda w: (w**2).mean(), "fsdp", P("fsdp"))(w)[1]


def fold_key(w: Any) -> Any:
    key = ts.manual.fold_rng_over_axis(jax.random.key(0), "fsdp")
    return w + jax.random.uniform(key)


count("axis index", by_hand(lambda w: w + ts.get_submesh_device_index("fsdp")), w)
count("gather_params", by_hand(gather_by_hand), w)
count("manual.value_and_grad", by_hand(differentiate_by_hand), w)
count("sync_gradients", by_hand(lambda w: ts.sync_gradients(w, "fsdp", P("fsdp"))), w)
count("fold_rng_over_axis", by_hand(fold_key), w)

# ------------------------------------------------------------------ with a plan

plan = ts.plan(PARAMS, [("w", P("fsdp"))], MESH, min_size=0)
state = ts.shard(PARAMS, plan)
batch = np.ones((8, 4), "float32")


def loss(state: Any) -> Any:
    return (batch @ ts.unshard(state, plan)["w"]).mean()


count("unshard by a plan", loss, state)
count("value_and_grad by a plan", lambda s: ts.training.value_and_grad(loss, plan)(s), state)
with jax.set_mesh(MESH):
    count("accumulate_gradients", accumulate, w)
count(
    "value_and_grad outside of a trace, made anew for each call",
    lambda f, s: ts.training.value_and_grad(lambda s: f(s["w"]).sum(), plan)(s),
    state,
    jit=False,
)
count(
    "unshard and a constraint outside of a trace",
    lambda f, s: f(ts.with_sharding_constraint(ts.unshard(s, plan), P("fsdp"), MESH)["w"]),
    state,
    jit=False,
)

# ------------------------------------------------------------------ calls between the user's


@ts.jit_step(plan=plan, donate=False)
def step(state: Any, batch: Any) -> Any:
    return state, (batch @ ts.unshard(state)["w"]).mean()


def initialise(f: Any) -> Any:
    return f(
        ts.init_sharded(lambda: {"w": jnp.ones((4, 4))}, rules=[(".*", None)], mesh=MESH)[0]["w"]
    )


between: dict[str, Callable[[Any], Any]] = {
    "shard, reshard, gather": lambda f: f(
        ts.gather(ts.reshard(ts.shard(PARAMS, plan), P(), MESH))["w"]
    ),
    "a step": lambda f: f(step(state, batch)[0]["w"]),
    "init_sharded": initialise,
    "from_process_local": lambda f: f(ts.from_process_local(batch, P("fsdp"), MESH)),
}
for name, call in between.items():
    count(f"{name}, between calls", lambda f, call=call: call(f), jit=False)
for module in ("checkpoint", "communication", "compat", "interchange", "programs", "testing"):
    getattr(ts, module)
other_function(w)
COUNTS["another function of the user, at the end"] = [len(other)] * 3
print(json.dumps(COUNTS))
