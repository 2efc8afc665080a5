"""Tactics: actions of rules that choose a spec by the shape of the leaf.

A tactic is a tuple of steps, and a step is a text and a function. Unlike a closure, the text can be
compared and printed: a plan shows which tactic decided, and leaves of one shape share its result.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsIndex

from jax.sharding import PartitionSpec

from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    axis_sizes,
    axis_tuple,
    current_or_given,
    unknown_axis,
)
from treeshard._core.specs import (
    MISFITS,
    Adjustment,
    all_axes,
    dim_entries,
    entries,
    entry_of,
    part_count,
    project,
    trim_spec,
    with_entries,
)
from treeshard._planning.logical import (
    LogicalRules,
    NamedAxes,
    ReadLogicalRules,
    current_logical_rules,
    notes_on_names,
    read_logical_rules,
    resolve_by,
    resolve_names,
    rules_of_variable,
)
from treeshard._planning.named_dims import NamesInBox, has_names, names_in, value_of
from treeshard.errors import ShardingRuleError, SpecError, counted, misfit_error

Refined = tuple[PartitionSpec, tuple[Adjustment, ...]]
# Takes the spec that the previous steps returned, the mesh, the leaf's path, and the leaf. Returns
# the refined spec, and the adjustments. Raises `SpecError` if it cannot return a spec, for example
# if logical names do not resolve.
Refine = Callable[[PartitionSpec, AnyMesh, str, Any], Refined]


@dataclass(frozen=True)
class Step:
    """One step of a tactic: the call that makes it, and a function. Equal calls are equal steps."""

    # The call, which a plan shows.
    text: str
    refine: Refine = field(compare=False)
    # Its own threshold in elements; `None` uses the threshold of the call that applies the rules.
    min_size: int | None = None
    # The axes over which it shards parameters that are gathered for use.
    fsdp_axes: tuple[str, ...] = ()
    # The kind of memory for the leaf; `None` for device memory.
    memory: str | None = None
    # Whether the result depends only on the leaf's shape and itemsize, so that equal leaves share a
    # decision. Otherwise the step takes the leaf in its box, if it has one.
    by_shape: bool = True


@dataclass(frozen=True, repr=False)
class Tactic:
    """An action of a rule that refines the spec of a leaf; `a | b` applies `a`, then `b`.

    Call `tactic(spec, mesh, path, leaf)` to get the refined spec. With `mesh=None`, the current
    mesh is used. If the spec does not fit, the call raises `SpecError`, which is also an
    `UnknownAxisError` if the mesh lacks an axis.

    Examples:
        >>> fsdp("fsdp", min_size=0) | replicate()
        fsdp('fsdp', min_size=0) | replicate()
    """

    steps: tuple[Step, ...]

    def __or__(self, other: "Tactic") -> "Tactic":
        return Tactic(self.steps + other.steps) if isinstance(other, Tactic) else NotImplemented

    def __repr__(self) -> str:
        return " | ".join(step.text for step in self.steps)

    def __call__(
        self, spec: PartitionSpec, mesh: MeshLike | None, path: str, leaf: Any
    ) -> PartitionSpec:
        mesh = current_or_given(mesh, repr(self))
        refined, adjustments = self.refine(spec, mesh, path, leaf, min_size_in_force(None))
        if misfits := [each for each in adjustments if each.kind in MISFITS]:
            why = " ".join(misfit.why for misfit in misfits)
            error = misfit_error({misfit.kind for misfit in misfits}, SpecError)
            raise error(f"{path} {tuple(value_of(leaf).shape)}, {self!r}: {why}")
        return refined

    @property
    def by_shape(self) -> bool:
        """Whether it depends only on the leaf's shape and itemsize."""
        return all(step.by_shape for step in self.steps)

    @property
    def fsdp_axes(self) -> frozenset[str]:
        """The axes over which it shards parameters that are gathered for use."""
        return frozenset(axis for step in self.steps for axis in step.fsdp_axes)

    @property
    def memory(self) -> str | None:
        """The kind of memory for the leaf, from the last step that names one."""
        return next((step.memory for step in reversed(self.steps) if step.memory), None)

    def refine(
        self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any, min_size: int
    ) -> Refined:
        """Applies the steps in turn. A step without `min_size` uses the argument as its threshold.

        `leaf` may be a box. Raises `SpecError` as the steps do.
        """
        value = value_of(leaf)
        size = math.prod(value.shape)
        adjustments: list[Adjustment] = []
        for step in self.steps:
            least = min_size if step.min_size is None else step.min_size
            if size < least:
                adjustments.append(too_small(size, least))
                continue
            spec, of_step = step.refine(spec, mesh, path, value if step.by_shape else leaf)
            name = f"{step.text}: " if len(self.steps) > 1 else ""
            adjustments += [each._replace(why=name + each.why) for each in of_step]
        return spec, tuple(adjustments)


def call_text(name: str, *args: Any, **options: Any) -> str:
    """The call of a tactic as text, without options that are `None` or empty."""
    shown = [*map(repr, args)]
    for key, value in options.items():
        # `0 == False`, but 0 is a value of an option.
        if value is not None and value is not False and value != ():
            shown.append(f"{key}={value!r}")
    return f"{name}({', '.join(shown)})"


def fsdp(
    axis: str | Sequence[str],
    *,
    min_size: SupportsIndex | None = None,
    skip: Sequence[SupportsIndex] = (),
    memory: str | None = None,
) -> Tactic:
    """Shards the largest free dim of a leaf that `axis` divides, as FSDP does.

    With `n` devices along `axis`, each device stores `1/n` of a leaf: shape `(d0, ..., dk, ...)`
    becomes shards of `(d0, ..., dk / n, ...)`. Among dims of equal length, the last dim is
    sharded. If no dim fits, the leaf keeps its spec, and the plan records the reason.

    Args:
        axis: A mesh axis, or several whose sizes multiply, outermost first.
        min_size: Leaves with fewer elements keep their spec, because many small gathers cost more
            time than the memory is worth. By default, the `min_size` of `match_partition_rules` or
            `plan` applies.
        skip: Dims that are never sharded; negative dims count from the end. `skip=(0,)`
            excludes the dim along which layers are stacked.
        memory: The kind of memory for the leaf, such as `"pinned_host"` for the host's memory. By
            default device memory. Scalars stay on the devices.

    Returns:
        A tactic, for use as the action of a rule.

    Raises:
        TypeError: If `axis` is neither a string nor a sequence of strings, or `min_size` is
            not an int.
        SpecError: If `axis` is empty or contains a name twice.

    Examples:
        >>> auto = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"), axis_types=auto)
        >>> fsdp("fsdp")(P(), mesh, "mlp/weight", jax.ShapeDtypeStruct((1024, 4096), "float32"))
        P(None, 'fsdp')

    Source:
        ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054; big_vision's tactic of
        this name.
    """
    axes = axes_to_shard(axis, "fsdp")
    least = None if min_size is None else index(min_size)
    skipped = tuple(map(index, skip))
    text = call_text("fsdp", entry_of(axes), min_size=least, skip=skipped, memory=memory)

    def refine(spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        return shard_largest(spec, mesh, tuple(leaf.shape), axes, skipped)

    return Tactic((Step(text, refine, least, fsdp_axes=axes, memory=memory),))


def shard_dim(
    axis: str | Sequence[str],
    dim: SupportsIndex,
    ignore_ndim_error: bool = False,
    *,
    memory: str | None = None,
) -> Tactic:
    """Shards one dim of a leaf over `axis`.

    Args:
        axis: A mesh axis, or several whose sizes multiply, outermost first.
        dim: The dim; a negative dim counts from the end.
        ignore_ndim_error: Whether leaves without the dim keep their spec. Otherwise a leaf without
            the dim is an error of the plan. A leaf whose dim is indivisible or already sharded is
            always an error.
        memory: The kind of memory for the leaf, as in `fsdp`.

    Returns:
        A tactic, for use as the action of a rule.

    Raises:
        TypeError: If `axis` is neither a string nor a sequence of strings, or `dim` is not
            an int.
        SpecError: If `axis` is empty or contains a name twice.

    Examples:
        >>> auto = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=auto)
        >>> heads = shard_dim("model", -2)
        >>> heads(P(), mesh, "attn/kernel", jax.ShapeDtypeStruct((1024, 16, 64), "float32"))
        P(None, 'model')

    Source:
        big_vision's tactic of this name.
    """
    axes, dim = axes_to_shard(axis, "shard_dim"), index(dim)
    text = call_text(
        "shard_dim", entry_of(axes), dim, ignore_ndim_error=ignore_ndim_error, memory=memory
    )

    def refine(spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        shape = tuple(leaf.shape)
        has_dim = -len(shape) <= dim < len(shape)
        if ignore_ndim_error and not has_dim:
            return spec, ()
        return _shard_one(spec, mesh, shape, axes, dim)

    return Tactic((Step(text, refine, memory=memory),))


def logical_partitioning(rules: LogicalRules | None = None) -> Tactic:
    """Shards leaves by the names of their dims, from Flax boxes or haliax.

    The names come from `nn.LogicallyPartitioned`, `nn.Partitioned`, the sharding metadata of nnx
    variables, the axes of a haliax `NamedArray`, or `hax.field(axis_names=...)`. Rules resolve the
    names of `LogicallyPartitioned` and haliax. In the other boxes, a name without a rule is a mesh
    axis, as in Flax. Leaves without names keep their spec.

    Args:
        rules: As in `logical_axis_rules`. For a haliax axis mapping, pass
            `list(mapping.items())`. By default, the rules that are in force when the tactic is
            applied: from `logical_axis_rules`, from Flax's context of that name, or from
            `hax.axis_mapping`. As in Flax, the rules of a `LogicallyPartitioned` replace the rules
            in force. The `sharding_rules` of an nnx variable are added; if they give a name other
            axes, planning raises.

    Returns:
        A tactic, for use as the action of a rule. Combine it as `logical_partitioning() | ...`:
        other tactics must come after it.

    Raises:
        ShardingRuleError: If rules are malformed. All are listed.

    Examples:
        >>> box = nn.LogicallyPartitioned(jax.numpy.ones((64, 512)), ("embed", "heads"))
        >>> by_names = logical_partitioning([("embed", "fsdp"), ("heads", "tensor")])
        >>> by_names(P(), make_mesh("fsdp=2,tensor=4"), "kernel", box)
        P('fsdp', 'tensor')

    Source:
        big_vision's tactic of this name; `flax.linen.logical_to_mesh_axes`;
        `haliax.partitioning.pspec_for`.
    """
    read = None if rules is None else read_logical_rules(rules)
    shown = list(read) if isinstance(read, tuple) else read
    text = f"logical_partitioning({'' if read is None else repr(shown)})"

    def refine(spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        return _shard_by_names(spec, mesh, leaf, read)

    # Boxes of equal shape may have different names.
    return Tactic((Step(text, refine, by_shape=False),))


def replicate(*, memory: str | None = None) -> Tactic:
    """Replicates a leaf, and raises `SpecError` if an earlier tactic sharded it.

    Args:
        memory: The kind of memory for the leaf, as in `fsdp`.

    Returns:
        A tactic, for use as the action of a rule.

    Examples:
        >>> replicate()(P(), make_mesh("data=8"), "bias", jax.numpy.zeros(8))
        P()
    """

    def refine(spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        if not any(entries(spec)):  # JAX reads `()` as `None`, and `UNCONSTRAINED` is true
            return with_entries(spec, ()), ()
        why = f"an earlier tactic sharded it as {spec}, so it cannot be replicated. Drop either."
        return spec, (Adjustment("already-sharded", why),)

    # It applies to leaves of every size.
    return Tactic((Step(call_text("replicate", memory=memory), refine, 0, memory=memory),))


# ------------------------------------------------------------------ sizes and axes

DEFAULT_MIN_SIZE = 2**14


def min_size_in_force(min_size: SupportsIndex | None) -> int:
    """The threshold of a call, in elements: the argument, or the environment, or 16384."""
    if min_size is not None:
        return index(min_size)  # also an integer of numpy
    text = os.environ.get("MIN_SHARDING_SIZE", "").strip()
    if not text:
        return DEFAULT_MIN_SIZE
    if not text.isdecimal():
        raise ShardingRuleError(
            f"MIN_SHARDING_SIZE is {text!r} in the environment. Set it to a number of"
            f" elements, such as {DEFAULT_MIN_SIZE}, or pass `min_size=`."
        )
    return int(text)


def too_small(size: int, min_size: int) -> Adjustment:
    """The adjustment of a leaf that is replicated for its size."""
    return Adjustment("too-small", f"{counted(size, 'element')}, fewer than min_size={min_size}.")


def axes_to_shard(axis: str | Sequence[str], where: str) -> tuple[str, ...]:
    """The axes of a tactic, as a tuple. Raises if there are none, or one occurs twice."""
    axes = axis_tuple(axis, where)
    if not axes or len(set(axes)) < len(axes):
        raise SpecError(f"{where}({axis!r}): give at least one axis, and each once.")
    return axes


# ------------------------------------------------------------------ steps


def shard_largest(
    spec: PartitionSpec,
    mesh: AnyMesh,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    skip: Sequence[int] = (),
) -> Refined:
    """Shards the largest free dim that the axes divide."""
    if conflicts := _axis_conflicts(spec, axes, mesh):
        return spec, conflicts
    count = part_count(axes, axis_sizes(mesh))
    new = dim_entries(spec, len(shape))
    skipped = {dim % len(shape) for dim in skip if -len(shape) <= dim < len(shape)}
    # big_vision tries dims in the order of `np.argsort(shape)[::-1]`: among equal lengths, the last
    # dim comes first. The maximum of these pairs is the same dim.
    candidates = [
        (length, dim)
        for dim, length in enumerate(shape)
        if length and length % count == 0 and dim not in skipped and new[dim] is None
    ]
    if not candidates:
        why = f"no free dim of shape {shape} is divisible by {count}."
        return spec, (Adjustment("no-dim", why, axes),)
    _, dim = max(candidates)
    new[dim] = entry_of(axes)
    return with_entries(spec, new), ()


def _shard_one(
    spec: PartitionSpec, mesh: AnyMesh, shape: tuple[int, ...], axes: tuple[str, ...], dim: int
) -> Refined:
    """Shards one given dim."""
    if not -len(shape) <= dim < len(shape):
        why = (
            f"shape {shape} has no dim {dim}. Make the pattern match fewer leaves, or pass"
            " `ignore_ndim_error=True` to keep the spec of such leaves."
        )
        return spec, (Adjustment("rank", why, axes),)
    new = dim_entries(spec, len(shape))
    if new[dim] is not None:
        why = (
            f"an earlier tactic already sharded dim {dim}: {spec}. Give all its axes to one tactic,"
            " outermost first, or choose another dim."
        )
        return spec, (Adjustment("already-sharded", why, axes, dim % len(shape)),)
    if conflicts := _axis_conflicts(spec, axes, mesh):
        return spec, conflicts
    new[dim] = entry_of(axes)
    # The dim may be indivisible: unlike `fsdp`, this tactic cannot choose another dim.
    return project(with_entries(spec, new), mesh, shape)


def _shard_by_names(
    spec: PartitionSpec, mesh: AnyMesh, leaf: Any, given: ReadLogicalRules | None
) -> Refined:
    """Shards a leaf by the names of its dims."""
    box = names_in(leaf) if has_names(leaf) else None
    if box is None or not any(box.names):
        return spec, ()
    if any(entries(spec)):
        why = f"an earlier tactic sharded it as {spec}. Put logical_partitioning first."
        return spec, (Adjustment("already-sharded", why),)
    rules = _rules_for(box, given)
    by_names = _resolve_box(box, rules, mesh)
    projected, adjustments = project(by_names, mesh, tuple(value_of(leaf).shape))
    notes = notes_on_names(box.names, rules, mesh) if box.logical else ()
    return trim_spec(projected), (*adjustments, *notes)


def _rules_for(box: NamesInBox, given: ReadLogicalRules | None) -> ReadLogicalRules | None:
    """The logical rules for a box: its own, the tactic's, and the rules in force."""
    own = None if box.rules is None else read_logical_rules(box.rules)
    if box.adds_rules:
        return rules_of_variable(given, own)
    if given is not None:
        return given
    return current_logical_rules() if own is None else own


def _resolve_box(box: NamesInBox, rules: ReadLogicalRules | None, mesh: AnyMesh) -> PartitionSpec:
    if box.logical:
        if rules is None:
            return resolve_names(box.names, mesh)  # raises: no rules are in force
        return resolve_by(rules, box.names, mesh)
    # As in Flax, a name without a rule is a mesh axis in any other box. A `PartitionAxis` raises
    # for names that it lacks, so it is not used if all names are axes.
    axes = axis_sizes(mesh)
    are_axes = axes.keys() >= set(all_axes(box.names))
    if rules is None or (isinstance(rules, NamedAxes) and are_axes):
        return PartitionSpec(*box.names)
    if not isinstance(rules, NamedAxes):
        ruled = {name for name, _ in rules}
        rules += tuple((axis, axis) for axis in axes if axis not in ruled)
    return resolve_by(rules, box.names, mesh)


def _axis_conflicts(
    spec: PartitionSpec, axes: tuple[str, ...], mesh: AnyMesh
) -> tuple[Adjustment, ...]:
    """Why axes cannot be added to a spec: the mesh lacks them, or the spec uses them already."""
    sizes = axis_sizes(mesh)
    if absent := [axis for axis in axes if axis not in sizes]:
        return tuple(
            Adjustment("axis-not-in-mesh", unknown_axis(axis, sizes), (axis,)) for axis in absent
        )
    if used := tuple(axis for axis in all_axes(entries(spec)) if axis in axes):
        why = f"{spec} uses {', '.join(map(repr, used))} already. An axis can split only one dim."
        return (Adjustment("axis-already-used", why, used),)
    return ()
