"""The step of `logical_partitioning`: shards by the names of dims in Flax boxes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from treeshard._logical import (
    ReadLogicalRules,
    current_logical_rules,
    read_logical_rules,
    resolve_by,
    resolve_names,
)
from treeshard._mesh import AnyMesh, axis_sizes
from treeshard._partition_axis import PartitionAxis, flat_names
from treeshard._paths import is_box
from treeshard._refinements import Refined, Refinement, is_free
from treeshard._specs import Adjustment, Entry, entries, is_spec, project, with_entries


@dataclass(frozen=True, repr=False)
class ByNames(Refinement):
    """Shards a leaf by the names of dims in its box."""

    rules: ReadLogicalRules | None = None
    reads_boxes = True

    def __repr__(self) -> str:
        if self.rules is None or isinstance(self.rules, PartitionAxis):
            return f"logical_partitioning({'' if self.rules is None else repr(self.rules)})"
        return f"logical_partitioning({list(self.rules)})"

    def refine(self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        if not is_box(leaf):
            return spec, ()
        box = _names_in(leaf)
        if not any(box.names):
            return spec, ()
        if not all(map(is_free, entries(spec))):
            why = f"an earlier tactic sharded it as {spec}. Put logical_partitioning first."
            return spec, (Adjustment("already-sharded", why),)
        shape = tuple(jax.tree.leaves(leaf)[0].shape)
        projected, adjustments = project(self._spec(box, mesh), mesh, shape)
        return with_entries(projected, entries(projected)), adjustments

    def _spec(self, box: "_NamesInBox", mesh: AnyMesh) -> PartitionSpec:
        rules = self.rules
        if rules is None:
            own = box.rules is not None
            rules = read_logical_rules(box.rules) if own else current_logical_rules()
        if box.logical:
            if rules is None:
                return resolve_names(box.names, mesh)  # raises: no rules are in force
            return resolve_by(rules, box.names, mesh)
        # As in Flax, a name in any other box is a mesh axis if it has no rule.
        axes = axis_sizes(mesh)
        are_axes = axes.keys() >= set(flat_names(box.names))
        if rules is None or (isinstance(rules, PartitionAxis) and are_axes):
            return PartitionSpec(*box.names)
        if not isinstance(rules, PartitionAxis):
            ruled = {name for name, _ in rules}
            rules += tuple((axis, axis) for axis in axes if axis not in ruled)
        return resolve_by(rules, box.names, mesh)


class _NamesInBox(NamedTuple):
    names: tuple[Entry, ...]
    rules: Any = None  # the box's own
    logical: bool = False  # whether names are never mesh axes


def _names_in(box: Any) -> _NamesInBox:
    if hasattr(type(box), "replace_boxed"):
        rules = getattr(box, "rules", None)
        return _NamesInBox(tuple(getattr(box, "names", ())), rules, hasattr(box, "rules"))
    metadata = box.get_metadata()
    names: Any = metadata.get("out_sharding") or ()
    names = entries(names) if is_spec(names) else tuple(names)
    return _NamesInBox(names, metadata.get("sharding_rules"))
