"""What `suggest` found: candidates in order, with numbers or the reason why they lost.

The order is by time, which is what people pay for. It is an estimate, so that a few percent decide
nothing: of candidates that are as fast, the simplest comes first.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from treeshard._core.text import columns, human_bytes
from treeshard.communication._collectives import bytes_text
from treeshard.programs._candidates import Candidate, Estimate

_HEADS = ("", "strategy", "mesh", "memory", "moved", "exposed", "time", "by")
_SHOWN = 10  # rows of the table
CLOSE = 1.03  # of times that differ by less, the simplest candidate comes first
_MOST_SHARE = 1.5  # norms and other small work may be repeated
_OUTCOMES = {
    "estimated": "estimated from its plan",
    "compiled": "compiled",
    "repeats": "devices repeat each other's work: each does {share:.1f} x an even share of it",
    "temporaries": "does not fit: {need} of {capacity}, of which {part} are temporaries",
    "state": "does not fit: {need} of {capacity}, of which the state takes {part}",
}
_ESTIMATE_NOTE = "estimate: from the plan alone. Its memory is without activations: a lower bound."


@dataclass(frozen=True)
class Verdict:
    """What the compiler says of a program, per device.

    Attributes:
        need: The bytes that it needs.
        capacity: The bytes that programs can use; `None` if that is unknown.
        temporaries: The bytes of intermediate values; `None` if the compiler refused it.
        planned: The payload that the plan predicts, in bytes per step.
        moved: The payload that the program moves.
        exposed: The bytes that it sends while it waits.
        exposed_seconds: The time of these, and `seconds` that of a step, as in `Cost`.
        seconds: See there.
        is_complete: Whether nothing is missing in these times, such as that of a kernel.
        share: The operations of a device, x an even share of the step's.
        findings: How the program differs from the plan.
    """

    need: int
    capacity: int | None
    temporaries: int | None = None
    planned: int | None = None
    moved: int | None = None
    exposed: int | None = None
    exposed_seconds: float | None = None
    seconds: float | None = None
    is_complete: bool = True
    share: float | None = None
    findings: Sequence[str] = ()


@dataclass(frozen=True)
class Suggestion:
    """One mesh and strategy.

    Attributes:
        candidate: The mesh, the strategy and what else was chosen.
        estimate: What its plan says; `None` if it was dropped before that.
        verdict: What the compiler says; `None` if it was not compiled.
        reason: Why it lost, if that is not its numbers.

    Examples:
        >>> strategy = ts.programs.Strategy("FSDP", ("fsdp",), [(".*", ts.fsdp("fsdp"))])
        >>> from treeshard.programs._candidates import Candidate
        >>> one = Candidate(strategy, {"fsdp": 8})
        >>> ts.programs.Suggestion(one, None, None, "a batch of 4 does not divide").outcome
        'a batch of 4 does not divide'
    """

    candidate: Candidate
    estimate: Estimate | None
    verdict: Verdict | None
    reason: str | None

    @property
    def mesh(self) -> str:
        """The mesh as text, for `make_mesh`."""
        return self.candidate.mesh

    @property
    def fits(self) -> bool | None:
        """Whether the compiled program fits; `None` if it was not compiled, or the device's memory
        is not known."""
        if self.verdict is None or self.verdict.capacity is None:
            return None
        return self.verdict.need <= self.verdict.capacity

    @property
    def lost(self) -> bool:
        """Whether there is a reason not to take it."""
        return self.reason is not None or self.fits is False or self.repeats

    @property
    def repeats(self) -> bool:
        """Whether devices do the same work, as where the batch is not split over an axis."""
        return self.verdict is not None and (self.verdict.share or 0) > _MOST_SHARE

    @property
    def outcome(self) -> str:
        """Why it lost, or how it stands, in a few words."""
        if self.reason is not None:
            return self.reason
        if self.verdict is None or self.estimate is None:
            return _OUTCOMES["estimated"]
        if self.repeats:
            return _OUTCOMES["repeats"].format(share=self.verdict.share)
        if self.fits is not False:
            return _OUTCOMES["compiled"]
        kind, part = "temporaries", self.verdict.temporaries
        if part is None:
            kind, part = "state", self.estimate.state_bytes
        return _OUTCOMES[kind].format(
            need=human_bytes(self.verdict.need),
            capacity=bytes_text(self.verdict.capacity),
            part=human_bytes(part),
        )


@dataclass(frozen=True)
class Suggestions:
    """Meshes and strategies for a model, the fastest first; `str()` of it is a table with reasons.

    Attributes:
        rows: Those that fit, as far as is known.
        losers: All others; `outcome` of each has the reason.
        target: The devices.
        stopped: Why compiling ended early; `None` if it did not.

    Examples:
        >>> print(ts.programs.Suggestions((), (), "8 x cpu", None).code())
        # nothing is left
    """

    rows: tuple[Suggestion, ...]
    losers: tuple[Suggestion, ...]
    target: str
    stopped: str | None

    @property
    def best(self) -> Suggestion | None:
        """The first that was compiled and fits, as far as is known; without a compiler, the first
        estimate."""
        return self.rows[0] if self.rows else None

    def code(self) -> str:
        """The best one as code to paste."""
        if self.best is None:
            return "# nothing is left"
        candidate = self.best.candidate
        mesh, dcn_axes = candidate.mesh_arguments
        arguments = f'"{mesh}"' if dcn_axes is None else f'"{mesh}", dcn_axes="{dcn_axes}"'
        lines = [f"mesh = ts.make_mesh({arguments})", "rules = ["]
        for pattern, action in candidate.strategy.rules:
            lines.append(f"    ({pattern!r}, {_action_code(action)}),")
        chosen = ", ".join(f"{name}={value!r}" for name, value in candidate.options.items())
        lines.append(f"]  # with {chosen}" if chosen else "]")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything as JSON: rows and losers with mesh, strategy, options, numbers and reason."""
        return json.dumps(
            {
                "target": self.target,
                "stopped": self.stopped,
                "rows": [_json_entry(row) for row in self.rows],
                "losers": [_json_entry(row) for row in self.losers],
                "code": self.code(),
            }
        )

    def __str__(self) -> str:
        lines = [f"on {self.target}", *self._table(), *self._notes(), *self._lost()]
        return "\n".join([*lines, "", self.code()])

    def _table(self) -> list[str]:
        if not self.rows:
            return ["nothing is left"]
        cells = [(str(i), *_cells(row)) for i, row in enumerate(self.rows[:_SHOWN], 1)]
        lines = [columns([_HEADS, *cells], right=3)]
        more = len(self.rows) - _SHOWN
        if more > 0:
            lines.append(f"and {more} more, the next by their estimates")
        return lines

    def _notes(self) -> list[str]:
        lines: list[str] = []
        if any(row.verdict is None for row in self.rows):
            lines.append(_ESTIMATE_NOTE)
        if self.stopped is not None:
            lines.append(f"Not everything was compiled: {self.stopped}.")
        for row in self.rows:
            if row.verdict is not None and row.verdict.findings:
                lines.append(f"{row.candidate} does not move exactly what its plan says:")
                lines += [f"    {finding}" for finding in row.verdict.findings]
        return lines

    def _lost(self) -> list[str]:
        """A line for each reason, with those that have it."""
        by_reason: dict[str, list[str]] = {}
        for row in self.losers:
            by_reason.setdefault(row.outcome, []).append(str(row.candidate))
        lines = ["", "lost:"] if by_reason else []
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"    {'; '.join(names[:3])}{more}: {reason}")
        return lines


def _cells(row: Suggestion) -> tuple[str, ...]:
    """A row of the table, after its number."""
    name, mesh = row.candidate.strategy.name, row.candidate.described
    verdict, estimate = row.verdict, row.estimate
    if verdict is None:
        assert estimate is not None
        least = f"> {human_bytes(estimate.state_bytes)}"
        return name, mesh, least, human_bytes(estimate.moved_bytes), "?", "?", "estimate"
    need = human_bytes(verdict.need)
    if verdict.capacity is not None:
        need = f"{need} of {human_bytes(verdict.capacity)}"
    moved, exposed = (bytes_text(size, "unknown") for size in (verdict.moved, verdict.exposed))
    time = "unknown"
    if verdict.seconds is not None:
        time = f"{'' if verdict.is_complete else '> '}{1000 * verdict.seconds:,.1f} ms"
    return name, mesh, need, moved, exposed, time, "compiler"


def _json_entry(row: Suggestion) -> dict[str, Any]:
    return {
        "strategy": row.candidate.strategy.name,
        "mesh": dict(row.candidate.axes),
        "slices": row.candidate.slices,
        "options": dict(row.candidate.options),
        "estimate": None if row.estimate is None else row.estimate._asdict(),
        "compiled": None if row.verdict is None else asdict(row.verdict),
        "fits": row.fits,
        "outcome": row.outcome,
    }


def ranked(all_rows: Sequence[Suggestion], target: str, stopped: str | None) -> Suggestions:
    """Orders candidates: those that were compiled and fit by their times, others as they come."""
    rows = [row for row in all_rows if not row.lost]
    losers = [row for row in all_rows if row.lost]
    compiled = [row for row in rows if row.verdict is not None]
    estimated = [row for row in rows if row.verdict is None]
    return Suggestions((*fastest_first(compiled), *estimated), tuple(losers), target, stopped)


def fastest_first(compiled: Sequence[Suggestion]) -> Sequence[Suggestion]:
    """The fastest first, then what exposes least, then what needs the least memory; but the
    simplest before those that are hardly faster."""
    left = sorted(compiled, key=lambda row: (time_of(row), *_then(row)))
    return simplest_first(left, time_of)


class Measure(NamedTuple):
    """What decides between candidates. Those of a lower `kind` come first."""

    kind: int
    amount: int | float

    def is_close_to(self, least: "Measure") -> bool:
        return self.kind == least.kind and self.amount <= CLOSE * least.amount


def time_of(row: Suggestion) -> Measure:
    """The time of a compiled candidate: a known one, one that lacks something, or where no peaks
    are known, what it sends while it waits."""
    verdict = row.verdict
    assert verdict is not None
    if verdict.seconds is not None:
        return Measure(0 if verdict.is_complete else 1, verdict.seconds)
    return Measure(2, _known_or_last(verdict.exposed))


def _then(row: Suggestion) -> tuple[int | float, int]:
    assert row.verdict is not None
    return _known_or_last(row.verdict.exposed_seconds), row.verdict.need


def simplest_first(
    ordered: Sequence[Suggestion], measure: Callable[[Suggestion], Measure]
) -> Sequence[Suggestion]:
    """Takes in turn the simplest of those that are about as good as the best that is left."""
    left, taken = list(ordered), list[Suggestion]()
    while left:
        best = measure(left[0])
        close = [row for row in left if measure(row).is_close_to(best)]
        first = min(close, key=lambda row: row.candidate.complexity)
        left.remove(first)
        taken.append(first)
    return taken


def _known_or_last(amount: int | float | None) -> int | float:
    return math.inf if amount is None else amount


def _action_code(action: Any) -> str:
    text = str(action)
    return f"ts.{text}" if text.startswith(("fsdp(", "shard_dim(", "replicate(")) else text
