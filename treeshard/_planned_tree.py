"""The tree of a plan, as specs, shardings and structs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from treeshard._decision import PlannedLeaf
from treeshard._matching import TreeDef
from treeshard._mesh import AnyMesh, axis_sizes
from treeshard._spec_trees import SpecCarrier
from treeshard._specs import axes_of, entries, with_entries
from treeshard._tactics import Tactic


@dataclass(frozen=True, eq=False, repr=False)
class PlannedTree(SpecCarrier):
    """A tree of planned leaves on a mesh. `Plan` documents the attributes."""

    mesh: AnyMesh
    rules: tuple[tuple[Any, Any], ...]
    min_size: int
    leaves: tuple[PlannedLeaf, ...]
    treedef: TreeDef = field(default=None)
    # The non-array leaves, by their index among all leaves.
    _others: Mapping[int, Any] = field(default_factory=dict)

    @property
    def specs(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tree with a `PartitionSpec` at every leaf; `P()` at non-array leaves."""
        return self._tree(lambda leaf: leaf.given, lambda _: PartitionSpec())

    @property
    def shardings(self) -> Any:
        """The tree with a `NamedSharding` at every array; `P()` at non-array leaves."""
        shardings = self._sharding_of_spec()
        return self._tree(lambda leaf: shardings[leaf.given], lambda _: PartitionSpec())

    @property
    def structs(self) -> Any:
        """The tree with a `ShapeDtypeStruct` that has a sharding at every array; non-array
        leaves as they are."""
        shardings = self._sharding_of_spec()

        def struct(leaf: PlannedLeaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[leaf.given])

        return self._tree(struct, lambda other: other)

    def _sharding_of_spec(self) -> dict[PartitionSpec, NamedSharding]:
        return {spec: NamedSharding(self.mesh, spec) for spec in {x.given for x in self.leaves}}

    def _tree(self, of_array: Callable[[PlannedLeaf], Any], of_other: Callable[[Any], Any]) -> Any:
        if not self._others:
            return self.treedef.unflatten(list(map(of_array, self.leaves)))
        return self.treedef.unflatten(
            [
                of_other(self._others[index]) if leaf is None else of_array(leaf)
                for index, leaf in enumerate(self.leaf_at_each_place())
            ]
        )

    def leaf_at_each_place(self) -> list[PlannedLeaf | None]:
        """A `PlannedLeaf` for every leaf of the tree, in JAX's order; `None` for non-arrays."""
        arrays = iter(self.leaves)
        indices = range(self.treedef.num_leaves)
        return [None if index in self._others else next(arrays) for index in indices]

    def bare(self) -> Any:
        """The tree with a `ShapeDtypeStruct` without a sharding at every array."""
        return self._tree(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lambda other: other
        )

    def bytes_per_device(self) -> int:
        """Returns the bytes that the tree takes on the device that holds the most.

        A leaf that is sharded unevenly counts as its largest shard.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8")).bytes_per_device()
            524288
        """
        return sum(leaf.bytes_per_device(self.mesh) for leaf in self.leaves)

    def fsdp_axes(self) -> frozenset[str]:
        """The axes over which the `fsdp` tactic sharded parameters.

        Parameters are gathered along these axes for use, so devices along them do the same
        work unless the batch is sharded over them too.
        """
        axes: set[str] = set()
        for decision in {leaf.decision for leaf in self.leaves}:
            action = None if decision.rule is None else self.rules[decision.rule][1]
            if isinstance(action, Tactic):
                used = (axis for entry in entries(decision.given) for axis in axes_of(entry))
                axes.update(action.fsdp_axes.intersection(used))
        return frozenset(axes)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, PlannedTree) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        # P("data", None) and P("data") mean the same.
        short = {spec: with_entries(spec, entries(spec)) for spec in {x.given for x in self.leaves}}
        leaves = tuple(sorted(self.leaves, key=lambda leaf: leaf.path))
        return tuple(axis_sizes(self.mesh).items()), tuple(
            (x.path, x.shape, x.dtype, short[x.given]) for x in leaves
        )
