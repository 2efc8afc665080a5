"""The plan of the step that is being traced: it tells functions inside how values are sharded.

On Auto axes a tracer does not know its sharding: the compiler chooses it after the trace. Specs
would have to be passed down through every layer; with the plan in force, a function finds them by
the structure and the shapes of what it is called with.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves, tree_map, tree_structure

from treeshard._core.arrays import has_shape
from treeshard._core.jax_private import mesh_set_outside
from treeshard._core.mesh import AnyMesh, axis_sizes, context_mesh, manual_axes, same_axes
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecTree, layer_specs
from treeshard._core.specs import all_axes, entries, entry_of, is_spec, trimmed, without_axes
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


@dataclass(frozen=True, eq=False)  # part of the key of jit's caches: comparing plans takes long
class PlanInForce:
    """What code inside a step may ask.

    Attributes:
        plan: The plan of the state.
        rows: The axes over which the rows of the batch are split.
        gather: Inside `shard_map_step`, gathers a tree of shards: `gather(tree, axes, specs)`.
        waits: On Explicit axes, whether gathered weights are typed so that their gradients wait
            to be scattered. Not every operation of JAX takes such a type.
    """

    plan: Plan
    rows: tuple[str, ...]
    gather: Callable[[PyTree, Sequence[str], SpecTree], PyTree] | None = None
    waits: bool = False

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The axes over which weights are gathered for use: those that split the batch."""
        return tuple(dict.fromkeys([*self.rows, *sorted(self.plan.fsdp_axes())]))

    def inside(self, fn: Callable[..., T]) -> Callable[..., T]:
        """`fn`, with this in force while it runs."""

        @wraps(fn)
        def run(*args: Any) -> T:
            with plan_in_force(self):
                return fn(*args)

        return run

    def specs_of(self, tree: PyTree) -> SpecTree:
        """The specs of the plan's subtree that has the structure and the shapes of `tree`.

        Where optimizer state is sharded differently from its parameters, those of the parameters.
        If only its layers, stacked on dim 0, have these shapes, the specs are those of one layer.
        Inside `shard_map`, the shapes are those of shards; arrays that have their full shapes
        there have been gathered, and get `None`.

        Raises:
            SpecError: If the plan has no such subtree, or several with different specs.
        """
        structure, paths_of, of_parameters = self._subtrees_like(tree)
        # Optimizer state has the structure of its parameters.
        for candidates in (of_parameters, paths_of.keys()):
            if len(candidates) == 1:
                [specs] = candidates
                return structure.unflatten(specs)
        shapes = _shapes(tree)
        shown = ", ".join(str(shape) for shape in shapes[:5]) + (", ..." if shapes[5:] else "")
        if not paths_of:
            raise SpecError(
                f"the plan has no subtree of this structure with leaves of shape {shown}."
            )
        several = "; ".join(f"{path} as {list(specs)}" for specs, path in paths_of.items())
        raise SpecError(
            f"the plan has several subtrees of this structure with leaves of shape {shown}, and"
            f" they are sharded differently: {several}. If one of them is optimizer state, shard it"
            " like its parameters (`Plan.follow`)."
        )

    def specs_of_state(self, parameters: PyTree) -> SpecTree | None:
        """The specs of the optimizer state of parameters; `None` if the plan has none that is
        sharded otherwise than they are, or several that differ."""
        structure, paths_of, of_parameters = self._subtrees_like(parameters)
        of_state = paths_of.keys() - of_parameters
        if len(of_state) != 1 or len(of_parameters) != 1:
            return None
        [specs] = of_state
        return structure.unflatten(specs)

    def _subtrees_like(self, tree: PyTree) -> tuple[Any, dict[_Specs, str], set[_Specs]]:
        """The structure of a tree without what is no array; the specs of each subtree of the plan
        that has it and these shapes, with its first paths; and which of them parameters have."""
        structure = tree_structure(tree_map(lambda x: x if has_shape(x) else None, tree))
        shapes = _shapes(tree)
        paths_of: dict[_Specs, str] = {}
        of_parameters: set[_Specs] = set()
        for start in subtrees(self.plan, structure):
            leaves = self.plan.leaves[start : start + structure.num_leaves]
            specs = self._fitting(leaves, shapes)
            if specs is None:
                continue
            paths_of.setdefault(specs, ", ".join(fold_paths([x.path for x in leaves])[:3]))
            if self._parameters.issuperset(leaf.path for leaf in leaves):
                of_parameters.add(specs)
        return structure, paths_of, of_parameters

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(leaf.path for leaf in parameters(self.plan.leaves))

    def _fitting(self, leaves: Sequence[PlannedLeaf], shapes: list[Shape]) -> _Specs | None:
        """The specs of arrays of these shapes, if leaves or their slices have them."""
        specs = [trimmed(leaf.given) for leaf in leaves]
        here = [self._shape_here(leaf) for leaf in leaves]
        full = [leaf.shape for leaf in leaves]
        if here == shapes:
            return tuple(specs)
        if full == shapes:
            return (None,) * len(leaves)
        if not all(full):  # scalars have no slices
            return None
        if [shape[1:] for shape in here] == shapes:
            paths = [leaf.path for leaf in leaves]
            sliced = layer_specs(dict(zip(paths, specs, strict=True)))
            return tuple(sliced[path] for path in paths)
        if [shape[1:] for shape in full] == shapes:
            return (None,) * len(leaves)
        return None

    def _shape_here(self, leaf: PlannedLeaf) -> Shape:
        """The shape of a leaf where this is traced: inside `shard_map`, that of a shard."""
        mesh = self.plan.mesh
        local = without_axes(leaf.given, axis_sizes(mesh).keys() - manual_axes())
        return NamedSharding(mesh, local).shard_shape(leaf.shape)


def _shapes(tree: PyTree) -> list[Shape]:
    return [tuple(x.shape) for x in tree_leaves(tree) if has_shape(x)]


def subtrees(plan: Plan, treedef: Any) -> Iterator[int]:
    """The index of the first leaf of each subtree that has this structure, non-arrays apart."""
    count = treedef.num_leaves

    def walk(node: Any, start: int) -> Iterator[int]:
        if node.num_leaves < count:
            return
        if node == treedef:
            yield start
        for child in node.children():
            yield from walk(child, start)
            start += child.num_leaves

    return walk(plan.structure_of_arrays, 0) if count else iter(())


# Part of the key of jit's caches, unlike a plain `ContextVar`. While a state is initialised, it is
# `INITIALISING`: nothing is sharded yet.
plan_in_force = jax.make_user_context(None)
INITIALISING = "initialising"

# The scope in which `accumulate_gradients` averages gradients over parts of the batch, by
# `axis_names`: by its name a trace tells that it does.
AVERAGES_PARTS = "mean_of_parts"
# The scope in which it takes a batch in several passes.
IN_MINIBATCHES = "in_minibatches"
# The scope in which `by_matrix` moves matrices.
BY_MATRIX = "by_matrix"

# Whether gradients are summed later, by the function that accumulates them. Made here, and not in a
# module that is imported while a step is traced: JAX forgets all traces when a context is made.
summed_later = jax.make_user_context(False)
# Whether that function takes the full batch in one pass, for a check of what it does in several.
in_one_pass = jax.make_user_context(False)


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
