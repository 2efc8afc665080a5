"""Reads the names of dims from Flax boxes and from haliax.

Flax has two kinds of boxes: Linen's boxes and nnx's variables. haliax has arrays with an `Axis` for
each dim, and module fields that name the dims of a plain array. This module imports neither
library, and recognises their classes by attributes.
"""

from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.paths import (
    TreeDef,
    children_with_keys,
    is_box,
    is_named_array,
    is_wrapper,
)
from treeshard._core.specs import Entry, entries, is_spec


class FieldArray(NamedTuple):
    """An array in a field of a module that names its dims, as `hax.field(axis_names=...)` does."""

    array: Any
    names: tuple[str, ...]


class OptimizerState(NamedTuple):
    """An array of optimizer state, with the metadata in the nnx variable of its parameter."""

    array: Any
    names: tuple[Entry, ...]
    rules: Any


class NamesInBox(NamedTuple):
    """The names of a leaf's dims.

    Attributes:
        names: An entry for each dim.
        rules: The box's own rules.
        logical: Whether names are never mesh axes.
        adds_rules: Whether its own rules are added to the rules in force, or replace them.
    """

    names: tuple[Entry, ...]
    rules: Any = None
    logical: bool = False
    adds_rules: bool = False


def has_names(leaf: Any) -> bool:
    """Whether a leaf, as `leaves_with_names` shows it, may have names of dims."""
    return isinstance(leaf, FieldArray | OptimizerState) or is_wrapper(leaf)


def names_in(leaf: Any) -> NamesInBox:
    """The names of dims in a leaf that `has_names`."""
    if isinstance(leaf, FieldArray):
        return NamesInBox(leaf.names, logical=True)
    if isinstance(leaf, OptimizerState):
        return NamesInBox(leaf.names, leaf.rules, adds_rules=True)
    if is_named_array(leaf):
        return NamesInBox(_names_of_axes(leaf), logical=True)
    # Linen: `nn.Partitioned(value, names, mesh)`, whose names are mesh axes, and
    # `nn.LogicallyPartitioned(value, names, mesh, rules)`, whose names need rules.
    if hasattr(type(leaf), "replace_boxed"):
        rules = getattr(leaf, "rules", None)
        return NamesInBox(tuple(getattr(leaf, "names", ())), rules, hasattr(leaf, "rules"))
    # nnx: `nnx.with_partitioning(init, names, sharding_rules=...)` keeps names in the metadata of
    # a `Variable`. `out_sharding` may also be a finished spec.
    metadata = leaf.get_metadata()
    names = _names_of_sharding(metadata.get("out_sharding"))
    return NamesInBox(names, metadata.get("sharding_rules"), adds_rules=True)


def _names_of_sharding(sharding: Any) -> tuple[Entry, ...]:
    """The names in an entry of the metadata: names, a spec or `None`."""
    return entries(sharding) if is_spec(sharding) else tuple(sharding or ())


def optimizer_states(tree: Any) -> dict[int, OptimizerState]:
    """The metadata of nnx variables about the optimizer state of their arrays, by leaf index.

    `nnx.with_partitioning(init, names, optimizer_sharding=...)` keeps it in their metadata.
    """
    states: dict[int, OptimizerState] = {}
    for i, leaf in enumerate(leaves_with_names(tree)):
        metadata = leaf.get_metadata() if hasattr(type(leaf), "get_metadata") else {}
        if "optimizer_sharding" in metadata:
            names = _names_of_sharding(metadata["optimizer_sharding"])
            states[i] = OptimizerState(value_of(leaf), names, metadata.get("sharding_rules"))
    return states


def has_variables(treedef: TreeDef) -> bool:
    """Whether a tree of this structure may have variables of nnx, by the classes of its nodes."""
    nodes = tree_leaves(treedef.unflatten(range(treedef.num_leaves)), is_leaf=is_wrapper)
    return any(hasattr(kind, "get_metadata") for kind in {*map(type, nodes)})


def _names_of_axes(array: Any) -> tuple[str, ...]:
    """The names of a `NamedArray`'s axes; empty if its array has other dims.

    A tree map keeps the axes: a factored moment has the axes of its parameter.
    """
    shape = tuple(value_of(array).shape)
    is_for_array = tuple(axis.size for axis in array.axes) == shape
    return tuple(axis.name for axis in array.axes) if is_for_array else ()


def value_of(leaf: Any) -> Any:
    """The array of a leaf, as `leaves_with_names` shows it."""
    if isinstance(leaf, FieldArray | OptimizerState):
        return leaf.array
    return tree_leaves(leaf)[0] if is_wrapper(leaf) else leaf


def leaves_with_names(tree: Any) -> list[Any]:
    """The leaves, in JAX's order, each with the object that has the names of its dims.

    A box or a `NamedArray` replaces the single leaf in it. A `FieldArray` replaces an array in a
    field that names its dims.
    """
    shown: list[Any] = []
    for node in tree_flatten(tree, is_leaf=lambda x: is_wrapper(x) or bool(_named_fields(x)))[0]:
        if is_wrapper(node):
            # A box may hold a tree: `nnx.Param({"q": ..., "k": ...})`. Its names then fit no leaf.
            inside = tree_leaves(node)
            shown += [node] if len(inside) == 1 else inside
        elif names_of_fields := _named_fields(node):
            for field, child in children_with_keys(node):
                leaves = leaves_with_names(child)
                is_array = len(leaves) == 1 and leaves[0] is child and not is_box(child)
                names = names_of_fields.get(field) if is_array else None
                shown += leaves if names is None else [FieldArray(child, names)]
        else:
            shown.append(node)
    return shown


def _named_fields(node: Any) -> dict[str, tuple[str, ...]]:
    return _named_fields_of(type(node))


@lru_cache(4096)
def _named_fields_of(kind: type) -> dict[str, tuple[str, ...]]:
    """The fields of a class that name the dims of an array, and these names."""
    if not is_dataclass(kind):
        return {}
    names = {field.name: field.metadata.get("axis_names") for field in fields(kind)}
    return {name: tuple(of_field) for name, of_field in names.items() if of_field}
