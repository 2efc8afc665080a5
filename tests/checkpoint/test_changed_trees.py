"""`restore` into a tree that has changed since the save: right, or a typed error; never unsaid."""

import enum
import re
import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Self

import equinox as eqx
import jax
import numpy as np
import pytest

import treeshard as ts
from treeshard.checkpoint import restore, save


class Pair(NamedTuple):
    w: Any
    b: Any


class Swapped(NamedTuple):
    b: Any
    w: Any


class Layer(eqx.Module):
    w: Any
    size: int = eqx.field(static=True)


class Mode(enum.IntEnum):
    TRAIN = 1
    EVAL = 2


class Other(enum.Enum):
    ELSE = 1


class Flags(enum.Flag):
    A = 1
    B = 2


class Numbers(enum.IntFlag):
    A = 1
    B = 2
    BOTH = 3


class Twice(float):
    def __new__(cls, x: float) -> Self:
        return super().__new__(cls, 2 * x)


class Needing(float):
    def __new__(cls, x: float, unit: str) -> Self:
        return super().__new__(cls, x)


Odd = enum.Flag("Odd", {"8": 1, "a|b": 2, "c": 4})  # names that look like those of combinations
FLAGS = [
    *(Flags.A | Flags.B, Flags(0), Numbers(0), ~Numbers.A, Numbers.A | Numbers.B),
    *(re.I | re.M, re.RegexFlag(0), Odd(1), Odd(5), Odd(0)),
]
SAVED = {
    **{f"flags{i}": flags for i, flags in enumerate(FLAGS)},
    "rate": 2.0,
    "w": np.ones((4, 2), np.float32),
    "none": None,
    "step": 7,
    "key": jax.random.key(0),
    "list": [np.ones(2), np.zeros(2)],
    "pair": Pair(1, 2.0),
    "layer": Layer(np.ones(2), 3),
    "mode": Mode.TRAIN,
    "act": jax.nn.relu,
}
W = SAVED["w"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("changed") / "c"
    save(path, SAVED)
    return path


@pytest.mark.parametrize(
    ("key", "leaf", "says"),
    [
        ("w", len, "w: in .*, but not requested"),
        ("w", None, r"w: saved as float32\[4,2\], requested as None"),
        ("none", W, r"none: saved as None, requested as float32\[4,2\]"),
        ("key", np.zeros(2, np.uint32), r"key: saved as key<fry>\[\], requested as uint32\[2\]"),
        ("list", deque([W, W]), "1 leaf cannot be saved, because JAX.*\n  list: a deque"),
        ("pair", (1, 2.0), "pair/0: not in .*pair/w"),
        ("pair/w", 1, r"pair/w: shared by \['pair'\].w, \['pair/w'\]"),
        ("step", True, "step: saved as a Python int, requested as a Python bool"),
        ("mode", Other.ELSE, "mode: saved as 'TRAIN', which Other does not have"),
        ("flags0", Other.ELSE, "saved as 'A|B', which Other does not have"),
        ("flags0", re.RegexFlag(0), "saved as 'A|B', which RegexFlag does not have"),
        ("rate", Twice(1), "rate: saved as 2.0, which Twice does not have"),
        ("rate", Needing(1, "m"), "rate: saved as 2.0, which Needing does not have"),
    ],
)
def test_what_cannot_be_restored_is_an_error(path: Path, key: str, leaf: Any, says: str) -> None:
    with pytest.raises(ts.errors.MismatchError, match=f"(?s){says}"):
        restore(path, {**SAVED, key: leaf})


@pytest.mark.parametrize("flags", [Numbers.A | 8, Numbers(8), Odd(6)], ids=repr)
def test_flags_without_names_are_not_saved(flags: Any, tmp_path: Path) -> None:
    with pytest.raises(ts.errors.LeafError, match="JAX does not know the class"):
        save(tmp_path / "c", {"flags": flags})


def test_a_none_may_be_new_or_gone(path: Path) -> None:
    like = {"new": None, **SAVED}
    del like["none"]
    assert restore(path, like)["new"] is None


@pytest.mark.parametrize(
    ("key", "like", "restored"),
    [
        ("list", {1: np.ones(2), 0: np.zeros(2)}, {0: np.ones(2), 1: np.zeros(2)}),
        ("pair", Swapped(0.0, 0), Swapped(2.0, 1)),
        ("layer", Layer(np.zeros(2), 4), Layer(np.ones(2), 4)),
        ("mode", Mode.EVAL, Mode.TRAIN),
        *[(f"flags{i}", next(iter(type(flags))), flags) for i, flags in enumerate(FLAGS)],
        ("act", jax.nn.gelu, jax.nn.gelu),
    ],
)
def test_other_containers_and_values_are_restored_by_path(path, key, like, restored) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = restore(path, {**SAVED, key: like})[key]
    leaves, expected = jax.tree.leaves(again), jax.tree.leaves(restored)
    for x, right in zip(leaves, expected, strict=True):
        assert type(x) is type(right)
        assert np.array_equal(x, right) if isinstance(x, np.ndarray) else x == right
    assert type(again) is type(like)
