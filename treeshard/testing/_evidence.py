"""What a comparison can show: a fault that no number would show is not said to be absent."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from treeshard._core.arrays import data_of
from treeshard._core.text import fold_paths
from treeshard.errors import WrongResultError
from treeshard.testing._computations import Computation, is_raw_key
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import LIMIT, Tolerance, distance, norm
from treeshard.testing._own_rows import OwnRows

_ROWS_ALIKE = (
    "{what}: Nothing was compared.\nAll rows of the batch are equal, so each device gets from its"
    " own rows what all of them give, and a missing reduction changes nothing. Use random numbers:"
    " `np.random.default_rng(0).normal(size=shape)`."
)

ZERO = "zero"
_HIDDEN = "hidden"
_NOT_FINITE = "not finite"
_ALIKE = "alike"
WHY = {
    ZERO: "zero on one device, where every factor and every order of shards gives the same",
    _HIDDEN: "rounding moves it by as much as its size: a wrong factor would not be seen",
    _NOT_FINITE: "not finite on one device either",
    _ALIKE: "all devices get the same from their own rows: a missing reduction would not be seen",
}


def check_rows(what: str, computation: Computation, layout: Layout) -> None:
    """Refuses a batch whose rows are all alike.

    Raises:
        WrongResultError: If they are.
    """
    dims = computation.row_dims(layout)
    arrays = [np.moveaxis(np.asarray(computation.batch[i]), dim, 0) for i, dim in dims.items()]
    if arrays and all((x == x[:1]).all() for x in arrays):
        raise WrongResultError(_ROWS_ALIKE.format(what=what))


def gaps(precisions: Sequence[tuple[Computation, Tolerance]], rows: OwnRows) -> dict[int, str]:
    """The results of which a comparison shows nothing, or little: by index, a word of `WHY`.

    The first of the precisions is the widest. Integers and keys must be equal to the bit, so they
    are compared wherever a layout runs.
    """
    tolerance = precisions[0][1]
    means = {i: rows.mean_over(rows.axes, i) for i in tolerance.noise} if rows.axes else {}
    found: dict[int, str] = {}
    for i in tolerance.noise:
        reference = tolerance.reference[i]
        if not np.isfinite(reference).all():
            found[i] = _NOT_FINITE
        elif not norm(reference):
            found[i] = ZERO
        elif min(each.visible(i) for _, each in precisions) > 0.5:
            found[i] = _HIDDEN
        elif (mean := means.get(i)) and _are_alike(rows, i, mean, LIMIT * tolerance.of(i)):
            found[i] = _ALIKE
    return found


def _are_alike(rows: OwnRows, i: int, means: dict[Any, np.ndarray], limit: float) -> bool:
    results = rows.results() or {}
    return all(distance(results[device][i], mean) <= limit for device, mean in means.items())


def without_other_step(computation: Computation, found: dict[int, str]) -> dict[int, str]:
    """The same, less the leaves that another step of the computation shows."""
    first, count = computation.first, len(computation.paths)
    steps = {i: [n for n in range(i % first, count, first) if n != i] for i in found}
    return {i: word for i, word in found.items() if all(n in found for n in steps[i])}


def kept_keys(computation: Computation, tolerance: Tolerance) -> list[str]:
    """Paths of the keys that a step that draws random numbers returns as they were."""
    if not tolerance.random:
        return []
    kept: list[str] = []
    for i, base in computation.bases.items():
        key = computation.start[base]
        is_kept = is_raw_key(key) and np.array_equal(data_of(key), tolerance.reference[i])
        if i < computation.first and is_kept:
            kept.append(computation.plan.leaves[base].path)
    return fold_paths(kept)
