"""Logical axis names of dims (`"batch"`, `"heads"`), and the rules that map them to mesh axes.

The rules are a list by priority, as in Flax, and not a dict: a name may have several rules, and the
axes that other dims of the array have taken decide which rule applies.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

from jax.sharding import PartitionSpec

from treeshard._core.contexts import logical_rules
from treeshard._core.mesh import (
    MeshLike,
    axis_sizes,
    unknown_axis,
)
from treeshard._core.specs import (
    UNCONSTRAINED,
    Adjustment,
    Entry,
    all_axes,
    axes_of,
    dim_entries,
    entries,
    entry_of,
    is_mesh_axes,
    project,
)
from treeshard.errors import ShardingRuleError, SpecError, counted, did_you_mean, listed

Mode = Literal["train", "generation"]


# `PartitionAxis` is one level up, and rules may be one.
class NamedAxes:
    """Base of classes that assign mesh axes to names in the order of an array's dims."""

    __slots__ = ()

    def resolve(
        self, *names: Entry, mode: Mode = "train", mesh: MeshLike | None = None
    ) -> PartitionSpec:
        """Resolves the logical names of an array's dims to mesh axes."""
        raise NotImplementedError

    def axes_by_name(self, mode: Mode) -> dict[str, Entry]:
        """The mesh axes of each name."""
        raise NotImplementedError


# ------------------------------------------------------------------ rules

LogicalRules = NamedAxes | Sequence[Any]  # of pairs (name, axes)
ReadLogicalRules = NamedAxes | tuple[tuple[str, Entry], ...]


@contextmanager
def logical_axis_rules(rules: LogicalRules) -> Iterator[None]:
    """Maps logical names of dims to mesh axes, inside a `with` block and in its thread.

    If blocks are nested, only the innermost applies. JAX compiles a jitted function again if it is
    called under other rules.

    Args:
        rules: A `PartitionAxis`, or pairs `(name, axes)`, which are read when the block starts. The
            axes of a pair are a mesh axis; several axes, outermost first; `UNCONSTRAINED`; or
            `None`, `()` or `[]` for a dim that stays replicated, whatever later rules say. Rules
            are tried in order. A rule applies to the dim with its name if no earlier rule decided
            the dim, and if all of the rule's axes are free. A name may have several rules. A name
            without a rule is replicated. A `PartitionAxis` assigns axes in the order of the dims,
            and raises for a name that it lacks.

    Raises:
        ShardingRuleError: If rules are malformed. The message lists all of them.

    Examples:
        >>> with logical_axis_rules([("batch", "fsdp"), ("embed", None)]):
        ...     y = with_sharding_constraint(jnp.ones((8, 4)), ("batch", "embed"), mesh)

    Source:
        Flax's context of this name, whose rules apply outside blocks of this function.
    """
    with logical_rules(read_logical_rules(rules)):
        yield


# ------------------------------------------------------------------ for other modules


def current_logical_rules() -> ReadLogicalRules | None:
    """The rules in force: of treeshard, otherwise of Flax or haliax; `None` without any."""
    if logical_rules.value is not None:
        return logical_rules.value
    # Linen and nnx both keep the rules of their contexts in this module.
    ambient = getattr(sys.modules.get("flax.core.spmd"), "get_logical_axis_rules", tuple)()
    if not ambient:
        # A dict from names to mesh axes, or `None` outside of `hax.axis_mapping(...)`.
        haliax = sys.modules.get("haliax.partitioning")
        mapping = getattr(haliax, "current_thread_local_mapping", dict)() or {}
        ambient = tuple(mapping.items())
    return read_logical_rules(ambient) if ambient else None


def resolve_names(
    names: Sequence[Entry], mesh: MeshLike | None = None, shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """Resolves names by the rules in force. Raises `SpecError` if there are none."""
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
    mesh: MeshLike | None = None,
    shape: tuple[int, ...] | None = None,
) -> PartitionSpec:
    """Resolves names by rules, and projects the spec on the mesh and the shape, if given."""
    check_names(names)
    # Flax also rejects repeated names, except `None` and `UNCONSTRAINED`.
    if twice := [name for name, count in Counter(all_axes(names)).items() if count > 1]:
        raise SpecError(
            f"{tuple(names)}: {', '.join(map(repr, twice))} occurs twice, and an axis can split"
            " only one dim. Use a different name for each dim, and give each name a rule."
        )
    # `project` would drop names beyond the rank, and dims would get the axes of wrong names.
    if shape is not None and len(names) > len(shape):
        raise SpecError(
            f"{tuple(names)} names {counted(len(names), 'dim')}, but shape {shape} has"
            f" {len(shape)}. Give at most one name per dim."
        )
    is_by_dim = isinstance(rules, NamedAxes)
    spec = rules.resolve(*names, mesh=mesh) if is_by_dim else _resolve_by_priority(names, rules)
    return on_mesh(spec, mesh, shape)


def rules_of_variable(
    given: ReadLogicalRules | None, own: ReadLogicalRules | None
) -> ReadLogicalRules | None:
    """The rules for an nnx variable: the given rules, or the rules in force, and then its own.

    Raises:
        SpecError: If both have rules for a name, and they differ.
    """
    rules = current_logical_rules() if given is None else given
    if isinstance(rules, tuple) and given is None and logical_rules.value is None:
        rules = tuple(dict(rules).items())  # in Flax's context, nnx takes the last rule of a name
    if not own:
        return rules
    merged = list(_pairs(rules))
    for name, axes in dict(_pairs(own)).items():
        others = [axes_of_name for other, axes_of_name in merged if other == name]
        if others and axes not in others:
            raise SpecError(
                f"the rules in force have {name!r} as {others[0]!r}, and the variable's own"
                f" `sharding_rules` have it as {axes!r}. Flax refuses both together: remove one."
            )
        merged.append((name, axes))
    return tuple(merged)


def _pairs(rules: ReadLogicalRules | None) -> tuple[tuple[str, Entry], ...]:
    is_by_dim = isinstance(rules, NamedAxes)
    return tuple(rules.axes_by_name("train").items()) if is_by_dim else rules or ()


def notes_on_names(
    names: Sequence[Entry], rules: ReadLogicalRules | None, mesh: MeshLike | None
) -> list[Adjustment]:
    """Why a list of rules does not shard some dims of these names: a name has no rule, or its rule
    names an axis that the mesh lacks."""
    # Without rules in force, and for names that a `PartitionAxis` lacks, the resolution raises. The
    # default fields of a `PartitionAxis` name axes that few meshes have.
    if rules is None or isinstance(rules, NamedAxes):
        return []
    known = {name for name, _ in rules}
    sizes = {} if mesh is None else axis_sizes(mesh)
    notes: list[Adjustment] = []
    for name in all_axes(names):
        if name not in known:
            why = f"{name!r} has no logical rule.{did_you_mean(name, known)}"
            notes.append(Adjustment("no-logical-rule", why))
    for name, entry in _entries_by_priority(names, rules).items():
        for axis in axes_of(entry) if sizes else ():
            if axis not in sizes:
                why = f"the logical rule for {name!r}: {unknown_axis(axis, sizes)}"
                notes.append(Adjustment("logical-axis-not-in-mesh", why, (axis,)))
    return notes


def read_logical_rules(rules: LogicalRules) -> ReadLogicalRules:
    """Normalises rules to a hashable form. Raises `ShardingRuleError` listing all bad rules."""
    if isinstance(rules, NamedAxes):
        return rules
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise ShardingRuleError(
            f"logical rules are {type(rules).__name__}. Give a list of (name, axes) pairs, such as"
            ' [("batch", ("data", "fsdp")), ("embed", None)], or a PartitionAxis.'
        )
    try:
        return _read(tuple(rules))
    except TypeError:  # a rule holds a list, which does not hash
        return _read.__wrapped__(tuple(rules))


# ------------------------------------------------------------------ reading rules


@lru_cache(maxsize=64)  # validating a long list takes longer than resolving names
def _read(pairs: tuple[Any, ...]) -> tuple[tuple[str, Entry], ...]:
    bad = [
        f"logical rule {index}, {rule!r}, {wrong}"
        for index, rule in enumerate(pairs)
        if (wrong := _find_mistake(rule))
    ]
    if bad:
        raise ShardingRuleError(listed(f"{len(bad)} logical rules are malformed:", bad))
    return tuple((name, _entry(axes)) for name, axes in pairs)


def _find_mistake(rule: Any) -> str | None:
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        return 'is not a pair (name, axes), such as ("batch", ("data", "fsdp")).'
    name, axes = rule
    if not isinstance(name, str):
        return f"starts with {type(name).__name__}. Give the logical name of a dim, a str."
    if axes is UNCONSTRAINED or is_mesh_axes(axes):
        return None
    return (
        "does not end with mesh axes. Give one, a tuple of distinct ones, or None for a dim that"
        " is not sharded."
    )


def _entry(axes: Any) -> Entry:
    return entry_of(axes) if isinstance(axes, tuple | list) else axes


# ------------------------------------------------------------------ resolving names


def _resolve_by_priority(
    names: Sequence[Entry], rules: tuple[tuple[str, Entry], ...]
) -> PartitionSpec:
    entry_by_name = _entries_by_priority(names, rules)
    dims: list[Entry] = []
    for dim in names:
        if isinstance(dim, tuple):  # the axes of its names, one after the other
            dims.append(entry_of(all_axes(map(entry_by_name.get, dim))))
        else:  # `UNCONSTRAINED` and `None` stay
            dims.append(entry_by_name.get(dim) if isinstance(dim, str) else dim)
    return PartitionSpec(*dims)


def _entries_by_priority(
    names: Sequence[Entry], rules: tuple[tuple[str, Entry], ...]
) -> dict[str, Entry]:
    """The mesh axes of each name that a rule applies to."""
    # As in Flax, rules are tried in the order of the list, not in the order of the dims:
    # by ("a", "x"), ("b", "x") and ("b", "y"), ("b", "a") becomes P("y", "x").
    undecided = set(all_axes(names))
    entry_by_name: dict[str, Entry] = {}
    used: set[str] = set()
    for name, entry in rules:
        if name in undecided and used.isdisjoint(axes_of(entry)):
            undecided.remove(name)
            entry_by_name[name] = entry
            used.update(axes_of(entry))
    return entry_by_name


def resolve_by_dims(names: Sequence[Entry], axes_by_name: Mapping[str, Entry]) -> PartitionSpec:
    # The first dim with an axis gets it; later dims keep their other axes.
    used: set[str] = set()
    dims: list[Entry] = []
    for dim in names:
        if dim is UNCONSTRAINED:
            dims.append(dim)
            continue
        axes = all_axes(axes_by_name[name] for name in axes_of(dim))
        free = [axis for axis in dict.fromkeys(axes) if axis not in used]
        used.update(free)
        dims.append(entry_of(free))
    return PartitionSpec(*dims)


def check_names(names: Any) -> None:
    """Raises `SpecError` unless `names` is a sequence of names of dims."""
    if isinstance(names, str | PartitionSpec) or not isinstance(names, Sequence):
        raise SpecError(
            f"{names!r} ({type(names).__name__}) is not a tuple of logical names. Give a name or"
            ' None for each dim, such as ("batch", None). A PartitionSpec always means mesh axes.'
        )
    for dim in names:
        if not (dim is UNCONSTRAINED or is_mesh_axes(dim)) or isinstance(dim, list):
            raise SpecError(
                f"{tuple(names)}: {dim!r} ({type(dim).__name__}) is not a logical name. Give a str,"
                " None, or a tuple of distinct str for a dim that merges several."
            )


def on_mesh(
    spec: PartitionSpec, mesh: MeshLike | None, shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """Projects a spec on a mesh and a shape, and keeps its number of entries."""
    # MaxText has one list of rules for all meshes, so a mesh may lack axes of the rules.
    count = len(entries(spec))
    projected, _ = project(spec, mesh, shape)
    return PartitionSpec(*dim_entries(projected, count))
