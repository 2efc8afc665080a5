"""Lists the layouts in which a computation must give the same numbers.

Each layout differs from the plan in one respect. All combinations would compile for minutes, and a
wrong result would not show its cause.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves

from treeshard._core.make_mesh import make_mesh, with_devices
from treeshard._core.mesh import MeshLike, describe_mesh
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec, specs_of_leaves
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import default_batch
from treeshard._planning.wrong_arguments import check_plan
from treeshard.errors import SpecError, did_you_mean


@dataclass(frozen=True)
class Layout:
    """One way to distribute a computation over devices, which must not change its result.

    Attributes:
        name: The name in tables.
        plan: How the parameters, or the state, are sharded.
        batch_specs: The specs of the batch.
        minibatches: How many minibatches run one after another.
        remat: Whether the forward pass is computed again for the backward pass.
        check_vma: If `None`, `jax.jit` compiles the loss. Otherwise the code by hand runs in
            `jax.shard_map`, with this argument.
        second: The layout of the second of two steps, on the restored state of the first.
        one_pass: Whether `accumulate_gradients` takes the batch in one pass.
    """

    name: str
    plan: Plan
    batch_specs: SpecTree
    minibatches: int = 1
    remat: bool = False
    check_vma: bool | None = None
    second: "Layout | None" = None
    one_pass: bool = False

    def __str__(self) -> str:
        parts = [f"{self.name}: {describe_mesh(self.plan.mesh)}", f"batch {self.batch_specs}"]
        if self.minibatches > 1:
            parts.append(f"{self.minibatches} minibatches")
        if self.remat:
            parts.append("jax.checkpoint")
        if self.check_vma is not None:
            parts.append(f"check_vma={self.check_vma}")
        if self.second is not None:
            parts.append(f"step 2 restored on {describe_mesh(self.second.plan.mesh)}")
        if self.one_pass:
            parts.append("accumulate_gradients in one pass")
        return "; ".join(parts)

    @property
    def mesh(self) -> Mesh:
        return with_devices(self.plan.mesh, "a layout")

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes with more than one device."""
        return tuple(axis for axis, size in self.mesh.shape.items() if size > 1)

    def on(self, devices: list[Any], sizes: tuple[int, ...], name: str) -> "Layout":
        """The layout on the first devices, with other axis sizes."""
        chosen = np.reshape(devices[: math.prod(sizes)], sizes)
        mesh = Mesh(chosen, self.mesh.axis_names, axis_types=self.mesh.axis_types)
        return replace(self, name=name, plan=replace(self.plan, mesh=mesh))

    def alone(self, minibatches: int = 1) -> "Layout":
        """The layout on one device of this process, under `jax.jit`, with the same axes."""
        mine = [d for d in self.mesh.devices.flat if d.process_index == jax.process_index()]
        alone = self.on(mine, (1,) * self.mesh.devices.ndim, "one device")
        return replace(alone, minibatches=minibatches, remat=False, check_vma=None, second=None)


def layouts(
    plan: Plan, batch: PyTree, batch_specs: SpecTree = None, *, by_hand: bool = False
) -> tuple[Layout, ...]:
    """Returns the layouts that `check_gradients` compares with one device.

    The layouts are `plan`, as planned; `mesh`, other axis sizes; `axes`, the axes and devices in
    another order; `batch`, the batch split over fewer axes; `minibatches`, in two minibatches; and
    `remat`, with `jax.checkpoint`. A body by hand adds `by hand` (`check_vma=True`), `unchecked`
    (`check_vma=False`), `unchecked mesh` and `unchecked axes`. A layout in which a leaf or the
    batch does not divide is left out.

    Args:
        plan: The plan of the parameters.
        batch: The batch, or its `jax.ShapeDtypeStruct`s.
        batch_specs: The specs of the batch, by default as in `jit_step`.
        by_hand: Whether there is a body by hand.

    Returns:
        The layouts: a test may select some of them by their attributes.

    Raises:
        ArgumentError: If `plan` is not a plan.
        MeshError: If the plan was made for an abstract mesh.
        SpecError: If the specs do not fit the batch; with `by_hand`, if they do not split it.

    Examples:
        >>> planned = plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], make_mesh("data=2,fsdp=4"))
        >>> batch = jax.ShapeDtypeStruct((16, 8), "float32")
        >>> for layout in layouts(planned, batch)[:3]:
        ...     print(layout)
        plan: data=2, fsdp=4; batch P(('data', 'fsdp'),)
        mesh: data=4, fsdp=2; batch P(('data', 'fsdp'),)
        axes: fsdp=4, data=2; batch P(('data', 'fsdp'),)
    """
    check_plan(plan, "layouts(plan(params, rules, mesh), batch)")
    batch_specs = default_batch(plan) if batch_specs is None else batch_specs
    split = get_names_from_partition_spec(batch_specs)
    if by_hand and not split:
        raise SpecError(
            "check_gradients: the batch is not split, and the plan does not imply how."
            " Pass the specs that `shard_map` splits it by: `batch_specs=P('data')`."
        )
    planned = Layout("plan", plan, batch_specs)
    meshes = [*_resize_axes(planned, batch), _reverse_axes(planned)]
    chosen = [planned, *meshes]
    if split:
        # Devices along the other axes compute the same rows, which must not change the result.
        fewer = PartitionSpec(split[0]) if len(split) > 1 else PartitionSpec()
        chosen.append(replace(planned, name="batch", batch_specs=fewer))
    chosen.append(replace(planned, name="minibatches", minibatches=2))
    chosen.append(replace(planned, name="remat", remat=True))
    if by_hand:
        # `check_vma` decides how JAX transposes collectives: with it, JAX sums the gradient of a
        # replicated leaf, and without it, the code has to reduce the gradient.
        chosen.append(replace(planned, name="by hand", check_vma=True))
        chosen.append(replace(planned, name="unchecked", check_vma=False))
        chosen += [replace(x, name=f"unchecked {x.name}", check_vma=False) for x in meshes]
    return tuple(chosen)


def select_layouts(
    what: str, available: Sequence[Layout], chosen: Sequence[Layout | str] | None
) -> list[Layout]:
    """The layouts that a caller chose, by name or as layouts; by default all."""
    if not chosen:
        return list(available)
    by_name = {layout.name: layout for layout in available}
    names = [x for x in chosen if isinstance(x, str)]
    if unknown := [name for name in names if name not in by_name]:
        hints = [f"{name!r}.{did_you_mean(name, by_name)}" for name in unknown]
        raise SpecError(
            f"{what}: there is no layout {' '.join(hints)} There are {', '.join(by_name)}. A layout"
            " in which a leaf or the batch does not divide is left out."
        )
    return [by_name[x] if isinstance(x, str) else x for x in chosen]


def make_restored_layout(planned: Layout, mesh: MeshLike) -> Layout:
    """The plan's layout for one step, and another mesh for the next step."""
    with_all = make_mesh(mesh) if isinstance(mesh, str) else mesh
    second = replace(planned, name="restored", plan=planned.plan.on(with_all))
    return replace(planned, name="restored", second=second)


def _reverse_axes(planned: Layout) -> Layout:
    """The axes and the devices in reverse order, to find code that assumes their order."""
    mesh = planned.mesh
    devices = np.reshape([*mesh.devices.flat][::-1], mesh.devices.shape[::-1])
    backwards = Mesh(devices, mesh.axis_names[::-1], axis_types=mesh.axis_types[::-1])
    return replace(planned, name="axes", plan=replace(planned.plan, mesh=backwards))


def _resize_axes(planned: Layout, batch: PyTree) -> list[Layout]:
    """A layout with other axis sizes, as few of them 1 as possible; empty if no sizes divide."""
    # The devices stay the same, because each process must have some of them.
    devices, sizes = [*planned.mesh.devices.flat], planned.mesh.devices.shape
    count = len(devices)
    if len(sizes) == 1 and jax.process_count() == 1:  # a single axis has one size only
        count //= 2
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    shapes = [x for x in product(divisors, repeat=len(sizes)) if math.prod(x) == count > 1]
    # An axis of size 1 does not split anything, so it shows no error.
    shapes.sort(key=lambda shape: (shape.count(1), shape))
    others = (planned.on(devices, shape, "mesh") for shape in shapes if shape != sizes)
    # Each layout costs a compilation, and all would find the same errors: one is enough.
    return list(islice((layout for layout in others if _divides(layout, batch)), 1))


def _divides(layout: Layout, batch: PyTree) -> bool:
    """Whether all leaves and the batch can be split evenly."""
    specs = specs_of_leaves(layout.batch_specs, batch, "batch specs")
    pairs = [(leaf.shape, leaf.given) for leaf in layout.plan.leaves]
    for x, spec in zip(tree_leaves(batch), specs, strict=True):
        if spec is not None and getattr(x, "shape", ()):
            pairs.append((x.shape, spec))
    try:
        for shape, spec in pairs:
            NamedSharding(layout.mesh, spec).shard_shape(shape)
    except ValueError:
        return False
    return True
