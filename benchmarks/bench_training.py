"""What a training step costs on top of JAX: python -m benchmarks.bench_training"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Figure, Row, medians, options, report, shuffled
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


def plus_one_each(tree: Any) -> Any:
    return jax.tree.map(plus_one, tree)


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.o = (nnx.Linear(2, 2, rngs=rngs) for _ in range(4))


class NnxModel(nnx.Module):
    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.layers = nnx.List([NnxLayer(nnx.Rngs(0)) for _ in range(125)])
        nnx.update(self, jax.device_put(nnx.state(self), NamedSharding(mesh, P())))


@nnx.jit(donate_argnums=0)
def nnx_plus_one(model: NnxModel) -> None:
    nnx.update(model, jax.tree.map(plus_one, nnx.state(model)))


def by_nnx(model: NnxModel) -> NnxModel:
    nnx_plus_one(model)
    return model


def dispatch(rounds: int, devices: int) -> Row:
    """The time until a call returns; each call gets the state that the last one returned."""
    mesh = ts.make_mesh("fsdp=-1", devices=jax.devices()[:devices])
    key = jax.random.key(0)
    model, plan = init_sharded(
        lambda: Model([Layer(key) for _ in range(125)]), rules=[(".*", None)], mesh=mesh
    )
    whole = NamedSharding(mesh, P())
    step = jit_step(lambda s, b: (jax.tree.map(plus_one, s), b), plan, batch=P())
    in_dict = jax.jit(plus_one_each, donate_argnums=0, out_shardings=whole)
    filtered = eqx.filter_jit(plus_one_each, donate="all")
    arrays = [x for x in jax.tree.leaves(model) if eqx.is_array(x)]
    copy = lambda x: jnp.copy(x) if eqx.is_array(x) else x  # noqa: E731
    states: dict[str, Any] = {
        "dict": {f"p{i:04}": copy(x) for i, x in enumerate(arrays)},
        "modules": jax.tree.map(copy, eqx.filter(model, eqx.is_array)),
        "filter_jit": jax.tree.map(copy, model),
        "treeshard": model,
        "nnx.jit": NnxModel(mesh),
    }

    calls: dict[str, Any] = {
        "dict": in_dict,
        # The same program, and arguments in the structure that treeshard has to take apart, too.
        "modules": jax.jit(plus_one_each, donate_argnums=0, out_shardings=whole),
        "treeshard": lambda s: step(s, ())[0],
        "filter_jit": filtered,
        "nnx.jit": by_nnx,
    }
    seconds = seconds_to_return(calls, states, rounds)
    took = {name: Figure(times) for name, times in seconds.items()}
    floor = "dict" if devices > 1 else "modules"
    ratio = {name: took[name] / took[floor] for name in took}
    what = f"{len(arrays)} arrays in Equinox modules"
    case = f"dispatch of a step: {what}, x jax.jit on a dict"
    if devices == 1:
        case = f"dispatch of a step on one device: {what}, x jax.jit on these, arrays only"
    return Row(
        case,
        ratio["treeshard"],
        "<= 1.15",
        {
            "eqx.filter_jit": ratio["filter_jit"],
            "nnx.jit, of as many": ratio["nnx.jit"],
            f"jax.jit on {'a dict' if floor == 'dict' else 'these'} (us)": took[floor] * 1e6,
        },
    )


def seconds_to_return(
    calls: Mapping[str, Callable[[Any], Any]], states: dict[str, Any], rounds: int
) -> dict[str, list[float]]:
    """Interleaves calls `state -> state`; counts the time until they return, not the devices."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 2):
        # Whichever comes second finds the other's threads still running.
        for name in shuffled(calls, round_):
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


# ------------------------------------------------------------------ a loop of the user's


def first_step(way: str) -> float:
    """The seconds of the first step of the README's loop, by treeshard or in plain JAX."""
    optimizer = optax.adam(1e-2)
    model = eqx.nn.MLP(64, 64, 512, depth=2, key=jax.random.key(0))
    state = model, optimizer.init(eqx.filter(model, eqx.is_array))
    plan = ts.plan(state, [("bias", None), (".*", ts.fsdp("fsdp"))], "fsdp=8")
    whole, split = NamedSharding(plan.mesh, P()), eqx.filter(plan.shardings, _is_sharding)

    def on_arrays(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
        arrays, static = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jax.tree.map(f, arrays, *others), static)

    constrain = jax.lax.with_sharding_constraint
    gathered: Callable[[Any], Any] = lambda m: ts.unshard(m, plan)  # noqa: E731
    kept: Callable[[Any], Any] = lambda s: ts.with_sharding_constraint(s, plan)  # noqa: E731
    if way == "plain":
        gathered = lambda m: on_arrays(lambda x: constrain(x, whole), m)  # noqa: E731
        kept = lambda s: on_arrays(constrain, s, split)  # noqa: E731

    @eqx.filter_jit
    def step(state: Any, batch: Any) -> Any:
        model, opt_state = state

        def loss_fn(model: Any) -> jax.Array:
            model = gathered(model)
            return ((jax.vmap(model)(batch) - batch) ** 2).mean()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return kept((eqx.apply_updates(model, updates), opt_state)), loss

    state = ts.shard(state, plan)
    batch = ts.shard(jax.random.normal(jax.random.key(1), (32, 64)), P("fsdp"), plan.mesh)
    jax.block_until_ready(batch)
    begin = time.perf_counter()
    jax.block_until_ready(step(state, batch)[1])
    return time.perf_counter() - begin


def _is_sharding(x: Any) -> bool:
    return isinstance(x, NamedSharding)


def first_steps(rounds: int) -> Row:
    """Each in a fresh process."""
    found: dict[str, list[float]] = {"ours": [], "plain": []}
    for round_ in range(rounds):
        for way in shuffled(found, round_):
            command = [sys.executable, "-m", "benchmarks.bench_training", f"--first={way}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way].append(float(done.stdout.splitlines()[-1]))
    plain = Figure(found["plain"])
    return Row(
        "first step of the README's loop in a fresh process, x plain JAX",
        Figure(found["ours"]) / plain,
        "<= 1.05",
        {"plain JAX (s)": plain},
    )


def constraints(rounds: int) -> Row:
    """Traces a function that has 200 constraints, each of a new value."""
    mesh, spec = ts.make_mesh("fsdp=8"), P("fsdp", None, None)
    x = jax.ShapeDtypeStruct((8, 128, 64), "float32")

    def traced(constrain: Callable[[Any], Any]) -> Any:
        def run(x: Any) -> Any:
            for _ in range(200):
                x = constrain(x + 1)
            return x

        return jax.jit(run).trace(x)

    sharding = NamedSharding(mesh, spec)
    calls = {
        "jax": lambda: traced(lambda x: jax.lax.with_sharding_constraint(x, sharding)),
        "treeshard": lambda: traced(lambda x: ts.with_sharding_constraint(x, spec, mesh)),
    }
    took = medians(calls, rounds)
    return Row(
        "tracing 200 constraints, x jax.lax.with_sharding_constraint",
        took["treeshard"] / took["jax"],
        "<= 1.15",
        {"jax.lax.with_sharding_constraint (ms)": took["jax"] * 1e3},
    )


# ------------------------------------------------------------------ the demo


class Demo:
    """The demo's parts, and each of its stages with treeshard and written in JAX and Equinox."""

    def __init__(self) -> None:
        self.args = train_fsdp.parse([])
        self.mesh = ts.make_mesh(self.args.mesh)
        self.optimizer = train_fsdp.make_optimizer(self.args)
        self.init = train_fsdp.make_init(self.args, self.optimizer)
        self.key = jax.random.key(self.args.seed)
        text, _ = train_fsdp.read_text(self.args.text_bytes)
        self.batch = next(train_fsdp.batches(text, self.args))

    def ours(self) -> tuple[Any, Callable[[Any], Any]]:
        """The state, and the step."""
        rules = train_fsdp.RULES
        state, plan = init_sharded(self.init, self.key, rules=rules, mesh=self.mesh)
        train_step = train_fsdp.make_train_step(self.optimizer)
        step = jit_step(train_step, plan, batch=P("fsdp"))
        return state, lambda state: step(state, self.batch)[0]

    def by_hand(self) -> tuple[Any, Callable[[Any], Any]]:
        """The same specs, by a loop over rules with the same tactic."""
        rules = [*train_fsdp.RULES[:-1], (".*", ts.fsdp("fsdp"))]

        def spec_of(path: Any, x: Any) -> P:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            action = next(action for pattern, action in rules if re.search(pattern, name))
            return P() if action is None else action(P(), self.mesh, name, x)

        structs, static = eqx.partition(
            eqx.filter_eval_shape(self.init, self.key),
            lambda x: isinstance(x, jax.ShapeDtypeStruct),
        )
        specs = jax.tree_util.tree_map_with_path(spec_of, structs)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)
        plan = ts.plan(eqx.filter_eval_shape(self.init, self.key), rules, self.mesh)
        train_step = train_fsdp.make_train_step(self.optimizer, plan)
        rows = NamedSharding(self.mesh, P("fsdp"))

        @partial(jax.jit, out_shardings=shardings)
        def init(key: jax.Array) -> Any:
            return eqx.filter(self.init(key), eqx.is_array)

        @partial(
            jax.jit,
            in_shardings=(shardings, rows),
            out_shardings=(shardings, None),
            donate_argnums=0,
        )
        def step(arrays: Any, batch: Any) -> Any:
            state, loss = train_step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), loss

        with jax.set_mesh(self.mesh):
            state = init(self.key)

        def call(state: Any) -> Any:
            with jax.set_mesh(self.mesh):
                return step(state, self.batch)[0]

        return state, call


def start(way: str) -> dict[str, float]:
    """Seconds until the state is initialised, and until the first step is done."""
    demo = Demo()
    begin = time.perf_counter()
    state, step = getattr(demo, way)()
    jax.block_until_ready(eqx.filter(state, eqx.is_array))
    initialised = time.perf_counter() - begin
    jax.block_until_ready(eqx.filter(step(state), eqx.is_array))
    return {"initialised": initialised, "first step": time.perf_counter() - begin}


def starts(rounds: int) -> list[Row]:
    """Each in a fresh process."""
    found: dict[str, dict[str, list[float]]] = {"ours": {}, "by_hand": {}}
    for round_ in range(rounds):
        for way in shuffled(found, round_):
            command = [sys.executable, "-m", "benchmarks.bench_training", f"--start={way}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            for name, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                found[way].setdefault(name, []).append(seconds)
    cases = {
        "initialised": "init_sharded of the demo, x jax.jit by hand",
        "first step": "the demo from start to the end of its first step, x by hand",
    }
    return [
        Row(
            case,
            Figure(found["ours"][name]) / Figure(found["by_hand"][name]),
            "<= 1.1",
            {"by hand (s)": Figure(found["by_hand"][name])},
        )
        for name, case in cases.items()
    ]


def step_time(rounds: int) -> Row:
    demo = Demo()
    made = {way: getattr(demo, way)() for way in ("ours", "by_hand")}
    states = {way: state for way, (state, _) in made.items()}

    def call(way: str) -> None:
        states[way] = made[way][1](states[way])
        jax.block_until_ready(eqx.filter(states[way], eqx.is_array))

    took = medians({way: partial(call, way) for way in made}, rounds)
    return Row(
        "a step of the demo, x jax.jit by hand",
        took["ours"] / took["by_hand"],
        "<= 1.05",
        {"by hand (ms)": took["by_hand"] * 1e3},
    )


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
    train_step = train_fsdp.make_train_step(optimizer)
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
    parser.add_argument("--start", choices=["ours", "by_hand"], help="start the demo, as JSON")
    parser.add_argument("--first", choices=["ours", "plain"], help="one first step, in seconds")
    parser.add_argument("--port")
    parser.add_argument("--index", type=int)
    chosen = options(parser)
    rounds = max(chosen.rounds, 30)
    if chosen.two:
        as_one_of_two(chosen.port, chosen.index, lambda: dispatch_on_one_of_two(rounds))
        return
    ts.simulate_devices(8)
    if chosen.first:
        print(first_step(chosen.first))
        return
    if chosen.start:
        print(json.dumps(start(chosen.start)))
        return
    rows = [
        dispatch(rounds, 8),
        dispatch(rounds, 1),
        dispatch_on_two(rounds),
        first_steps(min(chosen.rounds, 7)),
        constraints(chosen.rounds),
        step_time(chosen.rounds),
        *starts(min(chosen.rounds, 5)),
        *demo(),
    ]
    report("What a training step costs", rows, ("jax", "jaxlib", "equinox", "flax", "optax"))


if __name__ == "__main__":
    main()
