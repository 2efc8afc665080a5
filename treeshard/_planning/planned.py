"""The result of planning: a record for each array of a tree, and the specs and sums of all records.

The checks, the text and the difference of plans read a `PlannedTree`. `Plan` adds the methods that
call them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_structure

from treeshard._core.arrays import StaticSplit
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecCarrier, SpecTree
from treeshard._core.specs import all_axes, entries, trim_spec
from treeshard._planning.axis_names import splits_rows
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.tactics import Tactic
from treeshard.errors import MeshError


class ArrayFacts(NamedTuple):
    """Facts that arrays show and shapes do not. A plan for another mesh keeps them."""

    # Pairs of paths that hold the same array.
    same: tuple[tuple[str, str], ...] = ()
    # The paths of arrays that devices hold in a narrower dtype, with the original dtype.
    narrowed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class PlannedTree(SpecCarrier):
    """How every leaf of a tree is to be sharded over a mesh."""

    mesh: AnyMesh
    rules: tuple[tuple[Any, Any], ...]
    min_size: int
    leaves: tuple[PlannedLeaf, ...]
    # The tree's structure, and its non-array leaves.
    _split: StaticSplit
    strict: bool = True
    _array_facts: ArrayFacts = field(default_factory=ArrayFacts)

    @property
    def _follows(self) -> bool:
        """Whether another plan decided the leaves, instead of rules."""
        return False

    # -------------------------------------------------------------- the tree

    @property
    def specs(self) -> SpecTree:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tree with a `PartitionSpec` at every leaf; `P()` at non-array leaves."""
        given = [leaf.decision.spec for leaf in self.leaves]
        return self._split.fill_static(given, PartitionSpec())

    @property
    def shardings(self) -> SpecTree:
        """The tree with a `NamedSharding` at every array; `P()` at non-array leaves."""
        return self._split.fill_static(self.sharding_of_each(), PartitionSpec())

    @property
    def structs(self) -> PyTree:
        """The tree with a `ShapeDtypeStruct` and its sharding at every array; non-array leaves
        unchanged.

        Pass it to functions that need types only, such as `jax.eval_shape`, `step.lower` and
        `step.compile`. On Explicit axes, `jax.typeof` of a struct prints `float32[512@fsdp,64]`.
        """
        pairs = zip(self.leaves, self.sharding_of_each(), strict=True)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x, where in pairs]
        return self.with_arrays(structs)

    def with_arrays(self, arrays: Sequence[Any]) -> PyTree:
        """The tree with these arrays, in the order of `leaves`; non-array leaves unchanged."""
        return self._split.combine(arrays)

    @property
    def placements(self) -> SpecTree:
        """The specs, with a `NamedSharding` for a leaf that is in other memory."""
        return self._split.fill_static(self._placement_of_each(), PartitionSpec())

    def _placement_of_each(self) -> list[Any]:
        pairs = zip(self.leaves, self.sharding_of_each(), strict=True)
        return [x.given if x.memory is None else sharding for x, sharding in pairs]

    def specs_by_leaf(self, tree: PyTree, *, placements: bool = False) -> list[Any] | None:
        """The specs, or `placements`, for the leaves of a tree, if it has the planned structure."""
        if tree_structure(tree) != self._split.treedef:
            return None
        of_arrays = self._placement_of_each() if placements else [x.given for x in self.leaves]
        return list(self._split.fill_leaves(of_arrays, PartitionSpec()))

    def sharding_of_each(self) -> list[NamedSharding]:
        """The sharding of every array; equal ones are one object.

        Raises:
            MeshError: If the devices lack the memory of a leaf.
        """
        # A model has thousands of leaves and a few specs, and JAX compares shardings by identity
        # first.
        kinds = [(leaf.given, leaf.memory) for leaf in self.leaves]
        wanted = sorted({memory for _, memory in kinds if memory is not None})
        headline = f"The plan places leaves in {', '.join(wanted)}: "
        try:
            of_kind = {x: NamedSharding(self.mesh, x[0], memory_kind=x[1]) for x in set(kinds)}
        except ValueError as error:
            raise MeshError(f"{headline}{error}") from None
        # JAX leaves out the memory of devices whose memories it does not know.
        if not {sharding.memory_kind for sharding in of_kind.values()}.issuperset(wanted):
            devices: Any = self.mesh.devices
            raise MeshError(
                f"{headline}JAX knows of no such memory for {devices.flat[0].device_kind} that is"
                " not attached, and would keep these leaves on the devices. Compile where it is"
                " attached, or plan without `memory`."
            )
        return [of_kind[kind] for kind in kinds]

    def _bare_structs(self) -> PyTree:
        """The tree with a `ShapeDtypeStruct` without a sharding at every array."""
        # A model has few kinds of leaves, and making structs takes the most time.
        kinds = [(leaf.shape, leaf.dtype) for leaf in self.leaves]
        of_kind = {kind: jax.ShapeDtypeStruct(*kind) for kind in set(kinds)}
        return self.with_arrays([of_kind[kind] for kind in kinds])

    @cached_property
    def structure_of_arrays(self) -> Any:
        """The structure of the tree without its non-array leaves."""
        return tree_structure(self._split.fill_static([0] * len(self.leaves)))

    def leaf_at_each_index(self) -> list[PlannedLeaf | None]:
        """A `PlannedLeaf` for every leaf of the tree, in JAX's order; `None` for non-arrays."""
        return list(self._split.fill_leaves(self.leaves))

    # -------------------------------------------------------------- sums

    def bytes_per_device(self, memory: str | None = None) -> int:
        """Returns the size in bytes of the tree on the device that holds the most.

        An unevenly sharded leaf counts with its largest shard.

        Args:
            memory: The kind of memory, such as `"pinned_host"`; by default device memory.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8")).bytes_per_device()
            524288
        """
        leaves = (leaf for leaf in self.leaves if leaf.memory == memory)
        return sum(leaf.bytes_per_device(self.mesh) for leaf in leaves)

    def fsdp_axes(self) -> frozenset[str]:
        """Returns the axes that shard parameters which are gathered for use.

        These are all axes of the `fsdp` tactic. Axes of specs, logical names and functions count
        if their name says that they split a batch: `data`, `dp`, `batch`, `replica` or `fsdp`, also
        as a part of the name (`dcn_data`, `fsdp_transpose`). Shard the batch over these axes too;
        otherwise devices along them do the same work.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> decided = plan(tree, [("w", P("fsdp", "tensor"))], make_mesh("fsdp=4,tensor=2"))
            >>> decided.fsdp_axes()
            frozenset({'fsdp'})
        """
        axes: set[str] = set()
        # Equal decisions are one object, and few differ.
        for decision in {id(leaf.decision): leaf.decision for leaf in self.leaves}.values():
            split = set(all_axes(entries(decision.spec)))
            axes.update(filter(splits_rows, split))
            action = None if decision.rule is None else self.rules[decision.rule][1]
            if isinstance(action, Tactic):
                axes |= action.fsdp_axes & split
        return frozenset(axes)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, PlannedTree) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        short = {spec: trim_spec(spec) for spec in {x.given for x in self.leaves}}
        # Sorted, because trees of the same paths may flatten in different orders, as modules and
        # dicts do.
        leaves = sorted(self.leaves, key=lambda leaf: leaf.path)
        rows = [(x.path, x.shape, x.dtype, short[x.given], x.memory) for x in leaves]
        return tuple(axis_sizes(self.mesh).items()), tuple(rows)
