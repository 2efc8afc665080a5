"""What `suggest` found: candidates in order, with numbers or the reason why they lost."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from treeshard._core.text import columns, human_bytes
from treeshard.programs._candidates import Candidate, Estimate

_HEADS = ("", "strategy", "mesh", "memory", "moved", "exposed", "least time", "by")
_SHOWN = 10  # rows of the table
_MOST_SHARE = 1.5  # norms and other small work may be repeated


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
        exposed_seconds: The time of these, and `seconds` the least time of a step, as in `Cost`.
        seconds: See there.
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
        """Whether the compiled program fits; `None` if it was not compiled, or nobody knows."""
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
        if self.verdict is None:
            return "estimated from its plan"
        if self.repeats:
            return (
                f"devices repeat each other's work: each does {self.verdict.share:.1f} x an even"
                " share of it"
            )
        if self.fits is not False:
            return "compiled"
        need, capacity = self.verdict.need, self.verdict.capacity or 0
        parts = f"does not fit: {human_bytes(need)} of {human_bytes(capacity)}"
        if self.verdict.temporaries is not None:
            return f"{parts}, of which {human_bytes(self.verdict.temporaries)} are temporaries"
        if self.estimate is not None:
            return f"{parts}, of which the state takes {human_bytes(self.estimate.state_bytes)}"
        return parts

    def cells(self, number: int) -> tuple[str, ...]:
        """A row of the table."""
        known, plan = self.verdict, self.estimate
        assert plan is not None
        name, rest = self.candidate.strategy.name, self.candidate.described
        if known is None:
            need = f"> {human_bytes(plan.state_bytes)}"
            moved, exposed, least, by = human_bytes(plan.moved_bytes), "?", "?", "estimate"
        else:
            capacity = "" if known.capacity is None else f" of {human_bytes(known.capacity)}"
            need = f"{human_bytes(known.need)}{capacity}"
            moved = _or_unknown(known.moved, human_bytes)
            exposed = _or_unknown(known.exposed, human_bytes)
            least, by = _or_unknown(known.seconds, lambda x: f"{1000 * x:,.1f} ms"), "compiler"
        return (str(number), name, rest, need, moved, exposed, least, by)


def _or_unknown(value: Any, text: Any) -> str:
    return "unknown" if value is None else text(value)


@dataclass(frozen=True)
class Suggestions:
    """Meshes and strategies for a model, the best first; `str()` of it is a table with reasons.

    Attributes:
        rows: Those that fit, as far as is known.
        losers: All others; `outcome` of each has the reason.
        target: The devices.
        stopped: Why not everything was compiled; `None` if it was.

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
        """The first that was compiled and fits; without a compiler, the first estimate."""
        return self.rows[0] if self.rows else None

    def code(self) -> str:
        """The best one as code to paste."""
        if self.best is None:
            return "# nothing is left"
        one = self.best.candidate
        chosen = ", ".join(f"{name}={value!r}" for name, value in one.options.items())
        mesh, dcn_axes = one.mesh_arguments
        slow = f', dcn_axes="{dcn_axes}"' if dcn_axes else ""
        rules = "\n".join(f"    ({p!r}, {_action(action)})," for p, action in one.strategy.rules)
        options = f"  # with {chosen}" if chosen else ""
        return f'mesh = ts.make_mesh("{mesh}"{slow})\nrules = [\n{rules}\n]{options}'

    def to_json(self) -> str:
        """Everything as JSON: rows and losers with mesh, strategy, options, numbers and reason."""

        def entry(row: Suggestion) -> dict[str, Any]:
            one = row.candidate
            return {
                "strategy": one.strategy.name,
                "mesh": dict(one.axes),
                "slices": one.slices,
                "options": dict(one.options),
                "estimate": None if row.estimate is None else row.estimate._asdict(),
                "compiled": None if row.verdict is None else asdict(row.verdict),
                "fits": row.fits,
                "outcome": row.outcome,
            }

        return json.dumps(
            {
                "target": self.target,
                "stopped": self.stopped,
                "rows": [entry(row) for row in self.rows],
                "losers": [entry(row) for row in self.losers],
                "code": self.code(),
            }
        )

    def __str__(self) -> str:
        return "\n".join([f"on {self.target}", *self._table(), *self._notes(), "", self.code()])

    def _table(self) -> list[str]:
        if not self.rows:
            return ["nothing is left"]
        more = len(self.rows) - _SHOWN
        rest = [f"and {more} more, the next by their estimates"] if more > 0 else []
        return [columns([_HEADS, *self._cells()], right=3), *rest]

    def _cells(self) -> list[tuple[str, ...]]:
        return [row.cells(i + 1) for i, row in enumerate(self.rows[:_SHOWN])]

    def _notes(self) -> list[str]:
        lines: list[str] = []
        if any(row.verdict is None for row in self.rows):
            lines.append(
                "estimate: from the plan alone. Its memory is without activations: a lower bound."
            )
        if self.stopped is not None:
            lines.append(f"Not everything was compiled: {self.stopped}.")
        for row in self.rows:
            if row.verdict is not None and row.verdict.findings:
                lines.append(f"{row.candidate} does not move exactly what its plan says:")
                lines += [f"    {finding}" for finding in row.verdict.findings]
        if self.losers:
            lines += ["", "lost:"]
            reasons: dict[str, list[str]] = {}
            for row in self.losers:
                reasons.setdefault(row.outcome, []).append(str(row.candidate))
            for reason, who in reasons.items():
                more = f" and {len(who) - 3} more" if len(who) > 3 else ""
                lines.append(f"    {'; '.join(who[:3])}{more}: {reason}")
        return lines


def ranked(all_rows: Sequence[Suggestion], target: str, stopped: str | None) -> Suggestions:
    """Orders candidates: those that were compiled and fit by what they expose, then by time."""
    left = [row for row in all_rows if not row.lost]
    compiled = [row for row in left if row.verdict is not None]
    waiting = [row for row in left if row.verdict is None]
    least = min((_exposed(row) for row in compiled), default=(0.0, 0))

    def key(row: Suggestion) -> tuple[Any, ...]:
        seconds, size = _exposed(row)
        close = size <= 1.05 * least[1] and seconds <= 1.05 * least[0]
        assert row.verdict is not None
        time = row.verdict.seconds
        return (not close, 0 if close else seconds, 0 if close else size, time or float("inf"))

    kept = [*sorted(compiled, key=key), *waiting]
    losers = [row for row in all_rows if row not in kept]
    return Suggestions(tuple(kept), tuple(losers), target, stopped)


def _exposed(row: Suggestion) -> tuple[float, int]:
    assert row.verdict is not None
    seconds, size = row.verdict.exposed_seconds, row.verdict.exposed
    return (float("inf") if seconds is None else seconds, size or 0)


def _action(action: Any) -> str:
    text = str(action)
    return f"ts.{text}" if text.startswith(("fsdp(", "shard_dim(", "replicate(")) else text
