"""Matches the dims of an array to those of the array that it was computed from, by shape."""

from functools import lru_cache
from itertools import combinations

import numpy as np

from treeshard._decision import Shape

Dims = tuple[int | None, ...]


@lru_cache(4096)
def kept_dims(shape: Shape, full: Shape, field: str) -> Dims | None:
    """Matches the dims of an array to those of the array that it was computed from.

    Dims may be dropped, as in factored moments; added in front, as in histories; replaced,
    as in projections and reductions that keep a dim of 1; or reordered.

    Args:
        shape: The shape of the computed array.
        full: The shape of the array that it was computed from.
        field: The optimizer's name for it, which distinguishes the factors of arrays with
            dims of equal length.

    Returns:
        For each dim of `shape` the dim of `full`, or `None` for a new one; `None` if no dim
        matches.
    """
    new = len(shape) - len(full)
    if new > 0:
        return (*[None] * new, *range(len(full))) if shape[new:] == full else None
    if new == 0:
        return all_dims(shape, full) or _dims_by_length(shape, full)
    choices = [
        dims
        for dims in combinations(range(len(full)), len(shape))
        if all(full[dim] == length for dim, length in zip(dims, shape, strict=True))
    ]
    named = _factor_dims(full, field)
    if named in choices:
        return named
    # A dim that could be one of several gets no axes.
    return tuple(d[0] if len(set(d)) == 1 else None for d in zip(*choices, strict=True)) or None


def _factor_dims(full: Shape, field: str) -> Dims | None:
    """The dims that a factor of this name keeps: a row factor drops the longest, a column
    factor the second longest. This is Adafactor's rule, which sorts equal lengths as numpy."""
    if len(full) < 2 or not ("row" in field or "col" in field):
        return None
    by_length = np.argsort(full).tolist()
    dropped = by_length[-1] if "row" in field else by_length[-2]
    return tuple(dim for dim in range(len(full)) if dim != dropped)


def _dims_by_length(shape: Shape, full: Shape) -> Dims | None:
    """Dims of the same position and length; of the others, those whose length is unique."""
    dims = [dim if length == full[dim] else None for dim, length in enumerate(shape)]
    moved = [dim for dim, kept in enumerate(dims) if kept is None]
    for dim in moved:
        alike = [other for other in moved if full[other] == shape[dim]]
        if len(alike) == 1 and sum(shape[other] == shape[dim] for other in moved) == 1:
            dims[dim] = alike[0]
    return None if all(dim is None for dim in dims) else tuple(dims)


def part_dims(position: int, shape: Shape, full: Shape) -> Dims | None:
    """The dims of one of several arrays in the place of one: its moment along the dim of this
    position, or a half of the same shape, such as the real part."""
    if 0 <= position < len(full) and shape == (full[position],):
        return (position,)
    return all_dims(shape, full)


def all_dims(shape: Shape, full: Shape) -> Dims | None:
    return tuple(range(len(full))) if shape == full else None
