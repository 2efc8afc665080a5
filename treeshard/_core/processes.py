"""What several processes do together: they fail together and agree.

JAX starts a program on each process and never asks whether it is the same one. A process that
raises before it, or starts another, leaves the rest waiting in a collective without an end or a
word. So calls that move data exchange a message first.

Callers use `all_or_none` and `agreeing`: if one process raises, all raise. Both are made of
`exchange` and `tell`. Only the stages of a save call `tell` themselves, since they raise a
`CheckpointError` that lists the errors of all processes.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from treeshard._core.arrays import array_text, is_array, numbers
from treeshard._core.meetings import AS_LONG_AS_IT_TAKES as AS_LONG_AS_IT_TAKES
from treeshard._core.meetings import (
    TIMEOUT,
    exchange,
    get_out_of_step,
    indices,
    lines_differ,
    origin,
    release_interrupts,
    set_told,
)
from treeshard._core.mesh import AnyMesh, describe_mesh
from treeshard._core.specs import entries, with_entries
from treeshard._core.text import consecutive, in_groups
from treeshard.errors import ProcessError, listed, warn

# ------------------------------------------------------------------ failing together, agreeing


@contextmanager
def all_or_none(
    what: str,
    *,
    phase: str = "",
    among: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    moves: bool = True,
) -> Iterator[list[bytes]]:
    """Runs its block on every process; if it raises on one, all raise. Arguments as in `exchange`.

    Yields a list, to which the block may append the message of this process; after the block, it
    has the message of each process. The error of the block is raised here; on the others, a
    `ProcessError` quotes it. A Ctrl-C in the block is raised here only after the others were told;
    another one, while this process waits for them, is raised at once, and the break is final.
    """
    messages: list[bytes] = []
    own_error: BaseException | None = None  # told to the others before it is raised here
    try:
        release_interrupts()
        yield messages
        release_interrupts()
    except BaseException as error:  # a Ctrl-C too
        own_error = error
    try:
        told, failures = tell(
            what, own_error, messages, phase=phase, among=among, timeout=timeout, moves=moves
        )
    except ProcessError as absent:
        raise (own_error or absent) from None
    if own_error is not None:
        raise own_error
    facts = [f"process {i} raised {text}" for i, text in failures.items()]
    if len(facts) == 1:
        raise ProcessError(f"{what}: nothing was done, since {facts[0]}")
    if facts:
        headline = f"{what}: nothing was done, since other processes failed:"
        raise ProcessError(listed(headline, facts, 4, headed=True))
    messages[:] = told


def tell(
    what: str,
    error: BaseException | None,
    messages: Sequence[bytes],
    *,
    phase: str = "",
    among: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    moves: bool = True,
    lane: str = "",
) -> tuple[list[bytes], dict[int, str]]:
    """Tells the other processes the messages of this one, or its error. Arguments as in `exchange`.

    Returns the message of each process, and the errors, by process.
    """
    outcome = b"+" + b"".join(messages)
    if error is not None:
        outcome = f"-{type(error).__name__}: {error}".removesuffix(": ").encode()
    outcomes = exchange(
        what, outcome, phase=phase, among=among, timeout=timeout, moves=moves, lane=lane
    )
    set_told(error)
    failures: dict[int, str] = {}
    for i, text in zip(indices(among), outcomes, strict=True):
        if text[:1] == b"-":
            failures[i] = text[1:].decode()
    return [text[1:] for text in outcomes], failures


@contextmanager
def agreeing(
    what: str,
    *,
    phase: str = "",
    among: Sequence[int] | None = None,
    timeout: float = TIMEOUT,
    moves: bool = True,
) -> Iterator[dict[str, str]]:
    """Runs its block on every process; if the blocks record different facts, all raise.

    Yields a dict for the block to fill, in order: what this process is about to do, by leaf path or
    another name. The processes exchange a hash of the facts, and the facts themselves only if
    hashes differ. Otherwise as `all_or_none`.
    """
    facts: dict[str, str] = {}
    encoded = b""
    with all_or_none(what, phase=phase, among=among, timeout=timeout, moves=moves) as hashes:
        yield facts
        encoded = json.dumps(list(facts.items())).encode()  # a list: the order counts too
        hashes.append(hashlib.sha256(encoded).digest())
    if len(set(hashes)) == 1:
        if UNKNOWN in facts.values() and (lines := lines_differ(among)):
            warn(_AT_OTHER_LINES.format(what=what, lines=lines))
        return
    messages = exchange(
        what,
        zlib.compress(encoded),
        phase="differences",
        among=among,
        timeout=timeout,
        moves=moves,
    )
    decoded = [dict(json.loads(zlib.decompress(message))) for message in messages]
    differences = _differences(dict(zip(indices(among), decoded, strict=True)))
    headline = (
        f"{what}: the processes do not agree, and nothing was done. All of them must make the"
        " same call. The differences:"
    )
    get_out_of_step(what, among)
    raise ProcessError(listed(headline, differences, headed=True))


_AT_OTHER_LINES = (
    "{what}: the processes make this call at different lines: {lines}. That is right for two"
    " branches of one `if`, and wrong if a process skipped a call or made one more: then the values"
    " are of different arrays. A program of `jax.jit` made these, so they cannot be compared."
)


def _differences(by_process: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line per fact that differs; if none does, one for the first that is out of order."""
    names = dict.fromkeys(name for facts in by_process.values() for name in facts)
    differing: dict[str, str] = {}
    for name in names:
        row = {i: facts.get(name, "nothing") for i, facts in by_process.items()}
        # Arrays of other shapes have other values, which says nothing more.
        explained = name.endswith(_VALUES) and name.removesuffix(_VALUES) in differing
        if len(set(row.values())) > 1 and not explained:
            differing[name] = in_groups(row)
    if differing:
        return [f"{name}: {groups}" for name, groups in differing.items()]
    for position, order in enumerate(zip(*by_process.values(), strict=True)):
        if len(set(order)) > 1:
            row = dict(zip(by_process, map(repr, order), strict=True))
            return [f"leaf {position}: {in_groups(row)}"]
    raise AssertionError("the facts are the same")


# ------------------------------------------------------------------ participants and facts


# Arrays of at most this size are compared between processes by default.
SMALL_BYTES = 2**16
_VALUES = " (values)"  # in the names of facts
UNKNOWN = "made by another program"  # the fact about an array that no call of treeshard made


@lru_cache(maxsize=1024)
def processes_of(sharding: Sharding) -> frozenset[int]:
    """The indices of the processes that own devices of a sharding."""
    return frozenset(device.process_index for device in sharding.device_set)


def is_spread(x: Any) -> bool:
    """Whether `x` is an array with shards on devices of other processes."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable


def participating_processes(
    leaves: Iterable[Any], meshes: Iterable[AnyMesh] = (), more: Iterable[int] = ()
) -> list[int]:
    """The processes that own devices of spread leaves or of meshes, and `more`; ascending.

    Empty if this process is the only one, or is not among them: then there is no exchange.
    """
    if jax.process_count() == 1:
        return []
    shardings = {x.sharding for x in leaves if is_spread(x)}
    owners = frozenset[int]().union(*map(processes_of, shardings))
    owners |= {d.process_index for m in meshes if isinstance(m, Mesh) for d in m.devices.flat}
    participants = sorted({*owners, *more}) if owners else []
    me = jax.process_index()
    return participants if me in participants and participants != [me] else []


def facts_of(
    rows: Iterable[tuple[str, Any, Sequence[Sharding]]],
    among: Sequence[int] = (),
    compared_bytes: int = 0,
) -> dict[str, str]:
    """The facts about leaves that processes compare: path, array, target and source sharding.

    A row is a path, a leaf and its shardings. A leaf without shardings belongs to each process
    alone, and only its presence is compared. Of a spread leaf, the call of the processes `among`
    that made it is compared too; of other arrays of at most `compared_bytes`, a checksum.
    """
    meshes: dict[Any, str] = {}
    facts: dict[str, str] = {}
    for path, x, shardings in rows:
        name = path or "the array"
        while name in facts:  # leaves may share a path
            name += " (again)"
        placements = " from ".join(_placement(sharding, meshes) for sharding in shardings)
        facts[name] = f"{array_text(x)} as {placements}" if placements else "its own"
        if placements:
            facts |= fact_of_values(name, x, among, compared_bytes)
    described = {
        name or "the mesh": f"{describe_mesh(mesh)} on the devices {_ids(mesh)}"
        for mesh, name in meshes.items()
    }
    return described | facts


def fact_of_values(name: str, x: Any, among: Sequence[int], compared_bytes: int) -> dict[str, str]:
    """What processes compare about the values of a leaf; may be empty."""
    if is_spread(x):
        return fact_of_origin(name, x, among)
    if not is_array(x) or not 0 < x.nbytes <= compared_bytes:
        return {}
    return {name + _VALUES: checksum(x)}


def fact_of_origin(name: str, x: Any, among: Sequence[int] | None = None) -> dict[str, str]:
    """Which call of the processes `among` made an array; all processes by default.

    Empty if there are none, or if the array is on one process alone.
    """
    participants = indices(among)
    if len(participants) < 2 or not isinstance(x, jax.Array):
        return {}
    if made_in := origin(x, participants):
        return {name + _VALUES: f"made in {made_in}"}
    return {name + _VALUES: UNKNOWN} if len(processes_of(x.sharding)) > 1 else {}


def checksum(x: Any) -> str:
    flat: Any = np.ascontiguousarray(numbers(x)).reshape(-1).view(np.uint8)
    return f"CRC-32 {zlib.crc32(flat)}"


def _placement(sharding: Sharding, meshes: dict[Any, str]) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    text = str(with_entries(sharding.spec, entries(sharding)))  # without trailing `None`s
    if sharding.mesh not in meshes:  # the first one needs no name
        meshes[sharding.mesh] = f"mesh {len(meshes) + 1}" if meshes else ""
    name, kind = meshes[sharding.mesh], sharding.memory_kind
    if name:
        text += f" on {name}"
    if kind not in (None, "device"):
        text += f" in {kind}"
    return text


def _ids(mesh: Mesh) -> str:
    """`0-3, 8`"""
    runs = consecutive(device.id for device in mesh.devices.flat)
    return ", ".join(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}" for ids in runs)


# ------------------------------------------------------------------ progress

T = TypeVar("T")


def wants_bar() -> bool:
    """Whether to show a bar that was not asked for: on a terminal, if `tqdm` is installed."""
    return sys.stderr.isatty() and find_spec("tqdm") is not None


def with_bar(
    items: Sequence[T], what: str, *, unit: str = "leaf", show: bool = True, after: float = 0.0
) -> Iterator[T]:
    """Iterates over `items` with a progress bar on the terminal of process 0, which says how long
    the rest will take. It appears when `after` seconds are over.

    Where stderr is not a terminal, there is a line for each tenth instead. If `show` is true and
    `tqdm` is not installed, it raises on every process, in the name of `what`.
    """
    if not show:
        return iter(items)
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            f"{what}(progress=True) needs tqdm. Install it with `pip install 'treeshard[show]'`."
        ) from None
    if not items or jax.process_index() != 0:
        return iter(items)
    if not sys.stderr.isatty():
        return _with_lines(items, what, unit)
    return iter(tqdm(items, desc=what, unit=unit, delay=after))


def _with_lines(items: Sequence[T], what: str, unit: str) -> Iterator[T]:
    for i, item in enumerate(items):
        yield item
        tenths, before = 10 * (i + 1) // len(items), 10 * i // len(items)
        if tenths > before:
            print(f"{what}: {10 * tenths}%, {i + 1}/{len(items)} {unit}", file=sys.stderr)
