"""The layouts in which a computation must give the same numbers, and how it runs in each."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import axis_sizes, describe_mesh
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard._core.processes import is_spread
from treeshard._core.spec_trees import SpecTree, specs_of_leaves
from treeshard._core.specs import axes_of, entries
from treeshard._placement.gather import gather
from treeshard._placement.shard import shard
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, default_batch, row_axes
from treeshard.errors import SpecError, StateError
from treeshard.manual import gather_params
from treeshard.training._gradients import accumulate_gradients
from treeshard.training._pitfalls import user_line
from treeshard.training._step import Step

# The values of a leaf: of each device, the index of its shard, and the shard itself.
Shards = dict[Any, tuple[tuple[slice, ...], np.ndarray]]


@dataclass(frozen=True)
class Layout:
    """One way to spread a computation over devices, which must not change its result.

    Attributes:
        name: A word for tables.
        plan: How the parameters, or the state, are sharded.
        batch_specs: The specs of the batch.
        minibatches: How many minibatches run one after another.
        remat: Whether the forward pass is computed again for the backward pass.
        check_vma: `None`: `jax.jit` compiles the loss. Otherwise the body runs by hand in
            `jax.shard_map`, with this argument.
    """

    name: str
    plan: Plan
    batch_specs: SpecTree
    minibatches: int = 1
    remat: bool = False
    check_vma: bool | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {describe_mesh(self.plan.mesh)}; batch {self.batch_specs}"
        text += f"; {self.minibatches} minibatches" * (self.minibatches > 1)
        text += "; jax.checkpoint" * self.remat
        return text if self.check_vma is None else f"{text}; check_vma={self.check_vma}"

    @property
    def mesh(self) -> Mesh:
        return with_devices(self.plan.mesh, "a layout")

    def device(self) -> "Layout":
        """One device of this process, as a mesh of the same axes, and the loss by jit."""
        mine = (d for d in self.mesh.devices.flat if d.process_index == jax.process_index())
        mesh = _mesh_like(self.mesh, [next(mine)], (1,) * self.mesh.devices.ndim)
        return Layout("one device", replace(self.plan, mesh=mesh), self.batch_specs)


def layouts(
    plan: Plan, batch: PyTree, batch_specs: SpecTree = None, *, by_hand: bool = False
) -> tuple[Layout, ...]:
    """Returns the layouts that `check_gradients` compares with one device.

    They are: `plan`, as planned; `mesh`, other axis sizes; `axes`, the axes and devices in another
    order; `batch`, the batch split over fewer axes; `minibatches`, in two minibatches; and
    `remat`, with `jax.checkpoint`. With a body by hand also `by hand` (`check_vma=True`),
    `unchecked` (`check_vma=False`), `unchecked mesh` and `unchecked axes`. A layout in which a
    leaf or the batch does not divide is left out.

    Args:
        plan: The plan of the parameters.
        batch: The batch, or its `jax.ShapeDtypeStruct`s.
        batch_specs: The specs of the batch, by default as in `jit_step`.
        by_hand: Whether there is a body by hand.

    Returns:
        The layouts: a test may select some of them by their attributes.

    Raises:
        MeshError: If the plan was made for an abstract mesh.
        SpecError: If the specs do not fit the batch; if it is not split, and `by_hand`.

    Examples:
        >>> planned = plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], make_mesh("data=2,fsdp=4"))
        >>> for layout in layouts(planned, np.ones((16, 8), "float32"))[:3]:
        ...     print(layout)
        plan: data=2, fsdp=4; batch P('data',)
        mesh: data=4, fsdp=2; batch P('data',)
        axes: fsdp=4, data=2; batch P('data',)
    """
    batch_specs = default_batch(plan) if batch_specs is None else batch_specs
    split = split_axes(batch, batch_specs)
    if by_hand and not split:
        raise SpecError(
            "check_gradients: the batch is not split, and the plan does not imply how."
            " Pass the specs that `shard_map` splits it by: `batch_specs=P('data')`."
        )
    planned = Layout("plan", plan, batch_specs)
    mesh = planned.mesh
    devices = list(mesh.devices.flat)
    backwards = Mesh(
        np.array(devices[::-1]).reshape(mesh.devices.shape[::-1]),
        mesh.axis_names[::-1],
        axis_types=mesh.axis_types[::-1],
    )
    other = next((x for x in _other_sizes(planned) if _divides(x, batch)), None)
    axes = replace(planned, name="axes", plan=replace(plan, mesh=backwards))
    fewer = PartitionSpec(split[0]) if len(split) > 1 else PartitionSpec()
    by_jit = [
        planned,
        *([other] if other else []),
        axes,
        *([replace(planned, name="batch", batch_specs=fewer)] if split else []),
        replace(planned, name="minibatches", minibatches=2),
        replace(planned, name="remat", remat=True),
    ]
    if not by_hand:
        return tuple(by_jit)
    manual = [
        replace(planned, name="by hand", check_vma=True),
        replace(planned, name="unchecked", check_vma=False),
        *([replace(other, name="unchecked mesh", check_vma=False)] if other else []),
        replace(axes, name="unchecked axes", check_vma=False),
    ]
    return tuple(by_jit + manual)


def split_axes(batch: PyTree, batch_specs: SpecTree) -> list[str]:
    """The axes that split some leaf of the batch, in the order of its specs."""
    specs = specs_of_leaves(batch_specs, batch, "batch specs")
    names = [
        axis
        for x, spec in zip(tree_leaves(batch), specs, strict=True)
        if spec is not None and getattr(x, "shape", ())
        for entry in entries(spec)
        for axis in axes_of(entry)
    ]
    return list(dict.fromkeys(names))


def _mesh_like(mesh: Mesh, devices: Sequence[Any], sizes: tuple[int, ...]) -> Mesh:
    return Mesh(np.array(devices).reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)


def _other_sizes(layout: Layout) -> Iterator[Layout]:
    """The layout with other axis sizes, those with no axis of size 1 first."""
    mesh = layout.mesh
    devices, rank = list(mesh.devices.flat), mesh.devices.ndim
    count = len(devices) if rank > 1 or jax.process_count() > 1 else len(devices) // 2
    candidates = [x for x in _factors(count, rank) if x != mesh.devices.shape and count > 1]
    for sizes in sorted(candidates, key=lambda sizes: (sizes.count(1), sizes)):
        other = replace(layout.plan, mesh=_mesh_like(mesh, devices[:count], sizes))
        yield replace(layout, name="mesh", plan=other)


def _factors(count: int, rank: int) -> list[tuple[int, ...]]:
    if rank == 1:
        return [(count,)]
    firsts = [n for n in range(1, count + 1) if count % n == 0]
    return [(first, *rest) for first in firsts for rest in _factors(count // first, rank - 1)]


def _divides(layout: Layout, batch: PyTree) -> bool:
    """Whether all leaves and the batch can be split evenly."""
    sizes = axis_sizes(layout.mesh)
    specs = specs_of_leaves(layout.batch_specs, batch, "batch specs")
    pairs = [(leaf.shape, leaf.given) for leaf in layout.plan.leaves]
    pairs += [(getattr(x, "shape", ()), s) for x, s in zip(tree_leaves(batch), specs, strict=True)]
    return all(
        length % math.prod(sizes[axis] for axis in axes_of(entry)) == 0
        for shape, spec in pairs
        if spec is not None
        for length, entry in zip(shape, entries(spec), strict=False)
    )


# ------------------------------------------------------------------ what runs


class Computation:
    """A computation that runs in any layout, from values on the host.

    Attributes:
        paths: The names of its results.
        specs: Their specs, in words.
        start: What its differentiated or updated leaves are before it runs.
        batch: The leaves of the batch, on the host.
        bases: The leaf of `start` that each result is a change of, by index; `None` for a value.
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
        self.notes: dict[tuple[str, int], tuple[str, str]] = {}
        self.paths: list[str] = []
        self.specs: list[PartitionSpec] = []
        self.bases: list[int | None] = []
        self._compiled: dict[str, Any] = {}  # by layout

    def run(
        self, layout: Layout, start: list[Any] | None = None, batch: list[Any] | None = None
    ) -> list[Shards]:
        """The results in a layout, of this process's devices."""
        raise NotImplementedError

    def trace(self, layout: Layout) -> Any:
        """The jaxpr of the computation in a layout."""
        raise NotImplementedError

    def structs(self) -> tuple[list[Any], list[Any]]:
        """The forms of the leaves before it runs, and of the batch."""
        start, batch = (
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs] for xs in (self.start, self.batch)
        )
        return start, batch

    def row_dims(self, layout: Layout) -> dict[int, int]:
        """The dim that is the rows of each array of the batch that has one: the first split one."""
        dims: dict[int, int] = {}
        for i, (x, spec) in enumerate(zip(self.batch, self.batch_specs(layout), strict=True)):
            split = [dim for dim, entry in enumerate(entries(spec)) if axes_of(entry)]
            if getattr(x, "ndim", 0) and not is_key(x):
                dims[i] = split[0] if split else 0
        lengths = [self.batch[i].shape[dim] for i, dim in dims.items()]
        rows = max(set(lengths), key=lengths.count, default=0)
        return {i: dim for i, dim in dims.items() if self.batch[i].shape[dim] == rows > 1}

    def batch_specs(self, layout: Layout) -> list[Any]:
        """The spec of each array of the batch; a scalar has no dim to split."""
        tree = self.batch_split.combine(self.batch)
        specs = specs_of_leaves(layout.batch_specs, tree, "batch specs")
        return [
            PartitionSpec() if spec is None or not getattr(x, "ndim", 0) else spec
            for x, spec in zip(self.batch, self.batch_split.dynamic(specs), strict=True)
        ]

    def _place(self, layout: Layout, start: Any, batch: Any) -> tuple[list[Any], list[Any]]:
        given = [leaf.given for leaf in layout.plan.leaves]
        start = self.start if start is None else start
        batch = self.batch if batch is None else batch
        pairs = [(start, given), (batch, self.batch_specs(layout))]
        here, there = [shard(x, specs, layout.mesh, check="form") for x, specs in pairs]
        return here, there


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
        self.bases = [None] * len(self.paths)

    def run(
        self, layout: Layout, start: list[Any] | None = None, batch: list[Any] | None = None
    ) -> list[Shards]:
        with jax.set_mesh(layout.mesh):
            out = self._function(layout)(*self._place(layout, start, batch))
        return [_shards(x) for x in out]

    def _function(self, layout: Layout) -> Any:
        key = _key(layout)
        if key not in self._compiled:
            by_jit = layout.check_vma is None
            in_force = PlanInForce(
                layout.plan, row_axes(layout.batch_specs), None if by_jit else gather_params
            )
            run = in_force.inside(self._by_jit(layout) if by_jit else self._by_hand(layout))
            shardings = [NamedSharding(layout.mesh, spec) for spec in self.specs]
            self._compiled[key] = jax.jit(run, out_shardings=shardings if by_jit else None)
        return self._compiled[key]

    def value(self, arrays: list[Any], data: list[Any]) -> Any:
        out = self.loss(self.split.combine(arrays), self.batch_split.combine(data))
        return out[0] if isinstance(out, tuple) else out

    def _by_jit(self, layout: Layout) -> Callable[..., list[Any]]:
        """The value and the gradients of the loss, as one list."""

        def grads_of(arrays: list[Any], data: list[Any]) -> list[Any]:
            def value(differentiated: list[Any]) -> Any:
                return self.value(self._filled(arrays, differentiated), data)

            value = jax.checkpoint(value) if layout.remat else value
            start = [arrays[i] for i in self.differentiated]
            loss, grads = jax.value_and_grad(value)(start)
            return [loss, *grads]

        if layout.minibatches == 1:
            return grads_of
        rows = self.row_dims(layout)

        def accumulated(arrays: list[Any], data: list[Any]) -> list[Any]:
            def of_part(part: list[Any], _: None) -> Any:
                full = list(data)
                for (i, dim), x in zip(rows.items(), part, strict=True):
                    full[i] = jnp.moveaxis(x, 0, dim)
                return grads_of(arrays, full), ()

            part = [jnp.moveaxis(data[i], dim, 0) for i, dim in rows.items()]
            return accumulate_gradients(of_part, part, layout.minibatches)[0]

        return accumulated

    def _by_hand(self, layout: Layout) -> Callable[..., list[Any]]:
        specs = [leaf.given for leaf in layout.plan.leaves]

        def body(arrays: list[Any], data: list[Any]) -> list[Any]:
            out = self.by_hand(self.split.combine(arrays), self.batch_split.combine(data))
            value, grads = self._value_and_grads(out)
            checked = [
                self._fitting(layout, n + 1, g, arrays[i])
                for n, (i, g) in enumerate(zip(self.differentiated, grads, strict=True))
            ]
            return [value, *checked]

        return jax.shard_map(
            body,
            mesh=layout.mesh,
            in_specs=(specs, self.batch_specs(layout)),
            out_specs=self.specs,
            check_vma=bool(layout.check_vma),
        )

    def _value_and_grads(self, out: Any) -> tuple[Any, list[Any]]:
        try:
            value, grads = out
            at_leaves = self.split.treedef.flatten_up_to(grads)
        except (TypeError, ValueError) as error:
            raise StateError(
                "check_gradients: by_hand must return (loss, grads), as `manual.value_and_grad`"
                f" does, with grads in the structure of params: {error}"
            ) from None
        arrays = self.split.dynamic(at_leaves)
        value = value[0] if isinstance(value, tuple) else value
        return value, [arrays[i] for i in self.differentiated]

    def _fitting(self, layout: Layout, index: int, grad: Any, shard: Any) -> Any:
        """The gradient, or zeros and a note if it is absent or has another shape than its shard."""
        key = (layout.name, index)
        if not is_array(grad):
            self.notes[key] = "by_hand returns no gradient for it.", "Return one for every leaf."
        elif grad.shape != shard.shape:
            self.notes[key] = (
                f"each device has a gradient of {array_text(grad)}, and its shard is"
                f" {array_text(shard)}.",
                "Scatter it: `jax.lax.psum_scatter`, or `manual.value_and_grad`.",
            )
        else:
            return grad
        return shard * 0

    def _filled(self, arrays: list[Any], differentiated: Sequence[Any]) -> list[Any]:
        filled = list(arrays)
        for i, x in zip(self.differentiated, differentiated, strict=True):
            filled[i] = x
        return filled

    def trace(self, layout: Layout) -> Any:
        with jax.set_mesh(layout.mesh):
            return self._function(layout).trace(*self.structs()).jaxpr


class Steps(Computation):
    """Two steps in a row: how each changes the state, and what else it returns."""

    def __init__(self, step: Step, state: PyTree, batch: PyTree) -> None:
        super().__init__(state, batch, step.plan)
        self.step = step

    def run(
        self, layout: Layout, start: list[Any] | None = None, batch: list[Any] | None = None
    ) -> list[Shards]:
        arrays, data = self._place(layout, start, batch)
        step = self._step(layout)
        before = [_shards(x) for x in arrays]
        out: list[Shards] = []
        state, paths, specs, bases = self.split.combine(arrays), [], [], []
        for count in (1, 2):
            state, aux = step(state, self.batch_split.combine(data))
            # The next step may reuse the memory.
            after = [_shards(x) for x in self.split.dynamic(tree_leaves(state))]
            out += [_change(old, new) for old, new in zip(before, after, strict=True)]
            before = after
            paths += [f"step {count}: {leaf.path}" for leaf in layout.plan.leaves]
            specs += [leaf.given for leaf in layout.plan.leaves]
            bases += range(len(after))
            leaves = zip(leaf_paths(aux), tree_leaves(aux), strict=True)
            for path, x in ((p, x) for p, x in leaves if is_array(x)):
                out.append(_shards(x))
                paths.append(f"step {count}: {path_under('aux', path)}")
                specs.append(PartitionSpec())
                bases.append(None)
        self.paths, self.specs, self.bases = paths, specs, bases
        return out

    def trace(self, layout: Layout) -> Any:
        step = self._step(layout)

        def run(arrays: list[Any], data: list[Any]) -> Any:
            state, aux = step(self.split.combine(arrays), self.batch_split.combine(data))
            return self.split.dynamic(tree_leaves(state)), [
                x for x in tree_leaves(aux) if is_array(x)
            ]

        return jax.make_jaxpr(run)(*self.structs())

    def _step(self, layout: Layout) -> Step:
        key = _key(layout)
        if key not in self._compiled:
            self._compiled[key] = self.step.on(layout.plan, layout.batch_specs)
        return self._compiled[key]


def _host(x: Any) -> Any:
    return gather(x) if is_spread(x) else to_host(x)


def _key(layout: Layout) -> str:
    return f"{layout} {layout.mesh.devices.tolist()}"


def _shards(x: Any) -> Shards:
    """A copy of the shards of each device of this process."""
    return {s.device: (s.index, np.array(s.data)) for s in data_of(x).addressable_shards}


def _change(old: Shards, new: Shards) -> Shards:
    """How much each number changed; of integers and keys, what they are now."""
    return {
        device: (index, np.asarray(x.astype("float64") - old[device][1].astype("float64")))
        if jnp.issubdtype(x.dtype, jnp.floating)
        else (index, x)
        for device, (index, x) in new.items()
    }


def line_of(jaxpr: Any, index: int) -> str:
    """The line of code that made a result of a traced program, as `file:line`, or `""`."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if index >= len(jaxpr.outvars):  # of the second step: the code is the same
        return ""
    for eqn in jaxpr.eqns:
        position = next((i for i, x in enumerate(eqn.outvars) if x is jaxpr.outvars[index]), None)
        if position is not None:
            params = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
            inner = [x for x in params if len(getattr(x, "outvars", ())) == len(eqn.outvars)]
            line = line_of(inner[0], position) if len(inner) == 1 else ""
            return line or user_line(eqn).removeprefix(f"{os.getcwd()}/")
    return ""
