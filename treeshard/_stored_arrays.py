"""Reads leaves from the array store, and names the leaf in whatever goes wrong."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from treeshard._checksums import checksum, of_registers, registers
from treeshard._literals import parse_dtype
from treeshard._orbax import OnHost, read
from treeshard._processes import AS_LONG_AS_IT_TAKES, together
from treeshard._read_leaf import ReadLeaf, raise_damages
from treeshard._saved_leaf import SavedLeaf

Structs = Mapping[str, jax.ShapeDtypeStruct | OnHost]

_BATCH = 2**28  # bytes that are read to host memory at a time, if no single leaf has more


def read_together(
    path: epath.Path,
    rows: Sequence[SavedLeaf],
    structs: Structs,
    *,
    verify: bool,
    where: str,
    among: Sequence[int] | None,
) -> dict[str, Any]:
    """Reads arrays, each process its own shards. All processes return, or all raise.

    Args:
        path: The checkpoint.
        rows: The requested leaves.
        structs: The arrays to read for them, by key; leaves without elements have none.
        verify: Whether to compare checksums.
        where: The operation, as in `exchange`.
        among: As in `exchange`.

    Raises:
        DamagedError: If leaves cannot be read, or are not as saved: all are listed.
        ProcessError: If a process does not arrive.
    """
    stored = [row for row in rows if row.key in structs]
    known = [row for row in stored if verify and row.crc is not None]
    with together(where, among=among, timeout=AS_LONG_AS_IT_TAKES) as said:
        arrays, damages = _read(path, stored, structs)
        data = [arrays[row.key] for row in known if row.key in arrays]
        said.mine = _Outcome(damages, b"" if damages else registers(data)).told()
    read = list(map(_Outcome.from_told, said.every))
    raise_damages(path, {leaf: why for one in read for leaf, why in one.damages.items()})
    names = [row.path for row in known]
    found = of_registers([one.registers for one in read], data, where, names=names)
    wrong = {row.path: _difference(row, crc) for row, crc in zip(known, found, strict=True)}
    raise_damages(path, {leaf: why for leaf, why in wrong.items() if why})
    return arrays


class _Outcome(NamedTuple):
    """The result of a process's read: damages by leaf path; without any, its `registers`."""

    damages: dict[str, str]
    registers: bytes

    def told(self) -> bytes:
        return json.dumps(self.damages).encode() + b"\n" + self.registers

    @classmethod
    def from_told(cls, told: bytes) -> "_Outcome":
        damages, _, registers = told.partition(b"\n")
        return cls(json.loads(damages), registers)


def read_each(path: epath.Path, rows: Iterable[SavedLeaf]) -> Iterator[ReadLeaf]:
    """Reads leaves to host memory, a few at a time, and compares their checksums."""
    for batch in _batches(rows):
        stored = [row for row in batch if row.stored]
        structs = {row.key: _on_host(row) for row in stored}
        arrays, damages = _read(path, stored, structs)
        for row in batch:
            x = arrays.pop(row.key, None)
            damage = damages.get(row.path, "") if x is None else _difference(row, checksum(x))
            yield ReadLeaf(row, None if damage else _in_its_dtype(row, x), damage)


def _in_its_dtype(row: SavedLeaf, stored: np.ndarray | None) -> np.ndarray | None:
    if not row.dtype:
        return None
    dtype = parse_dtype("uint32" if row.kind == "key" else row.dtype)
    return np.zeros(row.stored_shape, dtype) if stored is None else stored.view(dtype)


def _read(
    path: epath.Path, rows: Sequence[SavedLeaf], structs: Structs
) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays by key, and by path why leaves cannot be read."""
    arrays, met = read(path, structs)
    texts = {row.path: met[row.key] for row in rows if row.key in met}
    short = {leaf: text if len(text) < 200 else f"{text[:200]}..." for leaf, text in texts.items()}
    return arrays, {leaf: f"it cannot be read: {text}" for leaf, text in short.items()}


def _on_host(row: SavedLeaf) -> OnHost:
    return OnHost(row.stored_shape, parse_dtype(row.stored or ""))


def _difference(row: SavedLeaf, crc: int) -> str:
    if row.crc is None or crc == row.crc:
        return ""
    return f"its bytes have the CRC-32 {crc}, but were saved with {row.crc}."


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
