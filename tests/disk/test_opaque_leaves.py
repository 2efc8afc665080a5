"""What is neither saved nor code is an error: it would come back as the template has it."""

import dataclasses
import functools
from collections import deque
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.interchange import load_safetensors, save_safetensors


@dataclasses.dataclass
class State:
    w: np.ndarray

    def grown(self) -> np.ndarray:
        return self.w * 2


class Called:
    """An object with a `__call__` and the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __call__(self, x: Any) -> Any:
        return x

    @jax.jit
    def jitted(self) -> None: ...


class Slotted:
    __slots__ = ("__w",)

    def __init__(self) -> None:
        self.__w = ONES

    def __call__(self) -> np.ndarray:
        return self.__w


class SlottedMore(Slotted):
    __slots__ = ()


@dataclasses.dataclass
class Counter:
    step: int

    def __call__(self) -> int:
        return self.step


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    more: Any = None

    def __call__(self) -> int:
        return self.size


class Perceptron(linen.Module):
    sizes: list[int]

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(self.sizes[0])(x)


@jax.custom_vjp
def identity(x: jax.Array) -> jax.Array:
    return x


identity.defvjp(lambda x: (x, None), lambda _, g: (g,))


def with_state() -> None: ...


ONES = np.ones(3, np.float32)
with_state.state = Called(w=ONES)
LOOP = Called(name="loop")
LOOP.loop = LOOP
MESH = ts.make_mesh("a=1", devices=jax.devices()[:1])
OPAQUE = {
    "dataclass": State(ONES),
    "deque": deque([1.0, 2.0]),
    "generator": np.random.default_rng(0),
    "method": State(ONES).grown,
    "partial": functools.partial(jnp.add, ONES),
    "partial of a method": functools.partial(State(ONES).grown),
    "partial with a method": functools.partial(map, State(ONES).grown),
    "partial with an object": functools.partial(map, deque([1.0])),
    "attribute": Called(w=ONES),
    "attribute of an attribute": Called(stats=State(ONES)),
    "layers": Called(layers=[Called(w=ONES), Called(w=ONES)]),
    "names": Called(names=np.array(["a"])),
    "objects": Called(generator=np.random.default_rng(0)),
    "slot": Slotted(),
    "slot of a base class": SlottedMore(),
    "number": Counter(7),
    "frozen": Config(1, Called(w=ONES)),
    "jitted object": jax.jit(Called(w=ONES)),
    "method of a number": Counter(7).__call__,
    "method of a generator": np.random.default_rng(0).normal,
    "method of layers": Called(layers=[State(ONES)]).__call__,
    "jitted method": Called(w=ONES).jitted,
    "state of a function": with_state,
}
CODE = {
    "function": lambda x: x,
    "jitted": jax.jit(jnp.sin),
    "partial": functools.partial(print, 1),
    "schedule": optax.cosine_decay_schedule(0.1, 100),
    "optimizer": optax.adamw(0.1),
    "type": State,
    "dtype": np.dtype("float32"),
    "norm": eqx.nn.LayerNorm(3),
    "activation": jax.nn.relu,
    "jax ufunc": jnp.add,
    "numpy function": np.linalg.norm,
    "custom_vjp": identity,
    "initializer": jax.nn.initializers.lecun_normal(),
    "tree_util.Partial": jax.tree_util.Partial(jax.nn.gelu),
    "filter_vmap": eqx.filter_vmap(jnp.sin, in_axes=(None,), out_axes=eqx.if_array(0)),
    "nnx.jit": nnx.jit(jnp.sin),
    "linen": linen.Sequential([linen.Dense(4), linen.relu]),
    "linen apply": Perceptron([2]).apply,
    "multi steps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "unravel": ravel_pytree({"w": ONES})[1],
    "mesh": MESH,
    "frozen": Config(1, (2.0, "a", None)),
    "configured": Called(
        name="a",
        flag=True,
        act=jnp.tanh,
        dtype=jnp.float32,
        spec=P("a"),
        sharding=NamedSharding(MESH, P("a")),
        precision=jax.lax.Precision.HIGH,
        config=Config(2),
    ),
    "numbers": Called(rates=[0.1, 0.2]),
    "method": Called(name="a").__call__,
    "jitted method": Called(name="a").jitted,
    "loop": LOOP,
}


def test_what_jax_does_not_know_is_not_saved_and_not_restored(tmp_path: Path) -> None:
    tree = {"w": ONES, **OPAQUE}
    says = f"{len(OPAQUE)} leaves cannot be saved, because JAX does not know the class:\n"
    for call in (save, save_safetensors):
        with pytest.raises(ts.errors.LeafError, match=f"^{call.__name__}: {says}") as told:
            call(tmp_path / "x", tree)
        assert "\n  dataclass: a State" in str(told.value)
        assert "\n  method: the function" in str(told.value)
        assert "\nRegister the class" in str(told.value)
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "x", {"w": ONES})
    save_safetensors(tmp_path / "y", {"w": ONES})
    for load, file in ((restore, "x"), (load_safetensors, "y")):
        for partial in (False, True):
            with pytest.raises(ts.errors.MismatchError, match=says):
                load(tmp_path / file, tree, partial=partial)


def test_code_is_static(tmp_path: Path) -> None:
    tree = {"w": ONES, **CODE}
    save(tmp_path / "x", tree)
    again = restore(tmp_path / "x", tree)
    is_tree = [name for name, x in CODE.items() if not jax.tree_util.all_leaves([x])]
    assert is_tree == ["optimizer", "norm", "tree_util.Partial", "filter_vmap", "multi steps"]
    assert all(again[name] is x for name, x in CODE.items() if name not in is_tree)


@pytest.mark.parametrize("tree", [{}, {"f": len}, optax.EmptyState()], ids=str)
def test_a_checkpoint_of_nothing_is_an_error(tree, tmp_path: Path) -> None:
    with pytest.raises(ts.errors.LeafError, match="save: the tree has no array, number, text or"):
        save(tmp_path / "x", tree)
    assert list(tmp_path.iterdir()) == []
