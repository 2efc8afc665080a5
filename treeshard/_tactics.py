"""Tactics: actions of rules that choose a spec by the shape of the leaf."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from operator import index
from typing import Any

import jax
from jax.sharding import PartitionSpec

from treeshard._by_names import ByNames
from treeshard._errors import ShardingRuleError, SpecError, UnknownAxisInSpecError
from treeshard._logical import LogicalRules, read_logical_rules
from treeshard._mesh import AnyMesh, axis_tuple, current_or_given
from treeshard._paths import is_box
from treeshard._refinements import (
    Fsdp,
    LooksAt,
    Own,
    Refined,
    Refinement,
    Replicate,
    ShardDim,
    Update,
)
from treeshard._specs import MISFITS, Adjustment

DEFAULT_MIN_SIZE = 2**14


def min_size_in_force(min_size: int | None) -> int:
    """The threshold of a call, in elements: its argument, else the environment's, else 16384."""
    if min_size is not None:
        return min_size
    text = os.environ.get("MIN_SHARDING_SIZE", "").strip()
    if not text:
        return DEFAULT_MIN_SIZE
    if not text.isdecimal():
        raise ShardingRuleError(
            f"MIN_SHARDING_SIZE is {text!r} in the environment. Set it to a whole number of"
            f" elements, such as {DEFAULT_MIN_SIZE}, or pass `min_size=`."
        )
    return int(text)


def too_small(size: int, floor: int) -> Adjustment:
    """The adjustment of a leaf that is replicated for its size."""
    return Adjustment("too-small", f"{size} elements are fewer than min_size={floor}.")


@dataclass(frozen=True, repr=False)
class Tactic:
    """Refines the spec of one leaf. An action of a rule; `a | b` applies `a`, then `b`.

    `tactic(spec, mesh, path, leaf)` returns the refined spec. `mesh=None` uses the mesh in
    force. A spec that does not fit raises `SpecError`, which is an `UnknownAxisError` too if
    the mesh lacks an axis.

    Examples:
        >>> fsdp("fsdp", min_size=0) | replicate()
        fsdp('fsdp', min_size=0) | replicate()
    """

    steps: tuple[Refinement, ...]

    def __or__(self, other: "Tactic") -> "Tactic":
        return Tactic(self.steps + other.steps) if isinstance(other, Tactic) else NotImplemented

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.steps))

    def __call__(
        self, spec: PartitionSpec, mesh: AnyMesh | None, path: str, leaf: Any
    ) -> PartitionSpec:
        mesh = current_or_given(mesh)
        refined, adjustments = self.refine(spec, mesh, path, leaf, min_size_in_force(None))
        if misfits := [each for each in adjustments if each.kind in MISFITS]:
            unknown = any(misfit.kind == "axis-not-in-mesh" for misfit in misfits)
            why = " ".join(misfit.why for misfit in misfits)
            kind = UnknownAxisInSpecError if unknown else SpecError
            raise kind(f"{path} {tuple(_value_in(leaf).shape)}, {self!r}: {why}")
        return refined

    @property
    def text(self) -> str:
        """The tactic as a strategy string, which parses to an equal tactic."""
        return " | ".join(step.text for step in self.steps)

    @property
    def looks_at(self) -> LooksAt:
        """What it depends on, as `Refinement.looks_at`."""
        kinds = {step.looks_at for step in self.steps}
        return "leaf" if "leaf" in kinds else "bytes" if "bytes" in kinds else "shape"

    @property
    def reads_boxes(self) -> bool:
        """Whether a step needs the box around a leaf."""
        return any(step.reads_boxes for step in self.steps)

    @property
    def fsdp_axes(self) -> frozenset[str]:
        """The axes over which it shards parameters that are gathered for use."""
        return frozenset(axis for step in self.steps for axis in step.fsdp_axes)

    def refine(
        self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any, floor: int
    ) -> Refined:
        """Applies the steps in turn, each to leaves of at least its own threshold or `floor`.

        `leaf` may be a box. Raises `SpecError` if an update did not return a spec.
        """
        value = _value_in(leaf)
        size = math.prod(value.shape)
        adjustments: list[Adjustment] = []
        for step in self.steps:
            min_size = floor if step.min_size is None else step.min_size
            if size < min_size:
                adjustments.append(too_small(size, min_size))
                continue
            spec, of_step = step.refine(spec, mesh, path, leaf if step.reads_boxes else value)
            name = f"{step!r}: " if len(self.steps) > 1 else ""
            adjustments += [each._replace(why=name + each.why) for each in of_step]
        return spec, tuple(adjustments)


def fsdp(
    axis: str | Sequence[str], *, min_size: int | None = None, skip: Sequence[int] = ()
) -> Tactic:
    """Shards the largest dim that is not sharded yet and that `axis` divides evenly.

    With `n` devices along `axis`, each stores `1/n` of a leaf: shape `(d0, ..., dk, ...)`
    becomes shards of `(d0, ..., dk / n, ...)`. Among dims of equal length, the last one is
    sharded. A leaf without such a dim keeps its spec, and the plan records it.

    Args:
        axis: A mesh axis, or several whose sizes multiply, outermost first.
        min_size: Leaves with fewer elements keep their spec: gathering many small arrays
            costs more time than their memory is worth. By default, the `min_size` of the
            call that applies the rules (`match_partition_rules`, `plan`).
        skip: Dims that are never sharded; negative ones count from the end. `skip=(0,)`
            excludes the dim along which layers are stacked.

    Returns:
        A tactic, for use as the action of a rule.

    Raises:
        TypeError: If `axis` is neither a string nor a sequence of strings.
        SpecError: If `axis` is empty or contains a name twice.

    Examples:
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
        >>> fsdp("fsdp")(P(), mesh, "mlp/weight", jax.ShapeDtypeStruct((1024, 4096), "float32"))
        P(None, 'fsdp')

    Source:
        ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054; big_vision's tactic of
        this name.
    """
    return Tactic((Fsdp(axes_to_shard(axis, "fsdp"), min_size, tuple(skip)),))


def shard_dim(axis: str | Sequence[str], dim: int, ignore_ndim_error: bool = False) -> Tactic:
    """Shards one dim over `axis`.

    Args:
        axis: A mesh axis, or several whose sizes multiply, outermost first.
        dim: The dim; a negative one counts from the end.
        ignore_ndim_error: Whether leaves without such a dim keep their spec. Otherwise they
            are errors, as are leaves whose dim is indivisible or already sharded.

    Returns:
        A tactic, for use as the action of a rule.

    Raises:
        TypeError: If `axis` is neither a string nor a sequence of strings, or `dim` is not
            an int.
        SpecError: If `axis` is empty or contains a name twice.

    Examples:
        >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
        >>> heads = shard_dim("model", -2)
        >>> heads(P(), mesh, "attn/kernel", jax.ShapeDtypeStruct((1024, 16, 64), "float32"))
        P(None, 'model')

    Source:
        big_vision's tactic of this name.
    """
    return Tactic((ShardDim(axes_to_shard(axis, "shard_dim"), index(dim), ignore_ndim_error),))


def logical_partitioning(rules: LogicalRules | None = None) -> Tactic:
    """Shards leaves by the names of dims in their Flax boxes.

    Boxes are `nn.LogicallyPartitioned`, `nn.Partitioned`, and nnx variables with sharding
    metadata. Names in `LogicallyPartitioned` are always resolved by rules. In the others, as
    in Flax, a name without a rule is a mesh axis. Leaves without a box keep their spec.

    Args:
        rules: As in `logical_to_mesh_spec`. By default the box's own rules, else those in
            force when the tactic is applied: of `logical_axis_rules`, or of Flax's context
            of that name.

    Returns:
        A tactic, for use as the action of a rule. It must come before tactics that shard
        further.

    Raises:
        ShardingRuleError: If rules are malformed. All are listed.

    Examples:
        >>> box = nn.LogicallyPartitioned(jax.numpy.ones((64, 512)), ("embed", "heads"))
        >>> by_names = logical_partitioning([("embed", "fsdp"), ("heads", "tensor")])
        >>> by_names(P(), make_mesh("fsdp=2,tensor=4"), "kernel", box)
        P('fsdp', 'tensor')

    Source:
        big_vision's tactic of this name; `flax.linen.logical_to_mesh_axes`.
    """
    return Tactic((ByNames(None if rules is None else read_logical_rules(rules)),))


def replicate() -> Tactic:
    """Replicates a leaf. It is an error if an earlier tactic sharded the leaf.

    Examples:
        >>> replicate()(P(), make_mesh("data=8"), "bias", jax.numpy.zeros(8))
        P()
    """
    return Tactic((Replicate(),))


# ------------------------------------------------------------------ users' tactics

# The factories that `tactic` registered, by name.
own_tactics: dict[str, Callable[..., Tactic]] = {}
_OURS = ("fsdp", "logical_partitioning", "replicate", "shard_dim")


def tactic(factory: Callable[..., Update]) -> Callable[..., Tactic]:
    """Registers a tactic of your own, for use in rules and by name in strategy strings.

    Args:
        factory: A function that returns an update `(spec, mesh, path, leaf) -> spec`. The
            `spec` passed to the update has one entry per dim. The spec that it returns must
            too, and may be a plain tuple, such as `spec[:-1] + ("tensor",)`. A later factory
            of the same name replaces this one.

    Returns:
        A function of the same arguments that returns a `Tactic`.

    Raises:
        ShardingRuleError: If treeshard itself has a tactic of that name.

    Examples:
        >>> @tactic
        ... def shard_last(axis):
        ...     return lambda spec, mesh, path, leaf: spec[:-1] + (axis,)
        >>> shard_last("data")(P(), make_mesh("data=8"), "w", jax.numpy.zeros((128, 128)))
        P(None, 'data')

    Source:
        big_vision's registry of such functions.
    """
    name = factory.__name__
    if name in _OURS:
        raise ShardingRuleError(
            f"@tactic: treeshard itself has a tactic {name!r}. Use another name for yours."
        )

    @wraps(factory)
    def make(*args: Any, **options: Any) -> Tactic:
        call = [*map(repr, args), *(f"{key}={value!r}" for key, value in options.items())]
        return Tactic((Own(f"{name}({', '.join(call)})", factory(*args, **options)),))

    own_tactics[name] = make
    return make


# ------------------------------------------------------------------ for other modules


def axes_to_shard(axis: str | Sequence[str], where: str) -> tuple[str, ...]:
    """The axes of a tactic, as a tuple. Raises if there are none, or one occurs twice."""
    axes = axis_tuple(axis, where)
    if not axes or len(set(axes)) < len(axes):
        raise SpecError(f"{where}({axis!r}): give at least one axis, and each once.")
    return axes


def _value_in(leaf: Any) -> Any:
    return jax.tree.leaves(leaf)[0] if is_box(leaf) else leaf
