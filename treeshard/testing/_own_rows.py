"""Computes on one device what each device would compute from its own rows of the batch.

If these results are equal, a missing reduction would not show. If each device draws its own random
numbers, the right result is computed from these results.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard.testing._computations import Axes, Computation, attempt, subsets
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import LIMIT, Tolerance, distance
from treeshard.testing._values import Results, Shards


class OwnRows:
    """What the devices of a layout compute from their own rows."""

    def __init__(self, computation: Computation, layout: Layout) -> None:
        self.computation, self.layout = computation, layout
        split = get_names_from_partition_spec(computation.batch_specs(layout))
        # The mesh axes that split the batch.
        self.axes = tuple(axis for axis in layout.split_axes if axis in split)
        # The error of the user's code for the rows of one device alone, if it raised one.
        self.error: Exception | None = None
        # By the axes along which keys are folded. Each entry needs a run per device.
        self._results: dict[Axes, Results | None] = {}

    def results(self, order: Axes = ()) -> Results | None:
        """The results of all devices, with keys folded by their index along some axes.

        The first dims of each result are the dims of the mesh. `None` if the code fails for the
        rows of one device alone.
        """
        if order not in self._results:
            # The user's code may need the full batch.
            self._results[order], error = attempt(lambda: self._compute(order))
            self.error = error or self.error
        return self._results[order]

    def _compute(self, order: Axes, start: list[Any] | None = None) -> Results:
        computation, mesh = self.computation, self.layout.mesh
        specs = computation.batch_specs(self.layout)
        maps = [
            NamedSharding(mesh, spec).devices_indices_map(np.shape(x))
            for x, spec in zip(computation.batch, specs, strict=True)
        ]
        # Devices that differ along other axes than the batch's have the same rows.
        computed: dict[str, Results] = {}
        of_devices: list[Results] = []
        for place, device in np.ndenumerate(mesh.devices):
            pairs = zip(mesh.shape.items(), place, strict=True)
            position = {axis: (at, size) for (axis, size), at in pairs}
            folded = {axis: position[axis] for axis in order}
            indices = [index[device] for index in maps]
            key = str((indices, folded))
            if key not in computed:
                batch = [x[index] for x, index in zip(computation.batch, indices, strict=True)]
                computed[key] = computation.run_as_device(self.layout, start, batch, folded)
            of_devices.append(computed[key])
        stacked = [np.stack(x) for x in zip(*of_devices, strict=True)]
        return [x.reshape(*mesh.devices.shape, *x.shape[1:]) for x in stacked]

    def has_equal_results(self, i: int, limit: float) -> bool:
        """Whether all devices get equal results from their own rows."""
        results = self.results() if self.axes else None
        if results is None:
            return False
        means = self._means(self.axes, i, ())
        return all(distance(results[i][at], means[at]) <= limit for at in self._places())

    def _means(self, reduced: Axes, i: int, order: Axes) -> np.ndarray:
        """For each device the mean over the devices that differ from it along `reduced` only."""
        values = (self.results(order) or [])[i].astype("float64")
        dims = tuple(map(self.layout.mesh.axis_names.index, reduced))
        return np.broadcast_to(values.mean(dims, keepdims=True), values.shape)

    def _places(self) -> list[Any]:
        """The index of each device. Its ellipsis keeps a scalar an array."""
        return [(*place, ...) for place in np.ndindex(self.layout.mesh.devices.shape)]

    # -------------------------------------------------------------- random numbers

    def distinct_orders(self) -> Iterator[Axes]:
        """The ways to fold keys that give different results, the fewest axes first."""
        seen: list[Results] = []
        for order in self.computation.key_orders(self.layout):
            results = self.results(order)
            if results is not None and not any(_equal(results, other) for other in seen):
                seen.append(results)
                yield order

    def expect_means(self, order: Axes, tolerance: Tolerance) -> Tolerance:
        """The means over all devices, with keys folded by their index along some axes."""
        means = self._average(self.results(order) or [])
        first = self.computation.first
        if first < len(means):  # the second step starts from the mean of all devices
            after = self.computation.after(means)
            means[first:] = self._average(self._compute(order, after))[:first]
        return tolerance.with_reference(means)

    def _average(self, results: Results) -> Results:
        dims = tuple(range(self.layout.mesh.devices.ndim))
        return [np.asarray(x.astype("float64").mean(dims)) for x in results]

    def is_explained(
        self, order: Axes, expected: Tolerance, result: Sequence[Shards], i: int
    ) -> bool:
        """Whether a result comes from keys folded along these axes, reduced over any axes."""
        if expected.find_factor(result[i], i) is not None:
            return True
        devices = self.layout.mesh.devices
        for reduced in subsets(self.axes):
            means = self._means(reduced, i, order)
            predicted = {devices[at[:-1]]: means[at] for at in self._places()}
            if max(expected.errors(result[i], i, predicted)) <= 2 * LIMIT:
                return True
        return False


def _equal(results: Results, others: Results) -> bool:
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        for x, y in zip(results, others, strict=True)
    )
