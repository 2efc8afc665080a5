"""What gradient accumulation moves, K = 4 against K = 1, from the compiled programs:
python -m benchmarks.bench_accumulate
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Row, report
from treeshard.manual import gather_params, sync_gradients, vary
from treeshard.training import accumulate_gradients

SPECS = {"up": P(None, "fsdp"), "down": P("fsdp"), "bias": P()}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]) ** 2)


def moved(program: jax.stages.Compiled) -> Counter[str]:
    """Bytes by kind of collective, loops counted as often as they turn."""
    found: Counter[str] = Counter()
    for one in ts.collectives(program):
        if one.total_bytes is None:
            raise RuntimeError(f"no trip count is known for {one}")
        found[one.kind] += one.total_bytes
    return found


def by_jit(args: Any, count: int, axis_names: str | None, mesh: Any) -> Counter[str]:
    def step(params: Any, x: jax.Array) -> Any:
        def grad_fn(minibatch: jax.Array, _: Any) -> Any:
            return jax.grad(loss_fn)(ts.unshard(params, SPECS, "fsdp"), minibatch), ()

        return accumulate_gradients(grad_fn, x, count, axis_names=axis_names)[0]

    out = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    with jax.set_mesh(mesh):
        return moved(jax.jit(step, out_shardings=out).lower(*args).compile())


def by_hand(args: Any, count: int, mesh: Any) -> Counter[str]:
    def step(params: Any, x: jax.Array) -> Any:
        whole, scatter = jax.vjp(lambda p: gather_params(p, "fsdp", SPECS), vary(params, "fsdp"))
        grads, _ = accumulate_gradients(
            lambda minibatch, _: (jax.grad(loss_fn)(whole, minibatch), ()), x, count
        )
        return sync_gradients(scatter(grads)[0], "fsdp", SPECS)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(SPECS, P("fsdp")), out_specs=SPECS)
    return moved(jax.jit(mapped).lower(*args).compile())


def main() -> None:
    ts.simulate_devices(8)
    mesh = ts.make_mesh("fsdp=8")
    shapes = {"up": (256, 1024), "down": (1024, 256), "bias": (1024,)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    args = ts.shard((params, np.ones((256, 256), np.float32)), (SPECS, P("fsdp")), mesh)
    one, four = by_jit(args, 1, None, mesh), by_jit(args, 4, None, mesh)
    named = by_jit(args, 4, "fsdp", mesh)
    hand_one, hand_four = by_hand(args, 1, mesh), by_hand(args, 4, mesh)
    without = f"{four['all-reduce'] / one['all-reduce']:.2f} without axis_names"
    rows = [
        Row("by hand: all bytes", hand_four.total() / hand_one.total(), "<= 1.05"),
        Row("by jit: all-gather", four["all-gather"] / one["all-gather"], "<= 1.05"),
        Row("by jit, axis_names: all-gather", named["all-gather"] / one["all-gather"], "<= 1.05"),
        Row(
            "by jit, axis_names: all-reduce",
            named["all-reduce"] / one["all-reduce"],
            "<= 1.05",
            without,
        ),
    ]
    report("Gradient accumulation, bytes of K = 4 over those of K = 1", rows)


if __name__ == "__main__":
    main()
