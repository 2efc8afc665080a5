"""Words each way in which a program differs from its plan: a fact and a hint per code.

All words are in one table, so that a page or a test can list them without a program. `_matching`
finds the differences, and passes their codes and values.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from treeshard._core.specs import entry_of
from treeshard._core.text import fold_paths
from treeshard._trace.roles import BY_HAND, BY_TYPES, CONSTRAINT
from treeshard.communication._collectives import Collective, bytes_text, total_bytes
from treeshard.errors import counted


class Unplanned(NamedTuple):
    """One way in which a program's communication differs from its plan.

    Attributes:
        code: What differs:

            - `"activation"`: computed values, or rows of the batch, are communicated
            - `"again"`: a weight is gathered, or a gradient reduced, more often than planned
            - `"all-reduce"`: full gradients are all-reduced, where a reduce-scatter was planned
            - `"as-one-product"`: the gradients of leaves that the step combines, such as factors of
              a product, may be reduced as one
            - `"batch-not-split"`: devices along an axis do the same work, because the axis does not
              split the batch
            - `"inside-loop"`: a gradient is reduced in each trip of a loop
            - `"not-moved"`: a planned transfer is not in the program
            - `"sharded-further"`: a leaf is gathered although the step could use its shards, or
              along an axis along which the plan keeps it split
            - `"state-unlike-weight"`: a gradient is gathered for optimizer state that is sharded
              less than its weight
            - `"other"`: another difference, which `fact` describes
        fact: What was found.
        hint: What to do about it.
        collectives: The ops; empty for `"not-moved"`.
        paths: The leaves that it concerns, if they are known.
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
        return "\n".join([head, *_lines(self.collectives)])


EXPLICIT = "on Explicit axes"
# The hints for all-reduces of full gradients, by how the step scatters gradients.
_BY_COMPILER = (
    "On Auto axes the compiler chooses, and often all-reduces over several axes or over a torus. On"
    " Explicit axes, `training.value_and_grad(loss, axis_names=...)` scatters gradients, as"
    " `treeshard.manual` does."
)
SCATTER_GRADIENTS = {
    "": _BY_COMPILER,
    CONSTRAINT: _BY_COMPILER,
    BY_HAND: "The step scatters them already, so this is the compiler's choice.",
    BY_TYPES: "Gradients of the step wait for one sum already, which scatters the gradients of"
    " weights that `unshard` gathers for products. JAX's types sum other gradients in full.",
    EXPLICIT: "Pass the axes of the batch to `training.value_and_grad(loss, axis_names=...)`: its"
    " gradients wait for one sum, which scatters them.",
}
# The hints for what is reduced for each use of a weight, by whether the axes are Explicit.
_REDUCE_ONCE = {
    False: "compilers may reduce the gradient of each use of a weight, except after"
    " `training.value_and_grad(loss, axis_names=...)` on Explicit axes and in `treeshard.manual`.",
    True: "JAX's types reduce the gradient of each use of a weight, except after"
    " `training.value_and_grad(loss, axis_names=...)`, in products.",
}
_OF_TYPES = (
    " On Explicit axes, call `unshard` before the loop, so that gradients of weights in products"
    " wait. JAX's types sum other gradients, such as bias gradients, in each trip."
)
# Code -> templates of the fact and of the hint.
WORDS = {
    "activation": (
        "{kind} of computed values, {size}.",
        "Gather weights where they are used, with `unshard` (a scanned layer at the start of the"
        " scan's body), and constrain values to the axes of the batch:"
        " `with_sharding_constraint(x, P({batch}))`.",
    ),
    "again": (
        "{kind} more often than planned, {size}.",
        "Call `unshard` once, before all uses of the weight and before loops that do not change"
        " it; {reduce_once}",
    ),
    "all-reduce": (
        "all-reduce of full gradients, {size}, where a reduce-scatter was planned.",
        "{detail}",
    ),
    "as-one-product": (
        "the planned reductions of these gradients are not in the program: they may be reduced as"
        " one product.",
        "The step computes with these leaves before it uses the batch, as in `x @ (w + a @ b)`: one"
        " reduction, of the gradient of `a @ b`, is enough for `a` and `b`.",
    ),
    "batch-not-split": (
        "{axes} does not split the batch: devices along it do the same work.",
        "Split the batch over it, `batch=P({batch_and_axes})`; or, for tensor parallelism,"
        " constrain the activations so that the weights stay sharded.",
    ),
    "inside-loop": (
        "{kind} of gradients in each trip of a loop, {size}.",
        "Add the gradients of each device in the loop, and reduce them once after it:"
        " `accumulate_gradients(..., axis_names=...)`, or, by hand, `manual.vary` the weights"
        " before the loop and `sync_gradients` after it.{of_types}",
    ),
    "not-moved": (
        "the planned {kind} ({detail}) is not in the program.",
        "Check that the step uses the leaf, and call `unshard` where it does.",
    ),
    "sharded-further": (
        "{kind} of a leaf along {axes}, although the step could use its shards, {size}.",
        "Shard the leaf like the arrays that it is used with (optimizer state with `Plan.follow`),"
        " or constrain the values that it produces:"
        " `with_sharding_constraint(x, P({batch}, ..., {axes}))`.",
    ),
    "state-unlike-weight": (
        "{kind} of gradients for optimizer state that is sharded less than its weight, {size}.",
        "Use one rule for both, or `Plan.follow`.",
    ),
    "other": (
        "{kind} {detail}.",
        "Split a batch for accumulation with `accumulate_gradients`, update matrices with"
        " `training.by_matrix`, and call callbacks on what the step returns, or on scalars.",
    ),
}


def explain(
    code: str,
    *,
    kind: str = "",
    detail: str = "",
    moved: Sequence[Collective] = (),
    paths: Sequence[str] = (),
    batch_axes: Sequence[str] = (),
    axes: Sequence[str] = (),
    is_explicit: bool = False,
) -> Unplanned:
    """Words a difference by its code.

    Args:
        code: One of `WORDS`.
        kind: The kind of the collectives.
        detail: What differs, for `"other"` and `"not-moved"`; the hint, for `"all-reduce"`.
        moved: The collectives.
        paths: The leaves that it concerns.
        batch_axes: The axes that split the batch.
        axes: The axes that it is about.
        is_explicit: Whether axes of the mesh are Explicit.
    """
    fields = {
        "kind": "op that looks like a collective," if kind == "unknown" else kind,
        "detail": detail,
        "size": bytes_text(total_bytes(moved)),
        "axes": " and ".join(map(repr, axes)),
        "reduce_once": _REDUCE_ONCE[is_explicit],
        "of_types": _OF_TYPES if is_explicit else "",
        "batch": repr(entry_of(batch_axes)),
        "batch_and_axes": repr(entry_of(list(dict.fromkeys([*batch_axes, *axes])))),
    }
    fact, hint = (words.format_map(fields) for words in WORDS[code])
    return Unplanned(code, fact, hint, tuple(moved), tuple(paths))


# ------------------------------------------------------------------ lines

_MOST_LINES = 10


def _lines(moved: Sequence[Collective]) -> list[str]:
    """A line for each group of equal collectives."""
    counts = Counter(map(collective_line, moved))
    lines = [f"    {times} x {line}" for line, times in counts.items()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"    ... and {len(lines) - _MOST_LINES} more"]
    return lines


def collective_line(collective: Collective) -> str:
    """A collective in one line: its size, its axes, its count and the line of user code."""
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
