"""Which dims of an array those of another, made from it, are: told from their shapes."""

from functools import lru_cache
from itertools import combinations

import numpy as np

from treeshard._decision import Shape

Dims = tuple[int | None, ...]


@lru_cache(4096)
def kept_dims(shape: Shape, whole: Shape, field: str) -> Dims | None:
    """Which dims of an array of shape `whole` those of an array made from it are.

    Some may have been dropped, as in factored moments; some stacked in front, as in
    histories; some replaced, as in projections and where reductions leave a dim of 1; or
    they may stand in another order.

    Args:
        shape: The shape of what was made from it.
        whole: The shape of what it was made from.
        field: What the optimizer calls it, for factors of arrays with dims of equal length.

    Returns:
        For each dim of `shape` the dim of `whole`, or `None` for a new one; `None` if the
        shapes have nothing to do with each other.
    """
    new = len(shape) - len(whole)
    if new > 0:
        return (*[None] * new, *range(len(whole))) if shape[new:] == whole else None
    if new == 0:
        return all_dims(shape, whole) or _dims_by_length(shape, whole)
    choices = [
        dims
        for dims in combinations(range(len(whole)), len(shape))
        if all(whole[dim] == length for dim, length in zip(dims, shape, strict=True))
    ]
    named = _factor_dims(whole, field)
    if named in choices:
        return named
    # What cannot be told apart stays whole.
    return tuple(d[0] if len(set(d)) == 1 else None for d in zip(*choices, strict=True)) or None


def _factor_dims(whole: Shape, field: str) -> Dims | None:
    """The dims that a factor of this name keeps: a row's are all but the longest, a column's
    all but the second longest. So Adafactor has it, and sorts equal lengths with numpy."""
    if len(whole) < 2 or not ("row" in field or "col" in field):
        return None
    by_length = np.argsort(whole).tolist()
    dropped = by_length[-1] if "row" in field else by_length[-2]
    return tuple(dim for dim in range(len(whole)) if dim != dropped)


def _dims_by_length(shape: Shape, whole: Shape) -> Dims | None:
    """Dims that kept place and length, and of the others those that no other equals."""
    dims = [dim if length == whole[dim] else None for dim, length in enumerate(shape)]
    moved = [dim for dim, kept in enumerate(dims) if kept is None]
    for dim in moved:
        alike = [other for other in moved if whole[other] == shape[dim]]
        if len(alike) == 1 and sum(shape[other] == shape[dim] for other in moved) == 1:
            dims[dim] = alike[0]
    return None if all(dim is None for dim in dims) else tuple(dims)


def part_dims(position: int, shape: Shape, whole: Shape) -> Dims | None:
    """The dims of one of several parts that stand where one array stood: its moment along the
    dim of that position, or a half of the same shape (the real one, say)."""
    if 0 <= position < len(whole) and shape == (whole[position],):
        return (position,)
    return all_dims(shape, whole)


def all_dims(shape: Shape, whole: Shape) -> Dims | None:
    return tuple(range(len(whole))) if shape == whole else None
