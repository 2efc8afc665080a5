"""A plan from a tree of specs instead of rules."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import all_leaves

from treeshard._core.mesh import AnyMesh
from treeshard._core.paths import Flat, PyTree, name_leaves
from treeshard._core.spec_trees import (
    ResolvedSpec,
    SpecCarrier,
    SpecTree,
    call_functions,
    is_spec_entry,
    is_spec_function,
    resolve_specs,
)
from treeshard._core.specs import trim_spec
from treeshard._planning.logical import resolve_names
from treeshard._planning.matching import Decided, split_arrays

_REPLICATED = ResolvedSpec(PartitionSpec(), PartitionSpec(), by_spec=True)


def is_spec_tree(x: Any) -> bool:
    """Whether the argument `rules` is a tree of specs.

    1. A list or tuple is a list of rules if it is empty, or has a string or a pattern anywhere in
       its lists and tuples. Any other sequence that is not a pytree is a list of rules, too.
    2. `None`, a string and a number are neither rules nor specs.
    3. Anything else is a tree of specs: a spec, a plan, a function, a container.
    """
    if type(x) in (list, tuple):
        return bool(x) and not _has_pattern(x)
    if isinstance(x, SpecCarrier) or (is_spec_entry(x) and x is not None):
        return True
    is_container = not all_leaves([x]) and x is not None
    return is_container or is_spec_function(x)


def _has_pattern(x: Any) -> bool:
    # A dict may have logical names in it, and a named tuple is the state of an optimizer.
    if type(x) in (list, tuple):
        return any(map(_has_pattern, x))
    return isinstance(x, str | bytes | re.Pattern)


def decide_by_specs(specs: SpecTree, tree: PyTree, flat: Flat, mesh: AnyMesh) -> Decided:
    """Decides every leaf of a tree by its given spec, whatever the size of the leaf."""
    if isinstance(specs, SpecCarrier):
        specs = specs.placements  # with memories
    resolved = resolve_specs(
        tree,
        call_functions(specs, tree),
        mesh,
        choose_mesh=lambda given, leaf: mesh,
        resolve=lambda names: trim_spec(resolve_names(names, mesh)),
    )
    known = {id(x): _on_devices(x, mesh) for x in resolved if x is not None}
    decisions = [_REPLICATED if x is None else known[id(x)] for x in resolved]
    split, arrays, shapes = split_arrays(flat)
    paths = split.dynamic(name_leaves(tree, split.treedef))
    return Decided(split, arrays, paths, shapes, split.dynamic(decisions))


def _on_devices(resolved: ResolvedSpec, mesh: AnyMesh) -> ResolvedSpec:
    """A decision of a plan: without a mesh, and with `None` for the default memory."""
    memory = resolved.memory_kind
    memory = None if memory in _default_memories(mesh) else memory
    # One spec for a subtree serves leaves of any rank, so a trimmed spec is intended.
    notes = tuple(note for note in resolved.adjustments if note.kind != "trimmed")
    return replace(resolved, mesh=None, memory_kind=memory, adjustments=notes, by_spec=True)


def _default_memories(mesh: AnyMesh) -> Sequence[str | None]:
    """The names of the memory in which devices hold arrays by default."""
    devices: Any = getattr(mesh, "devices", None)
    if devices is None:
        return ("device",)
    try:
        return ("device", devices.flat[0].default_memory().kind)
    except jax.errors.JaxRuntimeError:  # devices of a GPU topology raise "UNIMPLEMENTED"
        return ("device",)
