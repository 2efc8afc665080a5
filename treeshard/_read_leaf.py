"""A leaf that was read from disk, and what is wrong with it."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from treeshard._errors import DamagedError, listed
from treeshard._saved_leaf import SavedLeaf


class ReadLeaf(NamedTuple):
    """A leaf, read to host memory.

    Attributes:
        row: What it is.
        array: Its numbers in their own dtype: of keys the data, of packed ones the bytes; `None`
            if it is no array, or damaged.
        damage: What is wrong with it; nothing if it is as it was saved.
    """

    row: SavedLeaf
    array: np.ndarray | None
    damage: str


def raise_damages(path: str | os.PathLike[str], damages: Mapping[str, str]) -> None:
    """Raises one `DamagedError` for all of them, by leaf path, if there are any."""
    facts = [f"{leaf}: {why}" for leaf, why in damages.items()]
    if facts:
        raise DamagedError(f"{path}: {listed(f'{len(facts)} leaves are damaged:', facts)}")
