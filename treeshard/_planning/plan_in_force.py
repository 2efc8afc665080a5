"""The plan of the step that is being traced: it tells functions inside how values are sharded.

On Auto axes a tracer does not know its sharding: the compiler chooses it after the trace. Specs
would have to be passed down through every layer; with the plan in force, a function finds them by
the structure and the shapes of what it is called with.
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
    entries,
    entry_of,
    is_spec,
    trimmed,
    with_entries,
    without_axes,
)
from treeshard._core.text import fold_paths
from treeshard._planning.axis_names import splits_rows
from treeshard._planning.matching import PlannedLeaf, Shape, parameters
from treeshard._planning.plan import Plan
from treeshard.errors import SpecError

T = TypeVar("T")
_Specs = tuple[PartitionSpec | None, ...]


def default_batch(plan: Plan) -> PartitionSpec:
    """The spec of a batch by default: dim 0 over the axes along which the plan gathers parameters,
    and those that split a batch by their names."""
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
    """A part of a plan that a tree may be.

    Attributes:
        leaves: Its leaves.
        specs: How each array of the tree is sharded if it is this part; `None` for an array that
            has the full shape of a leaf that is sharded.
        is_layer: Whether the tree is one layer of it, a slice of dim 0.
    """

    leaves: tuple[PlannedLeaf, ...]
    specs: _Specs
    is_layer: bool


@dataclass(frozen=True, eq=False)
class PlanInForce:
    """What code inside a step may ask.

    Attributes:
        plan: The plan of the state.
        rows: The axes over which the rows of the batch are split.
        is_by_hand: Whether the code runs once per device, inside `shard_map_step`.
    """

    plan: Plan
    rows: tuple[str, ...]
    is_by_hand: bool = False
    # The shapes and specs of shards whose gradients code by hand has reduced, and over which axes.
    # It only grows: JAX does not run code again that it has traced before with this in force.
    _reduced: dict[tuple[Shape, PartitionSpec], set[str]] = field(default_factory=dict)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The axes over which weights are gathered for use: those that split the batch."""
        return tuple(dict.fromkeys([*self.rows, *sorted(self.plan.fsdp_axes())]))

    # Part of the key of jit's caches. Comparing plans takes long, and who passes one plan again and
    # again, as `value_and_grad(loss, plan)` in a loop, passes the same object. A step by hand has
    # traces of its own: tracing also fills `_reduced`.
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

    def note_received(self, arrays: Sequence[Any]) -> None:
        """Notes which leaves of the plan the arrays are that a step has received."""
        for x, leaf in zip(arrays, self.plan.leaves, strict=True):
            note_origin(x, Received(self.plan, leaf))

    def note_reduced(self, x: Any, spec: PartitionSpec, axes: Iterable[str]) -> None:
        """Notes that the gradient of a shard was reduced over axes of its spec."""
        self._reduced.setdefault((tuple(x.shape), trimmed(spec)), set()).update(axes)

    def reduced_axes(self, leaf: PlannedLeaf) -> set[str]:
        """The axes of its spec over which the gradient of a leaf, or of its layers, was reduced."""
        spec, shape = trimmed(leaf.given), self._shape_of_shard(leaf, leaf.given)
        of_layer = trimmed(with_entries(spec, entries(spec)[1:]))
        none: set[str] = set()
        return self._reduced.get((shape, spec), none) | self._reduced.get(
            (shape[1:], of_layer), none
        )

    # -------------------------------------------------------------- the specs of a tree

    # 1. Arrays that a step has received, or that were gathered, are known by identity.
    # 2. Inside `shard_map`, an array that is equal on all devices by its type is not a shard.
    # 3. All others are those of the plan's part that has the structure and the shapes of the tree,
    #    or whose layers, stacked on dim 0, have them. If several parts with different specs have
    #    them, nothing tells which it is. Under `jit`, a wrong one would change no value, so
    #    parameters come before optimizer state there; inside `shard_map` it would.

    def specs_of(
        self, tree: PyTree, call: str = "", specs: str = "specs", *, are_gradients: bool = False
    ) -> SpecTree:
        """The specs of a tree that is a part of the plan: a prefix, with one spec for a box.

        Inside `shard_map`, the shapes are those of shards. The spec is `None` for arrays that have
        their full shapes there, and for what is not an array.

        Args:
            tree: Any pytree.
            call: How to pass a plan, for messages: `"unshard(tree, {})"`.
            specs: What to pass in its place if the plan does not have the tree.
            are_gradients: Whether these are gradients: those of parameters, with `None` for leaves
                that have none. What cannot be a shard may then be no part of the plan.

        Raises:
            SpecError: If the plan has no such part, or several with different specs.
        """
        nodes, treedef = tree_flatten(tree, is_leaf=is_box_of_leaf)
        values = [tree_leaves(node)[0] for node in nodes]
        arrays = {i: x for i, x in enumerate(values) if has_shape(x)}
        found = {i: self.known_spec(x) for i, x in arrays.items()}
        unknown = [i for i, spec in found.items() if spec is UNKNOWN]
        if unknown:
            outline = treedef.unflatten([arrays.get(i) for i in range(len(values))])
            where = call.partition("(")[0]
            parts = self._parts_like(outline, where, are_gradients=are_gradients)
            if parts or not are_gradients or self.may_be_shards([*arrays.values()]):
                part = self._only(parts, outline, call, specs, are_gradients)
                of_part = dict(zip(arrays, part.specs, strict=True))
            else:
                of_part = dict.fromkeys(arrays, PartitionSpec())
            found |= {i: of_part[i] for i in unknown}
        return treedef.unflatten([found.get(i) for i in range(len(values))])

    def specs_of_state(self, parameters: PyTree) -> SpecTree | None:
        """The specs of the optimizer state of parameters; `None` if the plan has none that is
        sharded otherwise than they are, or several that differ."""
        outline = tree_map(lambda x: x if has_shape(x) else None, parameters)
        parts = self._parts_like(outline, "value_and_grad")
        of_parameters = {part.specs for part in parts if self._has_parameters(part)}
        of_state = {part.specs for part in parts} - of_parameters
        if len(of_state) != 1 or len(of_parameters) != 1:
            return None
        [specs] = of_state
        return tree_structure(outline).unflatten(specs)

    # -------------------------------------------------------------- one array

    def known_spec(self, x: Any) -> Any:
        """The spec of an array by its identity or its type, `None` if it is the full array of a
        leaf that is sharded; `UNKNOWN` if neither tells."""
        origin = origin_of(x)
        if isinstance(origin, Received) and origin.plan is self.plan:
            # Code inside a `shard_map` of the step's own may close over the full array.
            is_whole = tuple(x.shape) != self._shape_here(origin.leaf)
            return None if is_whole else trimmed(origin.leaf.given)
        if isinstance(origin, GatheredFrom):
            return origin.rest
        by_hand = self._manual_axes()
        is_equal = bool(by_hand) and not self._may_differ(x, by_hand)
        return PartitionSpec() if is_equal else UNKNOWN

    def _manual_axes(self) -> list[str]:
        """The axes of the plan over which this code runs once per device."""
        return [axis for axis in axis_sizes(self.plan.mesh) if axis in manual_axes()]

    def _may_differ(self, x: Any, axes: Iterable[str]) -> bool:
        """Whether devices along one of these axes may have different values of `x`."""
        sizes = axis_sizes(self.plan.mesh)
        is_struct = isinstance(x, jax.ShapeDtypeStruct)
        return any(sizes[axis] > 1 and (is_struct or still_differs(x, axis)) for axis in axes)

    def _shape_here(self, leaf: PlannedLeaf) -> Shape:
        """The shape of a leaf where this is traced: inside `shard_map`, that of a shard."""
        others = axis_sizes(self.plan.mesh).keys() - manual_axes()
        return self._shape_of_shard(leaf, without_axes(leaf.given, others))

    def _shape_of_shard(self, leaf: PlannedLeaf, spec: PartitionSpec) -> Shape:
        return NamedSharding(self.plan.mesh, spec).shard_shape(leaf.shape)

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
        sizes, seen = axis_sizes(self.plan.mesh), self._manual_axes()
        others = [axis for axis, size in sizes.items() if size == 1 or axis not in seen]
        return trimmed(without_axes(spec or PartitionSpec(), others))

    # -------------------------------------------------------------- the part of the plan

    def _parts_like(
        self, outline: PyTree, where: str, *, are_gradients: bool = False
    ) -> list[Part]:
        """The parts of the plan that have the structure and the shapes of a tree of arrays."""
        arrays, structure = tree_leaves(outline), tree_structure(outline)
        places = [
            list(range(start, start + len(arrays))) for start in subtrees(self._whole, structure)
        ]
        if not places and are_gradients:
            places = list(subtrees_with_gaps(self._whole, outline))
        parts: list[Part] = []
        refused: list[SpecError] = []
        for place in places:
            leaves = tuple(self.plan.leaves[i] for i in place)
            try:
                part = self._part(leaves, arrays)
            except SpecError as error:
                refused.append(error)
                continue
            parts += [part] if part is not None else []
        if refused and not parts:
            raise SpecError(f"{where}: {refused[0]}")
        return parts

    def _part(self, leaves: tuple[PlannedLeaf, ...], arrays: Sequence[Any]) -> Part | None:
        """These leaves as a part that arrays may be; `None` if shapes or types differ.

        Raises `SpecError` if the arrays are layers of a stack, and split over devices as such.
        """
        pairs = list(zip(leaves, arrays, strict=True))
        specs = [self._spec_at(leaf, x, 0) for leaf, x in pairs]
        if _MISFIT not in specs:
            return Part(leaves, tuple(specs), is_layer=False)
        specs = [self._spec_at(leaf, x, 1) for leaf, x in pairs]
        if _MISFIT in specs:
            return None
        sliced = layer_specs({leaf.path: spec for leaf, spec in zip(leaves, specs, strict=True)})
        return Part(leaves, tuple(sliced[leaf.path] for leaf in leaves), is_layer=True)

    def _spec_at(self, leaf: PlannedLeaf, x: Any, first: int) -> Any:
        """The spec of `leaf` if `x` has its dims from `first` on; `None` if `x` has its full shape;
        `_MISFIT` if it is another array."""
        shape, spec = tuple(x.shape), trimmed(leaf.given)
        if len(leaf.shape) != len(shape) + first:
            return _MISFIT
        is_split = all_axes(entries(self.part_by_hand(spec)))
        may_be_shard = all(self._may_differ(x, [axis]) for axis in is_split)
        if self._shape_here(leaf)[first:] == shape and may_be_shard:
            return spec
        return None if leaf.shape[first:] == shape else _MISFIT

    def _only(
        self, parts: Sequence[Part], outline: PyTree, call: str, specs: str, are_gradients: bool
    ) -> Part:
        """The part that a tree is; raises if there is none, or several that differ."""
        # Inside `shard_map` a wrong part would change values, so code by hand gets no choice.
        # Gradients are always those of parameters, and of all layers.
        if are_gradients or not self._manual_axes():
            parts = [part for part in parts if not part.is_layer] or parts
            parts = [part for part in parts if self._has_parameters(part)] or parts
        different = {self._seen(part): part for part in reversed(parts)}
        if len(different) == 1:
            return parts[0]
        raise self._not_one_part([*reversed(different.values())], outline, call, specs)

    def _not_one_part(
        self, parts: Sequence[Part], outline: PyTree, call: str, specs: str
    ) -> SpecError:
        """The error for a tree that is no part of the plan, or that several different parts fit."""
        where = call.partition("(")[0]
        shapes = [str(tuple(x.shape)) for x in tree_leaves(outline) if has_shape(x)]
        of_shape = ", ".join([*shapes[:5], *(["..."] if shapes[5:] else [])])
        if not parts:
            return SpecError(
                f"{where}: the plan has no subtree of this structure with leaves of shape"
                f" {of_shape}. Pass its specs: `{call.format(specs)}`."
            )
        first = leaf_paths(outline)[0]
        facts, lines = [], []
        for part in parts:
            paths = [leaf.path for leaf in part.leaves]
            facts.append(f"{', '.join(fold_paths(paths)[:3])} as {[x.given for x in part.leaves]}")
            lines.append(_line(self.plan, paths[0].removesuffix(first).removesuffix("/")))
        return SpecError(
            f"{where}: the plan has several subtrees of this structure with leaves of shape"
            f" {of_shape}, and they are sharded differently: {'; '.join(facts)}. Pass the plan of"
            f" the one that you mean, such as `{call.format(lines[0])}`."
        )

    def _seen(self, part: Part) -> tuple[Any, ...]:
        """What of the specs of a part makes a difference here."""
        by_hand = bool(self._manual_axes())
        return tuple(self.part_by_hand(spec) if by_hand else spec for spec in part.specs)

    def _has_parameters(self, part: Part) -> bool:
        return self._parameters.issuperset(leaf.path for leaf in part.leaves)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(leaf.path for leaf in parameters(self.plan.leaves))

    @cached_property
    def _whole(self) -> Any:
        """The structure of the plan's arrays, where boxes are leaves: code may take them off."""
        structure = self.plan.structure_of_arrays
        tree = structure.unflatten([0] * structure.num_leaves)
        return tree_structure(tree, is_leaf=is_box_of_leaf)


# What `PlanInForce.known_spec` returns for an array of which it knows nothing, and `_spec_at` for
# one that is not the leaf. `None` would be an array that has its full shape.
UNKNOWN = object()
_MISFIT = object()


def _line(plan: Plan, path: str) -> str:
    """How to write the plan of a subtree: `plan["layers"][0]`."""
    keys = path.split("/") if path else []
    try:
        reduce(lambda part, key: part[key], keys, plan)
    except SpecError:  # a key has a slash of its own
        keys = [path]
    return "plan" + "".join(f"[{key}]" if key.isdigit() else f'["{key}"]' for key in keys)


def _nodes(treedef: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Each node of a structure, with the index of its first leaf."""
    yield start, treedef
    for child in treedef.children():
        yield from _nodes(child, start)
        start += child.num_leaves


def subtrees(whole: Any, treedef: Any) -> Iterator[int]:
    """The index of the first leaf of each subtree that has this structure."""
    count = treedef.num_leaves
    nodes = _nodes(whole) if count else iter(())
    return (start for start, node in nodes if node.num_leaves == count and node == treedef)


def subtrees_with_gaps(whole: Any, tree: PyTree) -> Iterator[list[int]]:
    """The indices of the leaves that each subtree has in common with a tree that has its structure,
    but may have `None` in place of leaves."""
    count = len(tree_leaves(tree))
    for start, node in _nodes(whole):
        if node.num_leaves < count:
            continue
        try:
            found = node.flatten_up_to(tree)
        except (ValueError, TypeError, KeyError):  # another structure
            continue
        there = {start + i: x for i, x in enumerate(found) if tree_leaves(x)}
        if len(there) == count and all_leaves(there.values()):
            yield list(there)


# The value of `plan_in_force` while a state is initialised: nothing is sharded yet.
INITIALISING = "initialising"

# The scope in which `accumulate_gradients` averages gradients over parts of the batch, by
# `axis_names`: by its name a trace tells that it does.
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
