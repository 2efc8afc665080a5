"""How two stored trees differ, and by how much."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from treeshard._cli.stored_trees import StoredTree
from treeshard._core.arrays import used_bits
from treeshard._core.paths import pair
from treeshard._core.processes import with_bar
from treeshard._disk.leaves import SavedLeaf, raise_damages

Pair = tuple[SavedLeaf, SavedLeaf]

_BLOCK = 2**18  # numbers to compare at a time


class Numbers(NamedTuple):
    """How many numbers of two arrays differ in their bits, and by how much at most.

    Differences are of finite numbers, and `None` for keys and packed types; the relative one is
    relative to the larger number. `not_finite` pairs that differ have a NaN or an infinity.
    """

    differing: int
    size: int
    max_abs: int | float | None = None
    max_relative: float | None = None
    not_finite: int = 0


class Changed(NamedTuple):
    """A leaf that differs; `numbers` is `None` if the types differ, or if it is not an array."""

    a: SavedLeaf
    b: SavedLeaf
    numbers: Numbers | None


class Difference(NamedTuple):
    """How two trees differ; `unread` of the leaves that are the `same` have equal checksums."""

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
    """Compares two trees leaf by leaf, with a few leaves of each in memory at a time.

    Arrays with the same checksums are not read. `names` are the paths in `b` of the leaves of `a`.
    """
    renamed = ((names[x.path], x) for x in a.contents.leaves)
    pairs = pair(renamed, ((y.path, y) for y in b.contents.leaves))
    both = {path: (x, y) for path, x, y in pairs if x is not None and y is not None}
    verdicts = {path: _same_unread(x, y) for path, (x, y) in both.items()}
    unknown = {path: both[path] for path, same in verdicts.items() if same is None}
    numbers = _read(a, b, unknown, progress)
    changed = {
        path: Changed(x, y, numbers.get(path))
        for path, (x, y) in both.items()
        if verdicts[path] is False or (path in numbers and numbers[path].differing)
    }
    unread = sum(
        verdicts[path] is True and bool(x.dtype and x.crc) for path, (x, _) in both.items()
    )
    return Difference(
        len(both) - len(changed),
        unread,
        changed,
        [x.path for _, x, y in pairs if x is not None and y is None],
        [path for path, x, _ in pairs if x is None],
    )


def _same_unread(x: SavedLeaf, y: SavedLeaf) -> bool | None:
    """Whether two leaves are the same; `None` if their numbers must be read to tell."""
    if (x.kind, x.shape, x.dtype, x.impl, x.value) != (y.kind, y.shape, y.dtype, y.impl, y.value):
        return False
    if not x.dtype or 0 in x.shape or (x.crc is not None and x.crc == y.crc):
        return True
    return None


def _read(
    a: StoredTree, b: StoredTree, pairs: Mapping[str, Pair], progress: bool
) -> dict[str, Numbers]:
    """How the numbers of pairs of arrays differ, by path."""
    damages: tuple[dict[str, str], dict[str, str]] = {}, {}
    firsts = with_bar([x for x, _ in pairs.values()], "diff", show=progress)
    read = zip(a.read(firsts), b.read([y for _, y in pairs.values()]), strict=True)
    numbers: dict[str, Numbers] = {}
    for (path, (row, _)), leaves in zip(pairs.items(), read, strict=True):
        for leaf, damage in zip(leaves, damages, strict=True):
            damage |= {leaf.row.path: leaf.damage} if leaf.damage else {}
        x, y = (leaf.array for leaf in leaves)
        if x is not None and y is not None:
            numbers[path] = compare_numbers(x, y, opaque=row.kind == "key" or x.shape != row.shape)
    for tree, damage in zip((a, b), damages, strict=True):
        raise_damages(tree.contents.path, damage)
    return numbers


# ------------------------------------------------------------------ numbers


def compare_numbers(a: np.ndarray, b: np.ndarray, *, opaque: bool = False) -> Numbers:
    """How the numbers of two arrays of one shape and dtype differ; only their bits if `opaque`."""
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    blocks = [
        _of_block(a[i : i + _BLOCK], b[i : i + _BLOCK], opaque) for i in range(0, a.size, _BLOCK)
    ]
    counts, gaps, ratios, odd = zip(*blocks, strict=True)
    if opaque:
        return Numbers(sum(counts), a.size)
    return Numbers(sum(counts), a.size, max(gaps), max(ratios), sum(odd))


def _of_block(x: np.ndarray, y: np.ndarray, opaque: bool) -> tuple[int, Any, float, int]:
    differs = (_bits(x) != _bits(y)).any(axis=1)
    count = int(differs.sum())
    if not count or opaque:
        return count, 0, 0.0, 0
    x, y = x[differs], y[differs]
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
    # A difference beyond the range of int64 wraps around to the right uint64.
    gaps = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
    sizes = np.maximum(np.abs(x.astype(np.float64)), np.abs(y.astype(np.float64)))
    return int(gaps.max()), _most(gaps.astype(np.float64), sizes)


def _most(gaps: np.ndarray, sizes: np.ndarray) -> float:
    """The largest ratio. Pairs of zeros, which may differ in sign, have none."""
    real = sizes > 0
    return float((gaps[real] / sizes[real]).max(initial=0))


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint8).reshape(x.size, -1) & used_bits(x.dtype)
