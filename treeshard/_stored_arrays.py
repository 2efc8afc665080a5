"""Reading what the array store has, such that whatever is wrong with it gets the leaf's name."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from treeshard._checksums import checksum, checksums
from treeshard._errors import DamagedError, listed
from treeshard._literals import parse_dtype
from treeshard._orbax import OnHost, read
from treeshard._processes import AS_LONG_AS_IT_TAKES, exchange
from treeshard._saved_leaf import SavedLeaf

Structs = Mapping[str, jax.ShapeDtypeStruct | OnHost]

_BATCH = 2**28  # bytes that are read at a time to host memory, if no single leaf has more


class ReadLeaf(NamedTuple):
    """A leaf, read to host memory.

    Attributes:
        row: What the table says of it.
        stored: Its numbers as they are stored; `None` if none are, or if they cannot be read.
        damage: What is wrong with it; nothing if it is as it was saved.
    """

    row: SavedLeaf
    stored: np.ndarray | None
    damage: str


def read_together(
    path: epath.Path,
    rows: Sequence[SavedLeaf],
    structs: Structs,
    *,
    verify: bool,
    where: str,
    among: Sequence[int] | None,
    timeout: float,
) -> dict[str, Any]:
    """Reads arrays, each process its own shards. All processes return, or all raise.

    Args:
        path: The checkpoint.
        rows: The leaves that are wanted.
        structs: The arrays of those that are stored, by key.
        verify: Whether to compare checksums.
        where: What is being done, as in `exchange`.
        among: As in `exchange`. A process on its own reads numpy's arrays.
        timeout: Seconds that others are waited for; not while they read.

    Raises:
        DamagedError: If leaves cannot be read, or are not what was saved: all are named.
        ProcessError: If a process did not come.
    """
    stored = [row for row in rows if row.key in structs]
    arrays, damages = _read(path, stored, structs)
    said = exchange(where, json.dumps(damages).encode(), among=among, timeout=AS_LONG_AS_IT_TAKES)
    raise_damages(path, {leaf: why for one in said for leaf, why in json.loads(one).items()})
    if verify:
        known = [row for row in stored if row.crc is not None]
        data, names = [arrays[row.key] for row in known], [row.path for row in known]
        if among is None:
            found = checksums(data, where, timeout, names=names)
        else:
            found = list(map(checksum, data))
        wrong = {row.path: _difference(row, crc) for row, crc in zip(known, found, strict=True)}
        raise_damages(path, {leaf: why for leaf, why in wrong.items() if why})
    return arrays


def read_each(path: epath.Path, rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    """Reads leaves to host memory, a few at a time, and compares their checksums."""
    for batch in _batches(rows):
        stored = [row for row in batch if row.stored]
        structs = {row.key: _on_host(row) for row in stored}
        arrays, damages = _read(path, stored, structs)
        for row in batch:
            x = arrays.pop(row.key, None)
            damage = damages.get(row.path, "") if x is None else _difference(row, checksum(x))
            yield ReadLeaf(row, x, damage)


def raise_damages(path: epath.Path, damages: Mapping[str, str]) -> None:
    """Raises one error for all of them, if there are any."""
    facts = [f"{leaf}: {why}" for leaf, why in damages.items()]
    if facts:
        raise DamagedError(f"{path}: {listed(f'{len(facts)} leaves are damaged:', facts)}")


def _read(
    path: epath.Path, rows: Sequence[SavedLeaf], structs: Structs
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays by key; and why leaves cannot be read, by path."""
    arrays, met = read(path, structs)
    texts = {row.path: met[row.key] for row in rows if row.key in met}
    short = {leaf: text if len(text) < 200 else f"{text[:200]}..." for leaf, text in texts.items()}
    return arrays, {leaf: f"it cannot be read: {text}" for leaf, text in short.items()}


def _on_host(row: SavedLeaf) -> OnHost:
    return OnHost(row.stored_shape, parse_dtype(row.stored or ""))


def _difference(row: SavedLeaf, crc: int) -> str:
    if row.crc is None or crc == row.crc:
        return ""
    return f"its bytes have the CRC-32 {crc}, and those saved had {row.crc}."


def _batches(rows: Iterable[SavedLeaf]) -> Iterator[list[SavedLeaf]]:
    batch: list[SavedLeaf] = []
    held = 0
    for row in rows:
        if batch and held + row.bytes > _BATCH:
            yield batch
            batch, held = [], 0
        batch.append(row)
        held += row.bytes
    yield batch
