"""EasyDeL's constraints by logical names, which EasyDeL has as constants: `"__KV_LENGTH__"`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import register_static

from treeshard._placement.constraint import with_sharding_constraint
from treeshard._placement.partition_axis import PartitionAxis
from treeshard._planning.axis_names import USUAL_NAMES
from treeshard.errors import SpecError

# The constants whose fields have other names: `"__HEAD__"` is `head_axis`. For keys and values,
# eformer has separate fields; these are the defaults of these fields.
_FIELDS = {
    "kv_head": "tensor_parallel",
    "kv_head_dim": None,
    "head_dim": "attention_dim",
    "embed": "hidden_state",
    "length": "sequence",
    "query_length": "query_sequence",
    "kv_length": "key_sequence",
    "bias_head_seq": "bias_head_sequence",
    "bias_kv_seq": "bias_key_sequence",
}
_MODES: dict[str, Any] = dict.fromkeys(("__train__", "__prefill__"), "train")
_MODES |= dict.fromkeys(("__autoregressive__", "__insert__"), "generation")


@register_static
@dataclass(frozen=True)
class PartitionManager:
    """Resolves EasyDeL's names of dims, and constrains arrays by them.

    In decoding, a dim is sharded as in training unless `paxis` has other axes for it, as in
    eformer. `PartitionAxis.resolve` follows eformer's older class, which replicates the batch in
    decoding. (A `generation_` field that is `None` or equals its default counts as not given.)

    Args:
        paxis: The mesh axes of each name.

    Examples:
        >>> manager = PartitionManager(PartitionAxis())
        >>> manager.resolve(["__BATCH__", "__LENGTH__", "__EMBED__"], "__train__")
        P(('fsdp', 'dp'), 'sp', 'tp')

    Source:
        The class of this name in eformer 0.0.101.
    """

    paxis: PartitionAxis

    def resolve(
        self, axes: Any = None, mode: Any = None, dynamic_axes: Any = None, shape: Any = ()
    ) -> PartitionSpec:
        """Resolves names to mesh axes. It takes the arguments of `apply_logical_sharding`, or
        `dynamic_axes` as the first argument. A mode that is a dim needs the shape."""
        if dynamic_axes is None and hasattr(axes, "mode"):  # EasyDeL's rules: `resolve(ColumnWise)`
            axes, dynamic_axes = None, axes
        if axes is None or mode is None:
            if dynamic_axes is None:
                raise SpecError("PartitionManager: pass `axes=` and `mode=`, or `dynamic_axes=`.")
            axes, mode = dynamic_axes.axes, dynamic_axes.mode
        if isinstance(mode, int):
            if not shape[mode:]:
                why = f"mode={mode} is a dim, and the shape is {tuple(shape)}"
                raise SpecError(f"PartitionManager: {why}. Pass the `shape=` of the array.")
            mode = "generation" if shape[mode] == 1 else "train"
        names = [_read_name(name, dict(self.paxis.custom)) for name in axes]
        paxis = _set_decoding_axes(self.paxis)
        return paxis.resolve(*names, mode=_MODES.get(mode, mode))

    def shard(
        self,
        x: jax.Array,
        axes: Sequence[Any] | None = None,
        mode: str | int | None = None,
        dynamic_axes: Any = None,
        auto_correct: bool = True,
    ) -> jax.Array:
        """Does what `apply_logical_sharding` does, with this manager."""
        spec = self.resolve(axes, mode, dynamic_axes, x.shape)
        return with_sharding_constraint(x, spec, uneven="drop" if auto_correct else "error")


def apply_logical_sharding(
    x: jax.Array,
    partition_manager: PartitionManager,
    axes: Sequence[Any] | None = None,
    mode: str | int | None = None,
    dynamic_axes: Any = None,
    auto_correct: bool = True,
) -> jax.Array:
    """Constrains an array by the logical names of its dims.

    Args:
        x: The array.
        partition_manager: The manager that maps names to mesh axes.
        axes: A name for each dim: a constant of EasyDeL's such as `"__BATCH__"`, a name of
            `PartitionAxis` or of its `custom`, `None` or `"_"` for a dim that is not sharded, or
            several of them.
        mode: `"train"`, `"generation"`, or a constant of EasyDeL's. Or a dim: if the array has
            length 1 in this dim, the mode is decoding.
        dynamic_axes: An object with the attributes `axes` and `mode`, such as EasyDeL's
            `HiddenStateSharding`. It is used if `axes` or `mode` is not given.
        auto_correct: Whether axes that do not divide a dim are dropped. Otherwise they are
            an error.

    Returns:
        The array, constrained as by `with_sharding_constraint`.

    Raises:
        SpecError: If names or the mode are unknown or not given; without `auto_correct`, also if
            axes do not divide a dim.

    Examples:
        >>> manager = PartitionManager(PartitionAxis())
        >>> with jax.set_mesh(make_mesh("fsdp=4,tp=2")):
        ...     x = apply_logical_sharding(
        ...         jnp.ones((8, 16, 4)), manager, ["__BATCH__", "__LENGTH__", "__EMBED__"], mode=1
        ...     )
        >>> x.sharding.spec
        P('fsdp', None, 'tp')

    Source:
        eformer 0.0.101's function of this name, which also finds the manager made last.
    """
    return partition_manager.shard(x, axes, mode, dynamic_axes, auto_correct)


def _read_name(name: Any, custom: Collection[str]) -> Any:
    """A name, or several, as `PartitionAxis` has it: `"__KV_LENGTH__"` is `"key_sequence"`."""
    if isinstance(name, list | tuple):
        names = dict.fromkeys(_read_name(each, custom) for each in name)
        # `"__HEAD__"` and `"__KV_HEAD__"` may name the same axis, which a tuple has once.
        return tuple(each for each in names if each is not None)
    if name in (None, "_"):
        return None
    if name in custom or not str(name).startswith("__"):
        return name
    word = name.strip("_").lower()
    return _FIELDS.get(word, word)


def _set_decoding_axes(paxis: PartitionAxis) -> PartitionAxis:
    """The axes. Decoding uses the axes of training unless it has its own."""
    default = PartitionAxis(**{name: getattr(paxis, name) for name in USUAL_NAMES})
    changes: dict[str, Any] = {}
    for field in fields(PartitionAxis):
        own, training = getattr(paxis, field.name), field.name.removeprefix("generation_")
        if training != field.name and own in (None, getattr(default, field.name)):
            changes[field.name] = getattr(paxis, training)
    return replace(paxis, **changes)
