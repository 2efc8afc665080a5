"""What is neither saved nor code is an error: it would come back as the template has it."""

import dataclasses
import functools
from collections import deque
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.interchange import load_safetensors, save_safetensors


@dataclasses.dataclass
class State:
    w: np.ndarray

    def grown(self) -> np.ndarray:
        return self.w * 2


ONES = np.ones(3, np.float32)
OPAQUE = {
    "dataclass": State(ONES),
    "deque": deque([1.0, 2.0]),
    "generator": np.random.default_rng(0),
    "method": State(ONES).grown,
    "partial": functools.partial(jnp.add, ONES),
    "partial of a method": functools.partial(State(ONES).grown),
    "partial with a method": functools.partial(map, State(ONES).grown),
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
    assert all(again[name] is x for name, x in CODE.items() if name not in ("norm", "optimizer"))


@pytest.mark.parametrize("tree", [{}, {"f": len}, optax.EmptyState()], ids=str)
def test_a_checkpoint_of_nothing_is_an_error(tree, tmp_path: Path) -> None:
    with pytest.raises(ts.errors.LeafError, match="save: the tree has no array, number, text or"):
        save(tmp_path / "x", tree)
    assert list(tmp_path.iterdir()) == []
