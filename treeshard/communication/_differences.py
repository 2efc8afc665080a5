"""The words for the ways in which a program differs from its plan.

All of them are templates in one table, so that a page or a test can list them without a program.
Who finds a difference names its case: words that were chosen here would need all that is known
there.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treeshard._core.specs import entry_of
from treeshard._core.text import fold_paths, human_bytes
from treeshard.communication._collectives import Collective, bytes_text, total, total_bytes
from treeshard.errors import counted


class Unplanned(NamedTuple):
    """One way in which a program's communication differs from its plan.

    Attributes:
        code: What differs:

            - `"activation"`: computed values, or rows of the batch, move
            - `"again"`: a weight or a gradient moves more often than planned
            - `"all-reduce"`: of full gradients, where a reduce-scatter was planned
            - `"batch-not-split"`: along an axis that does not split the batch, weights are
              gathered, or nothing is done
            - `"inside-loop"`: a gradient is reduced in each trip of a loop
            - `"not-moved"`: planned, and not in the program
            - `"sharded-further"`: a leaf is gathered that a step need not gather, or along an axis
              along which the plan keeps it split
            - `"other"`: as `fact` says

            In `Comparison.by_compiler`: `"all-reduce"`, `"wider"`, `"narrower"`, `"merged"`
            (gathered less often than the step asks) or `"by-all-reduce"` (an all-gather).
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


class _Words(NamedTuple):
    """Templates of the fields that `explain` fills; `own` is what a report says of a compiler that
    does so by itself."""

    fact: str
    hint: str
    own: str = ""


# The words of each case: its code, and what else chooses among them.
WORDS = {
    "activation": _Words(
        "unplanned {kind} of computed values, {size}.",
        "Constrain the value to the axes of the batch: {constrain}, and gather weights"
        " with `unshard`.",
    ),
    "activation, batch": _Words(
        "{kind} of an argument that is not a parameter, {size}.",
        "If a constraint splits another dim than that of the batch, write {constrain}. To"
        " split a batch for accumulation, use `accumulate_gradients`.",
    ),
    "activation, loop": _Words(
        "unplanned {kind} of computed values, {size}.",
        "Gather the layer's weights at the start of the scan's body, so that the"
        " activations stay where they are: `unshard(layer, layer_specs(specs), axis)`. If they are,"
        " constrain values in the loop: {constrain}.",
    ),
    "again": _Words(
        "{kind} more often than planned, {size}.",
        "Call `unshard` once, before all uses of the weight, and before a loop that does not change"
        " it. Without a step, `remat=` says that the forward pass is repeated.",
    ),
    "again, gradient": _Words(
        "{kind} of gradients more often than planned, {size}.",
        "Compilers reduce the gradient of each use of a weight before they add these. On Explicit"
        " axes `training.value_and_grad` adds them first, and so does `treeshard.manual`. Gradients"
        " at several points, as in SAM and MAML, are reduced one by one.",
    ),
    "all-reduce": _Words(
        "all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
        "{on_cpus}Use `training.value_and_grad`, which constrains gradients to the plan's"
        " specs, or reduce-scatter them by hand (`treeshard.manual`).",
    ),
    "all-reduce, scattered": _Words(
        "all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
        "{on_cpus}The step scatters them already, by a constraint or by hand, so this is the"
        " compiler's choice. It does not make it on Explicit axes, or in `treeshard.manual`.",
    ),
    "batch-not-split": _Words(
        "weights are gathered along {gathered}, {size_of_gathers}, but the batch is"
        " not split over it: devices along it do the same work.",
        "Split the batch: `batch=P({batch_and_gathered})`. If the axis is for tensor parallelism,"
        " constrain the activations so that the weights stay sharded.",
    ),
    "batch-not-split, idle": _Words(
        "{detail} shards neither the state nor the batch, and nothing is moved"
        " along it: devices along it do the same work.",
        "Split the batch over it too: `batch=P({batch})`.",
    ),
    "inside-loop": _Words(
        "{kind} of gradients in each trip of a loop, {size_of_trips}.",
        "Add the gradients of each device in the loop, and reduce them once after it:"
        " `accumulate_gradients(..., axis_names=...)`; by hand, `manual.vary` the weights"
        " before the loop and `sync_gradients` after it.{elsewhere}",
    ),
    "not-moved": _Words(
        "the planned {kind} ({detail}) is not in the program.",
        "Check that the step uses the leaf, and that the plan is of this step. If computed values"
        " are moved instead, call `unshard` where the weight is used.",
    ),
    "other, devices": _Words(
        "{kind} between devices that do not form axes of the mesh, {size}.",
        "A reshape splits a sharded dim differently from the mesh. To split a batch for"
        " accumulation, use `accumulate_gradients`, or reshape it to (batch / k, k), swap the dims,"
        " and constrain it: `with_sharding_constraint(x, P(None, axis))`.",
    ),
    "other, host": _Words(
        "a callback takes {detail}.",
        "Call it on what the step returns, and not in each step, or pass it scalars.",
    ),
    "other, unreadable": _Words(
        "{kind} with unknown axes, bytes or count.",
        "Pass the mesh. A loop whose trips depend on data has no count.",
    ),
    "other, update": _Words(
        "{kind} in the update, {size}, which multiplies sharded matrices.",
        "Use `training.by_matrix(optimizer, plan)`, which gives each device full matrices for the"
        " update; or stack the layers and shard the stacked dim: `P(axis, None, None)`.",
    ),
    "other, wider": _Words(
        "{kind} in a wider dtype than the planned {detail}.",
        "{on_cpus}Cast the weights before the gather: `unshard(w.astype(dtype), ...)`, or"
        " `dtype=` of `manual.value_and_grad`.",
    ),
    "sharded-further": _Words(
        "{kind} of a leaf that a step does not have to gather, {size}.",
        "Shard the leaf like the arrays that it is used with: optimizer state with"
        " `Plan.follow`, and weights along the axis of the activations.",
    ),
    "sharded-further, axis": _Words(
        "weights are gathered along {detail} too, along which the plan keeps them split, {size}.",
        "Constrain the values that they produce, so that this axis splits the computation:"
        " `with_sharding_constraint(x, P({batch}, ..., {detail}))`.",
    ),
    # What compilers do by themselves, in the order in which a report says it
    "all-reduce, own": _Words(
        "all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
        "Use `training.value_and_grad`, which constrains gradients to the plan's"
        " specs, or reduce-scatter them by hand (`treeshard.manual`).",
        "all-reduces full gradients ({size}) where a reduce-scatter was planned",
    ),
    "all-reduce, own, scattered": _Words(
        "all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
        "The step scatters them already, by a constraint or by hand, so this is the"
        " compiler's choice. On Explicit axes, and in `treeshard.manual`, it makes it for small"
        " gradients only.",
        "all-reduces full gradients ({size}) where a reduce-scatter was planned",
    ),
    "wider": _Words(
        "{kind} in a wider dtype than the planned {detail}.",
        "The CPU's compiler has no collectives of 16-bit floats.",
        "moves 16-bit floats as float32",
    ),
    "merged": _Words(
        "gathered once in the program, and more often in the step.",
        "The compiler saw that these gathers are alike.",
        "gathers once what the step gathers more often",
    ),
    "by-all-reduce": _Words(
        "{kind} as an all-reduce of shards in arrays of zeros, {size}, which sends twice"
        " the bytes.",
        "Compilers do so for small shards: split the leaf over fewer devices.",
        "gathers {size} by all-reduces, which send twice the bytes",
    ),
    "narrower": _Words(
        "{kind} in a narrower dtype than the planned {detail}, {size}.",
        "The step casts it, or the compiler does, since its matrix products round to that dtype.",
        "{size} move as {dtypes}, narrower than planned: the step casts it, or the compiler does,"
        " since its matrix products round to it.",
    ),
}
OWN = [case for case, words in WORDS.items() if words.own]
# What a CPU's compiler does by itself is reported only if the program may be for another.
_ON_CPUS = "If the program is for CPUs, this is the compiler's own. "
_ELSEWHERE = " Compilers for TPUs and GPUs may do that by themselves."


def explain(
    case: str,
    kind: str = "",
    detail: str = "",
    moved: Sequence[Collective] = (),
    paths: Sequence[str] = (),
    batch_axes: Sequence[str] = (),
    platform: str | None = None,
) -> Unplanned:
    """A difference in the words of its case. `detail` tells those of one case apart."""
    size = bytes_text(total_bytes(moved))
    gathers = [x for x in moved if x.kind == "all-gather"]
    gathered = dict.fromkeys(axis for x in gathers for axis in x.axes or ())
    batch = repr(entry_of(batch_axes))
    fields = {
        "kind": "op that looks like a collective," if kind == "unknown" else kind,
        "detail": detail,
        "size": size,
        "size_of_gathers": bytes_text(total_bytes(gathers)),
        "size_of_trips": _size_of_trips(moved) + size,
        "batch": batch,
        "batch_and_gathered": repr(entry_of(list(dict.fromkeys([*batch_axes, *gathered])))),
        "gathered": ", ".join(map(repr, gathered)),
        "constrain": f"`with_sharding_constraint(x, P({batch}))`",
        "on_cpus": "" if platform else _ON_CPUS,
        "elsewhere": _ELSEWHERE if platform == "cpu" else "",
    }
    fact, hint = (words.format_map(fields) for words in WORDS[case][:2])
    return Unplanned(case.partition(",")[0], fact, hint, tuple(moved), tuple(paths))


def _size_of_trips(moved: Sequence[Collective]) -> str:
    """`4.0 KiB x 4 trips = `, if all run in a loop of the same number of trips."""
    trips = {x.count for x in moved}
    of_one_trip = total(x.bytes for x in moved)
    if len(trips) != 1 or None in trips or of_one_trip is None:
        return ""
    return f"{human_bytes(of_one_trip)} x {trips.pop()} trips = "


def by_compiler_lines(own: Iterable[Unplanned], platform: str | None) -> list[str]:
    """A line for what the compiler of a platform does by itself, and one for narrower dtypes."""
    moved: dict[str, list[Collective]] = defaultdict(list)
    for difference in own:
        moved[difference.code] += difference.collectives
    said: dict[str, str] = {}
    for case in OWN:
        code = case.partition(",")[0]
        if code in moved:
            size = human_bytes(total_bytes(moved[code]) or 0)
            dtypes = " and ".join(sorted({x.dtype for x in moved[code]}))
            said[code] = WORDS[case].own.format(size=size, dtypes=dtypes)
    # A step may have chosen narrower dtypes itself.
    narrower = [said.pop("narrower")] if "narrower" in said else []
    if not said:
        return narrower
    name = f"{platform.upper()} compiler" if platform else "compiler"
    others = " Compilers for TPUs and GPUs need not." if platform == "cpu" else ""
    return [f"The {name} {' and '.join(said.values())}.{others}", *narrower]


# ------------------------------------------------------------------ lines


def collective_lines(moved: Sequence[Collective], most: int) -> list[str]:
    """A line for each group of equal collectives, at most so many."""
    counts = Counter(map(collective_line, moved))
    lines = [f"    {times} x {line}" for line, times in counts.items()]
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"    ... and {len(lines) - most} more"]


def collective_line(collective: Collective) -> str:
    size = bytes_text(collective.bytes, "unknown bytes")
    times = "? times" if collective.count is None else counted(collective.count, "time")
    axes = " and ".join(map(repr, collective.axes or collective.within or ()))
    if collective.axes is None:
        axes = f"parts of {axes}" if collective.within else "unknown axes"
    parts = [f"{collective.kind} of {size} ({collective.dtype}) along {axes}, {times}"]
    if collective.is_inserted:
        parts.append("inserted by the partitioner")
    if collective.op_name:
        parts.append(f"in {_short(collective.op_name)}")
    if collective.source:
        parts.append(f"at {collective.source}")
    return ", ".join(parts)


def _short(op_name: str) -> str:
    # A combined op has the names of all the ops that it combines.
    return op_name if len(op_name) <= 100 else f"{op_name[:60]}...{op_name[-37:]}"
