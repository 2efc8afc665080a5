"""Tensor parallelism: values, raw gradients and collectives, with and without check_vma."""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, on, sent
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples.tensor_parallel import parallel_attention, parallel_mlp
from treeshard import manual

# Most of the time goes to XLA, and code that runs once need not be fast.
pytestmark = pytest.mark.usefixtures("quick_compiles")
checks = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
ROWS, TIME, WIDTH, HEAD, HIDDEN = 8, 8, 16, 2, 32


def normal(seed: int, *shape: int) -> jax.Array:
    scale = 1 / math.sqrt(shape[0])
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ------------------------------------------------------------------ a layer, twice

SHAPES = {name: (WIDTH, WIDTH) for name in "qkvo"} | {
    "up": (WIDTH, HIDDEN),
    "up_bias": (HIDDEN,),
    "down": (HIDDEN, WIDTH),
    "down_bias": (WIDTH,),
    "scale": (WIDTH,),
}
PARAMS = {name: normal(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
X, Y = 2 * normal(20, ROWS, TIME, WIDTH), normal(21, ROWS, TIME, WIDTH)


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    root = lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    return x * root * (1 + jnp.broadcast_to(scale, x.shape))


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (x @ p[name] for name in "qkv")
    split = lambda y: y.reshape(*y.shape[:-1], -1, HEAD)  # noqa: E731
    found = jax.nn.dot_product_attention(split(q), split(k), split(v), is_causal=True)
    return found.reshape(q.shape) @ p["o"]


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"] + p["up_bias"][None, None]) @ p["down"]


def layer(p: Any, x: jax.Array) -> jax.Array:
    x = x + attention(p, normalized(x, p["scale"]))
    return x + mlp(p, normalized(x, p["scale"])) + p["down_bias"][None, None]


def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Nonlinear in the parameters, so that wrong factors cannot cancel."""
    return jnp.mean(jnp.square(layer(p, x) - y))


def parallel_layer(p: Any, x: jax.Array, axis: Any, dim: int | None) -> jax.Array:
    # Each device applies the full scale to its own rows.
    scale = p["scale"] if dim is None else manual.enter_parallel(p["scale"], axis)
    qkv = (p["q"], p["k"], p["v"])
    x = x + parallel_attention(normalized(x, scale), qkv, p["o"], axis, head_width=HEAD, dim=dim)
    up = manual.column_parallel(normalized(x, scale), p["up"], axis, p["up_bias"], dim=dim)
    return x + manual.row_parallel(jax.nn.gelu(up), p["down"], axis, p["down_bias"], dim=dim)


class Layout(NamedTuple):
    mesh: str
    axis: Any = "tensor"
    dim: int | None = None
    fsdp: str = "other dim"


LAYOUTS = {
    "fsdp on the same dim": Layout("fsdp=4,tensor=2", fsdp="same dim"),
    "two axes": Layout("fsdp=2,a=2,b=2", ("a", "b")),
    "sequence split": Layout("fsdp=2,a=2,b=2", ("a", "b"), dim=-2),
}


def specs_of(layout: Layout) -> Any:
    axis = layout.axis
    both = (axis, "fsdp") if isinstance(axis, str) else (*axis, "fsdp")
    columns, rows = {
        "other dim": (P("fsdp", axis), P(axis, "fsdp")),
        "same dim": (P(None, both), P(both)),
        "none": (P(None, axis), P(axis)),
    }[layout.fsdp]
    split = dict.fromkeys(["q", "k", "v", "up"], columns) | dict.fromkeys(["o", "down"], rows)
    return split | {"up_bias": P(axis), "down_bias": P(), "scale": P()}


REFERENCE = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(PARAMS, X, Y)


@checks
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_device(name: str, check_vma: bool) -> None:
    """Gradients of split and full parameters and of the input; FSDP and tensor on one mesh."""
    layout, specs = LAYOUTS[name], specs_of(LAYOUTS[name])
    axis, dim = layout.axis, layout.dim
    batch = P("fsdp") if dim is None else P("fsdp", axis)

    def local(both: Any, y: jax.Array) -> jax.Array:
        error = jnp.square(parallel_layer(*both, axis, dim) - y)
        if dim is None:
            return jnp.mean(error)
        total = jnp.sum(error) / (error.size * lax.axis_size(axis))
        return manual.leave_parallel(total, axis)

    def step(p: Any, x: jax.Array, y: jax.Array) -> Any:
        # Each device has its own rows: None leaves their gradient as it is.
        grad = manual.value_and_grad(local, "fsdp", (specs, None))
        value, (grads, of_x) = grad((p, x), y)
        return value, (grads, of_x / lax.axis_size("fsdp"))

    run = on(
        ts.make_mesh(layout.mesh), step, (specs, batch, batch), (P(), (specs, batch)), check_vma
    )
    assert_close(run(PARAMS, X, Y), REFERENCE)


# ------------------------------------------------------------------ what is sent

SPECS = specs_of(Layout("", fsdp="none"))


def attention_block(p: Any, x: jax.Array, **how: Any) -> jax.Array:
    qkv = (p["q"], p["k"], p["v"])
    return parallel_attention(x, qkv, p["o"], "tensor", head_width=HEAD, **how)


FULL, PART = f"f32[{ROWS},{TIME},{WIDTH}]", f"f32[{ROWS},{TIME // 8},{WIDTH}]"


@checks
@pytest.mark.parametrize(
    ("dim", "forward", "both"),
    [
        (None, [("all-reduce", FULL)], [("all-reduce", FULL)] * 2),
        (
            1,
            [("all-gather", FULL), ("reduce-scatter", PART)],
            # Backwards the weights need the gathered rows again, which are still there.
            [("all-gather", FULL)] * 2 + [("reduce-scatter", PART)] * 2,
        ),
    ],
    ids=["whole", "sequence split"],
)
def test_a_block_communicates_once_each_way(
    dim: int | None, forward: Any, both: Any, check_vma: bool
) -> None:
    mesh, spec = ts.make_mesh("tensor=8"), P() if dim is None else P(None, "tensor")
    block = partial(attention_block, dim=dim)

    def backward(p: Any, x: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(block, p, x)
        return out, pull(g)

    run = on(mesh, block, (SPECS, spec), spec, check_vma)
    assert sent(run.lower(PARAMS, X).compile().as_text()) == forward
    run = on(mesh, backward, (SPECS, spec, spec), (spec, (SPECS, spec)), check_vma)
    assert sent(run.lower(PARAMS, X, X).compile().as_text()) == both


# ------------------------------------------------------------------ variants


@checks
def test_scanned_layers_under_remat(check_vma: bool) -> None:
    """The operators work under scan, checkpoint and vmap."""
    stacked = {name: jnp.stack([PARAMS[name]] * 3) for name in ("up", "down")}
    specs = {"up": P(None, None, "tensor"), "down": P(None, "tensor")}

    def deep(block: Any, p: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def body(x: jax.Array, p: Any) -> Any:
            return x + jax.vmap(lambda row: block(row, p["up"], p["down"]))(x), None

        return jnp.mean(jnp.square(lax.scan(body, x, p)[0]))

    plain = partial(deep, lambda x, up, down: jax.nn.gelu(x @ up) @ down)
    hand = partial(deep, partial(parallel_mlp, axis="tensor"))
    run = on(
        ts.make_mesh("tensor=8"), jax.value_and_grad(hand), (specs, P()), (P(), specs), check_vma
    )
    assert_close(run(stacked, X), jax.jit(jax.value_and_grad(plain))(stacked, X))


@checks
def test_second_order(check_vma: bool) -> None:
    def curvature(block: Any, up: jax.Array, down: jax.Array) -> Any:
        def slope(up: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(jnp.square(block(x, up, down))))(X[0])

        # How the gradient of the input changes with a split weight.
        return jax.grad(lambda up: jnp.sum(jnp.sin(slope(up))))(up)

    plain = partial(curvature, lambda x, up, down: jnp.tanh(x @ up) @ down)
    hand = partial(curvature, partial(parallel_mlp, axis="tensor", activation=jnp.tanh))
    run = on(
        ts.make_mesh("tensor=8"),
        hand,
        (P(None, "tensor"), P("tensor")),
        P(None, "tensor"),
        check_vma,
    )
    both = PARAMS["up"], PARAMS["down"]
    assert_close(run(*both), jax.jit(plain)(*both), 2e-5)


def test_no_axes_are_one_device() -> None:
    """The same layer, with its full weights, outside of shard_map."""
    alone = jax.jit(partial(parallel_layer, axis=(), dim=1))
    assert_close(alone(PARAMS, X), jax.jit(layer)(PARAMS, X))


@checks
def test_leaves_that_are_not_arrays_pass_through(check_vma: bool) -> None:
    norm = {"scale": jnp.ones(WIDTH), "count": jnp.int32(3), "activation": jnp.tanh, "none": None}

    def run(scale: jax.Array, x: jax.Array) -> jax.Array:
        inside = manual.enter_parallel({**norm, "scale": scale}, "tensor")
        assert inside["activation"] is jnp.tanh
        assert inside["none"] is None
        out = jnp.sum(normalized(x, inside["scale"]) * inside["count"].astype("float32"))
        return manual.leave_parallel(out, "tensor")

    by_hand = on(ts.make_mesh("tensor=8"), jax.grad(run), (P(), P("tensor")), P(), check_vma)
    wanted = jax.grad(lambda s: 3 * jnp.sum(normalized(X[0], s)))(norm["scale"])
    assert_close(by_hand(norm["scale"], X[0]), wanted)


# ------------------------------------------------------------------ bad input

SPLIT, WHOLE = P(None, "tensor"), P()
BAD = {
    "x differs": (
        lambda x, w: manual.column_parallel(x, w, "tensor"),
        (SPLIT, SPLIT),
        "column_parallel: x: shape (8, 2) differs between devices along 'tensor'. If these are"
        " shards of one array, pass the sharded dim as `dim`. If they are summands, sum them with"
        " `leave_parallel`. If they were computed from parameters that are not split, do not"
        " pass this axis to `value_and_grad`, `gather_params` or `vary`.",
    ),
    "x is not split": (
        lambda x, w: manual.column_parallel(x, w, "tensor", dim=0),
        (WHOLE, SPLIT),
        "column_parallel: x: shape (8, 16) is equal on all devices along 'tensor': there is"
        " nothing to gather.",
    ),
    "whole weights": (
        lambda x, w: manual.column_parallel(x, {"q": w, "k": w}, "tensor"),
        (WHOLE, WHOLE),
        "column_parallel: these leaves do not fit:\n  k: the weight (16, 16) is equal on all"
        " devices along 'tensor', so all of them would do the same work. Columns are split by"
        " P(None, 'tensor'), rows by P('tensor'). If each shall use the full weight, pass it"
        " through `enter_parallel`.\n  q: the weight",
    ),
    "a weight split on its rows": (
        lambda x, w: manual.column_parallel(x, w, "tensor"),
        (WHOLE, P("tensor")),
        "column_parallel: the weight's shard is (2, 16) here, and x (8, 16): it needs 16 rows."
        " Columns are split by P(None, 'tensor'), rows by P('tensor'). Equinox stores the"
        " transpose of its weights.",
    ),
    "a whole bias": (
        lambda x, w: manual.column_parallel(x, w, "tensor", jnp.ones(16)),
        (WHOLE, SPLIT),
        "the bias is (16,) here, and the product (8, 2): it needs 2 elements. In"
        " `column_parallel` it is split like the columns of its weight, by P(axis); in"
        " `row_parallel` it is not split.",
    ),
    "nothing to sum": (
        lambda x, w: manual.leave_parallel({"loss": x}, "tensor"),
        (WHOLE, WHOLE),
        "leave_parallel: loss: shape (8, 16) is equal on all devices along 'tensor': there is"
        " nothing to sum.",
    ),
    "no such dim": (
        lambda x, w: manual.enter_parallel(x, "tensor", dim=2),
        (SPLIT, WHOLE),
        "enter_parallel: dim 2 is out of range for shape (8, 2).",
    ),
    "an uneven dim": (
        lambda x, w: manual.leave_parallel(x, "tensor", dim=1),
        (SPLIT, WHOLE),
        "leave_parallel: dim 1 of shape (8, 2) is not divisible by 8, the number of devices along"
        " 'tensor'.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    f, in_specs, message = BAD[name]
    with pytest.raises(ts.TreeShardError, match=re.escape(message)):
        on(ts.make_mesh("tensor=8"), f, in_specs, P("tensor"))(X[0], PARAMS["q"])


def test_averaging_over_the_axis_that_splits_weights_raises() -> None:
    """It would gather the weights, and count every hidden unit many times."""

    def local(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(parallel_layer(p, x, "tensor", None)))

    step = manual.value_and_grad(local, ("fsdp", "tensor"), SPECS)
    mesh = ts.make_mesh("fsdp=2,tensor=4")
    with pytest.raises(ts.SpecError, match="do not pass this axis to"):
        on(mesh, step, (SPECS, P("fsdp")), (P(), SPECS))(PARAMS, X)
