"""Models of the field's kinds, in three libraries: parameters, a batch and a loss of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def eqx_attention(dtype: Any) -> Case:
    """Equinox: attention, norm, MLP; static leaves in the tree."""
    keys = jax.random.split(jax.random.key(0), 4)
    model = {
        "embed": eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0]),
        "attention": eqx.nn.MultiheadAttention(2, WIDTH, key=keys[1]),
        "norm": eqx.nn.LayerNorm(WIDTH),
        "mlp": eqx.nn.MLP(WIDTH, VOCABULARY, 32, 1, key=keys[2]),
    }

    def loss(model: Any, batch: Any) -> Any:
        def row(x: Any) -> Any:
            h = jax.vmap(model["embed"])(x)
            n = jax.vmap(model["norm"])(h)
            h = h + model["attention"](n, n, n)
            return jax.vmap(model["mlp"])(h)

        return cross_entropy(jax.vmap(row)(batch), jnp.roll(batch, 1, 1))

    return Case(cast(model, dtype), tokens(), loss)


def linen_conv(dtype: Any) -> Case:
    """Flax Linen: convolutions and a group norm."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Conv(WIDTH, (3, 3), dtype=dtype)(x))
            x = linen.GroupNorm(4, dtype=dtype)(x)
            x = linen.relu(linen.Conv(WIDTH, (3, 3), strides=2, dtype=dtype)(x))
            return linen.Dense(8, dtype=dtype)(x.mean((1, 2)))

    x = normal(ROWS, 8, 8, 4, seed=1, dtype=dtype)
    params = Net().init(jax.random.key(0), x)

    def loss(params: Any, x: Any) -> Any:
        out: Any = Net().apply(params, x)
        return jnp.mean(out.astype("float32") ** 2)

    return Case(cast(params, dtype), x, loss)


def nnx_mlp(dtype: Any) -> Case:
    """Flax nnx: an MLP whose state is the tree."""

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.a = nnx.Linear(WIDTH, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.b = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(jax.nn.gelu(self.norm(self.a(x))))

    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def loss(state: Any, x: Any) -> Any:
        return jnp.mean(nnx.merge(graph, state)(x).astype("float32") ** 2)

    return Case(cast(nnx.to_pure_dict(state), dtype), normal(ROWS, WIDTH, dtype=dtype), loss)


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


FUNCTIONS = (eqx_attention, linen_conv, nnx_mlp, scanned, experts, recurrent, tied, dropped)
MODELS = {f.__name__: f for f in FUNCTIONS}
