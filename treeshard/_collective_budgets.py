"""Assertions on how much a program moves, for tests."""

from collections.abc import Iterator, Sequence
from typing import Any

from treeshard._collectives import collectives
from treeshard._describe import columns, human_bytes
from treeshard._errors import CommunicationError
from treeshard._mesh import AnyMesh
from treeshard._moved import KINDS, Collective


def table(moved: Sequence[Collective]) -> str:
    """Collectives as an aligned table; equal ones share a line."""
    heads = ("kind", "axes", "count", "bytes each", "total", "array", "moves", "source")
    rows: dict[tuple[str, ...], int] = {}
    for one in moved:
        axes = "unknown" if one.axes is None else ", ".join(one.axes) or "none"
        size = "unknown" if one.bytes is None else human_bytes(one.bytes)
        moves = one.path or one.op_name or ""
        row = (one.kind, axes, size, str(one.bytes), str(one.count), one.dtype, moves)
        rows[(*row, one.source or "")] = rows.get((*row, one.source or ""), 0) + 1
    lines: list[tuple[str, ...]] = [heads]
    for (kind, axes, size, exact, count, dtype, moves, source), times in rows.items():
        known = count != "None" and exact != "None"
        runs = "unknown" if count == "None" else str(times * int(count))
        total = human_bytes(times * int(count) * int(exact)) if known else "unknown"
        lines.append((kind, axes, runs, size, total, dtype, moves, source))
    return columns(lines, right=4) if rows else "nothing"


Budget = int | tuple[int | None, int | None] | None


def assert_collectives(
    program: Any,
    mesh: AnyMesh | None = None,
    *,
    all_gather: Budget = None,
    reduce_scatter: Budget = None,
    all_reduce: Budget = None,
    all_to_all: Budget = None,
    collective_permute: Budget = None,
    max_bytes: int | None = None,
) -> None:
    """Checks how often a program runs each kind of collective, and how many bytes it moves.

    Args:
        program: As in `collectives`.
        mesh: As in `collectives`.
        all_gather: The exact number of executions, per buffer and including trips of loops; or
            `(count, bytes)`, where `bytes` is the most that all executions together may move,
            and either may be `None`. `None` leaves the kind unchecked.
        reduce_scatter: As `all_gather`.
        all_reduce: As `all_gather`.
        all_to_all: As `all_gather`.
        collective_permute: As `all_gather`.
        max_bytes: The most that all kinds together may move, in bytes of payload.

    Raises:
        CommunicationError: If a budget is exceeded, or a number in it is unknown. It is also an
            `AssertionError`. The message lists all collectives as a table.

    Examples:
        >>> mesh = make_mesh("fsdp=8")
        >>> w = jax.ShapeDtypeStruct((64, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        >>> whole = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
        >>> assert_collectives(whole.lower(w).compile(), all_gather=(1, 2048), all_reduce=0)

    Source:
        PyTorch's `CommDebugMode` counts collectives in tests.
    """
    budgets = (all_gather, reduce_scatter, all_reduce, all_to_all, collective_permute)
    moved = collectives(program, mesh)
    facts: list[str] = []
    for kind, budget in zip(KINDS, budgets, strict=True):
        count, most = budget if isinstance(budget, tuple) else (budget, None)
        these = [one for one in moved if one.kind == kind]
        runs = _sum(one.count for one in these)
        if count is not None and runs != count:
            facts.append(f"{kind}: {_or_unknown(runs)} executions, but {count:,} are expected.")
        facts += _over(kind, these, most)
    facts += _over("all collectives", moved, max_bytes)
    if facts:
        raise CommunicationError("\n".join([*facts, table(moved)]))


def _over(what: str, moved: Sequence[Collective], most: int | None) -> list[str]:
    total = _sum(one.total_bytes for one in moved)
    if most is None or (total is not None and total <= most):
        return []
    return [f"{what}: {_or_unknown(total)} bytes, but at most {most:,} are allowed."]


def _sum(numbers: Iterator[int | None]) -> int | None:
    known = list(numbers)
    return None if None in known else sum(number or 0 for number in known)


def _or_unknown(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"
