"""Faults planted in the values of a step, each with a twin that is right and has no finding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.programs import Types

WIDTH, ROWS, VOCAB = 512, 1024, 16384
Fn = Callable[..., jax.Array]


class Planted(NamedTuple):
    """A fault `(params, x) -> scalar`, its twin, and what the finding must say."""

    code: str
    fault: Fn
    twin: Fn
    fact: str
    fix: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (ROWS, WIDTH)
    axes: tuple[str, ...] = ("auto", "explicit")
    mesh: str = "fsdp=8"


def on(x: jax.Array, *spec: Any) -> jax.Array:
    """A value with a spec, on axes of both types."""
    types = jax.sharding.get_abstract_mesh().axis_types
    if jax.sharding.AxisType.Explicit in types:
        return jax.sharding.reshard(x, P(*spec))
    return ts.with_sharding_constraint(x, P(*spec))


def types_of(fn: Fn, mesh: Any, *, dtype: str = "float32", shape: Any = (ROWS, WIDTH)) -> Types:
    """The values of a step that computes `fn` of its parameters and its batch."""
    shapes = {"head": (WIDTH, VOCAB), "w": (WIDTH, WIDTH)}
    params = {name: struct(*shape, dtype=dtype) for name, shape in shapes.items()}
    plan = ts.plan(params, [(".*", ts.fsdp("fsdp"))], mesh)
    step = ts.jit_step(lambda state, x: (state, fn(state, x)), plan, batch=P(mesh.axis_names))
    return step.compile(plan.structs, struct(*shape, dtype=dtype)).types()


# ------------------------------------------------------------------ the programs


def replicated(p: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(on(x))
    return jnp.sum(hidden @ ts.unshard(p["w"]))


def split(p: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(on(x, "fsdp"))
    return jnp.sum(hidden @ ts.unshard(p["w"]))


def replicated_over_one(p: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(on(x, "fsdp"))
    return jnp.sum(hidden @ ts.unshard(p["w"]))


def split_over_both(p: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(on(x, ("data", "fsdp")))
    return jnp.sum(hidden @ ts.unshard(p["w"]))


def resharded(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    by_column = on(hidden, None, "fsdp")
    return jnp.sum(jnp.tanh(on(by_column, "fsdp")))


def resharded_for_a_use(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    by_column = jnp.cumsum(on(hidden, None, "fsdp"), axis=0)
    return jnp.sum(jnp.tanh(on(by_column, "fsdp")))


def resharded_by_a_gather(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    by_column = on(on(hidden), None, "fsdp")
    return jnp.sum(jnp.cumsum(by_column, axis=0) ** 2)


def resharded_directly(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    by_column = on(hidden, None, "fsdp")
    return jnp.sum(jnp.cumsum(by_column, axis=0) ** 2)


def gathered_to_reduce(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    return jnp.sum(on(hidden) ** 2)


def reduced_in_place(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    return jnp.sum(hidden**2)


def weight_gathered_to_reduce(p: Any, x: jax.Array) -> jax.Array:
    penalty = jnp.sum(jnp.abs(ts.unshard(p["head"] * 2.0)))
    return jnp.sum(x @ ts.unshard(p["w"])) + penalty


def weight_reduced_in_place(p: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(x @ ts.unshard(p["w"])) + jnp.sum(jnp.abs(p["head"] * 2.0))


def widened(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    wide = on(hidden.astype(jnp.float32), None, "fsdp")
    return jnp.sum(jnp.tanh(jnp.cumsum(wide, axis=0)))


def widened_after(p: Any, x: jax.Array) -> jax.Array:
    hidden = on(jnp.tanh(x @ ts.unshard(p["w"])), "fsdp")
    wide = on(hidden, None, "fsdp").astype(jnp.float32)
    return jnp.sum(jnp.tanh(jnp.cumsum(wide, axis=0)))


def weight_widened(p: Any, x: jax.Array) -> jax.Array:
    wide = ts.unshard(p["head"].astype(jnp.float32))
    return jnp.sum(x.astype(jnp.float32) @ wide)


def weight_widened_after(p: Any, x: jax.Array) -> jax.Array:
    wide = ts.unshard(p["head"]).astype(jnp.float32)
    return jnp.sum(x.astype(jnp.float32) @ wide)


def logits_at_once(p: Any, x: jax.Array) -> jax.Array:
    logits = x @ ts.unshard(p["head"])
    return jnp.sum(jax.nn.softmax(logits)[:, 0])


def logits_in_parts(p: Any, x: jax.Array) -> jax.Array:
    head = ts.unshard(p["head"])

    def part(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        return total + jnp.sum(jax.nn.softmax(rows @ head)[:, 0]), None

    parts = on(jnp.swapaxes(x.reshape(-1, 32, WIDTH), 0, 1), None, "fsdp")
    return jax.lax.scan(part, jnp.zeros(()), parts)[0]


def _attention(queries: jax.Array, keys: jax.Array, x: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", queries, keys))
    return jnp.sum(jnp.einsum("bts,bsd->btd", weights, x) ** 2)


def scores(p: Any, x: jax.Array) -> jax.Array:
    gradient = jax.grad(lambda keys: _attention(x, keys, x))(x @ ts.unshard(p["w"]))
    return jnp.sum(jnp.tanh(gradient))


def scores_in_parts(p: Any, x: jax.Array) -> jax.Array:
    parts = on(jnp.moveaxis(x.reshape(x.shape[0], 64, -1, WIDTH), 1, 0), None, "fsdp")

    def loss(keys: jax.Array) -> jax.Array:
        part = lambda total, queries: (total + _attention(queries, keys, x), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(part), jnp.zeros(()), parts)[0]

    return jnp.sum(jnp.tanh(jax.grad(loss)(x @ ts.unshard(p["w"]))))


def _summed_gradient(p: Any, x: jax.Array, *, inside: bool) -> jax.Array:
    """The gradient of a weight in microbatches, which waits for its sum over `fsdp`."""
    unreduced = P(unreduced=frozenset({"fsdp"}))
    parts = on(jnp.swapaxes(x.reshape(-1, 4, WIDTH), 0, 1), None, "fsdp")

    def part(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        gradient = jnp.einsum("bi,bj->ij", rows, jnp.tanh(rows), out_sharding=unreduced)
        return total + (jax.sharding.reshard(gradient, P()) if inside else gradient), None

    zeros = jnp.zeros((WIDTH, WIDTH), out_sharding=P())
    start = zeros if inside else jax.sharding.reshard(zeros, unreduced)
    total = jax.lax.scan(part, start, parts)[0]
    return jnp.sum(total if inside else jax.sharding.reshard(total, P()))


def summed_in_a_loop(p: Any, x: jax.Array) -> jax.Array:
    return _summed_gradient(p, x, inside=True)


def summed_after_a_loop(p: Any, x: jax.Array) -> jax.Array:
    return _summed_gradient(p, x, inside=False)


def _product(x: jax.Array) -> jax.Array:
    unreduced = P(unreduced=frozenset({"fsdp"}))
    return jnp.einsum("bi,bj->ij", x, jnp.tanh(x), out_sharding=unreduced)


def summed_twice(p: Any, x: jax.Array) -> jax.Array:
    product = _product(x)
    first, second = (jax.sharding.reshard(product, P()) for _ in range(2))
    return jnp.sum(jnp.tanh(first)) + jnp.sum(jnp.sin(second))


def summed_once(p: Any, x: jax.Array) -> jax.Array:
    product = jax.sharding.reshard(_product(x), P())
    return jnp.sum(jnp.tanh(product)) + jnp.sum(jnp.sin(product))


EXPLICIT = ("explicit",)  # JAX has no types of unreduced values on other axes
PLANTED = {
    "an activation, replicated": Planted(
        *("replicated", replicated, split),
        "float32[1024,512] has the rows of the batch, and is replicated over 'fsdp', 2.0 MiB on",
        "`with_sharding_constraint(x, P('fsdp'))`",
    ),
    "an activation, replicated over one of two axes": Planted(
        *("replicated", replicated_over_one, split_over_both),
        "float32[4096,512] has the rows of the batch, and is replicated over 'data', 2.0 MiB on",
        "`with_sharding_constraint(x, P(('data', 'fsdp')))`",
        shape=(4 * ROWS, WIDTH),
        mesh="data=2,fsdp=4",
    ),
    "resharded by a gather": Planted(
        *("resharded-twice", resharded_by_a_gather, resharded_directly),
        "float32[1024,512] is moved from P('fsdp',) to P(), and from there at once to P(None,",
        "Remove the first of the two",
    ),
    "resharded twice": Planted(
        *("resharded-twice", resharded, resharded_for_a_use),
        "float32[8192,512] is moved from P('fsdp',) to P(None, 'fsdp'), and from there at once to",
        "Remove the first of the two",
        shape=(8 * ROWS, WIDTH),
    ),
    "gathered to reduce": Planted(
        *("gathered-to-reduce", gathered_to_reduce, reduced_in_place),
        "float32[1024,512] is gathered over 'fsdp', 2.0 MiB on each device, and then only reduced.",
        "Reduce it as it is sharded",
    ),
    "a weight, gathered to reduce": Planted(
        *("gathered-to-reduce", weight_gathered_to_reduce, weight_reduced_in_place),
        "float32[512,16384] is gathered over 'fsdp', 32.0 MiB on each device, and then only",
        "Reduce it as it is sharded",
    ),
    "an activation, widened": Planted(
        *("widened", widened, widened_after),
        "float32[8192,512] is widened from bfloat16, and then moved from P('fsdp',) to P(None,",
        "Move it first, and widen the result.",
        "bfloat16",
        (8 * ROWS, WIDTH),
        EXPLICIT,  # the partitioner moves what is not yet widened
    ),
    "a weight, widened": Planted(
        *("widened", weight_widened, weight_widened_after),
        "float32[512,16384] is widened from bfloat16, and then moved from P(None, 'fsdp') to P(",
        "Move it first, and widen the result.",
        "bfloat16",
    ),
    "logits": Planted(
        *("dominates-peak", logits_at_once, logits_in_parts),
        "float32[8192,16384] and what is computed from it take ",
        "Compute the loss for a part of the rows at a time",
        shape=(8 * ROWS, WIDTH),
    ),
    "scores": Planted(
        *("dominates-peak", scores, scores_in_parts),
        "float32[16,4096,4096] and what is computed from it take ",
        "Use an attention that does not store the scores",
        shape=(16, 4096, WIDTH),
    ),
    "summed in a loop": Planted(
        *("reduced-in-loop", summed_in_a_loop, summed_after_a_loop),
        "float32[512,512] is summed over 'fsdp' in each of 4 trips, 1.0 MiB each",
        "Add first, and sum once after the loop",
        axes=EXPLICIT,
    ),
    "summed twice": Planted(
        *("reduced-twice", summed_twice, summed_once),
        "float32[512,512] is summed over 'fsdp' 2 times, 1.0 MiB each.",
        "Sum it once, and use the result.",
        axes=EXPLICIT,
    ),
}
CASES = [(name, axes) for name, planted in PLANTED.items() for axes in planted.axes]


def check(planted: Planted, mesh: Any) -> None:
    """Checks that a fault is found, once, and that its twin has no finding."""
    options = {"dtype": planted.dtype, "shape": planted.shape}
    types = types_of(planted.fault, mesh, **options)
    found = [x for x in types.findings if x.code == planted.code]
    assert len(found) == 1, f"{types}"
    assert planted.fact in found[0].fact
    assert planted.fix in found[0].fix
    assert f"{found[0]}" in f"{types}"
    twin = types_of(planted.twin, mesh, **options)
    assert twin.findings == (), f"{twin}"


def mesh_of_type(axes: str, names: str, **options: Any) -> jax.sharding.Mesh:
    """A mesh whose axes are all Auto, or all Explicit."""
    mesh = ts.make_mesh(names, **options)
    if axes == "auto":
        return mesh
    types = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
