"""How a computation runs in a layout: the gradients of a loss, and two steps in a row.

Results are read shard by shard from every device. `np.asarray` of an array would read one replica
of each shard, and so miss those that differ where JAX was told that they are the same.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import (
    StaticSplit,
    array_text,
    data_of,
    has_gradient,
    has_shape,
    is_array,
    is_key,
    to_host,
)
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.processes import is_spread
from treeshard._core.spec_trees import get_names_from_partition_spec, specs_of_leaves
from treeshard._core.specs import axes_of, entries
from treeshard._placement.gather import gather
from treeshard._placement.shard import shard
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, row_axes
from treeshard.errors import SpecError, StateError
from treeshard.manual import gather_params
from treeshard.testing._layouts import Layout
from treeshard.testing._report import Cause
from treeshard.training._accumulation import accumulate_gradients
from treeshard.training._pitfalls import explaining_types, user_line
from treeshard.training._step import Step

# The values of a result: of each device, the index of its shard, and the shard itself.
Shards = dict[Any, tuple[tuple[slice, ...], np.ndarray]]


_ABSENT = Cause("by_hand returns no gradient for it.", "Return one for every leaf.", "absent")
_OTHER_SHAPE = "each device has a gradient of {grad}, and its shard is {shard}."


class Computation:
    """A computation that runs in any layout, from values on the host.

    Attributes:
        paths: The names of its results.
        specs: Their specs.
        start: What its differentiated or updated leaves are before it runs.
        batch: The leaves of the batch, on the host.
        first: How many of its results do not follow from other ones.
        bases: The leaf of `start` that a result is a change of: both by index.
        notes: What was seen while a result was traced, by layout name and index of the result.
    """

    def __init__(self, tree: PyTree, batch: PyTree, plan: Plan) -> None:
        leaves, treedef = tree_flatten(tree)
        self.plan = plan
        self.split = StaticSplit(leaves, treedef, has_shape)
        self.start = [_host(x) for x in self.split.dynamic(leaves)]
        if [np.shape(data_of(x)) for x in self.start] != [leaf.shape for leaf in plan.leaves]:
            plan_paths = [leaf.path for leaf in plan.leaves]
            raise SpecError(
                "the plan is not one of this tree: it has"
                f" {', '.join(plan_paths[:5])}, and the tree has {', '.join(leaf_paths(tree)[:5])}."
            )
        data, batch_def = tree_flatten(batch)
        self.batch_split = StaticSplit(data, batch_def, has_shape)
        self.batch = [_host(x) for x in self.batch_split.dynamic(data)]
        self.notes: dict[tuple[str, int], Cause] = {}
        self.paths: list[str] = []
        self.specs: list[PartitionSpec] = []
        self.bases: dict[int, int] = {}
        self.first = 0
        self._functions: dict[str, Any] = {}  # by layout

    def is_by_hand(self, layout: Layout) -> bool:
        """Whether code by hand reduces the results of a layout, and not the compiler."""
        raise NotImplementedError

    def batch_axes(self, layout: Layout) -> tuple[str, ...]:
        """The axes of a layout's mesh that split the batch."""
        split = get_names_from_partition_spec(self.batch_specs(layout))
        return tuple(axis for axis, n in layout.mesh.shape.items() if n > 1 and axis in split)

    def run(
        self, layout: Layout, start: list[Any] | None = None, batch: list[Any] | None = None
    ) -> list[Shards]:
        """The results in a layout."""
        given = [leaf.given for leaf in layout.plan.leaves]
        start = self.start if start is None else start
        batch = self.batch if batch is None else batch
        pairs = [(start, given), (batch, self.batch_specs(layout))]
        arrays, data = [shard(x, specs, layout.mesh, check="form") for x, specs in pairs]
        return self._results(layout, arrays, data)

    def trace(self, layout: Layout) -> Any:
        """The jaxpr of the computation in a layout."""
        with jax.set_mesh(layout.mesh):
            return jax.make_jaxpr(partial(self._call, layout))(self.start, self.batch)

    def _results(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Shards]:
        return _shards(self._on_mesh(layout, arrays, data))

    def _on_mesh(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Any]:
        # Constraints with a bare `PartitionSpec` need a mesh, and `_shards` must be without: in it,
        # JAX computes nothing from the shard of one device.
        in_force = PlanInForce(layout.plan, row_axes(layout.batch_specs))
        with jax.set_mesh(layout.mesh), explaining_types(layout.mesh, in_force):
            return self._call(layout, arrays, data)

    def _call(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Any]:
        """The results as arrays; traced too."""
        raise NotImplementedError

    def _function(self, layout: Layout, make: Callable[[Layout], Any]) -> Any:
        """What runs in a layout, made once."""
        key = f"{layout} {layout.mesh.devices.tolist()}"
        if key not in self._functions:
            self._functions[key] = make(layout)
        return self._functions[key]

    def alone(
        self, layout: Layout, start: list[Any] | None = None, batch: list[Any] | None = None
    ) -> list[np.ndarray]:
        """The results in a layout of one device."""
        return [x for shards in self.run(layout, start, batch) for _, x in shards.values()]

    def row_dims(self, layout: Layout) -> dict[int, int]:
        """The dim that is the rows of each array of the batch that has one: the first split one."""
        dims: dict[int, int] = {}
        for i, (x, spec) in enumerate(zip(self.batch, self.batch_specs(layout), strict=True)):
            if getattr(x, "ndim", 0) and not is_key(x):
                split = (dim for dim, entry in enumerate(entries(spec)) if axes_of(entry))
                dims[i] = next(split, 0)
        counts = Counter(self.batch[i].shape[dim] for i, dim in dims.items())
        # Arrays of another length, such as one number of each class, have no rows.
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
        self.paths = ["loss", *(plan.leaves[i].path for i in self.differentiated)]
        self.specs = [PartitionSpec(), *(plan.leaves[i].given for i in self.differentiated)]
        self.first = len(self.paths)

    def is_by_hand(self, layout: Layout) -> bool:
        return layout.check_vma is not None

    def _call(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Any]:
        return self._function(layout, self._make)(arrays, data)

    def _make(self, layout: Layout) -> Any:
        by_jit = layout.check_vma is None
        rows = row_axes(layout.batch_specs)
        in_force = PlanInForce(layout.plan, rows, None if by_jit else gather_params)
        run = in_force.inside(self._by_jit(layout) if by_jit else self._by_hand(layout))
        # By hand `out_specs` say how results are sharded. Under `jit` the compiler would decide.
        shardings = [NamedSharding(layout.mesh, spec) for spec in self.specs]
        return jax.jit(run, out_shardings=shardings if by_jit else None)

    def _by_jit(self, layout: Layout) -> Callable[..., list[Any]]:
        """The value and the gradients of the loss, as one list."""

        def grads_of(arrays: list[Any], data: list[Any]) -> list[Any]:
            def value(differentiated: list[Any]) -> Any:
                params = dict(enumerate(arrays))
                params |= zip(self.differentiated, differentiated, strict=True)
                tree = self.split.combine(list(params.values()))
                return _first(self.loss(tree, self.batch_split.combine(data)))

            value = jax.checkpoint(value) if layout.remat else value
            loss, grads = jax.value_and_grad(value)([arrays[i] for i in self.differentiated])
            return [loss, *grads]

        if layout.minibatches == 1:
            return grads_of
        dims = self.row_dims(layout)

        def accumulated(arrays: list[Any], data: list[Any]) -> list[Any]:
            def of_part(part: dict[int, Any], _: None) -> Any:
                full = dict(enumerate(data))
                full |= {i: jnp.moveaxis(x, 0, dims[i]) for i, x in part.items()}
                return grads_of(arrays, list(full.values())), ()

            rows = {i: jnp.moveaxis(data[i], dim, 0) for i, dim in dims.items()}
            return accumulate_gradients(of_part, rows, layout.minibatches)[0]

        return accumulated

    def _by_hand(self, layout: Layout) -> Callable[..., list[Any]]:
        specs = [leaf.given for leaf in layout.plan.leaves]

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
            fitting = [
                self._fitting((layout.name, n), grads[i], arrays[i])
                for n, i in enumerate(self.differentiated, 1)
            ]
            return [_first(value), *fitting]

        return jax.shard_map(
            body,
            mesh=layout.mesh,
            in_specs=(specs, self.batch_specs(layout)),
            out_specs=self.specs,
            check_vma=bool(layout.check_vma),
        )

    def _fitting(self, key: tuple[str, int], grad: Any, shard: Any) -> Any:
        """The gradient, or zeros and a note if it is absent or has another shape than its shard."""
        if not is_array(grad):
            self.notes[key] = _ABSENT
        elif grad.shape == shard.shape:
            return grad
        else:
            fact = _OTHER_SHAPE.format(grad=array_text(grad), shard=array_text(shard))
            self.notes[key] = Cause(fact, "Return the gradient of the shard.", "shape")
        return shard * 0  # varies along the same axes as the shard, as `check_vma` wants


class Steps(Computation):
    """Two steps in a row: how each changes the state, and what else it returns."""

    def __init__(self, step: Step, state: PyTree, batch: PyTree) -> None:
        super().__init__(state, batch, step.plan)
        self.step = step
        self._aux: list[str] = []

    def is_by_hand(self, layout: Layout) -> bool:
        return self.step.is_by_hand

    def _results(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Shards]:
        leaves, count, out = self.plan.leaves, len(arrays), []
        before = _shards(arrays)
        for _ in (1, 2):
            results = self._on_mesh(layout, arrays, data)
            # A copy, since the step donates its state: the next one reuses the memory.
            arrays, after = results[:count], _shards(results)
            changes = [_change(old, new) for old, new in zip(before, after, strict=False)]
            out += [*changes, *after[count:]]
            before = after[:count]
        names = [*(leaf.path for leaf in leaves), *self._aux]
        # What a step returns beside its state is known when it has run.
        self.paths = [f"step {n}: {name}" for n in (1, 2) for name in names]
        self.first, others = len(names), len(self._aux)
        self.specs = [*(leaf.given for leaf in leaves), *[PartitionSpec()] * others] * 2
        self.bases = {n * self.first + i: i for n in (0, 1) for i in range(count)}
        return out

    def _call(self, layout: Layout, arrays: list[Any], data: list[Any]) -> list[Any]:
        step = self._function(layout, lambda x: self.step.on(x.plan, x.batch_specs))
        state, aux = step(self.split.combine(arrays), self.batch_split.combine(data))
        more = zip(leaf_paths(aux), tree_leaves(aux), strict=True)
        arrays_of_aux = {path_under("aux", path): x for path, x in more if is_array(x)}
        self._aux = list(arrays_of_aux)
        return [*self.split.dynamic(tree_leaves(state)), *arrays_of_aux.values()]


def _first(out: Any) -> Any:
    """The value of a loss that may return more."""
    return out[0] if isinstance(out, tuple) else out


def _host(x: Any) -> Any:
    return gather(x) if is_spread(x) else to_host(x)


def _shards(arrays: Sequence[Any]) -> list[Shards]:
    """A copy of the shard of each device, those of other processes included."""
    arrays = [data_of(x) for x in arrays]
    spread = {i: _by_device(x) for i, x in enumerate(arrays) if is_spread(x)}
    everywhere = dict(zip(spread, gather(list(spread.values())), strict=True))
    shards: list[Shards] = []
    for i, x in enumerate(arrays):
        indices = x.sharding.devices_indices_map(x.shape)
        values = {s.device: np.array(s.data) for s in x.addressable_shards}
        if i in everywhere:
            values = dict(zip(indices, everywhere[i], strict=True))
        shards.append({device: (indices[device], _real(x)) for device, x in values.items()})
    return shards


def _real(x: np.ndarray) -> np.ndarray:
    """The numbers of an array as real ones: a complex number becomes two, on a last dim."""
    return np.stack((np.real(x), np.imag(x)), -1) if np.iscomplexobj(x) else x


def _by_device(x: jax.Array) -> jax.Array:
    """The shards of an array, replicas included, stacked on dim 0."""
    # JAX takes the replicas of a shard to be equal, so a sharding in which each device has a row
    # of its own is the only way to read all of them.
    devices = list(x.sharding.devices_indices_map(x.shape))
    target = NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))
    shape = (len(devices), *x.sharding.shard_shape(x.shape))
    own = [jnp.expand_dims(s.data, 0) for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, target, own)


def _change(old: Shards, new: Shards) -> Shards:
    """How much each number changed; of integers and keys, what they are now."""
    changes: Shards = {}
    for device, (index, x) in new.items():
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = np.asarray(x.astype("float64") - old[device][1].astype("float64"))
        changes[device] = index, x
    return changes


def line_of(jaxpr: Any, index: int) -> str:
    """The line of code that made a result of a traced program, as `file:line`, or `""`."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if index >= len(jaxpr.outvars):  # of the second step: the code is the same
        return ""
    result = jaxpr.outvars[index]
    made = ((eqn, i) for eqn in jaxpr.eqns for i, x in enumerate(eqn.outvars) if x is result)
    eqn, position = next(made, (None, 0))
    if eqn is None:
        return ""
    # Equations such as `jit` and `shard_map` have a program of their own among their parameters,
    # with the same results; those of `cond` have several, and any may be the one that runs.
    params = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
    inner = [x for x in params if len(getattr(x, "outvars", ())) == len(eqn.outvars)]
    line = line_of(inner[0], position) if len(inner) == 1 else ""
    return line or user_line(eqn).removeprefix(f"{os.getcwd()}/")
