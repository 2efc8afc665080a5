"""The plan of the step that is being traced, for functions in the step that need specs.

On Auto axes, a tracer does not have a sharding, because the compiler chooses it after the trace.
Without a plan in force, users would pass specs through every layer. With it, a function finds the
specs by the structure and the shapes of its argument.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce, wraps
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import all_leaves, tree_flatten, tree_leaves, tree_map, tree_structure

from treeshard._core.arrays import has_shape
from treeshard._core.contexts import plan_in_force
from treeshard._core.jax_private import mesh_set_outside
from treeshard._core.mean_gather import GatheredFrom
from treeshard._core.mesh import (
    AnyMesh,
    axis_sizes,
    context_mesh,
    manual_axes,
    same_axes,
    still_differs,
)
from treeshard._core.origins import note_origin, origin_of
from treeshard._core.paths import PyTree, is_box_of_leaf, leaf_paths
from treeshard._core.spec_trees import SpecTree, layer_specs
from treeshard._core.specs import (
    all_axes,
    dim_entries,
    drop_axes,
    entries,
    entry_of,
    is_spec,
    trim_spec,
    with_entries,
)
from treeshard._core.text import fold_paths
from treeshard._planning.axis_names import splits_rows
from treeshard._planning.matching import PlannedLeaf, Shape, parameters
from treeshard._planning.plan import Plan
from treeshard.errors import SpecError

T = TypeVar("T")
_Specs = tuple[PartitionSpec | None, ...]


def default_batch(plan: Plan) -> PartitionSpec:
    """The default spec of a batch: dim 0 over the axes along which the plan gathers parameters, and
    the axes that split a batch by their names."""
    gathered = plan.fsdp_axes()
    split = [axis for axis in axis_sizes(plan.mesh) if axis in gathered or splits_rows(axis)]
    return PartitionSpec(entry_of(split)) if split else PartitionSpec()


def row_axes(batch: SpecTree) -> tuple[str, ...]:
    """The axes over which specs of a batch split its rows, which are dim 0."""
    specs = [x for x in tree_leaves(batch, is_leaf=is_spec) if is_spec(x)]
    on_dim_0 = [entry for spec in specs for entry in entries(spec)[:1]]
    return tuple(dict.fromkeys(all_axes(on_dim_0)))


class Received(NamedTuple):
    """The origin of an array that a step has received: a leaf of the plan of its state."""

    plan: Plan
    leaf: PlannedLeaf


class Part(NamedTuple):
    """A part of a plan that a tree may be."""

    leaves: tuple[PlannedLeaf, ...]
    # The spec of each array if the tree is this part; `None` for an array with the full shape of a
    # sharded leaf.
    specs: _Specs
    # Whether the tree is one layer of it, a slice of dim 0.
    is_layer: bool


# The result of `PlanInForce.known_spec` for an unknown array. `None` stands for an array of full
# shape.
UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class PlanInForce:
    """Answers questions of code inside a step about its plan.

    Attributes:
        plan: The plan of the state.
        rows: The axes over which the rows of the batch are split.
        is_by_hand: Whether the code runs once per device, inside `shard_map_step`.
    """

    plan: Plan
    rows: tuple[str, ...]
    is_by_hand: bool = False
    # The shapes and specs of shards whose gradients code by hand has reduced, and over which axes.
    # It only grows: JAX does not rerun code that it has traced with this plan in force.
    _reduced: dict[tuple[Shape, PartitionSpec], set[str]] = field(default_factory=dict)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The axes over which weights are gathered for use: the axes that split the batch."""
        return tuple(dict.fromkeys([*self.rows, *sorted(self.plan.fsdp_axes())]))

    # Part of the key of jit's caches. Comparing plans takes long, and repeated calls, such as
    # `value_and_grad(loss, plan)` in a loop, pass the same object. Each step by hand has its own
    # traces, because tracing also fills `_reduced`.
    def _key(self) -> tuple[Any, ...]:
        return id(self._reduced if self.is_by_hand else self.plan), self.rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanInForce) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def inside(self, fn: Callable[..., T]) -> Callable[..., T]:
        """`fn`, with this in force while it runs."""

        @wraps(fn)
        def run(*args: Any) -> T:
            with plan_in_force(self):
                return fn(*args)

        return run

    def record_received(self, arrays: Sequence[Any]) -> None:
        """Records the arrays that a step has received, as leaves of the plan."""
        for x, leaf in zip(arrays, self.plan.leaves, strict=True):
            note_origin(x, Received(self.plan, leaf))

    def record_reduced(self, x: Any, spec: PartitionSpec, axes: Iterable[str]) -> None:
        """Records that the gradient of a shard was reduced over axes of its spec."""
        self._reduced.setdefault((tuple(x.shape), trim_spec(spec)), set()).update(axes)

    def reduced_axes(self, leaf: PlannedLeaf) -> set[str]:
        """The axes of its spec over which the gradient of a leaf, or of its layers, was reduced."""
        spec, shape = trim_spec(leaf.given), self._shard_shape(leaf, leaf.given)
        of_layer = with_entries(spec, entries(spec)[1:])
        of_leaf = self._reduced.get((shape, spec), set())
        return of_leaf | self._reduced.get((shape[1:], of_layer), set())

    # -------------------------------------------------------------- the specs of a tree

    # 1. Arrays that a step has received, or that were gathered, are known by identity.
    # 2. Inside `shard_map`, an array that is equal on all devices by its type is not a shard.
    # 3. All other arrays belong to the part of the plan that has the structure and the shapes of
    #    the tree, or whose layers, stacked on dim 0, have them. Several such parts with different
    #    specs are ambiguous. Under `jit`, a wrong choice does not change values, so parameters
    #    come before optimizer state. Inside `shard_map`, it would, so ambiguity is an error.

    def specs_of(
        self, tree: PyTree, call: str = "", specs: str = "specs", *, are_gradients: bool = False
    ) -> SpecTree:
        """The specs of a tree that is a part of the plan: a prefix, with one spec for a box.

        Inside `shard_map`, shapes are shapes of shards. The spec is `None` for arrays that have
        their full shapes inside `shard_map`, and for leaves that are not arrays.

        Args:
            tree: Any pytree.
            call: How to pass a plan, for messages: `"unshard(tree, {})"`.
            specs: The specs to pass if the plan does not have the tree, for messages.
            are_gradients: Whether the tree has gradients of parameters, with `None` for leaves
                without one. Arrays that cannot be shards may then be absent from the plan.

        Raises:
            SpecError: If the plan has no such part, or several with different specs.
        """
        nodes, treedef = tree_flatten(tree, is_leaf=is_box_of_leaf)
        values = [tree_leaves(node)[0] for node in nodes]
        arrays = {i: x for i, x in enumerate(values) if has_shape(x)}
        found = {i: self.known_spec(x) for i, x in arrays.items()}
        if UNKNOWN in found.values():
            outline = treedef.unflatten([arrays.get(i) for i in range(len(values))])
            planned = self._specs_in_plan(outline, call, specs, are_gradients)
            for i, spec in zip(arrays, planned, strict=True):
                found[i] = spec if found[i] is UNKNOWN else found[i]
        return treedef.unflatten([found.get(i) for i in range(len(values))])

    def specs_of_state(self, parameters: PyTree) -> SpecTree | None:
        """The specs of the optimizer state of parameters, if they differ from the parameters'
        specs. `None` if they are equal, or the plan has several states that differ."""
        outline = tree_map(lambda x: x if has_shape(x) else None, parameters)
        parts = self._parts_like(outline, "value_and_grad", are_gradients=False)
        of_parameters = {part.specs for part in parts if self._has_parameters(part)}
        of_state = {part.specs for part in parts} - of_parameters
        if len(of_state) != 1 or len(of_parameters) != 1:
            return None
        [specs] = of_state
        return tree_structure(outline).unflatten(specs)

    # -------------------------------------------------------------- one array

    def known_spec(self, x: Any) -> Any:
        """The spec of an array by its identity or its type: `None` for the full array of a sharded
        leaf, and `UNKNOWN` if neither decides."""
        origin = origin_of(x)
        if isinstance(origin, Received) and origin.plan is self.plan:
            # Code in a `shard_map` inside the step may close over the full array.
            is_full = tuple(x.shape) != self._shape_here(origin.leaf)
            return None if is_full else trim_spec(origin.leaf.given)
        if isinstance(origin, GatheredFrom):
            return origin.rest
        may_be_shard = not self._is_once_per_device() or any(
            self._may_differ(x, axis) for axis in self._axes_by_hand()
        )
        return UNKNOWN if may_be_shard else PartitionSpec()

    def may_be_shards(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays have the shapes of shards, or of one layer of them."""
        unknown = {tuple(x.shape) for x in arrays if self.known_spec(x) is UNKNOWN}
        shapes: set[Shape] = set()
        for leaf in self.plan.leaves:
            split = dim_entries(self.part_by_hand(leaf.given), len(leaf.shape))
            here = self._shape_here(leaf)
            if any(split):
                shapes.add(here)
            if any(split[1:]) and not split[0]:
                shapes.add(here[1:])
        return not unknown.isdisjoint(shapes)

    def part_by_hand(self, spec: PartitionSpec | None) -> PartitionSpec:
        """The part of a spec that code by hand sees: its Manual axes of several devices."""
        seen = self._axes_by_hand()
        others = [axis for axis in self.plan.mesh.axis_names if axis not in seen]
        return drop_axes(spec or PartitionSpec(), others)

    def _is_once_per_device(self) -> bool:
        """Whether this code runs once per device along an axis of the plan, of any size."""
        return not manual_axes().isdisjoint(self.plan.mesh.axis_names)

    def _axes_by_hand(self) -> list[str]:
        """The axes of several devices along which this code runs once per device."""
        manual = manual_axes()
        sizes = axis_sizes(self.plan.mesh)
        return [axis for axis, size in sizes.items() if size > 1 and axis in manual]

    def _may_differ(self, x: Any, axis: str) -> bool:
        """Whether devices along an axis may have different values of `x`."""
        return isinstance(x, jax.ShapeDtypeStruct) or still_differs(x, axis)

    def _shape_here(self, leaf: PlannedLeaf) -> Shape:
        """The shape of a leaf in the traced code: inside `shard_map`, the shape of a shard."""
        return self._shard_shape(leaf, self.part_by_hand(leaf.given))

    def _shard_shape(self, leaf: PlannedLeaf, spec: PartitionSpec) -> Shape:
        return NamedSharding(self.plan.mesh, spec).shard_shape(leaf.shape)

    # -------------------------------------------------------------- the part of the plan

    def _specs_in_plan(
        self, outline: PyTree, call: str, specs: str, are_gradients: bool
    ) -> Sequence[PartitionSpec | None]:
        """The specs of the arrays of a tree, from the part of the plan that matches the tree."""
        arrays = tree_leaves(outline)
        parts = self._parts_like(outline, call.partition("(")[0], are_gradients)
        if are_gradients and not parts and not self.may_be_shards(arrays):
            return [PartitionSpec()] * len(arrays)
        by_hand = self._is_once_per_device()
        # Inside `shard_map`, a wrong part would change values, so all parts must agree. Gradients
        # always belong to parameters, and to all layers.
        if are_gradients or not by_hand:
            parts = [part for part in parts if not part.is_layer] or parts
            parts = [part for part in parts if self._has_parameters(part)] or parts
        # Only the part of specs that code by hand sees counts.
        different: dict[_Specs, Part] = {}
        for part in parts:
            seen = tuple(map(self.part_by_hand, part.specs)) if by_hand else part.specs
            different.setdefault(seen, part)
        if len(different) != 1:
            raise self._no_single_part([*different.values()], outline, call, specs)
        return parts[0].specs

    def _parts_like(self, outline: PyTree, where: str, are_gradients: bool) -> list[Part]:
        """The parts of the plan that have the structure and the shapes of a tree of arrays.

        Raises `SpecError` if all of them are stacks that are sharded along the dim of layers.
        """
        arrays = tree_leaves(outline)
        parts: list[Part] = []
        refused: list[SpecError] = []
        for place in find_subtrees(self._structure, outline, with_gaps=are_gradients):
            leaves = tuple(self.plan.leaves[i] for i in place)
            if (specs := self._specs_at(leaves, arrays, 0)) is not None:
                parts.append(Part(leaves, tuple(specs), is_layer=False))
            elif (specs := self._specs_at(leaves, arrays, 1)) is not None:
                stacked = {leaf.path: spec for leaf, spec in zip(leaves, specs, strict=True)}
                try:
                    sliced = layer_specs(stacked)
                except SpecError as error:
                    refused.append(error)
                else:
                    specs = tuple(sliced[leaf.path] for leaf in leaves)
                    parts.append(Part(leaves, specs, is_layer=True))
        if refused and not parts:
            raise SpecError(f"{where}: {refused[0]}")
        return parts

    def _specs_at(
        self, leaves: Sequence[PlannedLeaf], arrays: Sequence[Any], first: int
    ) -> list[PartitionSpec | None] | None:
        """The specs of leaves, as in `Part`; `None` if an array lacks their dims from `first`."""
        specs: list[PartitionSpec | None] = []
        for leaf, x in zip(leaves, arrays, strict=True):
            shape = tuple(x.shape)
            split = all_axes(entries(self.part_by_hand(leaf.given)))
            may_be_shard = all(self._may_differ(x, axis) for axis in split)
            if len(leaf.shape) != len(shape) + first:  # also for a scalar, which has no layers
                return None
            if self._shape_here(leaf)[first:] == shape and may_be_shard:
                specs.append(trim_spec(leaf.given))
            elif leaf.shape[first:] == shape:
                specs.append(None)
            else:
                return None
        return specs

    def _no_single_part(
        self, parts: Sequence[Part], outline: PyTree, call: str, specs: str
    ) -> SpecError:
        """The error for a tree that matches no part of the plan, or several different parts."""
        where = call.partition("(")[0]
        shapes = [str(tuple(x.shape)) for x in tree_leaves(outline)]
        of_shape = ", ".join([*shapes[:5], *(["..."] if shapes[5:] else [])])
        if not parts:
            return SpecError(
                f"{where}: the plan has no subtree of this structure with leaves of shape"
                f" {of_shape}. Pass its specs: `{call.format(specs)}`."
            )
        facts: list[str] = []
        for part in parts:
            paths = fold_paths([leaf.path for leaf in part.leaves])
            facts.append(f"{', '.join(paths[:3])} as {[leaf.given for leaf in part.leaves]}")
        below = leaf_paths(outline)[0]
        subtree = parts[0].leaves[0].path.removesuffix(below).removesuffix("/")
        return SpecError(
            f"{where}: the plan has several subtrees of this structure with leaves of shape"
            f" {of_shape}, and they are sharded differently: {'; '.join(facts)}. Pass the plan of"
            f" the one that you mean, such as `{call.format(_line(self.plan, subtree))}`."
        )

    def _has_parameters(self, part: Part) -> bool:
        return self._parameters.issuperset(leaf.path for leaf in part.leaves)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(leaf.path for leaf in parameters(self.plan.leaves))

    @cached_property
    def _structure(self) -> Any:
        """The structure of the plan's arrays, with boxes as leaves: code may remove boxes."""
        structure = self.plan.structure_of_arrays
        tree = structure.unflatten([0] * structure.num_leaves)
        return tree_structure(tree, is_leaf=is_box_of_leaf)


def _line(plan: Plan, path: str) -> str:
    """How to write the plan of a subtree: `plan["layers"][0]`."""
    keys = path.split("/") if path else []
    try:
        reduce(lambda part, key: part[key], keys, plan)
    except SpecError:  # a key contains a slash
        keys = [path]
    return "plan" + "".join(f"[{key}]" if key.isdigit() else f'["{key}"]' for key in keys)


def _nodes(treedef: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Each node of a structure, with the index of its first leaf."""
    yield start, treedef
    for child in treedef.children():
        yield from _nodes(child, start)
        start += child.num_leaves


def find_subtrees(planned: Any, tree: PyTree, *, with_gaps: bool = False) -> list[list[int]]:
    """The indices of the leaves of each subtree of a structure that is like a tree.

    If none is found and `with_gaps` is true, the tree may have `None` instead of leaves.
    """
    structure = tree_structure(tree)
    count = structure.num_leaves
    # A tree without arrays would match everywhere.
    nodes = [(start, node) for start, node in _nodes(planned) if 0 < count <= node.num_leaves]
    starts = [start for start, node in nodes if node.num_leaves == count and node == structure]
    if starts or not with_gaps:
        return [list(range(start, start + count)) for start in starts]
    in_common = [_leaves_in_common(start, node, tree) for start, node in nodes]
    return [leaves for leaves in in_common if len(leaves) == count]


def _leaves_in_common(start: int, node: Any, tree: PyTree) -> list[int]:
    """The indices of the leaves of a node where a tree has leaves too; empty if the structures
    differ."""
    try:
        found = node.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):
        return []
    there = {start + i: x for i, x in enumerate(found) if tree_leaves(x)}
    return list(there) if all_leaves(there.values()) else []


# The value of `plan_in_force` while a state is initialised, before it is sharded.
INITIALISING = "initialising"

# The scope in which `accumulate_gradients` averages gradients over parts of the batch, by
# `axis_names`. Traces show its name.
AVERAGES_PARTS = "mean_of_parts"
# The scope in which it takes a batch in several passes.
IN_MINIBATCHES = "in_minibatches"
# The scope in which `by_matrix` moves matrices.
BY_MATRIX = "by_matrix"


def current_plan() -> PlanInForce | None:
    """The plan in force, if a step is being traced."""
    value = plan_in_force.value
    return value if isinstance(value, PlanInForce) else None


def mesh_in_force() -> AnyMesh | None:
    """The mesh of the code that is being traced, with its devices if a plan or `jax.set_mesh` has
    them."""
    here, step = context_mesh(), current_plan()
    known = mesh_set_outside() if step is None else step.plan.mesh
    return known if known is not None and here is not None and same_axes(known, here) else here
