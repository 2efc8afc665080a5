"""What is wrong with a result that differs between layouts, found by trying explanations.

An explanation predicts the numbers of each device: those of the right result times a factor, those
of this device's rows alone, the means of some devices, another device's shard. The first one whose
prediction is within the noise is the cause.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from treeshard._core.arrays import is_key
from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard._core.specs import axes_of, entries, entry_of
from treeshard.testing._computations import Computation, Gradients, Shards
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import LIMIT, Tolerance, norm
from treeshard.testing._report import Cause

Subset = tuple[str, ...]
Starts = tuple[int, ...]  # identifies a shard
_SUMMED = "Use `jax.lax.pmean` instead of `psum`, or `manual.value_and_grad`, which averages once."
_UNREDUCED = "Average it over these axes: `jax.lax.pmean`, `manual.sync_gradients`."
_AVERAGED = "Average once: leave out one `pmean`, or one division by the number of devices."
_BY_COMPILER = (
    " If the loss has no `shard_map`, `custom_vjp` or constant that depends on the mesh, the"
    " compiler is wrong: report it, with this program, to JAX."
)


class Diagnosis:
    """The causes of wrong results in one layout."""

    def __init__(
        self, computation: Computation, layout: Layout, tolerance: Tolerance, result: list[Shards]
    ) -> None:
        self.computation, self.layout, self.tolerance = computation, layout, tolerance
        self.result = result
        mesh = layout.mesh
        self.sizes = {
            a: n for a, n in zip(mesh.axis_names, mesh.devices.shape, strict=True) if n > 1
        }
        self.place = {
            device: dict(zip(mesh.axis_names, index, strict=True))
            for index, device in np.ndenumerate(mesh.devices)
        }
        used = get_names_from_partition_spec(computation.batch_specs(layout))
        self.batch_axes = tuple(a for a in self.sizes if a in used)
        self._parts: dict[Any, Any] = {}

    # -------------------------------------------------------------- comparing

    def errors(self, i: int) -> list[float]:
        """The difference of each device's shard from the reference, in units of its noise."""
        reference = self.tolerance.reference[i]
        return [
            _distance(x, reference[index]) / self.tolerance.of(i, index)
            for index, x in self.result[i].values()
        ]

    def _factor(self, i: int, predicted: Mapping[Any, np.ndarray]) -> float | None:
        """By which factor all devices' shards are multiples of their predictions, if they are."""
        shards = [(index, x, predicted[d][index]) for d, (index, x) in self.result[i].items()]
        factor, rest, size = _fit([(x, expected) for _, x, expected in shards])
        close = all(
            _distance(x, factor * expected)
            <= 2 * LIMIT * max(abs(factor), 1) * self.tolerance.of(i, index)
            for index, x, expected in shards
        )
        return factor if close and rest < 0.3 * abs(factor) * size else None

    # -------------------------------------------------------------- explanations

    def cause(self, i: int) -> Cause:
        """Why a result is wrong."""
        note = self.computation.notes.get((self.layout.name, i))
        if note is not None:
            return note
        reference = self.tolerance.reference[i]
        for index, x in self.result[i].values():
            if x.shape != reference[index].shape:
                fact = f"has the shape {x.shape}, where one device gives {reference[index].shape}."
                return Cause(fact, "Return what has the same shape on all meshes.", "shape")
        cause = next(self._explanations(i), None) or self._unexplained(i)
        by_jit = isinstance(self.computation, Gradients) and self.layout.check_vma is None
        return cause._replace(fix=cause.fix + _BY_COMPILER) if by_jit else cause

    def _explanations(self, i: int) -> Iterator[Cause]:
        """Explanations that hold, the simplest first."""
        shards, reference = self.result[i], self.tolerance.reference[i].astype("float64")
        if not np.isfinite(reference).all():
            return
        bad = [x for _, x in shards.values() if not np.isfinite(x.astype("float64")).all()]
        if bad:
            yield Cause(
                f"not finite on {len(bad)} of {len(shards)} devices.",
                "Look for a division by the count of one device's rows, which may be 0.",
                "not finite",
            )
        if not any(np.any(x) for _, x in shards.values()):
            yield Cause(
                "zero: the leaf is not reached.",
                "Look for `stop_gradient`, or for a leaf that is replaced on the way to the loss.",
                "zero",
            )
        factor = self._factor(i, dict.fromkeys(shards, reference))
        if factor is not None and self._meanings(factor):
            yield self._of_factor(factor)
        yield from self._moved(i, reference)
        yield from self._of_parts(i)
        yield from self._partly(i)
        if factor is not None and reference.size > 1:
            yield self._of_factor(factor)

    def _of_factor(self, factor: float, unreduced: Subset = ()) -> Cause:
        """A multiple of the right result, or of a mean over some devices only."""
        shown = f"x {factor:.3f}" if abs(factor) > 0.1 else f"x {factor:.3g}"
        kept = f"not reduced along {named(unreduced)}: each device keeps its own"
        if abs(factor - 1) < 0.02:
            return Cause(f"{kept}.", _UNREDUCED, "per device")
        meanings = self._meanings(factor)
        fix = _SUMMED if factor > 1 else _AVERAGED if factor > 0 else "Look for a minus."
        if not meanings:
            meanings = ["multiplied by a number that is no product of axis sizes"]
            fix = "Look for a constant in the loss, or for another loss than the one compared."
        if unreduced:
            meanings = [f"{kept}, and {words}" for words in meanings]
            fix = f"{_UNREDUCED} {fix}"
        return Cause("", fix, shown, shown, tuple(meanings))

    def _meanings(self, factor: float) -> list[str]:
        """What a factor may mean, in words: products of axis sizes, or a number of rows."""
        sizes = {s: math.prod(self.sizes[axis] for axis in s) for s in _subsets(self.sizes)[1:]}

        def is_factor(number: Any) -> bool:
            return math.isclose(factor, number, rel_tol=0.02)

        def along_axes(words: str, power: int) -> list[str]:
            return [f"{words} along {named(s)}" for s, n in sizes.items() if is_factor(n**power)]

        dims = self.computation.row_dims(self.layout)
        rows = next((self.computation.batch[i].shape[dim] for i, dim in dims.items()), 1)
        own = rows // math.prod(self.sizes[axis] for axis in self.batch_axes)
        counts = [n for n in (rows, own) if n > 1]
        return (
            ["of the opposite sign"] * is_factor(-1)
            or along_axes("summed instead of averaged", 1)
            or along_axes("averaged twice", -1)
            or [f"a sum over {n} rows, where a mean is right" for n in counts if is_factor(n)]
            or [f"a mean over {n} rows, where a sum is right" for n in counts if is_factor(1 / n)]
            or along_axes("summed twice", 2)
        )

    def _moved(self, i: int, reference: np.ndarray) -> Iterator[Cause]:
        """Shards that are those of other devices."""
        indices = self._indices(i)
        if len(indices) > 1:
            origin: dict[Starts, Starts | None] = {}
            for index, x in self.result[i].values():
                limit = LIMIT * self.tolerance.of(i, index)
                fits = [
                    k for k, other in indices.items() if _distance(x, reference[other]) <= limit
                ]
                here = _starts(index)
                origin[here] = here if here in fits else fits[0] if fits else None
            if None not in origin.values() and any(a != b for a, b in origin.items()):
                yield self._of_origin(i, origin, indices)
        elif reference.ndim and len(reference) > 1:
            rows, limit = reference.reshape(len(reference), -1), LIMIT * self.tolerance.of(i)
            # Projections on one direction identify rows.
            direction = np.random.default_rng(0).normal(size=rows.shape[1])
            direction /= norm(direction)
            here = [np.sort(x.reshape(rows.shape) @ direction) for _, x in self.result[i].values()]
            if all(norm(x - np.sort(rows @ direction)) <= limit for x in here):
                yield Cause(
                    "rows permuted: it has the rows of dim 0 in another order.",
                    "Look for a reshape that interleaves the shards of several devices.",
                    "permuted",
                )

    def _of_origin(self, i: int, origin: Mapping[Starts, Any], indices: Mapping[Any, Any]) -> Cause:
        """Each device has a right shard, but some of them another one's."""
        wrong = [here for here, there in origin.items() if here != there]
        if len(set(origin.values())) < len(origin):
            here, there = indices[wrong[0]], indices[origin[wrong[0]]]
            more = f", and {len(wrong) - 1} more shards likewise" if len(wrong) > 1 else ""
            return Cause(
                f"{_span(here, there)} are those of another shard, {_span(there, here)}{more}.",
                "Look for a constant index, or an `axis_index` over other axes than the spec's.",
                "stale",
            )
        for dim, entry in enumerate(entries(self.computation.specs[i])):
            axes = tuple(a for a in axes_of(entry) if a in self.sizes)
            count = math.prod(self.sizes[axis] for axis in axes)
            length = self.tolerance.reference[i].shape[dim] // count
            for order in permutations(axes):
                if order != axes and all(
                    origin[_starts(index)][dim] == self._number(device, order) * length
                    for device, (index, _) in self.result[i].items()
                ):
                    return Cause(
                        f"rows permuted: the axes of dim {dim} are in another order,"
                        f" {entry_of(order)!r} instead of {entry_of(axes)!r}.",
                        "Name the axes in the order of the spec, outermost first, in"
                        " `all_gather`, `psum_scatter` and `axis_index` too.",
                        "permuted",
                    )
        return Cause(
            f"rows permuted: {len(wrong)} of {len(origin)} shards are on the wrong devices.",
            "Look for a `ppermute` that is not undone, or for devices in another order.",
            "permuted",
        )

    def _of_parts(self, i: int) -> Iterator[Cause]:
        """Means over some devices only, of what each gets from its own rows."""
        parts = None
        if self.batch_axes and self.layout.minibatches == 1:
            parts = self._of_rows()
        if parts is None:
            return
        for reduced in reversed(_subsets(self.batch_axes)):
            means: dict[Any, np.ndarray] = {}
            for device in self.result[i]:
                group = [
                    parts[other][i]
                    for other, at in self.place.items()
                    if all(a in reduced or n == at[a] for a, n in self.place[device].items())
                ]
                means[device] = _mean(group)
            factor = self._factor(i, means)
            if factor is None:
                continue
            unreduced = tuple(a for a in self.batch_axes if a not in reduced)
            if unreduced or abs(factor - 1) >= 0.02:
                yield self._of_factor(factor, unreduced)
            else:
                yield Cause(
                    "each device's own result, averaged: the devices' rows do not have the same"
                    " weight.",
                    "Divide by the count of all devices: `psum(total) / psum(count)`, as for a mean"
                    " over the tokens that a mask leaves. Statistics over the batch, such as those"
                    " of a batch norm, need a `pmean`.",
                    "own means",
                )

    def _partly(self, i: int) -> Iterator[Cause]:
        """Some shards, or some devices, are right."""
        indices, errors = self._indices(i), self.errors(i)
        shards = zip(self.result[i].values(), errors, strict=True)
        wrong = [(_starts(index), x) for (index, x), error in shards if error > LIMIT]
        count = len({start for start, _ in wrong})
        what = "wrong" if any(np.any(x) for _, x in wrong) else "zero"
        fix = "Look for code that treats some devices differently."
        if 0 < count < len(indices):
            rows = _span(indices[min(wrong, key=lambda x: x[0])[0]], None)
            of_all = f"{count} of {len(indices)} shards"
            yield Cause(f"{rows} are {what}: {of_all}, and the others are right.", fix)
        elif 0 < len(wrong) < len(errors):
            yield Cause(
                f"{what} on {len(wrong)} of {len(errors)} devices, right on the others.", fix
            )

    def _unexplained(self, i: int) -> Cause:
        reference = self.tolerance.reference[i].astype("float64")
        pairs = list(self.result[i].values())
        far = norm([_distance(x, reference[index]) for index, x in pairs])
        size = norm([norm(reference[index]) for index, _ in pairs])
        share = f"{100 * far / size:.3g}% of its size" if size else "from zero"
        error = max(self.errors(i))
        return Cause(
            f"differs by {share}, {error:.3g} times the noise; no known cause explains it.",
            "Compare the steps of the computation one by one.",
            short=f"{error:.1e} noise",
        )

    def _indices(self, i: int) -> dict[Starts, tuple[slice, ...]]:
        """The distinct shards of a result."""
        return {_starts(index): index for index, _ in self.result[i].values()}

    # -------------------------------------------------------------- what each device computes

    def _number(self, device: Any, axes: Sequence[str]) -> int:
        """`axis_index(axes)` of a device."""
        number = 0
        for axis in axes:
            number = number * self.sizes[axis] + self.place[device][axis]
        return number

    def _of_rows(self, folded: Subset = ()) -> dict[Any, list[np.ndarray]] | None:
        """What each device gets from its own rows, with keys folded by its index over axes.

        `None` if the rows of one device alone cannot be computed.
        """
        if folded not in self._parts:
            try:
                self._parts[folded] = self._compute_parts(folded)
            except Exception:  # the code may need the full batch
                self._parts[folded] = None
        return self._parts[folded]

    def _compute_parts(self, folded: Subset) -> dict[Any, list[np.ndarray]]:
        one, computation, mesh = self.layout.alone(), self.computation, self.layout.mesh
        specs = computation.batch_specs(self.layout)
        maps = [
            NamedSharding(mesh, spec).devices_indices_map(np.shape(x))
            for x, spec in zip(computation.batch, specs, strict=True)
        ]
        known: dict[Any, list[np.ndarray]] = {}
        parts: dict[Any, list[np.ndarray]] = {}
        for device in self.place:
            number = self._number(device, folded)
            where = [index[device] for index in maps]
            key = (number, str(where))
            if key not in known:
                rows = zip(computation.batch, where, strict=True)
                batch = [x[index] if np.ndim(x) else x for x, index in rows]
                if folded:
                    batch = [jax.random.fold_in(x, number) if _is_raw_key(x) else x for x in batch]
                known[key] = computation.alone(one, batch=batch)
            parts[device] = known[key]
        return parts

    # -------------------------------------------------------------- random numbers

    def unlikeness(self, reference: Sequence[np.ndarray]) -> float:
        """The median over leaves of what a factor does not explain, relative to their size."""
        shares: list[float] = []
        for shards, expected in zip(self.result, reference, strict=True):
            _, rest, _ = _fit([(x, expected[index]) for index, x in shards.values()])
            size = norm([norm(x) for _, x in shards.values()])
            if size and np.any(expected):
                shares.append(rest / size)
        return float(np.median(shares)) if shares else 0.0

    def keyed(self) -> Iterator[tuple[Subset, list[np.ndarray]]]:
        """What the result may be if each device draws its own random numbers.

        Yields:
            The axes by whose index keys are folded, outermost first, and the mean over all devices.
        """
        has_keys = any(map(_is_raw_key, self.computation.batch))
        orders = [o for s in _subsets(self.sizes) for o in permutations(s)] if has_keys else [()]
        for order in orders:
            parts = self._of_rows(order)
            if parts is not None:
                yield order, [_mean(row) for row in zip(*parts.values(), strict=True)]


def _distance(x: Any, reference: Any) -> float:
    """The norm of a difference; numbers that are not finite in both are equal."""
    x, reference = np.asarray(x, "float64"), np.asarray(reference, "float64")
    if x.shape != reference.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        same = (x == reference) | (np.isnan(x) & np.isnan(reference))
        distance = norm(np.where(same, 0.0, x - reference))
    return distance if math.isfinite(distance) else float("inf")


def _fit(pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float, float]:
    """The factor that takes predictions nearest to shards, what is left, and the predictions' size.

    All are Euclidean norms over all devices.
    """
    columns = zip(*pairs, strict=True)
    shards, expected = (
        np.concatenate([np.ravel(x) for x in xs]).astype("float64") for xs in columns
    )
    squares = float(np.vdot(expected, expected))
    factor = float(np.vdot(shards, expected)) / squares if squares else 0.0
    return factor, norm(shards - factor * expected), squares**0.5


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.mean([x.astype("float64") for x in arrays], axis=0))


def _subsets(axes: Mapping[str, int] | Sequence[str]) -> list[Subset]:
    return [s for n in range(len(axes) + 1) for s in combinations(axes, n)]


def named(axes: Sequence[str]) -> str:
    return " and ".join(f"`{axis}`" for axis in axes)


def _starts(index: tuple[slice, ...]) -> Starts:
    return tuple(i.start or 0 for i in index)


def _span(index: tuple[slice, ...], other: tuple[slice, ...] | None) -> str:
    """`rows 64 to 127`: the dim in which a shard differs from another one."""
    split = [d for d, i in enumerate(index) if i.start is not None and i.stop is not None]
    apart = [d for d in split if other is None or index[d] != other[d]]
    dim = (apart or split or [0])[0]
    span = f"{index[dim].start or 0} to {(index[dim].stop or 0) - 1}"
    return f"rows {span}" if dim == 0 else f"the indices {span} of dim {dim}"


def _is_raw_key(x: Any) -> bool:
    """Whether an array is a PRNG key, typed or of two uint32."""
    return is_key(x) or (getattr(x, "shape", None) == (2,) and x.dtype == np.uint32)
