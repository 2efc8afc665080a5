"""`PartitionAxis`: the mesh axes of each kind of dim of a transformer, and constraints by them.

The rest of treeshard knows its base, `NamedAxes`: rules that assign axes in the order of the dims.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import EllipsisType
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from treeshard._core.mesh import MeshLike, axis_sizes, describe_sizes, get_incontext_mesh
from treeshard._core.paths import PyTree
from treeshard._core.specs import (
    Entry,
    all_axes,
    axes_of,
    entries,
    entry_of,
    is_mesh_axes,
    trim_spec,
)
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._planning.axis_names import USUAL_NAMES, idle_axes, name_on_mesh
from treeshard._planning.logical import Mode, NamedAxes, check_names, on_mesh, resolve_by_dims
from treeshard.errors import ShardingRuleError, SpecError, did_you_mean, listed, warn

# What a field accepts. A finished `PartitionAxis` holds neither lists nor `...`.
MeshAxes = str | tuple[str, ...] | list[str] | EllipsisType | None

# Fields that default to the values of other fields.
_BATCH = {"from": ("fully_sharded_data_parallel_axis", "data_parallel_axis")}
_SEQUENCE = {"from": ("sequence_parallel_axis",)}
_TENSOR = {"from": ("tensor_parallel_axis",)}
_EXPERT = {"from": ("expert_parallel_axis",)}


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis(NamedAxes):
    """Maps each kind of dim of a transformer, such as batch or head, to mesh axes.

    To get the axes of your mesh, call `PartitionAxis.for_mesh(mesh)`; the defaults are EasyDeL's
    names. The first five fields name mesh axes. Each other field has the axes of one kind of dim:
    an axis, a tuple of axes (outermost first), or `None`. An omitted field, or `...`, is derived
    from the first five fields. `dataclasses.replace` passes all old values: to derive a field
    again, pass `head_axis=...`. Instances are hashable, and have no leaves in a pytree.

    `custom` has the mesh axes of your own names, such as `{"cache": "sp"}`. In generation,
    `"generation_cache"` overrides `"cache"`. The field stores sorted pairs.

    | field | default | on `data=2,fsdp=2,tensor=2`, by `for_mesh` |
    |---|---|---|
    | `data_parallel_axis` | `"dp"` | `"data"` |
    | `fully_sharded_data_parallel_axis` | `"fsdp"` | `"fsdp"` |
    | `tensor_parallel_axis` | `"tp"` | `"tensor"` |
    | `sequence_parallel_axis`, `expert_parallel_axis` | `"sp"`, `"ep"` | `"sp"`, `"ep"` |
    | `batch_axis` | `("fsdp", "dp")` | `("fsdp", "data")` |
    | `head_axis`, `hidden_state_axis`, | `"tp"` | `"tensor"` |
    | `mlp_intermediate_axis`, `vocab_axis` | `"tp"` | `"tensor"` |
    | `sequence_axis`, `query_sequence_axis`, `key_sequence_axis` | `"sp"` | `"sp"` |
    | `expert_axis` | `"ep"` | `"ep"` |
    | `generation_head_axis`, `generation_key_sequence_axis` | `"tp"`, `"sp"` | `"tensor"`, `"sp"` |
    | `generation_batch_axis` and all others | `None` | `None` |

    Raises:
        ShardingRuleError: If the value of a field or a custom name is not an axis, a tuple of
            distinct axes, or `None`, or if a custom name is the name of a field. The message lists
            all of them.

    Examples:
        >>> axes = PartitionAxis(tensor_parallel_axis="model", vocab_axis=None)
        >>> axes.head_axis, axes.vocab_axis, axes.batch_axis
        ('model', None, ('fsdp', 'dp'))
        >>> PartitionAxis(custom={"cache": "sp"}).resolve("batch", "cache")
        P(('fsdp', 'dp'), 'sp')

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

    custom: Mapping[str, MeshAxes] | tuple[tuple[str, Entry], ...] = ()

    def __post_init__(self) -> None:
        bad: list[str] = []
        for each in self._fields_of_axes():
            value = getattr(self, each.name)
            if value is ... and "from" in each.metadata:
                axes = [getattr(self, name) for name in each.metadata["from"]]
                value = entry_of(list(dict.fromkeys(axes)))
            elif isinstance(value, list):  # which does not hash
                value = tuple(value)
            object.__setattr__(self, each.name, value)
            is_name = each.name in USUAL_NAMES
            if not (isinstance(value, str) if is_name else is_mesh_axes(value)):
                valid = "a mesh axis" if is_name else "a mesh axis, a tuple of them, or None"
                bad.append(f"PartitionAxis({each.name}={value!r}): give {valid}.")
        custom = dict(self.custom)
        bad += [wrong for name in custom if (wrong := self._find_mistake(name, custom[name]))]
        if bad:
            raise ShardingRuleError(listed(f"{len(bad)} fields are not mesh axes:", bad))
        pairs = [(name, tuple(x) if isinstance(x, list) else x) for name, x in custom.items()]
        object.__setattr__(self, "custom", tuple(sorted(pairs)))

    def _find_mistake(self, name: Any, axes: Any) -> str | None:
        """What is wrong with a custom name."""
        names = [each.name for each in self._fields_of_axes()]
        short = [field.removesuffix("_axis") for field in names]
        call = f"PartitionAxis(custom={{{name!r}: {axes!r}}})"
        if not isinstance(name, str) or not is_mesh_axes(axes):
            return f"{call}: give a name, and a mesh axis, a tuple of them, or None."
        if name in (*names, *short):
            return f"{call}: the field {name.removesuffix('_axis')}_axis has this name. Set it."
        # In eformer such a name stands for the axes of the field.
        if references := [axis for axis in axes_of(axes) if axis in names]:
            return f"{call}: {references[0]} is a field. Give its mesh axes."
        return None

    @classmethod
    def for_mesh(cls, mesh: MeshLike, **fields: Any) -> Self:
        """Makes a `PartitionAxis` with the axes of a mesh, found by their usual names.

        | field | names |
        |---|---|
        | `data_parallel_axis` | dp, data, replica |
        | `fully_sharded_data_parallel_axis` | fsdp |
        | `tensor_parallel_axis` | tp, tensor, model, mp |
        | `sequence_parallel_axis` | sp, sequence, seq, context |
        | `expert_parallel_axis` | ep, expert |

        If the mesh has none of the names, the field keeps its default.

        Args:
            mesh: A mesh, or its axes as text.
            fields: Values of other fields, such as `vocab_axis="fsdp"`, or
                `generation_batch_axis=("fsdp", "data")` to shard the batch in generation.

        Raises:
            MeshError: If `mesh` is not a mesh.
            ShardingRuleError: As `PartitionAxis`.
            TypeError: If a field does not exist.

        Examples:
            >>> axes = PartitionAxis.for_mesh("data=2,fsdp=2,tensor=2", vocab_axis="fsdp")
            >>> axes.resolve("batch", "sequence", "head", mesh="data=2,fsdp=2,tensor=2")
            P(('fsdp', 'data'), None, 'tensor')
            >>> axes.vocab_axis
            'fsdp'
        """
        sizes = axis_sizes(mesh)
        named = {
            name: next((axis for axis in usual if axis in sizes), usual[0])
            for name, usual in USUAL_NAMES.items()
        }
        return cls(**(named | fields))

    def resolve(
        self, *names: Entry, mode: Mode = "train", mesh: MeshLike | None = None
    ) -> PartitionSpec:
        """Returns the spec of an array whose dims have these names.

        Args:
            names: One entry per dim: the name of a field, with or without `_axis` (`"batch"`); a
                custom name; `None` for a dim that is not sharded; `UNCONSTRAINED`; or a tuple of
                names for a dim that merges several dims.
            mode: `"train"` or `"generation"`. In generation, the fields `generation_...` override
                the other fields. The default of `generation_batch_axis` is `None`, as in EasyDeL:
                the batch is replicated.
            mesh: The mesh, or its axes as text. Axes that the mesh lacks are dropped. Without it,
                all axes stay.

        Returns:
            A spec with one entry per name. If several names use an axis, the first one gets it.

        Raises:
            SpecError: If a name or the mode is unknown. The message lists all unknown names.

        Warns:
            ShardingWarning: If `mesh`, or by default the current mesh, has axes of more than one
                device that no field names, because no array is sharded over them. Without `mesh`,
                there is no warning here if the spec has the default name of such an axis, such as
                `"dp"` for `"data"`: `with_sharding_constraint` warns.

        Examples:
            >>> PartitionAxis().resolve("batch", "sequence", "head", "hidden_state")
            P(('fsdp', 'dp'), 'sp', 'tp', None)
            >>> PartitionAxis().resolve("batch", "query_sequence", "head", mode="generation")
            P(None, None, 'tp')
        """
        if mode not in ("train", "generation"):
            hint = did_you_mean(str(mode), ("train", "generation"))
            raise SpecError(f"mode={mode!r} is neither 'train' nor 'generation'.{hint}")
        check_names(names)
        known = self.axes_by_name(mode)
        facts = [
            f"{name!r} is not a logical name of PartitionAxis.{did_you_mean(name, known)}"
            for name in all_axes(names)
            if name not in known
        ]
        if facts:
            short = ", ".join(name for name in known if not name.endswith("_axis"))
            headline = f"{len(facts)} names are unknown:"
            raise SpecError(f"{listed(headline, facts)}\nPartitionAxis has {short}.")
        spec = resolve_by_dims(names, known)
        self._warn_of_unnamed_axes(mesh, spec)
        return on_mesh(spec, mesh)

    def constrain(
        self, x: PyTree, *names: Entry, mode: Mode = "train", mesh: MeshLike | None = None
    ) -> PyTree:
        """Shards an array by the logical names of its dims, inside or outside `jit`.

        Calls `resolve`, then `with_sharding_constraint`.

        Args:
            x: An array, or a tree of arrays.
            names: As in `resolve`.
            mode: As in `resolve`.
            mesh: The mesh, or its axes as text; by default the current mesh.

        Returns:
            The constrained array or tree; without a mesh, `x` itself.

        Raises:
            SpecError: As `resolve` and `with_sharding_constraint`, which may also warn.

        Examples:
            >>> axes = PartitionAxis()
            >>> x = axes.constrain(jnp.ones((8, 16, 4)), "batch", None, "head", mesh="fsdp=4,tp=2")
            >>> x.sharding.spec
            P('fsdp', None, 'tp')
        """
        spec = self.resolve(*names, mode=mode, mesh=mesh)
        return with_sharding_constraint(x, trim_spec(spec), mesh)

    def _warn_of_unnamed_axes(self, mesh: MeshLike | None, spec: PartitionSpec) -> None:
        here = get_incontext_mesh(raise_error=False) if mesh is None else mesh
        if here is None:
            return
        sizes, unnamed = axis_sizes(here), idle_axes(here, all_axes(self._all_entries().values()))
        # Without `mesh`, the spec keeps the axes that are absent, and whoever applies it tells.
        is_told_later = mesh is None and any(
            name_on_mesh(axis, sizes) in unnamed for axis in all_axes(entries(spec))
        )
        if unnamed and not is_told_later:
            warn(
                f"PartitionAxis: no field names {', '.join(map(repr, unnamed))} of the mesh"
                f" ({describe_sizes(sizes)}), so no array is sharded over it."
                " `PartitionAxis.for_mesh(mesh)` takes the names of a mesh."
            )

    def axes_by_name(self, mode: Mode) -> dict[str, Entry]:
        """The mesh axes of each name, with and without its `_axis`."""
        by_name: dict[str, Entry] = {}
        given = self._all_entries()
        for name, axes in given.items():
            of_mode = given.get(f"generation_{name}", axes) if mode == "generation" else axes
            by_name[name.removesuffix("_axis")] = by_name[name] = of_mode
        return by_name

    def _all_entries(self) -> dict[str, Entry]:
        """The mesh axes of each field and of each custom name."""
        of_fields = {each.name: getattr(self, each.name) for each in self._fields_of_axes()}
        return of_fields | dict(self.custom)

    def _fields_of_axes(self) -> list[Field[Any]]:
        return [each for each in fields(self) if each.name != "custom"]
