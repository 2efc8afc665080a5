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
from treeshard._core.specs import axes_of, entries, entry_of
from treeshard.testing._layouts import Computation, Gradients, Layout, Shards
from treeshard.testing._noise import LIMIT, Tolerance, full, norm
from treeshard.testing._report import Cause

Subset = tuple[str, ...]
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
        specs = computation.batch_specs(layout)
        used = {a for spec in specs for entry in entries(spec) for a in axes_of(entry)}
        self.batch_axes = tuple(a for a in self.sizes if a in used)
        self._parts: dict[Any, Any] = {}

    # -------------------------------------------------------------- comparing

    def error(self, i: int, reference: Any = None) -> float:
        """The largest difference of a device's shard from the reference, in units of its noise."""
        reference = self.tolerance.reference[i] if reference is None else reference
        return max(
            _distance(x, reference[index]) / self._noise(i, index)
            for index, x in self.result[i].values()
        )

    def _noise(self, i: int, index: tuple[slice, ...]) -> float:
        return self.tolerance.of(i, index) or 1e-30

    def _factor(self, i: int, predicted: Mapping[Any, np.ndarray]) -> float | None:
        """By which factor all devices' shards are multiples of their predictions, if they are."""
        pairs = [(self.result[i][d], r[self.result[i][d][0]]) for d, r in predicted.items()]
        squares = sum(float(np.vdot(r, r)) for _, r in pairs)
        if squares == 0:
            return None
        factor = sum(float(np.vdot(x.astype("float64"), r)) for (_, x), r in pairs) / squares
        allowed = [
            2 * LIMIT * max(abs(factor), 1) * self._noise(i, index) for (index, _), _ in pairs
        ]
        distances = [_distance(x, factor * r) for (_, x), r in pairs]
        close = all(d <= limit for d, limit in zip(distances, allowed, strict=True))
        explained = norm(distances) < 0.3 * abs(factor) * squares**0.5
        return factor if close and explained else None

    # -------------------------------------------------------------- explanations

    def cause(self, i: int) -> Cause:
        """Why a result is wrong."""
        note = self.computation.notes.get((self.layout.name, i))
        if note is not None:
            return Cause(*note, "absent")
        cause = next(self._explanations(i), None) or self._unexplained(i)
        return cause._replace(fix=cause.fix + _BY_COMPILER) if self._by_jit else cause

    @property
    def _by_jit(self) -> bool:
        return isinstance(self.computation, Gradients) and self.layout.check_vma is None

    def _explanations(self, i: int) -> Iterator[Cause]:
        """Explanations that hold, the simplest first."""
        shards, reference = self.result[i], self.tolerance.reference[i].astype("float64")
        bad = [d for d, (_, x) in shards.items() if not np.isfinite(x.astype("float64")).all()]
        if bad and np.isfinite(reference).all():
            yield Cause(
                f"not finite on {len(bad)} of {len(shards)} devices.",
                "Look for a division by the count of one device's rows, which may be 0.",
                "not finite",
            )
        if not np.isfinite(reference).all():
            return
        if not any(np.any(x) for _, x in shards.values()):
            yield Cause(
                "zero: the leaf is not reached.",
                "Look for `stop_gradient`, or for a leaf that is replaced on the way to the loss.",
                "zero",
            )
        if norm(reference) <= LIMIT * self._noise(i, (slice(None),) * reference.ndim):
            yield Cause(
                "it should be zero up to rounding, and is not.",
                "Look for terms that only some layouts add to the loss.",
            )
        factor = self._factor(i, dict.fromkeys(shards, reference))
        if factor is not None and self._meanings(factor):
            yield self._of_factor(factor, ())
        yield from self._moved(i, reference)
        yield from self._of_parts(i)
        yield from self._partly(i, reference)
        if factor is not None and reference.size > 1:
            yield self._of_factor(factor, ())

    def _of_factor(self, factor: float, unreduced: Subset) -> Cause:
        """A multiple of the right result, or of a mean over some devices only."""
        shown = f"x {factor:.3f}" if abs(factor) > 0.1 else f"x {factor:.3g}"
        if abs(factor - 1) < 0.02:
            return Cause(not_reduced(unreduced), _UNREDUCED, "per device")
        meanings = self._meanings(factor)
        fix = _SUMMED if factor > 1 else _AVERAGED if factor > 0 else "Look for a minus."
        if not meanings:
            meanings = ["multiplied by a number that is no product of axis sizes"]
            fix = "Look for a constant in the loss, or for another loss than the one compared."
        if unreduced:
            meanings = [f"{not_reduced(unreduced)[:-1]}, and {words}" for words in meanings]
            fix = f"{_UNREDUCED} {fix}"
        return Cause("", fix, shown, shown, tuple(meanings))

    def _meanings(self, factor: float) -> list[str]:
        """What a factor may mean, in words: products of axis sizes."""
        if math.isclose(factor, -1, rel_tol=0.02):
            return ["of the opposite sign"]
        sizes = {s: math.prod(self.sizes[axis] for axis in s) for s in _subsets(self.sizes) if s}

        def along_axes(words: str, power: int) -> list[str]:
            fits = [s for s, n in sizes.items() if math.isclose(factor, n**power, rel_tol=0.02)]
            return [f"{words} along {named(subset)}" for subset in fits]

        return (
            along_axes("summed instead of averaged", 1)
            or along_axes("averaged twice", -1)
            or self._by_rows(factor)
            or along_axes("summed twice", 2)
        )

    def _by_rows(self, factor: float) -> list[str]:
        """Whether a factor is the number of rows of the batch, or of one device."""
        computation = self.computation
        dims = computation.row_dims(self.layout)
        rows = next((computation.batch[i].shape[dim] for i, dim in dims.items()), 1)
        for count in (rows, rows // math.prod([self.sizes[axis] for axis in self.batch_axes])):
            if count > 1 and math.isclose(factor, count, rel_tol=0.02):
                return [f"a sum over {count} rows, where a mean is right"]
            if count > 1 and math.isclose(factor, 1 / count, rel_tol=0.02):
                return [f"a mean over {count} rows, where a sum is right"]
        return []

    def _moved(self, i: int, reference: np.ndarray) -> Iterator[Cause]:
        """Shards that are those of other devices."""
        indices = {_starts(index): index for index, _ in self.result[i].values()}
        if len(indices) > 1:
            origin: dict[Any, Any] = {}
            for index, x in self.result[i].values():
                limit = LIMIT * self._noise(i, index)
                fits = [
                    k for k, other in indices.items() if _distance(x, reference[other]) <= limit
                ]
                here = _starts(index)
                origin[here] = here if here in fits else fits[0] if fits else None
            wrong = [here for here, there in origin.items() if here != there]
            if wrong and None not in origin.values():
                yield self._of_origin(i, origin, indices, wrong)
        elif len(self.result[i]) and reference.ndim and len(reference) > 1:
            rows = reference.reshape(len(reference), -1)
            limit = LIMIT * self._noise(i, (slice(None),) * reference.ndim)
            x = next(iter(self.result[i].values()))[1].astype("float64").reshape(rows.shape)
            if norm(np.sort([norm(r) for r in x]) - np.sort([norm(r) for r in rows])) <= limit:
                yield Cause(
                    "rows permuted: it has the rows of dim 0 in another order.",
                    "Look for a reshape that interleaves the shards of several devices.",
                    "permuted",
                )

    def _of_origin(
        self, i: int, origin: Mapping[Any, Any], indices: Mapping[Any, Any], wrong: Sequence[Any]
    ) -> Cause:
        """Each device has a right shard, but some of them another one's."""
        spec = self.computation.specs[i]
        if len(set(origin.values())) < len(origin):
            here, there = indices[wrong[0]], indices[origin[wrong[0]]]
            more = f", and {len(wrong) - 1} more shards likewise" if len(wrong) > 1 else ""
            return Cause(
                f"{_span(here, there)} are those of another shard, {_span(there, here)}{more}.",
                "Look for a constant index, or an `axis_index` over other axes than the spec's.",
                "stale",
            )
        for dim, entry in enumerate(entries(spec)):
            axes = [a for a in axes_of(entry) if a in self.sizes]
            for order in permutations(axes):
                if list(order) == axes or not self._reorders(i, origin, dim, axes, order):
                    continue
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

    def _reorders(
        self, i: int, origin: Mapping[Any, Any], dim: int, axes: Sequence[str], order: Sequence[str]
    ) -> bool:
        """Whether each device has the shard that it would have with the axes in this order."""
        length = self.tolerance.reference[i].shape[dim] // math.prod(self.sizes[a] for a in axes)
        for device, (index, _) in self.result[i].items():
            number = 0
            for axis in order:
                number = number * self.sizes[axis] + self.place[device][axis]
            if origin[_starts(index)][dim] != number * length:
                return False
        return True

    def _of_parts(self, i: int) -> Iterator[Cause]:
        """Means over some devices only, of what each gets from its own rows."""
        if not self.batch_axes or self.layout.minibatches > 1:
            return
        for reduced in sorted(_subsets(self.batch_axes), key=len, reverse=True):
            predicted = self._mean_over(reduced, self._of_rows(), i)
            factor = None if predicted is None else self._factor(i, predicted)
            if factor is None:
                continue
            unreduced = tuple(a for a in self.batch_axes if a not in reduced)
            if unreduced:
                yield self._of_factor(factor, unreduced)
            elif abs(factor - 1) < 0.02:
                yield Cause(
                    "each device's own result, averaged: the devices' rows do not have the same"
                    " weight.",
                    "Divide by the count of all devices: `psum(total) / psum(count)`, as for a mean"
                    " over the tokens that a mask leaves.",
                    "own means",
                )
            else:
                yield self._of_factor(factor, ())

    def _partly(self, i: int, reference: np.ndarray) -> Iterator[Cause]:
        """Some shards are right."""
        indices = {_starts(index): index for index, _ in self.result[i].values()}
        wrong = {
            _starts(index)
            for index, x in self.result[i].values()
            if _distance(x, reference[index]) > LIMIT * self._noise(i, index)
        }
        if len(indices) > 1 and wrong and len(wrong) < len(indices):
            first = indices[min(wrong)]
            zero = all(
                not np.any(x) for index, x in self.result[i].values() if _starts(index) in wrong
            )
            yield Cause(
                f"{_span(first, None)} are {'zero' if zero else 'wrong'}: {len(wrong)} of"
                f" {len(indices)} shards, and the others are right.",
                "Look for code that treats some devices differently.",
            )

    def _unexplained(self, i: int) -> Cause:
        reference = self.tolerance.reference[i].astype("float64")
        pairs = list(self.result[i].values())
        far = norm([_distance(x, reference[index]) for index, x in pairs])
        size = norm([norm(reference[index]) for index, _ in pairs])
        share = f"{100 * far / size:.3g}% of its size" if size else "from zero"
        return Cause(
            f"differs by {share}, {self.error(i):.3g} times the noise; no known cause explains it.",
            "Compare the steps of the computation one by one.",
            short=f"{self.error(i):.1e} noise",
        )

    # -------------------------------------------------------------- what each device computes

    def _mean_over(
        self, reduced: Subset, of_device: Mapping[Any, Any] | None, i: int
    ) -> dict[Any, np.ndarray] | None:
        """What each device would have if it were averaged over these axes only."""
        if of_device is None:
            return None
        means: dict[Any, Any] = {}
        for device in self.result[i]:
            fixed = [a for a in self.place[device] if a not in reduced]
            group = [
                of_device[other][i]
                for other, at in self.place.items()
                if all(at[a] == self.place[device][a] for a in fixed)
            ]
            means[device] = _mean(group)
        return means

    def _of_rows(self, folded: Subset | None = None) -> dict[Any, list[np.ndarray]] | None:
        """What each device gets from its own rows, with keys folded by its index over axes.

        `None` if the rows of one device alone cannot be computed.
        """
        if folded not in self._parts:
            try:
                self._parts[folded] = self._compute_parts(folded)
            except Exception:  # the code may need the full batch
                self._parts[folded] = None
        return self._parts[folded]

    def _compute_parts(self, folded: Subset | None) -> dict[Any, list[np.ndarray]]:
        one, computation, mesh = self.layout.device(), self.computation, self.layout.mesh
        shardings = [NamedSharding(mesh, spec) for spec in computation.batch_specs(self.layout)]
        batches = list(zip(computation.batch, shardings, strict=True))
        known: dict[Any, list[np.ndarray]] = {}
        parts: dict[Any, list[np.ndarray]] = {}
        for device, at in self.place.items():
            number = None
            if folded is not None:
                number = 0
                for axis in folded:
                    number = number * self.sizes[axis] + at[axis]
            where = [s.devices_indices_map(np.shape(x))[device] for x, s in batches]
            key = (number, tuple(map(str, where)))
            if key not in known:
                batch = [
                    _folded(x, number) if _is_raw_key(x) else x[index] if np.ndim(x) else x
                    for (x, _), index in zip(batches, where, strict=True)
                ]
                known[key] = [full(x) for x in computation.run(one, batch=batch)]
            parts[device] = known[key]
        return parts

    # -------------------------------------------------------------- random numbers

    def unlikeness(self, reference: Sequence[np.ndarray]) -> float:
        """The median over leaves of what a factor does not explain, relative to their size."""
        shares: list[float] = []
        for shards, expected in zip(self.result, reference, strict=True):
            pairs = [(x.astype("float64"), expected[index]) for index, x in shards.values()]
            squares = sum(float(np.vdot(r, r)) for _, r in pairs)
            size = norm([norm(x) for x, _ in pairs])
            if squares and size:
                factor = sum(float(np.vdot(x, r)) for x, r in pairs) / squares
                shares.append(norm([norm(x - factor * r) for x, r in pairs]) / size)
        return float(np.median(shares)) if shares else 0.0

    def keyed(self) -> Iterator[tuple[Subset | None, list[np.ndarray]]]:
        """What the result may be if each device draws its own random numbers.

        Yields:
            The axes by whose index keys are folded, outermost first, and the mean over all devices.
        """
        has_keys = any(map(_is_raw_key, self.computation.batch))
        orders = [o for s in _subsets(self.sizes) for o in permutations(s)] if has_keys else [()]
        for order in orders:
            parts = self._of_rows(order or None)
            if parts is not None:
                rows = zip(*parts.values(), strict=True)
                yield order, [_mean(row) for row in rows]


def _distance(x: Any, reference: Any) -> float:
    """The norm of a difference; numbers that are not finite in both are equal."""
    x, reference = np.asarray(x, "float64"), np.asarray(reference, "float64")
    if x.shape != reference.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):
        same = (x == reference) | (np.isnan(x) & np.isnan(reference))
        distance = norm(np.where(same, 0.0, x - reference))
    return distance if math.isfinite(distance) else float("inf")


def _mean(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.asarray(np.mean([x.astype("float64") for x in arrays], axis=0))


def _subsets(axes: Mapping[str, int] | Sequence[str]) -> list[Subset]:
    return [s for n in range(len(axes) + 1) for s in combinations(axes, n)]


def named(axes: Sequence[str]) -> str:
    return " and ".join(f"`{axis}`" for axis in axes)


def not_reduced(axes: Sequence[str]) -> str:
    return f"not reduced along {named(axes)}: each device keeps its own."


def _starts(index: tuple[slice, ...]) -> tuple[int, ...]:
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


def _folded(key: Any, number: int | None) -> Any:
    return key if number is None else jax.random.fold_in(key, number)
