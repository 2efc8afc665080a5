"""The tree of a plan: what it hands out to those who place arrays."""

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
    """A tree of planned leaves on a mesh. `Plan`, which says what its attributes are, adds what
    can be asked of it."""

    mesh: AnyMesh
    rules: tuple[tuple[Any, Any], ...]
    min_size: int
    leaves: tuple[PlannedLeaf, ...]
    treedef: TreeDef = field(default=None)
    # The leaves that are no arrays, by their place among all leaves.
    _others: Mapping[int, Any] = field(default_factory=dict)

    @property
    def specs(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tree with a `PartitionSpec` at every leaf; `P()` at leaves that are no arrays."""
        return self._tree(lambda leaf: leaf.given, lambda _: PartitionSpec())

    @property
    def shardings(self) -> Any:
        """The tree with a `NamedSharding` at every array; `P()` at other leaves."""
        placed = self._placed()
        return self._tree(lambda leaf: placed[leaf.given], lambda _: PartitionSpec())

    @property
    def structs(self) -> Any:
        """The tree with a `ShapeDtypeStruct`, sharding included, at every array; other leaves
        stay as they are."""
        placed = self._placed()

        def struct(leaf: PlannedLeaf) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed[leaf.given])

        return self._tree(struct, lambda other: other)

    def _placed(self) -> dict[PartitionSpec, NamedSharding]:
        return {spec: NamedSharding(self.mesh, spec) for spec in {x.given for x in self.leaves}}

    def _tree(self, of_array: Callable[[PlannedLeaf], Any], of_other: Callable[[Any], Any]) -> Any:
        if not self._others:
            return self.treedef.unflatten(list(map(of_array, self.leaves)))
        return self.treedef.unflatten(
            [
                of_other(self._others[place]) if leaf is None else of_array(leaf)
                for place, leaf in enumerate(self.leaf_at_each_place())
            ]
        )

    def leaf_at_each_place(self) -> list[PlannedLeaf | None]:
        """The leaves of the tree in the order in which JAX flattens it; `None` for no arrays."""
        arrays = iter(self.leaves)
        places = range(self.treedef.num_leaves)
        return [None if place in self._others else next(arrays) for place in places]

    def bare(self) -> Any:
        """The tree with a `ShapeDtypeStruct` of no sharding at every array."""
        return self._tree(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lambda other: other
        )

    def bytes_per_device(self) -> int:
        """Returns the bytes that the fullest device will hold.

        Uneven shards count as the largest of them.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8")).bytes_per_device()
            524288
        """
        return sum(leaf.bytes_per_device(self.mesh) for leaf in self.leaves)

    def fsdp_axes(self) -> frozenset[str]:
        """The axes over which the `fsdp` tactic sharded parameters, each gathered for use.

        Devices along such an axis do the same work unless the batch is sharded over it too.
        """
        found: set[str] = set()
        for decision in {leaf.decision for leaf in self.leaves}:
            action = None if decision.rule is None else self.rules[decision.rule][1]
            if isinstance(action, Tactic):
                used = (axis for entry in entries(decision.given) for axis in axes_of(entry))
                found.update(action.fsdp_axes.intersection(used))
        return frozenset(found)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, PlannedTree) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        # P("data", None) and P("data") are one placement.
        short = {spec: with_entries(spec, entries(spec)) for spec in {x.given for x in self.leaves}}
        leaves = tuple(sorted(self.leaves, key=lambda leaf: leaf.path))
        return tuple(axis_sizes(self.mesh).items()), tuple(
            (x.path, x.shape, x.dtype, short[x.given]) for x in leaves
        )
