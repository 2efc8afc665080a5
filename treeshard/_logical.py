"""Logical names: what a dim means (`"batch"`, `"heads"`), and the rules that give it axes."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec

from treeshard._errors import ShardingRuleError, SpecError, listed
from treeshard._mesh import AnyMesh
from treeshard._partition_axis import (
    PartitionAxis,
    check_names,
    flat_names,
    is_mesh_axes,
    on_mesh,
)
from treeshard._specs import UNCONSTRAINED, Entry, axes_of, entry_of

# A dict has one rule a name; in a list of pairs, a name may stand several times.
LogicalRules = PartitionAxis | Mapping[str, Any] | Sequence[Any]
ReadLogicalRules = PartitionAxis | tuple[tuple[str, Entry], ...]


def logical_to_mesh_spec(
    names: Sequence[Entry],
    rules: LogicalRules,
    mesh: AnyMesh | None = None,
    shape: tuple[int, ...] | None = None,
) -> PartitionSpec:
    """Resolves the names of an array's dims to mesh axes, by rules.

    Rules are a list by priority. Each gives its axes to the dim that bears its name, if no
    earlier rule decided that dim and all of the axes are free. A name may have several
    rules. One without a rule is not sharded.

    Args:
        names: One a dim: a name, `None` for a dim that is not sharded, `UNCONSTRAINED`, or
            a tuple of names for a dim that is several in one.
        rules: Pairs `(name, axes)`, or a dict of them. Axes are a mesh axis, several
            (outermost first), `UNCONSTRAINED`, or one of `None`, `()`, `[]` for a dim that
            is not sharded, whatever later rules say. Or a `PartitionAxis`: then dims are
            served in their own order, and names that it lacks are an error.
        mesh: Where given, axes that it lacks drop out, after the rules are applied: an
            axis that is absent and one of size 1 come to the same.
        shape: Where given with a mesh, axes that do not divide their dim drop out.

    Returns:
        A spec with one entry a name.

    Raises:
        ShardingRuleError: If rules are malformed: all are listed.
        SpecError: If a name stands there twice, `names` are no names or more than `shape`
            has dims, or a `PartitionAxis` lacks one of them.

    Examples:
        >>> rules = [("batch", "x"), ("features", "x"), ("heads", "y"), ("batch", "z")]
        >>> logical_to_mesh_spec(("batch", "length", "heads", "features"), rules)
        P('x', None, 'y', None)

    Source:
        `flax.linen.logical_to_mesh_axes`, which MaxText builds on.
    """
    return resolve_by(read_logical_rules(rules), names, mesh, shape)


@contextmanager
def logical_axis_rules(rules: LogicalRules) -> Iterator[None]:
    """Puts rules in force, in this thread, for the logical names used inside.

    The innermost of nested contexts holds, alone. A jitted function that is called under
    other rules is compiled anew.

    Args:
        rules: As `logical_to_mesh_spec` takes them. They are read once, at the start.

    Raises:
        ShardingRuleError: If rules are malformed: all are listed.

    Examples:
        >>> with logical_axis_rules([("batch", "fsdp"), ("embed", None)]):
        ...     y = with_sharding_constraint(jnp.ones((8, 4)), ("batch", "embed"), mesh)

    Source:
        Flax's context of this name, whose rules are used where none of these are in force.
    """
    with _in_force(read_logical_rules(rules)):
        yield


# Its value is part of the key of jit's caches, which a variable of our own would not be.
_in_force = jax.make_user_context(None)


# ------------------------------------------------------------------ for the other rooms


def current_logical_rules() -> ReadLogicalRules | None:
    """The rules in force: ours, else those of Flax where it is loaded, else `None`."""
    if _in_force.value is not None:
        return _in_force.value
    # Linen's and nnx's contexts both keep their rules there.
    ambient = getattr(sys.modules.get("flax.core.spmd"), "get_logical_axis_rules", tuple)()
    return read_logical_rules(ambient) if ambient else None


def resolve_names(
    names: Sequence[Entry], mesh: AnyMesh | None = None, shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """The spec that the rules in force give to names. Raises `SpecError` if there are none."""
    rules = current_logical_rules()
    if rules is None:
        raise SpecError(
            f"{names} is a tuple of logical names, and no rules are in force to resolve them. Write"
            f" P{names} if these are mesh axes, or run inside"
            " `with treeshard.logical_axis_rules(rules):`."
        )
    return resolve_by(rules, names, mesh, shape)


def resolve_by(
    rules: ReadLogicalRules,
    names: Sequence[Entry],
    mesh: AnyMesh | None = None,
    shape: tuple[int, ...] | None = None,
) -> PartitionSpec:
    """The spec that rules give to names, projected on what of a mesh and a shape is given."""
    check_names(names)
    if twice := [name for name, count in Counter(flat_names(names)).items() if count > 1]:
        raise SpecError(
            f"{tuple(names)}: {', '.join(map(repr, twice))} stands there twice, and axes can split"
            " one dim only. Name the dims apart, and give each name a rule."
        )
    if shape is not None and len(names) > len(shape):
        raise SpecError(
            f"{tuple(names)} names {len(names)} dims, but shape {shape} has {len(shape)}. Give at"
            " most one name a dim."
        )
    if isinstance(rules, PartitionAxis):
        return on_mesh(rules.resolve(*names), mesh, shape)
    return on_mesh(_by_priority(names, rules), mesh, shape)


def names_without_rule(names: Sequence[Entry], rules: ReadLogicalRules) -> list[str]:
    """The names that no rule speaks of, in order. (Those that a `PartitionAxis` lacks are an
    error instead.)"""
    ruled = None if isinstance(rules, PartitionAxis) else {name for name, _ in rules}
    return [name for name in flat_names(names) if ruled is not None and name not in ruled]


def read_logical_rules(rules: LogicalRules) -> ReadLogicalRules:
    """Rules in one form, which hashes. Raises `ShardingRuleError` listing all bad rules."""
    if isinstance(rules, PartitionAxis):
        return rules
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise ShardingRuleError(
            f"logical rules are {type(rules).__name__}. Give a list of (name, axes) pairs, such as"
            ' [("batch", ("data", "fsdp")), ("embed", None)], a dict, or a PartitionAxis.'
        )
    try:
        return _read(tuple(pairs))
    except TypeError:  # lists do not hash
        return _read.__wrapped__(tuple(pairs))


# ------------------------------------------------------------------ rules


@lru_cache(maxsize=64)  # to read long lists costs more than to resolve names by them
def _read(pairs: tuple[Any, ...]) -> tuple[tuple[str, Entry], ...]:
    bad = [
        f"logical rule {index}, {rule!r}, {wrong}"
        for index, rule in enumerate(pairs)
        if (wrong := _what_is_wrong(rule))
    ]
    if bad:
        raise ShardingRuleError(listed(f"{len(bad)} logical rules are malformed:", bad))
    return tuple((name, _entry(axes)) for name, axes in pairs)


def _what_is_wrong(rule: Any) -> str | None:
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        return 'is no pair (name, axes), such as ("batch", ("data", "fsdp")).'
    name, axes = rule
    if not isinstance(name, str):
        return f"starts with {type(name).__name__}. Give the logical name of a dim, a str."
    if axes is UNCONSTRAINED or is_mesh_axes(axes):
        return None
    return (
        "does not end with mesh axes. Give one, a tuple of different ones, or None for a dim"
        " that is not sharded."
    )


def _entry(axes: Any) -> Entry:
    if axes is UNCONSTRAINED:
        return axes
    return entry_of([axes] if isinstance(axes, str) else axes or ())


def _by_priority(names: Sequence[Entry], rules: tuple[tuple[str, Entry], ...]) -> PartitionSpec:
    undecided = set(flat_names(names))
    given: dict[str, Entry] = {}
    used: set[str] = set()
    for name, entry in rules:
        if name in undecided and used.isdisjoint(axes_of(entry)):
            undecided.remove(name)
            given[name] = entry
            used.update(axes_of(entry))
    return PartitionSpec(*[_of_dim(dim, given) for dim in names])


def _of_dim(dim: Entry, given: Mapping[str, Entry]) -> Entry:
    """The entry of a dim: that of its name, or the axes of its names one after the other."""
    if not isinstance(dim, tuple):
        return given.get(dim) if isinstance(dim, str) else dim
    return entry_of([axis for name in dim for axis in axes_of(given.get(name))])
