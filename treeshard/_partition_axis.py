"""The dims of a transformer, by names that are known ahead, and the mesh axes they take."""

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
# What one dim is sharded over, as it may be given; once made, neither a list nor `...`.
MeshAxes = str | tuple[str, ...] | list[str] | EllipsisType | None

# Fields that are what other fields are, unless they are given.
_BATCH = {"from": ("fully_sharded_data_parallel_axis", "data_parallel_axis")}
_SEQUENCE = {"from": ("sequence_parallel_axis",)}
_TENSOR = {"from": ("tensor_parallel_axis",)}
_EXPERT = {"from": ("expert_parallel_axis",)}


@jax.tree_util.register_static
@dataclass(frozen=True)
class PartitionAxis:
    """Says which mesh axes each dim of a transformer is sharded over.

    The first five fields are the names of mesh axes. Each of the others says what one kind
    of dim is sharded over: an axis, a tuple of axes (outermost first), or `None`. Those
    that are not given, or given as `...`, follow the mesh axes. (`dataclasses.replace`
    gives all that it does not change, so there write `head_axis=...` to derive it again.)
    It is hashable, and in a pytree it has no leaves.

    Raises:
        ShardingRuleError: If a field is neither an axis, a tuple of different axes, nor
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
            elif isinstance(value, list):  # a list does not hash
                value = tuple(value)
            object.__setattr__(self, each.name, value)
            is_name = isinstance(each.default, str)
            if not (isinstance(value, str) if is_name else is_mesh_axes(value)):
                wanted = "a mesh axis" if is_name else "a mesh axis, a tuple of them, or None"
                bad.append(f"PartitionAxis({each.name}={value!r}): give {wanted}.")
        if bad:
            raise ShardingRuleError(listed(f"{len(bad)} fields are no mesh axes:", bad))

    def resolve(
        self, *names: Entry, mode: Mode = "train", mesh: AnyMesh | None = None
    ) -> PartitionSpec:
        """Resolves the names of an array's dims to mesh axes.

        Args:
            names: One a dim: a field, with or without its `_axis` (`"batch"`), `None` for
                a dim that is not sharded, `UNCONSTRAINED`, or a tuple of names for a dim
                that is several in one.
            mode: In `"generation"`, a name that has a `generation_` field takes that.
            mesh: Where given, axes that it lacks drop out.

        Returns:
            A spec with one entry a name. An axis goes to the first name that claims it.

        Raises:
            SpecError: If there are unknown names (all are listed), or an unknown mode.

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
        given = {_short(each.name): getattr(self, each.name) for each in fields(self)}
        if mode == "train":
            return given
        return {name: given.get(f"generation_{name}", axes) for name, axes in given.items()}


def _short(name: str) -> str:
    return name.removesuffix("_axis")


def _unknown_names(unknown: list[str], known: dict[str, Entry]) -> str:
    facts = [
        f"{name!r} is no logical name of PartitionAxis.{did_you_mean(_short(name), known)}"
        for name in unknown
    ]
    return f"{listed('Some names are not known:', facts)}\nPartitionAxis has {', '.join(known)}."


# ------------------------------------------------------------------ names of dims


def flat_names(names: Sequence[Entry]) -> list[str]:
    """The names of all dims, one after the other."""
    return [name for dim in names for name in axes_of(dim)]


def check_names(names: Any) -> None:
    """Raises `SpecError` if these are no names of dims."""
    if isinstance(names, str | PartitionSpec) or not isinstance(names, Sequence):
        raise SpecError(
            f"{names!r} ({type(names).__name__}) is no tuple of logical names. Give a name or None"
            ' for each dim, such as ("batch", None). A PartitionSpec always means mesh axes.'
        )
    for dim in names:
        if not (dim is UNCONSTRAINED or is_mesh_axes(dim)) or isinstance(dim, list):
            raise SpecError(
                f"{tuple(names)}: {dim!r} ({type(dim).__name__}) is no logical name. Give a str,"
                " None, or a tuple of different str for a dim that is several in one."
            )


def is_mesh_axes(value: Any) -> bool:
    """Whether `value` can stand at one dim: `None`, a name, or several different ones."""
    if isinstance(value, tuple | list):
        return all(isinstance(name, str) for name in value) and len(set(value)) == len(value)
    return value is None or isinstance(value, str)


def on_mesh(
    spec: PartitionSpec, mesh: AnyMesh | None, shape: tuple[int, ...] | None = None
) -> PartitionSpec:
    """What of a spec a mesh and a shape can have, with as many entries as before."""
    count = len(entries(spec))
    # Every axis divides 0: without a shape none is taken out for being uneven.
    given, _ = project(spec, mesh, (0,) * count if shape is None else shape)
    return PartitionSpec(*entries(given), *[None] * (count - len(entries(given))))
