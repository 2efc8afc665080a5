"""Runs a computation in a layout: the gradients of a loss, or two steps in a row."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import (
    StaticSplit,
    array_text,
    has_gradient,
    has_shape,
    is_array,
    is_key,
    is_raw_key,
)
from treeshard._core.contexts import in_one_pass
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.spec_trees import specs_of_leaves
from treeshard._core.specs import axes_of, entries
from treeshard._placement.shard import shard
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, row_axes
from treeshard.errors import SpecError, StateError
from treeshard.testing._layouts import Layout
from treeshard.testing._report import Finding
from treeshard.testing._values import (
    Results,
    Shards,
    apply_change,
    change_of,
    count_finite,
    move_off_value,
    on_host,
    scale_of,
    shards_of,
    values_of,
)
from treeshard.testing._widening import Widening
from treeshard.training._accumulation import accumulate_gradients
from treeshard.training._step import Step
from treeshard.training._type_errors import sharding_type_errors

Axes = tuple[str, ...]
# The index of a device along each axis, and the size of the axis.
Position = Mapping[str, tuple[Any, Any]]
T = TypeVar("T")

_ABSENT = Finding("by_hand returns no gradient for it.", "absent")
_OTHER_SHAPE = "each device has a gradient of {grad}, and its shard is {shard}."


class Output(NamedTuple):
    """One result of a computation: a loss, a gradient, or a leaf after a step."""

    path: str  # its name in reports
    spec: PartitionSpec
    base: int | None = None  # if it is the change of a leaf, the index of the leaf in `start`
    is_aux: bool = False  # whether it is beside the point of a check, as the loss value is
    step: int = 1  # the number of the step; step 2 starts from the results of step 1


class Computation:
    """A computation that runs in any layout, from values on the host."""

    def __init__(self, tree: PyTree, batch: PyTree, plan: Plan) -> None:
        leaves, treedef = tree_flatten(tree)
        self.plan = plan
        self.split = StaticSplit(leaves, treedef, has_shape)
        # The differentiated or updated leaves before the computation runs.
        self.start = [on_host(x) for x in self.split.dynamic(leaves)]
        if [np.shape(x) for x in self.start] != [leaf.shape for leaf in plan.leaves]:
            plan_paths = [leaf.path for leaf in plan.leaves]
            raise SpecError(
                "the plan is not one of this tree: it has"
                f" {', '.join(plan_paths[:5])}, and the tree has {', '.join(leaf_paths(tree)[:5])}."
            )
        data, batch_def = tree_flatten(batch)
        self.batch_split = StaticSplit(data, batch_def, has_shape)
        self.batch = [on_host(x) for x in self.batch_split.dynamic(data)]
        # Findings during the trace, by the layout's name and the result's index.
        self.notes: dict[tuple[str, int], Finding] = {}
        # Its results. For a step, they are known after a run.
        self.outputs: list[Output] = []
        # The rewriting of traces, if floats are widened, and the computation without it.
        self.widening: Widening | None = None
        self.narrow = self
        # Traces and compiled functions: noise is measured by a dozen runs of one program.
        self._made: dict[str, Any] = {}
        self._has_x64 = jax.dtypes.canonicalize_dtype("float64") == "float64"

    @property
    def first(self) -> int:
        """The number of results of step 1, from which the others follow."""
        return sum(output.step == 1 for output in self.outputs)

    # -------------------------------------------------------------- of each kind

    def is_by_hand(self, layout: Layout) -> bool:
        """Whether code by hand, rather than the compiler, reduces the results of a layout."""
        raise NotImplementedError

    def move_off(self, layout: Layout) -> None:
        """Moves the parameters off special values, such as zeros, that hide other gradients."""

    def key_orders(self, layout: Layout) -> list[Axes]:
        """The axes, in order, along which a device may have folded its key by its index."""
        raise NotImplementedError

    def run_as_device(
        self, layout: Layout, start: list[Any] | None, batch: list[Any], folded: Position
    ) -> Results:
        """The results of a device from its own rows, with keys folded by its index along axes."""
        raise NotImplementedError

    def _make(self, layout: Layout) -> Callable[[list[Any], list[Any]], list[Any]]:
        """A function of arrays and of the batch that returns the results in a layout."""
        raise NotImplementedError

    # -------------------------------------------------------------- runs

    @property
    def keeps_16_bits(self) -> bool:
        """Whether it runs in the program's own floats of 16 bits, in which sums may be wrong."""
        return self.widening is None or self.widening.above > 0

    def widen(self, widening: Widening) -> "Computation":
        """The same computation with wider floats."""
        wide = copy(self)  # shares `narrow`, which keeps the traces
        wide.start = [widening.array(x) for x in self.start]
        wide.batch = [widening.array(x) for x in self.batch]
        wide.widening = widening
        wide._made = {}
        return wide

    def alone(
        self, layout: Layout, start: list[Any] | None = None, batch: list[Any] | None = None
    ) -> Results:
        """The results in a layout of one device."""
        return values_of(self.run(layout, start, batch))

    def run(
        self,
        layout: Layout,
        start: list[Any] | None = None,
        batch: list[Any] | None = None,
        position: Position | None = None,
    ) -> list[Shards]:
        """The results in a layout; with `position`, `axis_index` returns that position."""
        start = self.start if start is None else start
        batch = self.batch if batch is None else batch
        # Copied because a step donates its state, and keys are on a device already.
        start = [jnp.copy(x) if is_key(x) else x for x in start]
        given = [leaf.given for leaf in layout.plan.leaves]
        is_float64 = self.widening is not None and self.widening.dtype == "float64"
        with jax.enable_x64(is_float64 or self._has_x64):
            arrays = shard(start, given, layout.mesh, check="form")
            data = shard(batch, self.batch_specs(layout), layout.mesh, check="form")
            return self._results(layout, arrays, data, dict(position or {}))

    def _results(
        self, layout: Layout, arrays: list[Any], data: list[Any], position: Position
    ) -> list[Shards]:
        return shards_of(self._on_mesh(layout, arrays, data, position))

    def _on_mesh(
        self, layout: Layout, arrays: list[Any], data: list[Any], position: Position
    ) -> list[Any]:
        # The program runs as the user wrote it. Widened floats, or the index of a device as an
        # argument, need a trace.
        if self.widening is None and not position:
            with self._enter(layout):
                return self._call(layout, arrays, data)
        traced = self.trace(layout, position, data)

        def compiled() -> Any:
            program = traced if self.widening is None else self.widening.program(traced)
            return jax.jit(jaxpr_as_fun(program))

        run = self._once(f"program {id(traced)}", compiled)  # `narrow` keeps the trace
        with self._enter(layout):
            return run(*tree_leaves((position, arrays, data)))

    def after(self, results: Results) -> list[Any]:
        """The leaves after the first of two steps."""
        start = list(self.start)
        for output, result in zip(self.outputs[: self.first], results, strict=False):
            if output.base is not None:
                start[output.base] = apply_change(self.start[output.base], result)
        return start

    def trace(
        self, layout: Layout, position: Position | None = None, data: Sequence[Any] | None = None
    ) -> Any:
        """The jaxpr of the computation in a layout, in its own dtypes, for the shapes of `data`."""
        narrow = self.narrow
        position = dict(position or {})
        shapes = [np.shape(x) for x in (narrow.batch if data is None else data)]

        def call(position: Position, arrays: list[Any], data: list[Any]) -> list[Any]:
            with _indices_of(position):
                return narrow._call(layout, arrays, data)

        def traced() -> Any:
            given = [leaf.given for leaf in layout.plan.leaves]
            arrays = _structs(narrow.start, map(np.shape, narrow.start), given, layout.mesh)
            rows = _structs(narrow.batch, shapes, narrow.batch_specs(layout), layout.mesh)
            # As without wider floats, so that the code gets its own dtypes.
            with self._enter(layout), jax.enable_x64(self._has_x64):
                return jax.make_jaxpr(call)(position, arrays, rows)

        return narrow._once(f"trace {_key(layout)} {[*position]} {shapes}", traced)

    def _call(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Any]:
        """The results as arrays. It may be traced."""
        return self._once(_key(layout), lambda: self._make(layout))(arrays, data)

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @contextmanager
    def _enter(self, layout: Layout) -> Iterator[None]:
        # Constraints with a bare `PartitionSpec` need the mesh. `shards_of` must run without it: on
        # a mesh, JAX cannot compute from the shard of one device.
        in_force = PlanInForce(layout.plan, row_axes(layout.batch_specs))
        types = sharding_type_errors(layout.mesh, in_force.gathered_axes)
        mesh, one_pass = jax.set_mesh(layout.mesh), in_one_pass(layout.one_pass)
        with mesh, types, one_pass, _devices_are(layout.mesh):
            yield

    # -------------------------------------------------------------- the batch

    def row_dims(self, layout: Layout) -> dict[int, int]:
        """By array of the batch, the dim of its rows: the first split dim."""
        dims: dict[int, int] = {}
        for i, (x, spec) in enumerate(zip(self.batch, self.batch_specs(layout), strict=True)):
            if getattr(x, "ndim", 0) and not is_key(x):
                split = (dim for dim, entry in enumerate(entries(spec)) if axes_of(entry))
                dims[i] = next(split, 0)
        counts = Counter(self.batch[i].shape[dim] for i, dim in dims.items())
        # Arrays of other lengths, such as one number per class, have no rows.
        [(rows, _)] = counts.most_common(1) or [(0, 0)]
        return {i: dim for i, dim in dims.items() if self.batch[i].shape[dim] == rows > 1}

    def batch_specs(self, layout: Layout) -> list[Any]:
        """The spec of each array of the batch; a scalar has no dim to split."""
        tree = self.batch_split.combine(self.batch)
        specs = specs_of_leaves(layout.batch_specs, tree, "batch specs")
        pairs = zip(self.batch, self.batch_split.dynamic(specs), strict=True)
        return [spec if spec and getattr(x, "ndim", 0) else PartitionSpec() for x, spec in pairs]


class Gradients(Computation):
    """The value of a loss and its gradients."""

    def __init__(
        self, loss: Any, params: PyTree, batch: PyTree, plan: Plan, by_hand: Any = None
    ) -> None:
        super().__init__(params, batch, plan)
        self.loss, self.by_hand = loss, by_hand
        self.differentiated = [i for i, x in enumerate(self.start) if has_gradient(x)]
        leaves = [plan.leaves[i] for i in self.differentiated]
        grads = [Output(leaf.path, leaf.given) for leaf in leaves]
        self.outputs = [Output("loss", PartitionSpec(), is_aux=True), *grads]

    def is_by_hand(self, layout: Layout) -> bool:
        return layout.check_vma is not None

    def move_off(self, layout: Layout) -> None:
        given, random = self.start, np.random.default_rng(0)
        typical = max((scale_of(given[i]) for i in self.differentiated), default=0.0) or 1.0
        moved = list(given)
        for i in self.differentiated:
            moved[i] = move_off_value(given[i], typical, random)
        # The moved values may be invalid: a variance of zero may become negative.
        if count_finite(self.alone(layout, moved)) >= count_finite(self.alone(layout, given)):
            self.start = moved

    def key_orders(self, layout: Layout) -> list[Axes]:
        if not any(map(is_raw_key, self.batch)):
            return [()]
        # Each order of axes gives other indices, and so other keys of `fold_in`.
        return [order for some in subsets(layout.split_axes) for order in permutations(some)]

    def run_as_device(
        self, layout: Layout, start: list[Any] | None, batch: list[Any], folded: Position
    ) -> Results:
        if folded:
            number = _axis_index(folded, tuple(folded))
            batch = [jax.random.fold_in(x, number) if is_raw_key(x) else x for x in batch]
        return self.alone(layout.alone(), start, batch)

    def _make(self, layout: Layout) -> Callable[[list[Any], list[Any]], list[Any]]:
        rows = row_axes(layout.batch_specs)
        if self.is_by_hand(layout):
            # In `shard_map`, `out_specs` determine the shardings of results.
            by_hand = PlanInForce(layout.plan, rows, is_by_hand=True)
            return jax.jit(by_hand.inside(self._make_by_hand(layout)))
        shardings = [NamedSharding(layout.mesh, output.spec) for output in self.outputs]
        run = PlanInForce(layout.plan, rows).inside(self._make_jitted(layout))
        return jax.jit(run, out_shardings=shardings)

    def _make_jitted(self, layout: Layout) -> Callable[..., list[Any]]:
        """The value and the gradients of the loss, as one list."""

        def grads_of(arrays: list[Any], data: list[Any]) -> list[Any]:
            def value(differentiated: list[Any]) -> Any:
                params = list(arrays)
                for i, x in zip(self.differentiated, differentiated, strict=True):
                    params[i] = x
                out = self.loss(self.split.combine(params), self.batch_split.combine(data))
                return _value_of(out)

            value = jax.checkpoint(value) if layout.remat else value
            loss, grads = jax.value_and_grad(value)([arrays[i] for i in self.differentiated])
            return [loss, *grads]

        if layout.minibatches == 1:
            return grads_of
        dims = self.row_dims(layout)

        def accumulated(arrays: list[Any], data: list[Any]) -> list[Any]:
            def of_part(part: dict[int, Any], _: None) -> Any:
                rows = list(data)
                for i, x in part.items():
                    rows[i] = jnp.moveaxis(x, 0, dims[i])
                return grads_of(arrays, rows), ()

            rows_first = {i: jnp.moveaxis(data[i], dim, 0) for i, dim in dims.items()}
            return accumulate_gradients(of_part, rows_first, layout.minibatches)[0]

        return accumulated

    def _make_by_hand(self, layout: Layout) -> Callable[..., list[Any]]:
        def body(arrays: list[Any], data: list[Any]) -> list[Any]:
            out = self.by_hand(self.split.combine(arrays), self.batch_split.combine(data))
            try:
                value, tree = out
                grads = self.split.dynamic(self.split.treedef.flatten_up_to(tree))
            except (TypeError, ValueError) as error:
                raise StateError(
                    "check_gradients: by_hand must return (loss, grads), as"
                    " `manual.value_and_grad` does, with grads in the structure of params:"
                    f" {error}"
                ) from None
            results = [_value_of(value)]
            for i in self.differentiated:
                wrong_form = _wrong_form(grads[i], arrays[i])
                if wrong_form is not None:
                    self.notes[layout.name, len(results)] = wrong_form
                    grads[i] = arrays[i] * 0  # varies as the shard does, as `check_vma` requires
                results.append(grads[i])
            return results

        return jax.shard_map(
            body,
            mesh=layout.mesh,
            in_specs=([leaf.given for leaf in layout.plan.leaves], self.batch_specs(layout)),
            out_specs=[output.spec for output in self.outputs],
            check_vma=bool(layout.check_vma),
        )


class Steps(Computation):
    """Two steps in a row: the changes of the state, and the other results of each step."""

    def __init__(self, step: Step, state: PyTree, batch: PyTree) -> None:
        super().__init__(state, batch, step.plan)
        self.step = step
        self._aux: list[str] = []

    def is_by_hand(self, layout: Layout) -> bool:
        return self.step.is_by_hand

    def key_orders(self, layout: Layout) -> list[Axes]:
        return subsets(layout.split_axes) if self.step.is_by_hand else [()]

    def run_as_device(
        self, layout: Layout, start: list[Any] | None, batch: list[Any], folded: Position
    ) -> Results:
        alone = layout.alone()
        if not folded:
            return self.alone(alone, start, batch)
        # Only the step can fold its key: the key may be in the state, and split before.
        position = {axis: folded.get(axis, (0, size)) for axis, size in layout.mesh.shape.items()}
        # The layout has another name, so that `jit` does not reuse the trace for one device.
        return values_of(self.run(replace(alone, name="one of several"), start, batch, position))

    def _results(
        self, layout: Layout, arrays: list[Any], data: list[Any], position: Position
    ) -> list[Shards]:
        count, out = len(arrays), []
        before = shards_of(arrays)
        for number in (1, 2):
            if number == 2 and layout.second is not None:
                arrays, data = self._save_and_restore(arrays, layout.second)
                layout, before = layout.second, shards_of(arrays)
            results = self._on_mesh(layout, arrays, data, position)
            # A copy, because the next step donates the state and reuses its memory.
            arrays, after = results[:count], shards_of(results)
            changes = [change_of(old, new) for old, new in zip(before, after, strict=False)]
            out += [*changes, *after[count:]]
            before = after[:count]
        # The results of a step beside its state are known after a run.
        self.outputs = [output for step in (1, 2) for output in self._outputs_of(step)]
        return out

    def _outputs_of(self, step: int) -> Iterator[Output]:
        for i, leaf in enumerate(self.plan.leaves):
            yield Output(f"step {step}: {leaf.path}", leaf.given, i, step=step)
        for name in self.narrow._aux:
            yield Output(f"step {step}: {name}", PartitionSpec(), is_aux=True, step=step)

    def _save_and_restore(self, arrays: list[Any], layout: Layout) -> tuple[list[Any], list[Any]]:
        """A state, saved and restored in a layout, and the batch in that layout."""
        from treeshard import checkpoint  # needs TensorStore

        # Named by numbers, because paths of a state may not be valid names of files.
        named = {f"{i:05}": x for i, x in enumerate(arrays)}
        specs = [leaf.given for leaf in layout.plan.leaves]
        shapes = [leaf.shape for leaf in layout.plan.leaves]
        structs = _structs(arrays, shapes, specs, layout.mesh)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(f"{folder}/state", named)
            state = checkpoint.restore(f"{folder}/state", dict(zip(named, structs, strict=True)))
        data = shard(self.batch, self.batch_specs(layout), layout.mesh, check="form")
        return list(state.values()), data

    def _make(self, layout: Layout) -> Callable[[list[Any], list[Any]], list[Any]]:
        step = self.step.on(layout.plan, layout.batch_specs)

        def call(arrays: list[Any], data: list[Any]) -> list[Any]:
            state, aux = step(self.split.combine(arrays), self.batch_split.combine(data))
            more = zip(leaf_paths(aux), tree_leaves(aux), strict=True)
            arrays_of_aux = {path_under("aux", path): x for path, x in more if is_array(x)}
            self._aux = list(arrays_of_aux)
            return [*self.split.dynamic(tree_leaves(state)), *arrays_of_aux.values()]

        return call


def _value_of(out: Any) -> Any:
    """The value of a loss, which may also return other results."""
    return out[0] if isinstance(out, tuple) else out


def _wrong_form(grad: Any, shard: Any) -> Finding | None:
    """The finding for a gradient that is absent or has another shape than its shard."""
    if not is_array(grad):
        return _ABSENT
    if grad.shape == shard.shape:
        return None
    return Finding(_OTHER_SHAPE.format(grad=array_text(grad), shard=array_text(shard)), "shape")


# ------------------------------------------------------------------ what surrounds a call


def attempt(run: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result of a run of the user's code, or its error.

    Code that is right on its own mesh may raise any error in another layout, for the rows of one
    device, or with wider floats, which kernels or platforms may not support. The check continues
    with the runs that do not raise.
    """
    try:
        return run(), None
    # Errors that stop a process, such as Ctrl-C, are not caused by a layout.
    except Exception as error:
        return None, error


def _key(layout: Layout) -> str:
    return f"{layout} {layout.mesh.devices.tolist()}"


def _structs(
    arrays: Sequence[Any], shapes: Iterable[Any], specs: Sequence[Any], mesh: Mesh
) -> list[Any]:
    """The types of sharded arrays of these dtypes."""
    # On Explicit axes the sharding of an argument is part of its type.
    parts = zip(arrays, shapes, specs, strict=True)
    return [
        jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))
        for x, shape, spec in parts
    ]


def _devices_are(mesh: Mesh) -> AbstractContextManager[Any]:
    """Lets `jax.device_count()` and its like answer for a mesh.

    On one device of eight, `jax.device_count()` would return eight. A program that wrongly divides
    by it would be wrong by the same factor in all layouts.
    """
    local = sum(x.process_index == jax.process_index() for x in mesh.devices.flat)
    # The user's code calls the functions of `jax`, so they are patched.
    return mock.patch.multiple(
        jax,
        device_count=lambda *_, **__: mesh.devices.size,
        local_device_count=lambda *_, **__: local,
    )


def _indices_of(position: Position) -> AbstractContextManager[Any]:
    """Lets `jax.lax.axis_index` return the index of a position in a larger mesh."""
    original = lax.axis_index

    def axis_index(axis_name: Any) -> Any:
        names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
        # The original is 0 on one device, and its type varies along the axis.
        return original(names) + _axis_index(position, names)

    return mock.patch.object(lax, "axis_index", axis_index) if position else nullcontext()


def _axis_index(position: Position, axes: Axes) -> Any:
    """The index along several axes as `jax.lax.axis_index` counts it: the last axis is fastest."""
    number = 0
    for axis in axes:
        index, size = position[axis]
        number = number * size + index
    return number


def subsets(axes: Sequence[str]) -> list[Axes]:
    """All subsets of axes, the smallest first."""
    return [s for n in range(len(axes) + 1) for s in combinations(axes, n)]
