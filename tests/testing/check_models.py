"""Models of the field's kinds: parameters, a batch and a loss of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from treeshard import manual

WIDTH, VOCABULARY, LENGTH, ROWS = 16, 32, 8, 16


class Case(NamedTuple):
    params: Any
    batch: Any
    loss: Callable[..., Any]


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def tokens(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCABULARY, (rows, LENGTH)).astype("int32")


def cross_entropy(logits: Any, targets: Any) -> Any:
    logs = jax.nn.log_softmax(logits.astype("float32"))
    return -jnp.mean(jnp.take_along_axis(logs, targets[..., None], -1))


def cast(tree: Any, dtype: Any) -> Any:
    floats = lambda x: eqx.is_inexact_array(x)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if floats(x) else x, tree)


def attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("btd,bsd->bts", q, k) / 4
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)


def scanned(dtype: Any) -> Case:
    """A transformer with stacked layers, `lax.scan` and `jax.checkpoint`."""
    square = dict.fromkeys("qkvo", (3, WIDTH, WIDTH))
    shapes = square | {"up": (3, WIDTH, 32), "down": (3, 32, WIDTH)}
    params = {
        "layers": {
            n: normal(*s, seed=i, dtype=dtype) / 4 for i, (n, s) in enumerate(shapes.items())
        },
        "embed": normal(VOCABULARY, WIDTH, dtype=dtype),
        "head": normal(WIDTH, VOCABULARY, seed=9, dtype=dtype) / 4,
    }

    def loss(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, p: Any) -> Any:
            h = h + attend(h @ p["q"], h @ p["k"], h @ p["v"]) @ p["o"]
            return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

        h, _ = jax.lax.scan(layer, params["embed"][batch], params["layers"])
        return cross_entropy(h @ params["head"], jnp.roll(batch, 1, 1))

    return Case(params, tokens(), loss)


def experts(dtype: Any) -> Case:
    """A mixture of experts with dense dispatch to the best two."""
    params = {
        "router": normal(WIDTH, 4, dtype=dtype),
        "up": normal(4, WIDTH, 32, seed=1, dtype=dtype) / 4,
        "down": normal(4, 32, WIDTH, seed=2, dtype=dtype) / 6,
    }

    def loss(p: Any, x: Any) -> Any:
        scores = jax.nn.softmax((x @ p["router"]).astype("float32"))
        second = jnp.sort(scores, axis=-1)[:, -2:-1]
        gates = jnp.where(scores >= second, scores, 0).astype(x.dtype)
        h = jax.nn.relu(jnp.einsum("bd,edf->bef", x, p["up"]))
        y = jnp.einsum("bef,efd,be->bd", h, p["down"], gates)
        return jnp.mean(y.astype("float32") ** 2)

    return Case(params, normal(ROWS, WIDTH, seed=5, dtype=dtype), loss)


def recurrent(dtype: Any) -> Case:
    """A gated recurrent network, whose rows are dim 1 of the batch."""
    cell = eqx.nn.GRUCell(WIDTH, WIDTH, key=jax.random.key(0))
    model = {"cell": cell, "out": eqx.nn.Linear(WIDTH, 8, key=jax.random.key(1))}

    def loss(model: Any, x: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            return jax.vmap(model["cell"])(x, h), None

        h, _ = jax.lax.scan(step, 0 * x[0], x)
        return jnp.mean(jax.vmap(model["out"])(h).astype("float32") ** 2)

    return Case(cast(model, dtype), normal(LENGTH, ROWS, WIDTH, seed=3, dtype=dtype), loss)


def tied(dtype: Any) -> Case:
    """A language model whose output uses the embedding, and a mean over unmasked tokens."""
    params = {
        "embed": normal(VOCABULARY, WIDTH, dtype=dtype) / 4,
        "w": normal(WIDTH, WIDTH, seed=1, dtype=dtype) / 4,
        "scale": jnp.ones((), dtype),
    }

    def loss(p: Any, batch: Any, axes: tuple[str, ...] = ()) -> Any:
        """By hand, `axes` are those that split the batch: the mean is over the tokens of all."""
        x, mask = batch["tokens"], batch["mask"]
        h = jnp.tanh(p["embed"][x] @ p["w"]) * p["scale"]
        logs = jax.nn.log_softmax((h @ p["embed"].T).astype("float32"))
        picked = jnp.take_along_axis(logs, jnp.roll(x, 1, 1)[..., None], -1)[..., 0]
        return -jax.lax.psum(jnp.sum(picked * mask), axes) / jax.lax.psum(jnp.sum(mask), axes)

    mask = (np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 7 < 4).astype("float32")
    return Case(params, {"tokens": tokens(), "mask": mask}, loss)


def dropped(dtype: Any) -> Case:
    """An MLP with dropout, whose key comes with the batch."""
    params = {
        "up": normal(WIDTH, 32, dtype=dtype) / 4,
        "bias": normal(32, seed=2, dtype=dtype) / 9,
        "down": normal(32, 8, seed=1, dtype=dtype) / 6,
    }

    def loss(p: Any, batch: Any, axes: tuple[str, ...] = ()) -> Any:
        """By hand, `axes` are those that split the batch: each device draws numbers of its own."""
        x, key = batch
        key = manual.fold_rng_over_axis(key, axes) if axes else key
        h = jax.nn.relu(x @ p["up"] + p["bias"][None])
        h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h, 0)
        return jnp.mean((h @ p["down"]).astype("float32") ** 2)

    return Case(params, (normal(ROWS, WIDTH, dtype=dtype), jax.random.key(3)), loss)


FUNCTIONS = (scanned, experts, recurrent, tied, dropped)
MODELS = {f.__name__: f for f in FUNCTIONS}
