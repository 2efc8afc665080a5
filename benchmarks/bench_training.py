"""What a training step costs on top of JAX: python -m benchmarks.bench_training"""

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Figure, Row, options, report
from benchmarks._processes import as_one_of_two, as_two
from examples import train_fsdp
from treeshard.training import init_sharded, jit_step

# ------------------------------------------------------------------ dispatch


class Layer(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    act: Any

    def __init__(self, key: jax.Array) -> None:
        self.q, self.k, self.v, self.o = (eqx.nn.Linear(2, 2, key=key) for _ in range(4))
        self.act = jax.nn.gelu


class Model(eqx.Module):
    layers: list[Layer]


def plus_one(x: Any) -> Any:
    return x + 1 if eqx.is_array(x) else x


def dispatch(rounds: int) -> Row:
    """The time until a call returns; each call gets the state that the last one returned."""
    mesh = ts.make_mesh("fsdp=8")
    key = jax.random.key(0)
    model, plan = init_sharded(
        lambda: Model([Layer(key) for _ in range(125)]), rules=[(".*", None)], mesh=mesh
    )
    whole = NamedSharding(mesh, P())
    step = jit_step(lambda s, b: (jax.tree.map(plus_one, s), b), plan, batch=P())
    in_dict = jax.jit(lambda d: jax.tree.map(plus_one, d), donate_argnums=0, out_shardings=whole)
    filtered = eqx.filter_jit(lambda m: jax.tree.map(plus_one, m), donate="all")
    arrays = [x for x in jax.tree.leaves(model) if eqx.is_array(x)]
    copy = lambda x: jnp.copy(x) if eqx.is_array(x) else x  # noqa: E731
    states: dict[str, Any] = {
        "dict": {f"p{i:04}": copy(x) for i, x in enumerate(arrays)},
        "filter_jit": jax.tree.map(copy, model),
        "treeshard": model,
    }

    calls: dict[str, Any] = {
        "dict": in_dict,
        "treeshard": lambda s: step(s, ())[0],
        "filter_jit": filtered,
    }
    seconds = seconds_to_return(calls, states, rounds)
    took = {name: Figure(times) for name, times in seconds.items()}
    ratio = {name: took[name] / took["dict"] for name in took}
    return Row(
        f"dispatch of a step: {len(arrays)} arrays in Equinox modules, x jax.jit on a dict",
        ratio["treeshard"],
        "<= 1.15",
        {"eqx.filter_jit": ratio["filter_jit"], "jax.jit on a dict (us)": took["dict"] * 1e6},
    )


def seconds_to_return(
    calls: Mapping[str, Callable[[Any], Any]], states: dict[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Interleaves calls `state -> state`; counts the time until they return, not the devices."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 2):
        # Whichever comes second finds the other's threads still running, so they take turns.
        for name in list(calls)[:: -1 if round_ % 2 else 1]:
            start = time.perf_counter()
            states[name] = calls[name](states[name])
            elapsed = time.perf_counter() - start
            jax.block_until_ready(states[name])
            if round_ > 1:
                seconds[name].append(elapsed)
    return seconds


# ------------------------------------------------------------------ two processes


def dispatch_on_one_of_two(rounds: int) -> dict[str, list[float]]:
    """The same on one of two processes, with a batch that is sharded over both."""
    mesh = ts.make_mesh("fsdp=8")
    tree = {f"w{i:02}": np.full((64, 64), 1 / 64, np.float32) for i in range(20)}
    plan = ts.plan(tree, [(".*", P("fsdp"))], mesh, min_size=0)
    batch = ts.from_process_local(np.ones((8, 64), np.float32), P("fsdp"), mesh)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    def train_step(params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    step = jit_step(train_step, plan, batch=P("fsdp"))
    shardings = plan.shardings
    jitted = jax.jit(
        train_step,
        in_shardings=(shardings, NamedSharding(mesh, P("fsdp"))),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    states = {name: ts.shard(tree, plan) for name in ("jax.jit", "treeshard")}
    calls = {
        "jax.jit": lambda state: jitted(state, batch)[0],
        "treeshard": lambda state: step(state, batch)[0],
    }
    return seconds_to_return(calls, states, rounds)


def dispatch_on_two(rounds: int) -> Row:
    seconds = as_two("benchmarks.bench_training", "--two", f"--rounds={rounds}")[0]
    took = {name: Figure(times) for name, times in seconds.items()}
    return Row(
        "dispatch of jit_step on 2 processes, batch global, x jax.jit",
        took["treeshard"] / took["jax.jit"],
        "<= 1.3",
        {"jax.jit (us)": took["jax.jit"] * 1e6},
    )


# ------------------------------------------------------------------ the demo


def demo() -> list[Row]:
    """Counts and bytes of the main job, taken from the run itself."""
    programs: list[str] = []

    def listen(name: str, seconds: float, **_: Any) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            programs.append(name)

    args = train_fsdp.parse([])
    optimizer = train_fsdp.make_optimizer(args)
    state, plan = init_sharded(
        train_fsdp.make_init(args, optimizer),
        jax.random.key(args.seed),
        rules=train_fsdp.RULES,
        mesh=ts.make_mesh(args.mesh),
    )
    train_step = train_fsdp.make_train_step(optimizer, plan.specs.model)
    step = jit_step(train_step, plan, batch=P("fsdp"))
    text, _ = train_fsdp.read_text(args.text_bytes)
    data = train_fsdp.batches(text, args)
    jax.monitoring.register_event_duration_secs_listener(listen)
    for _ in range(3):
        state, _ = step(state, next(data))
    arrays = [x for x in jax.tree.leaves(state) if eqx.is_array(x)]
    held = {device: 0 for device in jax.devices()}
    for x in arrays:
        for piece in x.addressable_shards:
            held[piece.device] += piece.data.nbytes
    even = sum(x.nbytes for x in arrays) / len(held)
    return [
        Row("compiles over 3 steps of the demo", len(programs), "1"),
        Row("bytes on the fullest device, x total/8", max(held.values()) / even, "<= 1.02"),
        Row("the same, as the plan says", plan.bytes_per_device() / even, "<= 1.02"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--two", action="store_true", help="measure as one of two processes")
    parser.add_argument("--port")
    parser.add_argument("--index", type=int)
    chosen = options(parser)
    rounds = max(chosen.rounds, 30)
    if chosen.two:
        as_one_of_two(chosen.port, chosen.index, lambda: dispatch_on_one_of_two(rounds))
        return
    ts.simulate_devices(8)
    rows = [dispatch(rounds), dispatch_on_two(rounds), *demo()]
    report("What a training step costs", rows, ("jax", "jaxlib", "equinox", "optax"))


if __name__ == "__main__":
    main()
