"""What each device would compute from its own rows of the batch, repeated on one device.

Where these are alike, a missing reduction would change nothing. And where each device draws its own
random numbers, the right result is made of these.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from treeshard.testing._computations import Axes, Computation, Shards, subsets
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import LIMIT, Results, Tolerance, errors_of, multiple_in
from treeshard.testing._report import Finding

_UNFOLDED = "the key is not folded along {axes}: devices draw the same random numbers."
_FOLDED = (
    "the key is folded along {axes}, where devices have the same rows: they draw different random"
    " numbers for the same activations."
)
_REPEATED = (
    "{layout}: each device draws its own random numbers; compared with keys folded by"
    " axis_index({order!r}) on one device"
)
UNREPEATED = (
    "{layout}: not checked, since each device draws random numbers in a way that one device cannot"
    " repeat; fold the key by `manual.fold_rng_over_axis`, or by `fold_in(key, axis_index(axes))`"
)

OF_THE_MEAN_GRADIENT = (
    "{layout}: what is not linear in the gradients is not checked, since each device draws its own"
    " random numbers, and a step does not return their mean gradient; `check_gradients` compares it"
)


class OwnRows:
    """What the devices of a layout compute from their own rows.

    Attributes:
        axes: The mesh axes that split the batch.
        order: The axes by whose index devices fold their keys.
        error: What was raised where the rows of one device alone cannot be computed.
    """

    def __init__(self, computation: Computation, layout: Layout) -> None:
        self.computation, self.layout = computation, layout
        self.axes = computation.batch_axes(layout)
        self.order: Axes = ()
        self.error: Exception | None = None
        self._results: dict[Axes, dict[Any, Results] | None] = {}

    def mean_over(self, reduced: Axes, i: int, order: Axes = ()) -> dict[Any, np.ndarray] | None:
        """For each device the mean of a result over the devices that differ along `reduced` only.

        `None` if the rows of one device alone cannot be computed.
        """
        results = self.results(order)
        if results is None:
            return None
        mesh = self.layout.mesh
        values = np.stack([results[device][i].astype("float64") for device in mesh.devices.flat])
        values = values.reshape(*mesh.devices.shape, *values.shape[1:])
        dims = tuple(map(mesh.axis_names.index, reduced))
        means = np.broadcast_to(values.mean(dims, keepdims=True), values.shape)
        # The dots keep a scalar an array.
        return {device: means[*index, ...] for index, device in np.ndenumerate(mesh.devices)}

    def results(self, order: Axes = ()) -> dict[Any, Results] | None:
        """The results of each device, with keys folded by its index along some axes."""
        if order not in self._results:
            try:
                self._results[order] = self._compute(order)
            except Exception as error:  # the user's code, which may need the full batch
                self._results[order], self.error = None, error
        return self._results[order]

    def _compute(self, order: Axes, start: list[Any] | None = None) -> dict[Any, Results]:
        computation, mesh = self.computation, self.layout.mesh
        maps = [
            NamedSharding(mesh, spec).devices_indices_map(np.shape(x))
            for x, spec in zip(computation.batch, computation.batch_specs(self.layout), strict=True)
        ]
        # Devices that differ along other axes than the batch's have the same rows.
        computed: dict[Any, Results] = {}
        results: dict[Any, Results] = {}
        for place, device in np.ndenumerate(mesh.devices):
            pairs = zip(mesh.shape.items(), place, strict=True)
            position = {axis: (at, size) for (axis, size), at in pairs}
            indices = [index[device] for index in maps]
            key = str((indices, [position[axis] for axis in order]))
            if key not in computed:
                batch = [x[index] for x, index in zip(computation.batch, indices, strict=True)]
                computed[key] = computation.of_device(self.layout, batch, position, order, start)
            results[device] = computed[key]
        return results

    # -------------------------------------------------------------- random numbers

    def distinct_orders(self) -> Iterator[Axes]:
        """The ways to fold keys that give different results, the fewest axes first."""
        seen: list[dict[Any, Results]] = []
        for order in self.computation.key_orders(self.layout):
            results = self.results(order)
            if results is not None and not any(_equal(results, other) for other in seen):
                seen.append(results)
                yield order

    def mean(self, order: Axes) -> Results:
        """The means over all devices, with keys folded by their index along some axes."""
        means = _means(self.results(order) or {})
        first = self.computation.first
        if first < len(means):  # the second step starts from what all devices have
            after = self.computation.after(means)
            means[first:] = _means(self._compute(order, after))[:first]
        return means

    def explained(self, order: Axes, tolerance: Tolerance, result: Sequence[Shards]) -> int:
        """How many results are those of keys that are folded so, reduced over any of the axes."""
        expected = tolerance.with_reference(self.mean(order))
        indices = range(self.computation.first)
        return sum(self.is_explained(order, expected, result, i) for i in indices)

    def is_explained(
        self, order: Axes, expected: Tolerance, result: Sequence[Shards], i: int
    ) -> bool:
        """Whether a result is that of keys that are folded so, reduced over any of the axes."""
        if multiple_in(result[i], expected, i) is not None:
            return True
        means = (self.mean_over(reduced, i, order) for reduced in subsets(self.axes))
        return any(max(errors_of(result[i], expected, i, x)) <= 2 * LIMIT for x in means if x)

    def unexplained(self, expected: Tolerance, result: Sequence[Shards]) -> frozenset[int]:
        """The results of a step that follow from the devices' own in no way that is known.

        Of what is linear in the gradients, the mean over the devices is the right result. Others,
        such as Adam's second moment, are made of the mean gradient, which a step does not return.
        """
        first = self.computation.first
        if not self.order or first == len(expected.reference):
            return frozenset()
        of_keys = partial(self.is_explained, self.order, expected, result)
        unknown = {i for i in range(first) if not of_keys(i)}
        if unknown:  # the second step starts from them
            after = range(first, len(expected.reference))
            unknown.update(i for i in after if expected.error(result[i], i) > LIMIT)
        return frozenset(unknown)


def with_own_keys(
    rows: OwnRows, tolerance: Tolerance, result: Sequence[Shards]
) -> tuple[Tolerance | None, Finding | None, str]:
    """What to compare a result with, if devices may have drawn random numbers by themselves.

    One device can repeat them if it knows the key of each: one for all rows, the same on each
    device, or a key folded by `axis_index`. Code that does not reduce its results is known by
    the results of single devices. Returns the results to compare with, what is wrong with the
    keys, and a note; `None` if no device can repeat the numbers.
    """
    indices = range(rows.computation.first)
    if all(tolerance.error(result[i], i) <= LIMIT for i in indices):
        return tolerance, None, ""
    counts = {order: rows.explained(order, tolerance, result) for order in rows.distinct_orders()}
    as_one_device = sum(_is_right(result[i], tolerance, i) for i in indices)
    most = max(counts.values(), default=0)
    best = [order for order, count in counts.items() if count == most]
    if as_one_device > most:
        return tolerance, None, ""
    if as_one_device == most or len(best) > 1:  # in no way, or in several
        return None, None, UNREPEATED.format(layout=rows.layout.name)
    [order] = best
    rows.order = order
    expected = tolerance.with_reference(rows.mean(order))
    if missing := sorted({*rows.axes} - {*order}):
        return expected, Finding(_UNFOLDED.format(axes=named(missing)), "same key"), ""
    if extra := sorted({*order} - {*rows.axes}):
        return expected, Finding(_FOLDED.format(axes=named(extra)), "other key"), ""
    return expected, None, _REPEATED.format(layout=rows.layout.name, order=order)


def _means(results: dict[Any, Results]) -> Results:
    of_devices = zip(*results.values(), strict=True)
    return [np.asarray(np.mean(x, 0, "float64")) for x in of_devices]


def _is_right(shards: Shards, expected: Tolerance, i: int) -> bool:
    if expected.error(shards, i) <= LIMIT:
        return True
    return multiple_in(shards, expected, i) is not None


def _equal(results: dict[Any, Results], others: dict[Any, Results]) -> bool:
    for device, arrays in results.items():
        for x, y in zip(arrays, others[device], strict=True):
            if not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
                return False
    return True


def named(axes: Sequence[str]) -> str:
    """Axes in words: "`data` and `fsdp`"."""
    return " and ".join(f"`{axis}`" for axis in axes)
