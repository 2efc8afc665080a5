"""What nobody planned, in words: what was found, and what to do about it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from treeshard._describe import fold_paths, human_bytes
from treeshard._moved import Collective


class Unplanned(NamedTuple):
    """One way in which a program moves other data than its plan says.

    Attributes:
        code: `"activation"`, `"batch"`, `"again"` (moved more often than planned),
            `"sharded-further"` (a leaf that no step should gather), `"all-reduce"` (where a
            reduce-scatter was planned), `"wider"` (in a larger dtype), `"across-axes"` (between
            devices that form no axis of the mesh), `"unreadable"`, or `"not-moved"` (planned, and
            not in the program).
        fact: What was found.
        hint: What to do about it, or why nothing can be done.
        collectives: The ops; none for `"not-moved"`.
        paths: The leaves that it concerns, if it is known.
    """

    code: str
    fact: str
    hint: str
    collectives: tuple[Collective, ...] = ()
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The fact and the hint, then a line for each op, as far as ten."""
        shown = ", ".join(fold_paths(dict.fromkeys(self.paths)))
        head = f"{self.code}: {shown + ': ' if shown else ''}{self.fact} {self.hint}"
        alike: dict[str, int] = {}
        for one in self.collectives:
            alike[_shown(one)] = alike.get(_shown(one), 0) + 1
        lines = [f"    {times} x {line}" for line, times in alike.items()]
        more = [f"    ... and {len(lines) - 10} more"] if len(lines) > 10 else []
        return "\n".join([head, *lines[:10], *more])


def explained(
    code: str, kind: str, detail: str, moved: Sequence[Collective], split: Sequence[str]
) -> tuple[str, str]:
    unshard = (
        "Constrain the layer's weights at the start of the scan's body, so that they move"
        " instead: `unshard(layer, layer_specs(specs), axis)`."
    )
    moves = total([one.total_bytes for one in moved])
    size = "an unknown number of bytes" if moves is None else human_bytes(moves)
    match code:
        case "activation":
            constrain = (
                "Constrain the value to the batch's axes:"
                f" `with_sharding_constraint(x, P({tuple(split)!r}))`, and gather weights with"
                " `unshard`."
            )
            fact = f"{kind} of computed values, {size}, that nobody planned."
            return fact, unshard if detail == "loop" else constrain
        case "across-axes":
            return (
                f"{kind} between devices that form no axis of the mesh, {size}.",
                "A reshape has split a sharded dim in another way than the mesh does. A batch that"
                " is split for accumulation: reshape it to (batch / k, k), swap, and constrain it:"
                " `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "batch":
            return (
                f"{kind} of an argument that is no parameter, {size}.",
                "If a batch is reshaped for accumulation, reshape it to (batch / k, k) and swap, or"
                " constrain the result: `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "again" if kind != "all-gather":
            return (
                f"{kind} of the size of a gradient that was reduced already, {size}.",
                "The partitioner reduces the gradient of each use of a weight, and of each"
                " minibatch in a loop, before it adds them: see `accumulate_gradients`, and"
                " `treeshard.manual`.",
            )
        case "again":
            return (
                f"{kind} more often than planned, {size} too much.",
                "If it runs again for gradients, say `remat=`; in a loop over minibatches, gather"
                " before it and reduce once after it: `accumulate_gradients`.",
            )
        case "sharded-further":
            return (
                f"{kind} of a leaf that a step can do without gathering, {size}.",
                "Lay the leaf as what it is used with: `Plan.follow` for optimizer state, and for"
                " weights the axis of the activations.",
            )
        case "all-reduce":
            return (
                f"all-reduce of whole gradients, {size}, where a reduce-scatter was planned.",
                "The CPU's compiler has no other way; on other backends constrain the gradients to"
                " the plan's specs, or scatter by hand (`treeshard.manual`).",
            )
        case "wider":
            return (
                f"{kind} in a wider dtype than the planned {detail}.",
                "The CPU's compiler widens 16-bit types; elsewhere cast before the gather.",
            )
    return (
        f"{kind} of which the axes, the bytes or the count cannot be told.",
        "Give the mesh; a loop whose trips depend on data has no count.",
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
    # Combined ops have the names of all that they combine.
    return op_name if len(op_name) <= 100 else f"{op_name[:60]}...{op_name[-37:]}"
