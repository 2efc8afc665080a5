"""What each device would compute from its own rows of the batch, repeated on one device.

Code by hand that does not reduce its results, or averages what is no mean over rows, gives means of
these. Comparing with them proves it, which the size of a difference does not: any fault has a size.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from treeshard._core.arrays import is_key
from treeshard.testing._computations import Computation, Shards
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import Results, Tolerance, multiple_of
from treeshard.testing._report import Cause

Axes = tuple[str, ...]

# Devices drew the same random numbers as one device if what no factor explains of their results is
# less than this part of them. Other numbers change about all of a result.
_ALIKE = 0.02

_UNFOLDED = "the key is not folded along {axes}: devices draw the same random numbers."
_FOLD = "Fold it: `jax.random.fold_in(key, jax.lax.axis_index({names!r}))`."
_FOLDED = (
    "the key is folded along {axes}, where devices have the same rows: they draw different random"
    " numbers for the same activations."
)
_FOLD_LESS = "Fold it over the axes of the batch only."
_REPEATED = (
    "{layout}: each device draws its own random numbers; compared with keys folded by"
    " axis_index({order!r}) on one device"
)
_UNREPEATED = (
    "{layout}: each device draws random numbers in a way that one device cannot repeat, so only"
    " differences are seen that are larger than those between keys"
)


class OwnRows:
    """What the devices of a layout compute from their own rows.

    Attributes:
        axes: The mesh axes that split the batch.
    """

    def __init__(self, computation: Computation, layout: Layout) -> None:
        self.computation, self.layout = computation, layout
        self.axes = computation.batch_axes(layout)
        self._results: dict[Axes, dict[Any, Results] | None] = {}

    def mean_over(self, reduced: Axes, i: int) -> dict[Any, np.ndarray] | None:
        """For each device the mean of a result over the devices that differ along `reduced` only.

        `None` if the rows of one device alone cannot be computed.
        """
        results = self.results()
        if results is None:
            return None
        mesh = self.layout.mesh
        values = np.stack([results[device][i].astype("float64") for device in mesh.devices.flat])
        values = values.reshape(*mesh.devices.shape, *values.shape[1:])
        dims = tuple(map(mesh.axis_names.index, reduced))
        means = np.broadcast_to(values.mean(dims, keepdims=True), values.shape)
        # The dots keep a scalar an array.
        return {device: means[*index, ...] for index, device in np.ndenumerate(mesh.devices)}

    def results(self, folded: Axes = ()) -> dict[Any, Results] | None:
        """The results of each device, with keys folded by its `axis_index` over some axes."""
        if folded not in self._results:
            try:
                self._results[folded] = self._compute(folded)
            except Exception:  # the user's code, which may need the full batch
                self._results[folded] = None
        return self._results[folded]

    def _compute(self, folded: Axes) -> dict[Any, Results]:
        computation, mesh = self.computation, self.layout.mesh
        maps = [
            NamedSharding(mesh, spec).devices_indices_map(np.shape(x))
            for x, spec in zip(computation.batch, computation.batch_specs(self.layout), strict=True)
        ]
        # Devices that differ along other axes than the batch's have the same rows.
        computed: dict[Any, Results] = {}
        results: dict[Any, Results] = {}
        for position, device in np.ndenumerate(mesh.devices):
            number = 0
            for axis in folded:  # as in `jax.lax.axis_index`, the last axis counts fastest
                index_along = position[mesh.axis_names.index(axis)]
                number = number * mesh.shape[axis] + index_along
            indices = [index[device] for index in maps]
            key = number, str(indices)
            if key not in computed:
                batch = [x[index] for x, index in zip(computation.batch, indices, strict=True)]
                if folded:
                    batch = [_folded(x, number) for x in batch]
                computed[key] = computation.alone(self.layout.alone(), batch=batch)
            results[device] = computed[key]
        return results

    def keyed(self) -> Iterator[tuple[Axes, Results]]:
        """The result of all devices, if each folds its key by its index along some axes.

        Yields:
            The axes, outermost first, and the mean over all devices.
        """
        # `fold_in` of another index is another key, so each order of the axes is a case of its own.
        orders: list[Axes] = [()]
        if any(map(_is_raw_key, self.computation.batch)):
            axes = [a for a, size in self.layout.mesh.shape.items() if size > 1]
            orders = [order for some in subsets(axes) for order in permutations(some)]
        for order in orders:
            results = self.results(order)
            if results is not None:
                of_devices = zip(*results.values(), strict=True)
                yield order, [np.asarray(np.mean(x, 0, "float64")) for x in of_devices]


def with_own_keys(
    rows: OwnRows, tolerance: Tolerance, result: Sequence[Shards]
) -> tuple[Tolerance, Cause | None, str]:
    """What to compare a result with, if devices may have drawn random numbers by themselves.

    One device can repeat them if it knows the key of each: one for all rows, the same on each
    device, or a key folded by `axis_index`. Returns the results to compare with, what is wrong with
    the keys, and a note.
    """
    if _unlikeness(result, tolerance.reference) < _ALIKE:
        return tolerance, None, ""
    name = rows.layout.name
    keyed = list(rows.keyed())
    alike = [(order, x) for order, x in keyed if _unlikeness(result, x) <= _ALIKE]
    if len(alike) != 1:  # in none of these ways, or random numbers hardly matter
        widened = tolerance.widened([x for _, x in keyed])
        return widened, None, _UNREPEATED.format(layout=name)
    [(order, repeated)] = alike
    expected = tolerance.with_reference(repeated)
    if missing := sorted({*rows.axes} - {*order}):
        fact, fix = _UNFOLDED.format(axes=named(missing)), _FOLD.format(names=missing)
        return expected, Cause(fact, fix, "same key"), ""
    if extra := sorted({*order} - {*rows.axes}):
        return expected, Cause(_FOLDED.format(axes=named(extra)), _FOLD_LESS, "other key"), ""
    return expected, None, _REPEATED.format(layout=name, order=order)


def _unlikeness(result: Sequence[Shards], reference: Sequence[np.ndarray]) -> float:
    """The median over results of the part that is not a multiple of the reference.

    Zeros, which are a multiple of anything, do not count.
    """
    parts: list[float] = []
    for shards, expected in zip(result, reference, strict=True):
        if np.any(expected) and any(np.any(x) for _, x in shards.values()):
            _, rest = multiple_of(shards, expected)
            parts.append(rest)
    return float(np.median(parts)) if parts else 0.0


def subsets(axes: Sequence[str]) -> list[Axes]:
    """All choices of axes, the smallest first."""
    return [s for n in range(len(axes) + 1) for s in combinations(axes, n)]


def named(axes: Sequence[str]) -> str:
    """Axes in words: "`data` and `fsdp`"."""
    return " and ".join(f"`{axis}`" for axis in axes)


def _folded(x: Any, number: int) -> Any:
    return jax.random.fold_in(x, number) if _is_raw_key(x) else x


def _is_raw_key(x: Any) -> bool:
    """Whether an array is a PRNG key, typed or of two uint32, as `jax.random.PRNGKey` makes it."""
    return is_key(x) or (getattr(x, "shape", None) == (2,) and x.dtype == np.uint32)
