"""The words for the ways in which a program differs from its plan."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from treeshard._core.specs import entry_of
from treeshard._core.text import fold_paths, human_bytes
from treeshard.communication._collectives import Collective, total
from treeshard.errors import counted


class Unplanned(NamedTuple):
    """One way in which a program's communication differs from its plan.

    Attributes:
        code: `"activation"`, `"batch"`, `"batch-not-split"` (weights are gathered along an axis
            that does not split the batch), `"idle-axis"` (an axis that nothing uses), `"again"`
            (moved more often than planned), `"reduction-inside-loop"` (a gradient reduced in each
            trip of a loop), `"sharded-further"` (a leaf that a step should not gather, or along an
            axis along which it should stay split), `"state-unlike-weight"` (optimizer state on
            other dims), `"all-reduce"` (where a reduce-scatter was planned), `"wider"` or
            `"narrower"` (in another dtype), `"by-all-reduce"` (an all-gather that a compiler
            makes an all-reduce), `"across-axes"` (between
            devices that do not form axes of the mesh), `"to-host"` (a callback takes an array to
            the host), `"unreadable"`, or `"not-moved"` (planned, but not in the program).
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
        return "\n".join([head, *collective_lines(self.collectives, 10)])


# ------------------------------------------------------------------ words


def explain(
    code: str,
    kind: str,
    detail: str = "",
    moved: Sequence[Collective] = (),
    batch_axes: Sequence[str] = (),
    platform: str | None = None,
) -> tuple[str, str]:
    """The fact and the hint of a difference. `detail` tells those of one code apart."""
    moves = total([one.total_bytes for one in moved])
    size = "an unknown number of bytes" if moves is None else human_bytes(moves)
    # What a CPU's compiler does by itself is reported only if the program may be for another.
    on_cpus = "" if platform else "If the program is for CPUs, this is the compiler's own. "
    constrain = f"`with_sharding_constraint(x, P({entry_of(batch_axes)!r}))`"
    match code:
        case "activation":
            fact = f"unplanned {kind} of computed values, {size}."
            if detail == "loop":
                return fact, (
                    "Gather the layer's weights at the start of the scan's body, so that the"
                    " activations stay where they are: `unshard(layer, layer_specs(specs), axis)`."
                )
            if detail:
                return fact, f"Constrain values in the loop to the batch's axes: {constrain}."
            return fact, (
                f"Constrain the value to the axes of the batch: {constrain}, and gather weights"
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
                f"If a constraint splits another dim than that of the batch, write {constrain}. To"
                " split a batch for accumulation, reshape it to (batch / k, k) and swap the dims,"
                " or constrain the result: `with_sharding_constraint(x, P(None, axis))`.",
            )
        case "batch-not-split":
            gathers = [one for one in moved if one.kind == "all-gather"]
            axes = list(dict.fromkeys(axis for one in gathers for axis in one.axes or ()))
            both = entry_of(list(dict.fromkeys([*batch_axes, *axes])))
            return (
                f"weights are gathered along {', '.join(map(repr, axes))}, {size}, but the batch is"
                " not split over it: devices along it do the same work.",
                f"Split the batch: `batch=P({both!r})`. If the axis is for tensor parallelism,"
                " constrain the activations so that the weights stay sharded.",
            )
        case "reduction-inside-loop":
            trips = {one.count for one in moved}
            once = total([one.bytes for one in moved])
            if len(trips) == 1 and None not in trips and once is not None:
                size = f"{human_bytes(once)} x {trips.pop()} trips = {size}"
            return (
                f"{kind} of gradients in each trip of a loop, {size}.",
                "Add the gradients of each device in the loop, and reduce them once after it:"
                " `accumulate_gradients(..., axis_names=...)`; by hand, `manual.vary` the weights"
                " before the loop and `sync_gradients` after it."
                + " Compilers for TPUs and GPUs may do that by themselves."
                * (platform == "cpu"),
            )
        case "again" if kind != "all-gather":
            return (
                f"{kind} of gradients more often than planned, {size}.",
                "The partitioner reduces the gradient of each use of a weight before it adds them."
                " Use `accumulate_gradients` or `treeshard.manual` to reduce once.",
            )
        case "again":
            return (
                f"{kind} more often than planned, {size}.",
                "If the forward pass is repeated for the gradients, pass `remat=`. In a loop over"
                " minibatches, gather before the loop and reduce after it: `accumulate_gradients`.",
            )
        case "state-unlike-weight":
            return (
                f"{kind} in the update, {size}: the optimizer state is sharded unlike its weight.",
                "Shard it like the weight: `Plan.follow(optimizer_state)`, or one rule for both.",
            )
        case "sharded-further" if detail:
            return (
                f"weights are gathered along {detail} too, along which the plan keeps them split,"
                f" {size}.",
                "Constrain the values that they produce, so that this axis splits the computation:"
                f" `with_sharding_constraint(x, P({entry_of(batch_axes)!r}, ..., {detail}))`.",
            )
        case "narrower":
            return (
                f"{kind} in a narrower dtype than the planned {detail}, {size}.",
                "The step casts it, or the compiler does, since its matrix products round to that"
                " dtype. `dtype=` plans for it.",
            )
        case "by-all-reduce":
            return (
                f"{kind} as an all-reduce of shards in arrays of zeros, {size}, which sends twice"
                " the bytes.",
                "Compilers do so for small shards: split the leaf over fewer devices.",
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
                f"{on_cpus}Use `training.value_and_grad`, which constrains gradients to the plan's"
                " specs, or reduce-scatter them by hand (`treeshard.manual`).",
            )
        case "wider":
            return (
                f"{kind} in a wider dtype than the planned {detail}.",
                f"{on_cpus}Cast the weights before the gather: `unshard(w.astype(dtype), ...)`, or"
                " `dtype=` of `manual.value_and_grad`.",
            )
        case "not-moved":
            return f"the planned {kind} ({detail}) is not in the program.", (
                "The compiler gathers once and keeps the result, which takes memory until the"
                " gradient is computed. In a scan it does not."
                if "again" in detail
                else "Check that the step uses the leaf, and that the plan is of this step."
            )
    what = "op that looks like a collective," if kind == "unknown" else kind
    return (
        f"{what} with unknown axes, bytes or count.",
        "Pass the mesh. A loop whose trips depend on data has no count.",
    )


def by_compiler_line(own: Sequence[Unplanned], platform: str | None) -> str:
    """A line for what the compiler of a platform does by itself, and one for narrower dtypes."""
    facts: list[str] = []
    if size := _moved(own, "all-reduce"):
        facts.append(f"all-reduces full gradients ({size}) where a reduce-scatter was planned")
    if _moved(own, "wider"):
        facts.append("moves 16-bit floats as float32")
    if size := _moved(own, "by-all-reduce"):
        facts.append(f"gathers {size} by all-reduces, which send twice the bytes")
    name = f"{platform.upper()} compiler" if platform else "compiler"
    others = " Compilers for TPUs and GPUs need not." if platform == "cpu" else ""
    line = f"The {name} {' and '.join(facts)}.{others}" if facts else ""
    if size := _moved(own, "narrower"):
        dtypes = sorted({x.dtype for one in own if one.code == "narrower" for x in one.collectives})
        line += (
            f"\n{size} move as {' and '.join(dtypes)}, narrower than planned: the step casts it,"
        )
        line += " or the compiler does, since its matrix products round to it."
    return line.strip()


def _moved(differences: Sequence[Unplanned], code: str) -> str:
    """What differences of one code move, as text; empty if there are none."""
    moved = [x for one in differences if one.code == code for x in one.collectives]
    return human_bytes(total([x.total_bytes for x in moved]) or 0) if moved else ""


def collective_lines(moved: Sequence[Collective], most: int) -> list[str]:
    """A line for each group of equal collectives, at most so many."""
    counts = Counter(map(collective_line, moved))
    lines = [f"    {times} x {line}" for line, times in counts.items()]
    more = [f"    ... and {len(lines) - most} more"] if len(lines) > most else []
    return [*lines[:most], *more]


def collective_line(one: Collective) -> str:
    size = "unknown bytes" if one.bytes is None else human_bytes(one.bytes)
    times = "? times" if one.count is None else counted(one.count, "time")
    axes = "unknown axes" if one.axes is None else " and ".join(map(repr, one.axes))
    parts = [f"{one.kind} of {size} ({one.dtype}) along {axes}, {times}"]
    parts += ["inserted by the partitioner"] if one.is_inserted else []
    parts += [f"in {_short(one.op_name)}"] if one.op_name else []
    parts += [f"at {one.source}"] if one.source else []
    return ", ".join(parts)


def _short(op_name: str) -> str:
    # A combined op has the names of all the ops that it combines.
    return op_name if len(op_name) <= 100 else f"{op_name[:60]}...{op_name[-37:]}"
