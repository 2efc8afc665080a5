"""In what two trees on disk differ, and by how much."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from treeshard._checksums import used_bits
from treeshard._progress import with_bar
from treeshard._read_leaf import raise_damages
from treeshard._saved_leaf import SavedLeaf
from treeshard._stored_trees import StoredTree

Pair = tuple[SavedLeaf, SavedLeaf]

_BLOCK = 2**18  # numbers that are compared at a time


class Numbers(NamedTuple):
    """How the numbers of two arrays differ.

    Attributes:
        differing: How many have other bits.
        size: How many there are.
        max_abs: The largest difference of two that are finite; `None` of keys and packed types.
        max_relative: The same, each relative to the larger of the two.
        not_finite: How many differ of which one is NaN or infinite.
    """

    differing: int
    size: int
    max_abs: int | float | None = None
    max_relative: float | None = None
    not_finite: int = 0


class Changed(NamedTuple):
    """A leaf that both have and that differs.

    Attributes:
        a: What it is in the one.
        b: What it is in the other.
        numbers: How its numbers differ; `None` if it is of other types, or no array.
    """

    a: SavedLeaf
    b: SavedLeaf
    numbers: Numbers | None


class Difference(NamedTuple):
    """In what two trees differ.

    Attributes:
        same: How many leaves do not differ.
        unread: How many of these are arrays that were not read, since their checksums are the same.
        changed: Those that differ, by path.
        only_in_a: The paths that only the one has.
        only_in_b: The paths that only the other has.
    """

    same: int
    unread: int
    changed: dict[str, Changed]
    only_in_a: list[str]
    only_in_b: list[str]

    def __bool__(self) -> bool:
        return bool(self.changed or self.only_in_a or self.only_in_b)


def difference(
    a: StoredTree, b: StoredTree, names: Mapping[str, str], *, progress: bool = False
) -> Difference:
    """Compares two trees leaf by leaf; of each a few leaves are in memory at a time.

    Arrays with the same checksums are not read.

    Args:
        a: The one.
        b: The other.
        names: The paths of the leaves of `a` in `b`.
        progress: Whether to show a bar, a step a leaf (needs `tqdm`).

    Raises:
        DamagedError: If leaves are not what was saved.
    """
    others = {row.path: row for row in b.contents.leaves}
    known = set(names.values())
    both = [(x, y) for x in a.contents.leaves if (y := others.get(names[x.path])) is not None]
    told = {y.path: _unread(x, y) for x, y in both}
    to_read = [pair for pair in both if told[pair[1].path] is None]
    changed = {y.path: Changed(x, y, None) for x, y in both if told[y.path] is False}
    for (x, y), numbers in _read(a, b, to_read, progress):
        if numbers.differing:
            changed[y.path] = Changed(x, y, numbers)
    unread = sum(told[y.path] is True and bool(x.dtype and x.crc) for x, y in both)
    return Difference(
        len(both) - len(changed),
        unread,
        {y.path: changed[y.path] for _, y in both if y.path in changed},
        [x.path for x in a.contents.leaves if names[x.path] not in others],
        [y.path for y in b.contents.leaves if y.path not in known],
    )


def _unread(x: SavedLeaf, y: SavedLeaf) -> bool | None:
    """Whether they are the same; `None` if their numbers must be read."""
    if (x.kind, x.shape, x.dtype, x.impl, x.value) != (y.kind, y.shape, y.dtype, y.impl, y.value):
        return False
    if not x.dtype or 0 in x.shape or (x.crc is not None and x.crc == y.crc):
        return True
    return None


def _read(
    a: StoredTree, b: StoredTree, pairs: Sequence[Pair], progress: bool
) -> Iterator[tuple[Pair, Numbers]]:
    damages: tuple[dict[str, str], dict[str, str]] = {}, {}
    firsts = with_bar([x for x, _ in pairs], "diff", show=progress)
    read = zip(a.read(firsts), b.read([y for _, y in pairs]), strict=True)
    for pair, leaves in zip(pairs, read, strict=True):
        for leaf, found in zip(leaves, damages, strict=True):
            found |= {leaf.row.path: leaf.damage} if leaf.damage else {}
        x, y = (leaf.array for leaf in leaves)
        if x is not None and y is not None:
            yield pair, compare_numbers(x, y, opaque=_is_opaque(pair[0], x))
    for tree, found in zip((a, b), damages, strict=True):
        raise_damages(tree.contents.path, found)


def _is_opaque(row: SavedLeaf, x: np.ndarray) -> bool:
    return row.kind == "key" or x.shape != row.shape


# ------------------------------------------------------------------ numbers


def compare_numbers(a: np.ndarray, b: np.ndarray, *, opaque: bool = False) -> Numbers:
    """How the numbers of two arrays of one shape and dtype differ.

    Args:
        a: The one.
        b: The other.
        opaque: Whether they are bits that mean no numbers.
    """
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    found = [
        _of_block(a[i : i + _BLOCK], b[i : i + _BLOCK], opaque) for i in range(0, a.size, _BLOCK)
    ]
    counts, gaps, ratios, odd = zip(*found, strict=True)
    if opaque:
        return Numbers(sum(counts), a.size)
    return Numbers(sum(counts), a.size, max(gaps), max(ratios), sum(odd))


def _of_block(x: np.ndarray, y: np.ndarray, opaque: bool) -> tuple[int, Any, float, int]:
    other = (_bits(x) != _bits(y)).any(axis=1)
    count = int(other.sum())
    if not count or opaque:
        return count, 0, 0.0, 0
    x, y = x[other], y[other]
    if x.dtype.kind == "b" or jnp.issubdtype(x.dtype, np.integer):
        return count, *_of_integers(x, y), 0
    wide = "complex128" if x.dtype.kind == "c" else "float64"
    x, y = x.astype(wide), y.astype(wide)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    with np.errstate(all="ignore"):
        gaps, sizes = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
    return count, float(gaps.max(initial=0)), _most(gaps, sizes), count - x.size


def _of_integers(x: np.ndarray, y: np.ndarray) -> tuple[int, float]:
    if x.dtype != np.uint64:
        x, y = x.astype(np.int64), y.astype(np.int64)
    # Beyond the range of int64 the difference wraps around, and to the right number.
    gaps = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    sizes = np.maximum(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))
    return int(gaps.max()), _most(gaps.astype(np.float64), sizes)


def _most(gaps: np.ndarray, sizes: np.ndarray) -> float:
    """The largest ratio; zeros of different signs have none."""
    real = sizes > 0
    return float((gaps[real] / sizes[real]).max(initial=0))


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8).reshape(x.size, -1) & used_bits(x.dtype)
