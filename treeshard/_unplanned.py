"""Describes each way in which a program differs from its plan, and what to do about it."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from treeshard._describe import fold_paths, human_bytes
from treeshard._moved import Collective


class Unplanned(NamedTuple):
    """One way in which a program's communication differs from its plan.

    Attributes:
        code: `"activation"`, `"batch"`, `"again"` (moved more often than planned),
            `"sharded-further"` (a leaf that a step should not gather), `"all-reduce"` (where a
            reduce-scatter was planned), `"wider"` (in a larger dtype), `"across-axes"` (between
            devices that do not form axes of the mesh), `"unreadable"`, or `"not-moved"`
            (planned, but not in the program).
        fact: What was found.
        hint: What to do about it, or why nothing can be done.
        collectives: The ops; empty for `"not-moved"`.
        paths: The leaves that it concerns, where they are known.
    """

    code: str
    fact: str
    hint: str
    collectives: tuple[Collective, ...] = ()
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The fact and the hint, then a line per op, at most ten."""
        shown = ", ".join(fold_paths(dict.fromkeys(self.paths)))
        head = f"{self.code}: {shown + ': ' if shown else ''}{self.fact} {self.hint}"
        counts = Counter(map(_shown, self.collectives))
        lines = [f"    {times} x {line}" for line, times in counts.items()]
        more = [f"    ... and {len(lines) - 10} more"] if len(lines) > 10 else []
        return "\n".join([head, *lines[:10], *more])


def explained(
    code: str, kind: str, detail: str, moved: Sequence[Collective], batch_axes: Sequence[str]
) -> tuple[str, str]:
    """The fact and the hint of a difference."""
    moves = total([one.total_bytes for one in moved])
    size = "an unknown number of bytes" if moves is None else human_bytes(moves)
    match code:
        case "activation":
            fact = f"unplanned {kind} of computed values, {size}."
            if detail == "loop":
                return fact, (
                    "Gather the layer's weights at the start of the scan's body, so that the"
                    " activations stay where they are: `unshard(layer, layer_specs(specs), axis)`."
                )
            return fact, (
                "Constrain the value to the axes of the batch:"
                f" `with_sharding_constraint(x, P({tuple(batch_axes)!r}))`, and gather weights"
                " with `unshard`."
            )
        case "across-axes":
            return (
                f"{kind} between devices that do not form axes of the mesh, {size}.",
                "A reshape splits a sharded dim differently from the mesh. To split a batch for"
                " accumulation, reshape it to (batch / k, k), swap the dims, and constrain it:"
                " `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "batch":
            return (
                f"{kind} of an argument that is not a parameter, {size}.",
                "To split a batch for accumulation, reshape it to (batch / k, k) and swap the dims,"
                " or constrain the result: `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "again" if kind != "all-gather":
            return (
                f"{kind} of the size of a gradient that is already reduced, {size}.",
                "The partitioner reduces the gradient of each use of a weight, and of each"
                " minibatch in a loop, before it adds them. Use `accumulate_gradients` or"
                " `treeshard.manual` to reduce once.",
            )
        case "again":
            return (
                f"{kind} more often than planned, {size} too much.",
                "If the forward pass is repeated for the gradients, pass `remat=`. In a loop over"
                " minibatches, gather before the loop and reduce after it: `accumulate_gradients`.",
            )
        case "sharded-further":
            return (
                f"{kind} of a leaf that a step does not have to gather, {size}.",
                "Shard the leaf like the arrays that it is used with: optimizer state with"
                " `Plan.follow`, and weights along the axis of the activations.",
            )
        case "all-reduce":
            return (
                f"all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
                "The CPU compiler always does so. On other backends, constrain the gradients to"
                " the plan's specs, or reduce-scatter them by hand (`treeshard.manual`).",
            )
        case "wider":
            return (
                f"{kind} in a wider dtype than the planned {detail}.",
                "The CPU compiler widens 16-bit dtypes. On other backends, cast before the gather.",
            )
    return (
        f"{kind} with unknown axes, bytes or count.",
        "Pass the mesh. A loop whose trips depend on data has no count.",
    )


def in_loop(one: Collective) -> bool:
    return (one.count or 0) > 1 or "while/body" in (one.op_name or "")


def is_scalar(one: Collective) -> bool:
    return one.kind == "all-reduce" and one.rank == 0 and one.bytes is not None


def elements(size: int | None, dtype: str) -> int | None:
    if size is None:
        return None
    try:
        return size // jnp.dtype(dtype).itemsize
    except TypeError:
        return None


def total(numbers: Sequence[int | None]) -> int | None:
    return None if None in numbers else sum(number or 0 for number in numbers)


def _shown(one: Collective) -> str:
    size = "unknown bytes" if one.bytes is None else human_bytes(one.bytes)
    times = "? times" if one.count is None else f"{one.count:,} times"
    axes = "unknown axes" if one.axes is None else " and ".join(map(repr, one.axes))
    parts = [f"{one.kind} of {size} ({one.dtype}) along {axes}, {times}"]
    parts += [f"in {_short(one.op_name)}"] if one.op_name else []
    parts += [f"at {one.source}"] if one.source else []
    return ", ".join(parts)


def _short(op_name: str) -> str:
    # A combined op has the names of all the ops that it combines.
    return op_name if len(op_name) <= 100 else f"{op_name[:60]}...{op_name[-37:]}"
