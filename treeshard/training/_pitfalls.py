"""Pitfalls of a step: shared memory, and arrays put on one device.

JAX donates an array's buffers, and ends the process if a call on several devices gets one of them
twice: arrays of the state that share memory with others are copied. A `device_put` to one device
has no effect in a program for several: the step warns of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from treeshard._core.arrays import data_of
from treeshard._planning.matching import PlannedLeaf
from treeshard.errors import counted, listed, own_lines, warn

# Set on the arrays that a step returned: each has memory of its own, so only the same object may
# be in a tree twice. Asking for the buffers of 1000 arrays takes longer than calling a step.
_MARK = "_treeshard_has_own_memory"


def mark_as_separate(arrays: Sequence[Any]) -> None:
    """Says of arrays that a compiled step has just returned that no two of them share memory."""
    for x in arrays:
        setattr(x, _MARK, True)


def separated(
    arrays: list[Any], batch: Sequence[Any], leaves: Sequence[PlannedLeaf], where: str
) -> list[Any]:
    """The arrays of a state, with copies of those that share memory with others or with the batch.

    Warns:
        ShardingWarning: If there are any; it names the paths of both arrays.
    """
    if _have_own_memory(arrays) and not any([hasattr(x, _MARK) for x in batch]):
        return arrays
    shared = _shared(arrays, batch, leaves)
    if not shared:
        return arrays
    facts = [
        f"{leaves[i].path}: it shares its memory with {other}, and a step that donates its state"
        " can use that memory once, so it was copied. Make it an array of its own with"
        " `jnp.copy`, or make the step with `donate=False`."
        for i, other in shared.items()
    ]
    warn(f"{where}: {listed(f'{len(facts)} arrays of the state share memory:', facts)}")
    originals = [arrays[i] for i in shared]
    copies = jax.jit(_copied, out_shardings=[x.sharding for x in originals])(originals)
    new = dict(zip(shared, copies, strict=True))
    return [new.get(i, x) for i, x in enumerate(arrays)]


def _have_own_memory(arrays: list[Any]) -> bool:
    """Whether these are arrays that a step returned, each once."""
    return all([hasattr(x, _MARK) for x in arrays]) and len(set(map(id, arrays))) == len(arrays)


def _shared(
    arrays: list[Any], batch: Sequence[Any], leaves: Sequence[PlannedLeaf]
) -> dict[int, str]:
    """The arrays that share memory, and what with: the batch, or the path of an earlier one."""
    owners: dict[Any, str] = {}
    for x in batch:
        owners.update(dict.fromkeys(_buffers(x), "the batch"))
    shared: dict[int, str] = {}
    for i, x in enumerate(arrays):
        buffers = _buffers(x)
        used = [owners[buffer] for buffer in buffers if buffer in owners]
        if used:
            shared[i] = used[0]
        else:
            owners.update(dict.fromkeys(buffers, leaves[i].path))
    return shared


def _copied(arrays: list[Any]) -> list[Any]:
    return [jnp.copy(x) for x in arrays]


def _buffers(x: Any) -> list[Any]:
    """What identifies the memory of an array: device and address of each shard on this process."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return []
    try:
        # An address is unique on its own device only. Empty shards have no memory to share.
        return [
            (shard.device, shard.data.unsafe_buffer_pointer())
            for shard in data_of(x).addressable_shards
            if shard.data.size
        ] or [id(x)]
    except jax.errors.JaxRuntimeError:  # a platform that does not tell addresses
        return [id(x)]


# ------------------------------------------------------------------ arrays on one device


def warn_of_device_puts(jaxpr: Any, where: str) -> None:
    """Warns once of all `jax.device_put` to one device in a traced step."""
    facts = [
        f"`device_put` of {array} to {device} at {source}"
        for array, device, source in dict.fromkeys(_device_puts(jaxpr))
    ]
    if facts:
        headline = f"{where}: the step puts {counted(len(facts), 'array')} on one device:"
        message = listed(headline, facts, headed=True)
        warn(
            f"{message}\nThe program runs on all devices of the mesh, so this has no effect. Put"
            " arrays on one device outside of the step; in it, write"
            " `treeshard.with_sharding_constraint`."
        )


def _device_puts(jaxpr: Any) -> Iterator[tuple[str, str, str]]:
    """The array, the device and the source line of each."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "device_put":
            # Of a tree it is one equation: `device_put[devices=(CpuDevice(id=0), None) ...] a b`.
            for variable, target in zip(eqn.invars, eqn.params["devices"], strict=True):
                if isinstance(target, SingleDeviceSharding):
                    [target] = target.device_set
                if isinstance(target, jax.Device):
                    yield variable.aval.str_short(), str(target), source_line(eqn)


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a traced program, and of all programs in them."""
    for eqn in jaxpr.eqns:
        yield eqn
        # `jaxpr` of a jit or a scan, the tuple `branches` of a cond, `call_jaxpr` of a custom_vjp
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def source_line(eqn: Any) -> str:
    """The innermost line that is neither treeshard's nor another package's, as `file:line`."""
    return user_line(eqn) or next(iter(_lines(eqn)), "an unknown line")


def user_line(eqn: Any) -> str:
    """The same, or `""` if all lines are treeshard's or another package's."""
    return next(iter(own_lines(_lines(eqn))), "")


def _lines(eqn: Any) -> list[str]:
    traceback = eqn.source_info.traceback
    return [] if traceback is None else [f"{x.file_name}:{x.line_num}" for x in traceback.frames]
