"""A leaf that was read from disk, and how it is damaged."""

import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from treeshard._errors import DamagedError, listed
from treeshard._saved_leaf import SavedLeaf


class ReadLeaf(NamedTuple):
    """A leaf, read to host memory.

    Attributes:
        row: Its row in the table.
        array: Its values in their own dtype: the data of keys, the bytes of packed numbers; `None`
            if it is not an array, or is damaged.
        damage: How it is damaged; empty if it is as saved.
    """

    row: SavedLeaf
    array: np.ndarray | None
    damage: str


def raise_damages(path: str | os.PathLike[str], damages: Mapping[str, str]) -> None:
    """Raises one `DamagedError` that lists all damages, given by leaf path, if there are any."""
    facts = [f"{leaf}: {why}" for leaf, why in damages.items()]
    if facts:
        raise DamagedError(f"{path}: {listed(f'{len(facts)} leaves are damaged:', facts)}")
