"""How a leaf may be sharded, said once for leaves of every shape."""

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
    """The floor of a call, in elements: its own, else the environment's, else the default."""
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
    """That a leaf of `size` elements stays whole."""
    return Adjustment("too-small", f"{size} elements are fewer than min_size={floor}.")


@dataclass(frozen=True, repr=False)
class Tactic:
    """What refines one leaf's spec: an action of a rule. `a | b` does `a`, then `b`.

    Called as `tactic(spec, mesh, path, leaf)`, it returns the refined spec: `mesh=None`
    takes the mesh in force, and a misfit raises `SpecError`, or its subclass
    `UnknownAxisError` if the mesh lacks an axis.

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
        given, notes = self.refine(spec, mesh, path, leaf, min_size_in_force(None))
        if misfits := [note for note in notes if note.kind in MISFITS]:
            unknown = any(note.kind == "axis-not-in-mesh" for note in misfits)
            why = " ".join(note.why for note in misfits)
            kind = UnknownAxisInSpecError if unknown else SpecError
            raise kind(f"{path} {tuple(_value_in(leaf).shape)}, {self!r}: {why}")
        return given

    @property
    def text(self) -> str:
        """The tactic as a strategy string, which reads back as an equal one."""
        return " | ".join(step.text for step in self.steps)

    @property
    def looks_at(self) -> LooksAt:
        """What of a leaf it depends on, as `Refinement.looks_at`."""
        seen = {step.looks_at for step in self.steps}
        return "leaf" if "leaf" in seen else "bytes" if "bytes" in seen else "shape"

    @property
    def reads_boxes(self) -> bool:
        """Whether a step wants the box that a leaf is in."""
        return any(step.reads_boxes for step in self.steps)

    @property
    def fsdp_axes(self) -> frozenset[str]:
        """The axes over which it shards parameters that are gathered for use."""
        return frozenset(axis for step in self.steps for axis in step.fsdp_axes)

    def refine(
        self, spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any, floor: int
    ) -> Refined:
        """Takes the steps in turn, each above its own floor or else `floor`.

        `leaf` may be a box. Raises `SpecError` for an update that returned no spec.
        """
        value = _value_in(leaf)
        size = math.prod(value.shape)
        notes: list[Adjustment] = []
        for step in self.steps:
            least = floor if step.min_size is None else step.min_size
            if size < least:
                notes.append(too_small(size, least))
                continue
            spec, more = step.refine(spec, mesh, path, leaf if step.reads_boxes else value)
            # Of several steps it matters which.
            which = f"{step!r}: " if len(self.steps) > 1 else ""
            notes += [note._replace(why=which + note.why) for note in more]
        return spec, tuple(notes)


def fsdp(
    axis: str | Sequence[str], *, min_size: int | None = None, skip: Sequence[int] = ()
) -> Tactic:
    """Shards the largest dim that is free and that `axis` divides evenly.

    With `n` devices along `axis`, each stores `1/n` of a leaf: shape `(d0, ..., dk, ...)`
    becomes shards of `(d0, ..., dk / n, ...)`. Among dims of equal length the last is
    taken. A leaf without such a dim keeps its spec, and a plan says so.

    Args:
        axis: A mesh axis, or several whose sizes multiply, outermost first.
        min_size: Leaves with fewer elements stay as they are: gathering many small arrays
            costs more time than their memory is worth. By default the floor of the call
            that decides (`match_partition_rules`, `plan`).
        skip: Dims never to shard; negative ones count from the back. `skip=(0,)` keeps
            the dim free that layers are stacked on.

    Returns:
        A tactic, to stand in a rule.

    Raises:
        TypeError: If `axis` is neither a string nor a sequence of strings.
        SpecError: If `axis` is empty or holds a name twice.

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
        dim: The dim; a negative one counts from the back.
        ignore_ndim_error: Whether leaves that have no such dim keep their spec. Otherwise
            they are misfits, as are leaves whose dim is not divisible or sharded already.

    Returns:
        A tactic, to stand in a rule.

    Raises:
        TypeError: If `axis` is neither a string nor a sequence of strings, or `dim` no int.
        SpecError: If `axis` is empty or holds a name twice.

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
    """Shards leaves by the names that their boxes give their dims.

    Boxes are Flax's: `nn.LogicallyPartitioned`, `nn.Partitioned`, and nnx variables with
    sharding metadata. The names of the first are all resolved by rules; in the others, as in
    Flax, a name that no rule speaks of is a mesh axis. Leaves in no box keep their spec.

    Args:
        rules: As `logical_to_mesh_spec` takes them. By default the box's own, else those in
            force when the leaf is decided: by `logical_axis_rules`, or Flax's context of
            that name.

    Returns:
        A tactic, to stand in a rule. It must come before tactics that shard further.

    Raises:
        ShardingRuleError: If rules are malformed: all are listed.

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
    """Keeps a leaf whole on every device. One that an earlier tactic sharded is a misfit.

    Examples:
        >>> replicate()(P(), make_mesh("data=8"), "bias", jax.numpy.zeros(8))
        P()
    """
    return Tactic((Replicate(),))


# ------------------------------------------------------------------ tactics of your own

# What `tactic` registered, by name.
own_tactics: dict[str, Callable[..., Tactic]] = {}
_OURS = ("fsdp", "logical_partitioning", "replicate", "shard_dim")


def tactic(factory: Callable[..., Update]) -> Callable[..., Tactic]:
    """Makes a factory of updates one of tactics, and known by its name in strategy strings.

    Args:
        factory: A function that returns an update `(spec, mesh, path, leaf) -> spec`. There
            `spec` has an entry for every dim, and what is returned must too: it may be a
            plain tuple, such as `spec[:-1] + ("tensor",)`. A later factory of the same name
            takes its place.

    Returns:
        A function of the same arguments that returns a `Tactic`.

    Raises:
        ShardingRuleError: If treeshard has a tactic of that name.

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
        raise ShardingRuleError(f"@tactic: treeshard has a tactic {name!r}. Give yours a new name.")

    @wraps(factory)
    def make(*args: Any, **options: Any) -> Tactic:
        given = [*map(repr, args), *(f"{key}={value!r}" for key, value in options.items())]
        return Tactic((Own(f"{name}({', '.join(given)})", factory(*args, **options)),))

    own_tactics[name] = make
    return make


# ------------------------------------------------------------------ for the other rooms


def axes_to_shard(axis: str | Sequence[str], where: str) -> tuple[str, ...]:
    """The axes of a tactic. Raises for none, and for one that stands there twice."""
    axes = axis_tuple(axis, where)
    if not axes or len(set(axes)) < len(axes):
        raise SpecError(f"{where}({axis!r}): name at least one axis, and each once.")
    return axes


def _value_in(leaf: Any) -> Any:
    return jax.tree.leaves(leaf)[0] if is_box(leaf) else leaf
