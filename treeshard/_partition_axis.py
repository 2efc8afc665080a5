"""`PartitionAxis`: the named dims of a transformer, and the mesh axes of each."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from types import EllipsisType
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from treeshard._errors import ShardingRuleError, SpecError, did_you_mean, listed
from treeshard._mesh import AnyMesh
from treeshard._specs import UNCONSTRAINED, Entry, axes_of, entries, entry_of, project

Mode = Literal["train", "generation"]
# What a field accepts. A finished `PartitionAxis` holds neither lists nor `...`.
MeshAxes = str | tuple[str, ...] | list[str] | EllipsisType | None

# Fields that default to the values of other fields.
_BATCH = {"from": ("fully_sharded_data_parallel_axis", "data_parallel_axis")}
_SEQUENCE = {"from": ("sequence_parallel_axis",)}
_TENSOR = {"from": ("tensor_parallel_axis",)}
_EXPERT = {"from": ("expert_parallel_axis",)}


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis:
    """Maps each kind of dim of a transformer to the mesh axes that it is sharded over.

    The first five fields name mesh axes. Each of the others is the mesh axis of one kind of
    dim, a tuple of axes (outermost first), or `None`. A field that is not given, or given as
    `...`, is derived from the first five. (`dataclasses.replace` passes every field that it
    does not change, so there write `head_axis=...` to derive it again.) Instances are
    hashable, and have no leaves in a pytree.

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

    def resolve(
        self, *names: Entry, mode: Mode = "train", mesh: AnyMesh | None = None
    ) -> PartitionSpec:
        """Resolves the logical names of an array's dims to mesh axes.

        Args:
            names: One entry per dim: the name of a field, with or without its `_axis`
                (`"batch"`), `None` for a dim that is not sharded, `UNCONSTRAINED`, or a
                tuple of names for a dim that merges several.
            mode: With `"generation"`, names that have a `generation_` field use that field.
            mesh: If given, axes that it lacks are dropped.

        Returns:
            A spec with one entry per name. An axis goes to the first name that uses it.

        Raises:
            SpecError: If names are unknown (all are listed), or the mode is.

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
        known = self._axes_by_name(mode)
        if unknown := [name for name in flat_names(names) if _short(name) not in known]:
            raise SpecError(_unknown_names(unknown, known))
        used: set[str] = set()
        dims: list[Entry] = []
        for dim in names:
            if dim is UNCONSTRAINED:
                dims.append(dim)
                continue
            axes = [axis for name in axes_of(dim) for axis in axes_of(known[_short(name)])]
            free = [axis for axis in dict.fromkeys(axes) if axis not in used]
            used.update(free)
            dims.append(entry_of(free))
        return on_mesh(PartitionSpec(*dims), mesh)

    def _axes_by_name(self, mode: Mode) -> dict[str, Entry]:
        axes_of_name = {_short(each.name): getattr(self, each.name) for each in fields(self)}
        if mode == "train":
            return axes_of_name
        return {
            name: axes_of_name.get(f"generation_{name}", axes)
            for name, axes in axes_of_name.items()
        }


def _short(name: str) -> str:
    return name.removesuffix("_axis")


def _unknown_names(unknown: list[str], known: dict[str, Entry]) -> str:
    facts = [
        f"{name!r} is not a logical name of PartitionAxis.{did_you_mean(_short(name), known)}"
        for name in unknown
    ]
    headline = f"{len(facts)} names are unknown:"
    return f"{listed(headline, facts)}\nPartitionAxis has {', '.join(known)}."


# ------------------------------------------------------------------ names of dims


def flat_names(names: Sequence[Entry]) -> list[str]:
    """The names of all dims, one after the other."""
    return [name for dim in names for name in axes_of(dim)]


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


def is_mesh_axes(value: Any) -> bool:
    """Whether `value` can be the entry of one dim: `None`, a name, or several distinct ones."""
    if isinstance(value, tuple | list):
        return all(isinstance(name, str) for name in value) and len(set(value)) == len(value)
    return value is None or isinstance(value, str)


def on_mesh(
    spec: PartitionSpec, mesh: AnyMesh | None, shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """Projects a spec on a mesh and a shape, and keeps its number of entries."""
    count = len(entries(spec))
    # Every axis divides 0: without a shape no axis is dropped as uneven.
    projected, _ = project(spec, mesh, (0,) * count if shape is None else shape)
    return PartitionSpec(*entries(projected), *[None] * (count - len(entries(projected))))
