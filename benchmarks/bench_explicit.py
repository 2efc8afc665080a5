"""What a step with minibatches moves on a mesh data=2,fsdp=4: python -m benchmarks.bench_explicit

Four layers of 512 x 512, float32, in a scan with `jax.checkpoint` that gathers each where it is
used, and a scan over four minibatches around it. Ours, on Explicit axes, is `unshard`,
`training.value_and_grad` and `training.accumulate_gradients`. Plain JAX gathers with
`with_sharding_constraint` on Auto axes and with `jax.sharding.reshard` on Explicit ones, and adds
the gradients of the minibatches in the carry of the scan. All are compiled for simulated CPU
devices, whose compiler does not make reduce-scatters by itself, and their gradients are equal.
Bytes are what a device sends in a step, if devices form a ring.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Row, report
from treeshard.training import accumulate_gradients, value_and_grad

AXES, ROWS = "data=2,fsdp=4", P(("data", "fsdp"))
LAYERS, WIDTH, MINIBATCHES, BATCH = 4, 512, 4, 256
SPECS = {"w": P(None, "fsdp")}
MIB = 2**20


def mean_of_layers(params: Any, x: jax.Array, gather: Callable[[Any], Any]) -> jax.Array:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ gather(w)), None

    return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)


class Moved(NamedTuple):
    """What reduces gradients in a step, and what all collectives send."""

    runs: int
    runs_over_data: int
    reduced_bytes: float
    bytes: float
    gradient: np.ndarray


def moved_by(program: jax.stages.Compiled, gradient: Any) -> Moved:
    found = [one for one in ts.collectives(program) if one.rank]
    if any(one.count is None or one.wire_bytes is None for one in found):
        raise RuntimeError("no count is known for a collective")
    reduced = [one for one in found if one.kind != "all-gather"]
    return Moved(
        sum(one.count for one in reduced),
        sum(one.count for one in reduced if "data" in (one.axes or ())),
        sum(one.count * one.wire_bytes for one in reduced) / MIB,
        sum(one.count * one.wire_bytes for one in found) / MIB,
        np.asarray(gradient),
    )


def of_ours(mesh: Mesh, params: Any, x: Any) -> Moved:
    plan = ts.plan(params, list(SPECS.items()), mesh)

    def gradients(params: Any, x: jax.Array) -> tuple[Any, Any]:
        def of_minibatch(rows: jax.Array, _: Any) -> Any:
            loss = lambda p, rows: mean_of_layers(p, rows, ts.unshard)  # noqa: E731
            return value_and_grad(loss)(params, rows)[1], ()

        return accumulate_gradients(of_minibatch, x, MINIBATCHES, axis_names="data")[0], ()

    step = ts.jit_step(gradients, plan, batch=ROWS, donate=False)
    program = step.compile(plan.structs, x).compiled
    return moved_by(program, step(ts.shard(params, plan), x)[0]["w"])


def of_plain_jax(mesh: Mesh, gather: Callable[[Any], Any], params: Any, x: Any) -> Moved:
    def gradients(params: Any, x: jax.Array) -> Any:
        minibatches = jnp.moveaxis(x.reshape(-1, MINIBATCHES, WIDTH), 1, 0)
        grad = jax.grad(lambda p, rows: mean_of_layers(p, rows, gather))

        def add(total: Any, rows: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad(params, rows)), None

        total = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), minibatches)[0]
        return jax.tree.map(lambda g: g / MINIBATCHES, total)

    placed = ts.shard((params, x), (SPECS, ROWS), mesh)
    shardings = jax.tree.map(lambda x: x.sharding, placed[0])
    with jax.set_mesh(mesh):
        program = jax.jit(gradients, out_shardings=shardings).lower(*placed).compile()
        return moved_by(program, program(*placed)["w"])


def main() -> None:
    ts.simulate_devices(8)
    random = np.random.default_rng(0)
    params = {"w": random.standard_normal((LAYERS, WIDTH, WIDTH)).astype("float32") / WIDTH**0.5}
    x = random.standard_normal((BATCH, WIDTH)).astype("float32")
    auto, explicit = ts.make_mesh(AXES), ts.make_mesh(AXES, axis_types="explicit")
    ours = of_ours(explicit, params, x)
    others = {
        "plain JAX, Auto axes": of_plain_jax(
            auto, lambda w: jax.lax.with_sharding_constraint(w, P()), params, x
        ),
        "plain JAX, Explicit axes": of_plain_jax(
            explicit, lambda w: jax.sharding.reshard(w, P()), params, x
        ),
        "ours, Auto axes": of_ours(auto, params, x),
    }
    for other in others.values():
        np.testing.assert_allclose(other.gradient, ours.gradient, rtol=1e-4, atol=1e-8)

    def row(case: str, field: str, reach: str = "") -> Row:
        vs = {name: getattr(moved, field) for name, moved in others.items()}
        return Row(case, getattr(ours, field), reach, vs)

    # Each layer is scattered over 4 devices in each pass, and its shards are summed once over 2.
    in_layers = LAYERS * MINIBATCHES
    least = in_layers * WIDTH**2 * 4 * 3 / 4 + LAYERS * WIDTH**2 * 4 / 4
    rows = [
        row("runs of collectives that reduce gradients", "runs", f"<= {in_layers + 1}"),
        row("of these, runs over data", "runs_over_data", "<= 1"),
        row("sent to reduce gradients, MiB", "reduced_bytes", f"<= {least / MIB}"),
        row("sent by all collectives, MiB", "bytes"),
    ]
    report("A step of 4 layers and 4 minibatches on data=2,fsdp=4, runs and bytes", rows)


if __name__ == "__main__":
    main()
