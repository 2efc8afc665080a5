"""What is said of a result that differs between layouts: what was measured, and a proven cause.

A cause is named only if it predicts the numbers of every device within their noise; one that names
mesh axes must predict them on meshes of other sizes too. A likely explanation is not enough: who
follows a wrong one changes right code. What nothing predicts gets the measured difference alone.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from treeshard._core.spec_trees import get_names_from_partition_spec
from treeshard.testing._computations import Axes, Computation, Shards, subsets
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import LIMIT, Tolerance, distance, errors_of, finite, norm
from treeshard.testing._own_rows import OwnRows, multiple_in, named
from treeshard.testing._own_shards import OwnShards
from treeshard.testing._report import DIFFERS, Cause

Index = tuple[slice, ...]

# ------------------------------------------------------------------ words

_SHAPE = "has the shape {shape}, where one device gives {right}."
_SAME_SHAPE = "Return what has the same shape on all meshes."
_NOT_FINITE = "not finite on {wrong} of {all} devices."
_ELSEWHERE = "not finite in other places than on one device."
_ZERO = "zero on all devices."
_MOVED = "has other devices' shards in {wrong} of {all} places: {here} has the numbers of {there}."
_SHARDS = "{what} in {wrong} of {all} shards, such as {here}; right in the others."
_DEVICES = "{what} on {wrong} of {all} devices; right on the others."
_MULTIPLE = "a multiple of the right result"

_UNREDUCED = "not reduced along {axes}: each device keeps its own."
_AVERAGE = "Average over {axes}: `jax.lax.pmean`, or `manual.sync_gradients` for gradients."
_SCATTER = (
    "It is split along {axes}, so reduce the full gradient, with `jax.lax.psum_scatter` divided by"
    " the size or with `manual.gather_params`: `pmean` would average different rows."
)
_OWN_MEANS = (
    "each device's own result, averaged: the mean over devices is not the result of all rows."
)
_REDUCE_PARTS = (
    "Reduce sums, counts and statistics over the devices before they are divided or used, as in"
    " `psum(total) / psum(count)`."
)

_SUMMED = "summed instead of averaged along {axes}"
_USE_MEAN = "Use `jax.lax.pmean` instead of `psum`, or `manual.value_and_grad`."
_DIVIDE = (
    "It is split along {axes}: divide the sum by the size, as `manual.gather_params` and"
    " `manual.value_and_grad` do. `pmean` would average different rows."
)
_TRANSPOSED = "multiplied by the size of {axes}, without `check_vma` only"
_LEAVE = (
    "Without `check_vma` the gradient of `psum` is `psum`: use `manual.leave_parallel` for the sum"
    " of a row-parallel product, or of a loss."
)
_LOCAL_NORM = (
    "as if each shard were the whole leaf: each device scales by the norm of its own shards of"
    " {what}."
)
_PSUM_SQUARES = "Add the squares over {axes} before the root: `jax.lax.psum(squares, {names!r})`."
_OWN_SHARDS = (
    "as if each shard were the whole leaf: `{name}` at {line} has each device's shard alone, and"
    " nothing from the others."
)
_GATHER_FIRST = (
    "Gather the whole leaf along {axes} before it, add up over {axes} what it sums"
    " (`jax.lax.psum`), or shard a dim of stacked layers, so that each device has whole ones."
)
# Under `jit` a program means the same in all layouts, whatever the partitioner makes of it.
_BY_JIT = (
    "If the code has no `shard_map` and takes no number from the mesh or from"
    " `jax.device_count()`, the compiler is wrong: report it, with this program, to JAX."
)


class Diagnosis:
    """What is wrong with the results of one layout.

    Attributes:
        unknown: The results of which the right ones are not known.
    """

    def __init__(
        self,
        computation: Computation,
        rows: OwnRows,
        expected: Tolerance,
        result: list[Shards],
        unknown: Collection[int] = (),
    ) -> None:
        self.computation, self.rows, self.layout = computation, rows, rows.layout
        self.expected, self.result, self.unknown = expected, result, unknown

    def errors(self, i: int, predicted: Mapping[Any, np.ndarray] | None = None) -> list[float]:
        """The difference of each device's shard from a full result, in units of its noise."""
        return errors_of(self.result[i], self.expected, i, predicted)

    def is_wrong(self, i: int) -> bool:
        """Whether a result is further from the right one than rounding takes it."""
        note = (self.layout.name, i) in self.computation.notes
        return note or max(self.errors(i)) > LIMIT

    def visible(self, i: int) -> float | None:
        """The smallest relative error that would be seen; `None` of what must be equal."""
        if i not in self.expected.noise:
            return None
        return min(self.expected.visible(i, index) for index, _ in self.result[i].values())

    def cause(self, i: int) -> Cause:
        """What is wrong with a result, and why, if the numbers prove it."""
        # A gradient of another form cannot leave `shard_map`, and was replaced by zeros.
        note = self.computation.notes.get((self.layout.name, i))
        if note is not None:
            return note
        cause = next(self._proven(i), None) or self._measured(i)
        if self.computation.is_by_hand(self.layout):
            return cause
        return cause._replace(fix=f"{cause.fix} {_BY_JIT}".strip())

    def _proven(self, i: int) -> Iterator[Cause]:
        """The statements that hold, the simplest first."""
        reference = self.expected.reference[i].astype("float64")
        shards = [(index, x.astype("float64")) for index, x in self.result[i].values()]
        for index, x in shards:
            if x.shape != reference[index].shape:
                fact = _SHAPE.format(shape=x.shape, right=reference[index].shape)
                yield Cause(fact, _SAME_SHAPE, "shape")
        if not np.isfinite(reference).all():  # which no prediction can be compared with
            return
        wrong = sum(not np.isfinite(x).all() for _, x in shards)
        if wrong:
            yield Cause(_NOT_FINITE.format(wrong=wrong, all=len(shards)), short="not finite")
        if not any(np.any(x) for _, x in shards):
            yield Cause(_ZERO, short="zero")
        factor = multiple_in(self.result[i], self.expected, i)
        if factor is not None:
            shown = f"x {factor:.3f}" if abs(factor) > 0.1 else f"x {factor:.3g}"
            yield Cause(_MULTIPLE, short=shown, measured=shown, multiple=factor)
        yield from self._moved(i, reference)
        yield from self._local_norms(i, reference)
        yield from self._own_rows(i)
        yield from self._own_shards(i)
        yield from self._partly(i)

    def _moved(self, i: int, reference: np.ndarray) -> Iterator[Cause]:
        """Each device has a shard of the right result, but not all have their own."""
        indices = self._indices(i)
        moved: dict[str, str] = {}
        for index, x in self.result[i].values():
            limit = LIMIT * self.expected.of(i, index)
            texts = [t for t, at in indices.items() if distance(x, reference[at]) <= limit]
            if not texts:
                return
            if _text(index) not in texts:
                moved[_text(index)] = texts[0]
        if moved:
            here, there = next(iter(moved.items()))
            fact = _MOVED.format(wrong=len(moved), all=len(indices), here=here, there=there)
            yield Cause(fact, short="moved")

    def _local_norms(self, i: int, reference: np.ndarray) -> Iterator[Cause]:
        """Each device has scaled by a norm of its own shards, as clipping and LAMB do."""
        split = get_names_from_partition_spec(self.computation.specs[i])
        axes = [axis for axis in self.layout.split_axes if axis in split]
        if not axes or i not in self._leaf_paths() or not self.computation.is_by_hand(self.layout):
            return
        for what, factors in self._norm_factors(i).items():
            scaled = {device: factor * reference for device, factor in factors.items()}
            # A factor scales the noise too.
            limit = 2 * LIMIT * max(1.0, *factors.values())
            if all(map(math.isfinite, factors.values())) and max(self.errors(i, scaled)) <= limit:
                fix = _PSUM_SQUARES.format(axes=named(axes), names=tuple(axes))
                yield Cause(_LOCAL_NORM.format(what=what), fix, "own norms")

    def _own_shards(self, i: int) -> Iterator[Cause]:
        """An operation of the update has a shard where it needs the whole leaf, as in Muon, Shampoo
        and Adafactor."""
        split = get_names_from_partition_spec(self.computation.specs[i])
        axes = [axis for axis in self.layout.split_axes if axis in split]
        is_state = i < self.computation.first and i in self.computation.bases
        if not axes or not is_state or not self.computation.is_by_hand(self.layout):
            return
        found = None if self._shards is None else self._shards.culprit(i)
        if found is not None:
            fact = _OWN_SHARDS.format(name=found.name, line=found.line or "an unknown line")
            yield Cause(fact, _GATHER_FIRST.format(axes=named(axes)), "own shards")

    @cached_property
    def _shards(self) -> OwnShards | None:
        try:
            return OwnShards(self.computation, self.layout)
        except Exception:  # not every program runs with all of its values as results
            return None

    def _norm_factors(self, i: int) -> dict[str, dict[Any, float]]:
        """For each norm that may have been used, the factors between its values: of the leaf, or of
        the tree that it is in, or of the parameter over that of its update."""
        computation = self.computation
        paths = self._leaf_paths()
        words = paths[i].split("/")
        factors: dict[str, dict[Any, float]] = {}
        for length in range(len(words), 0, -1):
            prefix = "/".join(words[:length])
            inside = [n for n, path in paths.items() if f"{path}/".startswith(f"{prefix}/")]
            factors[f"`{prefix}`"] = self._ratios(inside)
        factors["all leaves"] = self._ratios(list(paths))
        base = computation.bases.get(i)
        start = None if base is None else np.asarray(computation.start[base], "float64")
        if start is not None and start.any():
            updates = factors[f"`{paths[i]}`"]
            own = {d: norm(start[index]) / norm(start) for d, (index, _) in self.result[i].items()}
            of_update = {device: ratio * own[device] for device, ratio in updates.items()}
            factors[f"`{paths[i]}` and of those of its update"] = of_update
        return factors

    def _leaf_paths(self) -> dict[int, str]:
        """The paths of the leaves of floats of the first step, by the index of the result."""
        computation = self.computation
        leaves = computation.bases or range(
            1, computation.first
        )  # the first gradient is after the loss
        floats = [n for n in leaves if n < computation.first and n in self.expected.noise]
        return {n: computation.paths[n].removeprefix("step 1: ") for n in floats}

    def _ratios(self, results: Sequence[int]) -> dict[Any, float]:
        """The norm of some right results over that of a device's shards of them."""
        ratios: dict[Any, float] = {}
        for device in self.layout.mesh.devices.flat:
            references = [self.expected.reference[n].astype("float64") for n in results]
            shards = [
                x[self.result[n][device][0]] for n, x in zip(results, references, strict=True)
            ]
            own = norm([norm(x) for x in shards])
            ratios[device] = norm([norm(x) for x in references]) / own if own else math.inf
        return ratios

    def _own_rows(self, i: int) -> Iterator[Cause]:
        """Means over some devices only, of what each gets from its own rows."""
        if self.layout.minibatches > 1:
            return
        # The most axes first: along those where all devices have the same rows, nothing is missing.
        for reduced in reversed(subsets(self.rows.axes)):
            means = self.rows.mean_over(reduced, i)
            if means is None or max(self.errors(i, means)) > 2 * LIMIT:
                continue
            unreduced = [axis for axis in self.rows.axes if axis not in reduced]
            if unreduced:
                yield self._unreduced(i, unreduced)
            else:
                yield Cause(_OWN_MEANS, _REDUCE_PARTS, "own means")

    def _unreduced(self, i: int, axes: Sequence[str]) -> Cause:
        # Along the axes of its spec, devices have other rows of the leaf, which no mean may mix.
        spec_axes = get_names_from_partition_spec(self.computation.specs[i])
        split = [axis for axis in axes if axis in spec_axes]
        full = [axis for axis in axes if axis not in spec_axes]
        fixes = [
            template.format(axes=named(some))
            for template, some in ((_AVERAGE, full), (_SCATTER, split))
            if some
        ]
        return Cause(_UNREDUCED.format(axes=named(axes)), " ".join(fixes), "per device")

    def _partly(self, i: int) -> Iterator[Cause]:
        """Some shards, or some devices, are right."""
        errors = self.errors(i)
        shards = zip(self.result[i].values(), errors, strict=True)
        wrong = [(_text(index), x) for (index, x), error in shards if error > LIMIT]
        what = "wrong" if any(np.any(x) for _, x in wrong) else "zero"
        texts = list(dict.fromkeys(text for text, _ in wrong))
        count = len(self._indices(i))
        if len(texts) < count:
            fact = _SHARDS.format(wrong=len(texts), all=count, what=what, here=texts[0])
            yield Cause(fact)
        elif len(wrong) < len(errors):
            yield Cause(_DEVICES.format(what=what, wrong=len(wrong), all=len(errors)))

    def _measured(self, i: int) -> Cause:
        """How far a result is from the right one."""
        reference = self.expected.reference[i].astype("float64")
        shards = list(self.result[i].values())
        far = norm([distance(x, reference[index]) for index, x in shards])
        if not math.isfinite(far):
            return Cause(_ELSEWHERE, short="not finite")
        size = norm([norm(finite(reference[index])) for index, _ in shards])
        return Cause(DIFFERS, short=f"off {100 * far / size:.2g}%" if size else "not zero")

    def _indices(self, i: int) -> dict[str, Index]:
        """The distinct shards of a result."""
        return {_text(index): index for index, _ in self.result[i].values()}


def _text(index: Index) -> str:
    """`[4:8, :]`, from an index as JAX gives it: `slice(None)` is a dim that is not split."""
    dims = (":" if dim.start is None else f"{dim.start}:{dim.stop}" for dim in index)
    return f"[{', '.join(dims)}]"


# ------------------------------------------------------------------ over all layouts


def statements(
    computation: Computation, i: int, causes: Mapping[str, Cause], layouts: Mapping[str, Layout]
) -> Iterator[tuple[list[str], str, str]]:
    """What is said of one result: layouts, what is wrong in them, and what to change.

    `layouts` are those that ran, and `causes` those of the layouts where the result is wrong.
    """
    of_factor = _of_factor(computation, i, causes, layouts)
    measured: dict[tuple[str, str], dict[str, str]] = {}
    for name, cause in causes.items():
        if cause.multiple is not None:
            cause = cause._replace(**of_factor)
        measured.setdefault((cause.fact, cause.fix), {})[name] = cause.measured
    for (fact, fix), numbers in measured.items():
        yield list(numbers), _with_numbers(fact, numbers), fix


def _with_numbers(fact: str, numbers: Mapping[str, str]) -> str:
    """A fact, with what was measured in its first layout, and in those that differ from it."""
    first = next(iter(numbers.values()))
    if not first:
        return fact
    others = [f"{number} in `{name}`" for name, number in numbers.items() if number != first]
    return f"{fact} ({'; '.join([first, *others])})."


def _of_factor(
    computation: Computation, i: int, causes: Mapping[str, Cause], layouts: Mapping[str, Layout]
) -> dict[str, str]:
    """What is said of a factor by hand, if it is the size of axes on all meshes."""
    factors = {name: c.multiple for name, c in causes.items() if c.multiple is not None}
    wrong = [layouts[name] for name in factors]
    if not factors or not all(map(computation.is_by_hand, wrong)):
        return {}
    # Where the result is right, the factor is 1. With `check_vma` other code is differentiated.
    kinds = {layout.check_vma for layout in wrong}
    others = [layouts[name] for name in layouts.keys() - causes.keys()]
    right = [layout for layout in others if layout.check_vma in kinds]
    numbers = [*factors.values(), *(1.0 for _ in right)]
    axes = _axes_of(numbers, [layout.mesh.shape for layout in wrong + right])
    if not axes:
        return {}
    if kinds == {False} and any(layout.check_vma for layout in others):
        return {"fact": _TRANSPOSED.format(axes=named(axes)), "fix": _LEAVE}
    if any({*axes} - {*computation.batch_axes(layout)} for layout in wrong):
        return {}
    return _summed(computation.specs[i], axes)


def _summed(spec: PartitionSpec, axes: Axes) -> dict[str, str]:
    """What is said of a sum in place of a mean; no mean may mix the shards of a leaf."""
    split = {*axes} & {*get_names_from_partition_spec(spec)}
    fix = _DIVIDE.format(axes=named(sorted(split))) if split else _USE_MEAN
    return {"fact": _SUMMED.format(axes=named(axes)), "fix": fix}


def _axes_of(numbers: Sequence[float], shapes: Sequence[Mapping[str, int]]) -> Axes:
    """The axes whose sizes multiply to the number of each mesh; none if that proves nothing.

    A number that is the same on all meshes may be a constant, and axes that others would explain
    as well are not proven.
    """
    if max(numbers) < 1.5 * min(numbers):
        return ()
    sizes = {axis: np.array([shape[axis] for shape in shapes]) for axis in shapes[0]}
    split = [axis for axis in sizes if sizes[axis].max() > 1]
    matches: list[Axes] = []
    for axes in subsets(split):
        products = math.prod(sizes[axis] for axis in axes)
        if np.allclose(numbers, products, rtol=0.01, atol=0):
            matches.append(axes)
    return matches[0] if len(matches) == 1 else ()
