"""Logical axis names of dims (`"batch"`, `"heads"`), and the rules that map them to mesh axes.

The rules are a list by priority and not a dict, as in Flax: a name may have several, and which one
applies depends on the axes that the other dims of the same array have taken.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import EllipsisType
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from treeshard._core.contexts import logical_rules
from treeshard._core.mesh import (
    MeshLike,
    axis_sizes,
    describe_sizes,
    get_incontext_mesh,
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
from treeshard._planning.axis_names import idle_axes
from treeshard.errors import ShardingRuleError, SpecError, counted, did_you_mean, listed, warn

Mode = Literal["train", "generation"]
# What a field accepts. A finished `PartitionAxis` holds neither lists nor `...`.
MeshAxes = str | tuple[str, ...] | list[str] | EllipsisType | None

# Fields that default to the values of other fields.
_BATCH = {"from": ("fully_sharded_data_parallel_axis", "data_parallel_axis")}
_SEQUENCE = {"from": ("sequence_parallel_axis",)}
_TENSOR = {"from": ("tensor_parallel_axis",)}
_EXPERT = {"from": ("expert_parallel_axis",)}
# What meshes call the axes of the first five fields; the default of the field comes first.
_USUAL_NAMES = {
    "data_parallel_axis": ("dp", "data", "replica"),
    "fully_sharded_data_parallel_axis": ("fsdp",),
    "tensor_parallel_axis": ("tp", "tensor", "model", "mp"),
    "sequence_parallel_axis": ("sp", "sequence", "seq", "context"),
    "expert_parallel_axis": ("ep", "expert"),
}


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis:
    """Maps each kind of dim of a transformer to the mesh axes that it is sharded over.

    The first five fields name mesh axes. Each of the others is the mesh axis of one kind of
    dim, a tuple of axes (outermost first), or `None`. A field that is not given, or given as
    `...`, is derived from the first five. (`dataclasses.replace` passes every field that it
    does not change, so there write `head_axis=...` to derive it again.) Instances are
    hashable, and have no leaves in a pytree.

    | field | default | on `data=2,fsdp=2,tensor=2`, by `for_mesh` |
    |---|---|---|
    | `data_parallel_axis` | `"dp"` | `"data"` |
    | `fully_sharded_data_parallel_axis` | `"fsdp"` | `"fsdp"` |
    | `tensor_parallel_axis` | `"tp"` | `"tensor"` |
    | `sequence_parallel_axis`, `expert_parallel_axis` | `"sp"`, `"ep"` | the same, not there |
    | `batch_axis` | `("fsdp", "dp")` | `("fsdp", "data")` |
    | `head_axis`, `hidden_state_axis`, | `"tp"` | `"tensor"` |
    | `mlp_intermediate_axis`, `vocab_axis` | `"tp"` | `"tensor"` |
    | `sequence_axis`, `query_sequence_axis`, `key_sequence_axis` | `"sp"` | `"sp"` |
    | `expert_axis` | `"ep"` | `"ep"` |
    | `generation_head_axis`, `generation_key_sequence_axis` | `"tp"`, `"sp"` | `"tensor"`, `"sp"` |
    | `generation_batch_axis` and all others | `None` | `None` |

    Raises:
        ShardingRuleError: If a field is neither an axis, a tuple of distinct axes, nor
            `None`. All such fields are listed.

    Examples:
        >>> axes = PartitionAxis(tensor_parallel_axis="model", vocab_axis=None)
        >>> axes.head_axis, axes.vocab_axis, axes.batch_axis
        ('model', None, ('fsdp', 'dp'))

    Source:
        EasyDeL and eformer's class of this name.
    """

    data_parallel_axis: str = "dp"
    fully_sharded_data_parallel_axis: str = "fsdp"
    tensor_parallel_axis: str = "tp"
    sequence_parallel_axis: str = "sp"
    expert_parallel_axis: str = "ep"

    batch_axis: MeshAxes = field(default=..., metadata=_BATCH)
    sequence_axis: MeshAxes = field(default=..., metadata=_SEQUENCE)
    query_sequence_axis: MeshAxes = field(default=..., metadata=_SEQUENCE)
    head_axis: MeshAxes = field(default=..., metadata=_TENSOR)
    key_sequence_axis: MeshAxes = field(default=..., metadata=_SEQUENCE)
    hidden_state_axis: MeshAxes = field(default=..., metadata=_TENSOR)
    mlp_intermediate_axis: MeshAxes = field(default=..., metadata=_TENSOR)
    vocab_axis: MeshAxes = field(default=..., metadata=_TENSOR)
    expert_axis: MeshAxes = field(default=..., metadata=_EXPERT)
    expert_gate_axis: MeshAxes = None
    attention_dim_axis: MeshAxes = None
    bias_head_sequence_axis: MeshAxes = None
    bias_key_sequence_axis: MeshAxes = None

    generation_batch_axis: MeshAxes = None
    generation_query_sequence_axis: MeshAxes = None
    generation_head_axis: MeshAxes = field(default=..., metadata=_TENSOR)
    generation_key_sequence_axis: MeshAxes = field(default=..., metadata=_SEQUENCE)
    generation_attention_dim_axis: MeshAxes = None

    def __post_init__(self) -> None:
        bad: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value is ... and "from" in each.metadata:
                axes = [getattr(self, name) for name in each.metadata["from"]]
                value = entry_of(list(dict.fromkeys(axes)))
            elif isinstance(value, list):  # which does not hash
                value = tuple(value)
            object.__setattr__(self, each.name, value)
            is_name = isinstance(each.default, str)
            if not (isinstance(value, str) if is_name else is_mesh_axes(value)):
                valid = "a mesh axis" if is_name else "a mesh axis, a tuple of them, or None"
                bad.append(f"PartitionAxis({each.name}={value!r}): give {valid}.")
        if bad:
            raise ShardingRuleError(listed(f"{len(bad)} fields are not mesh axes:", bad))

    @staticmethod
    def for_mesh(mesh: MeshLike) -> "PartitionAxis":
        """Makes one whose first five fields are the axes of a mesh, by their usual names.

        They are `data_parallel_axis`: dp, data, replica; `fully_sharded_data_parallel_axis`: fsdp;
        `tensor_parallel_axis`: tp, tensor, model, mp; `sequence_parallel_axis`: sp, sequence, seq,
        context; `expert_parallel_axis`: ep, expert. A field without an axis keeps its default.

        Args:
            mesh: A mesh, or its axes as text.

        Examples:
            >>> axes = PartitionAxis.for_mesh("data=2,fsdp=2,tensor=2")
            >>> axes.resolve("batch", "sequence", "head", mesh="data=2,fsdp=2,tensor=2")
            P(('fsdp', 'data'), None, 'tensor')
        """
        sizes = axis_sizes(mesh)
        named = {
            field: next((name for name in usual if name in sizes), usual[0])
            for field, usual in _USUAL_NAMES.items()
        }
        return PartitionAxis(**named)

    def resolve(
        self, *names: Entry, mode: Mode = "train", mesh: MeshLike | None = None
    ) -> PartitionSpec:
        """Resolves the logical names of an array's dims to mesh axes.

        Args:
            names: One entry per dim: the name of a field, with or without its `_axis`
                (`"batch"`), `None` for a dim that is not sharded, `UNCONSTRAINED`, or a
                tuple of names for a dim that merges several.
            mode: With `"generation"`, names that have a `generation_` field use that field. Its
                default for the batch is `None`: the batch is replicated, as in EasyDeL, unless you
                set `generation_batch_axis`.
            mesh: If given, axes that it lacks are dropped.

        Returns:
            A spec with one entry per name. An axis goes to the first name that uses it.

        Raises:
            SpecError: If names are unknown (all are listed), or the mode is.

        Warns:
            ShardingWarning: If `mesh`, or by default the current mesh, has axes of more than one
                device that no field names: nothing is ever sharded over them.

        Examples:
            >>> PartitionAxis().resolve("batch", "sequence", "head", "hidden_state")
            P(('fsdp', 'dp'), 'sp', 'tp', None)
            >>> PartitionAxis().resolve("batch", "query_sequence", "head", mode="generation")
            P(None, None, 'tp')
        """
        if mode not in ("train", "generation"):
            hint = did_you_mean(str(mode), ("train", "generation"))
            raise SpecError(f"mode={mode!r} is neither 'train' nor 'generation'.{hint}")
        _check_names(names)
        known = self._axes_by_name(mode)
        facts = [
            f"{name!r} is not a logical name of PartitionAxis.{did_you_mean(name, known)}"
            for name in all_axes(names)
            if name not in known
        ]
        if facts:
            short = ", ".join(name for name in known if not name.endswith("_axis"))
            headline = f"{len(facts)} names are unknown:"
            raise SpecError(f"{listed(headline, facts)}\nPartitionAxis has {short}.")
        self._warn_of_unnamed_axes(mesh)
        return _on_mesh(_resolve_by_dims(names, known), mesh)

    def _warn_of_unnamed_axes(self, mesh: MeshLike | None) -> None:
        here = get_incontext_mesh(raise_error=False) if mesh is None else mesh
        if here is None:
            return
        named = all_axes(getattr(self, each.name) for each in fields(self))
        if unnamed := idle_axes(here, named):
            warn(
                f"PartitionAxis: no field names {', '.join(map(repr, unnamed))} of the mesh"
                f" ({describe_sizes(axis_sizes(here))}), so nothing is sharded over it."
                " `PartitionAxis.for_mesh(mesh)` takes the names of a mesh."
            )

    def _axes_by_name(self, mode: Mode) -> dict[str, Entry]:
        """The mesh axes of each name, with and without its `_axis`."""
        by_name: dict[str, Entry] = {}
        for each in fields(self):
            of_generation = f"generation_{each.name}"
            is_replaced = mode == "generation" and hasattr(self, of_generation)
            axes = getattr(self, of_generation if is_replaced else each.name)
            by_name[each.name.removesuffix("_axis")] = by_name[each.name] = axes
        return by_name


# ------------------------------------------------------------------ rules

LogicalRules = PartitionAxis | Sequence[Any]  # of pairs (name, axes)
ReadLogicalRules = PartitionAxis | tuple[tuple[str, Entry], ...]


@contextmanager
def logical_axis_rules(rules: LogicalRules) -> Iterator[None]:
    """Resolves logical names inside the block by these rules, in this thread.

    Of nested contexts only the innermost applies. A jitted function that is called under
    different rules is compiled again.

    Args:
        rules: Pairs `(name, axes)`. `axes` is a mesh axis, several (outermost first),
            `UNCONSTRAINED`, or one of `None`, `()` and `[]` for a dim that is not sharded,
            whatever later rules say. They are tried in order: a rule applies to the dim with
            its name if no earlier rule decided that dim and all of the rule's axes are still
            free. A name may have several rules. A name without a rule is not sharded. Or a
            `PartitionAxis`: it assigns axes in the order of the dims, and a name that it lacks
            is an error. They are read once, when the block starts.

    Raises:
        ShardingRuleError: If rules are malformed. All are listed.

    Examples:
        >>> with logical_axis_rules([("batch", "fsdp"), ("embed", None)]):
        ...     y = with_sharding_constraint(jnp.ones((8, 4)), ("batch", "embed"), mesh)

    Source:
        Flax's context of this name. Its rules apply where no treeshard context is active.
    """
    with logical_rules(read_logical_rules(rules)):
        yield


# ------------------------------------------------------------------ for other modules


def current_logical_rules() -> ReadLogicalRules | None:
    """The rules in force: treeshard's, else those of Flax or of haliax, else `None`."""
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
    _check_names(names)
    # Flax too refuses names that occur twice, but for `None` and `UNCONSTRAINED`.
    if twice := [name for name, count in Counter(all_axes(names)).items() if count > 1]:
        raise SpecError(
            f"{tuple(names)}: {', '.join(map(repr, twice))} occurs twice, and an axis can split"
            " only one dim. Use a different name for each dim, and give each name a rule."
        )
    # `project` would drop names beyond the rank, and the dims would get axes of other names.
    if shape is not None and len(names) > len(shape):
        raise SpecError(
            f"{tuple(names)} names {counted(len(names), 'dim')}, but shape {shape} has"
            f" {len(shape)}. Give at most one name per dim."
        )
    is_by_dim = isinstance(rules, PartitionAxis)
    spec = rules.resolve(*names) if is_by_dim else _resolve_by_priority(names, rules)
    return _on_mesh(spec, mesh, shape)


def rules_of_variable(
    given: ReadLogicalRules | None, own: ReadLogicalRules | None
) -> ReadLogicalRules | None:
    """The rules for an nnx variable: those given, or in force, and its own ones for other names.

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
        merged += [] if others else [(name, axes)]
    return tuple(merged)


def _pairs(rules: ReadLogicalRules | None) -> tuple[tuple[str, Entry], ...]:
    is_by_dim = isinstance(rules, PartitionAxis)
    return tuple(rules._axes_by_name("train").items()) if is_by_dim else rules or ()


def notes_on_names(
    names: Sequence[Entry], rules: ReadLogicalRules | None, mesh: MeshLike | None
) -> list[Adjustment]:
    """Why a list of rules does not shard a leaf with these names as they say: a name has no rule,
    or its rule names an axis that the mesh lacks."""
    # Without rules in force, and for names that a `PartitionAxis` lacks, resolving them raises. Its
    # default fields name axes that few meshes have.
    if rules is None or isinstance(rules, PartitionAxis):
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
    if isinstance(rules, PartitionAxis):
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


@lru_cache(maxsize=64)  # validating a long list costs more than resolving names by it
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
    # As in Flax, rules are tried in the order of the list, and not dims in the order of the array:
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


def _resolve_by_dims(names: Sequence[Entry], axes_by_name: Mapping[str, Entry]) -> PartitionSpec:
    # An axis goes to the first dim that has it, and a dim gets those of its axes that are left.
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


def _check_names(names: Any) -> None:
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


def _on_mesh(
    spec: PartitionSpec, mesh: MeshLike | None, shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """Projects a spec on a mesh and a shape, and keeps its number of entries."""
    # MaxText has one list of rules for all meshes, so rules name axes that a mesh may lack.
    count = len(entries(spec))
    projected, _ = project(spec, mesh, shape)
    return PartitionSpec(*dim_entries(projected, count))
