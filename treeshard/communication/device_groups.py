"""Reads the device groups and shardings in a program's text, and names them by mesh axes."""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\)(?=\s*\{))?\s*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?(?:=(\d+))?")


class Groups(NamedTuple):
    """The device groups of one collective.

    Attributes:
        size: The number of devices in a group; `None` if it is unknown.
        axes: The mesh axes that a group spans, in the mesh's order; `None` if the groups do not
            span whole axes, or the mesh is unknown.
    """

    size: int | None
    axes: tuple[str, ...] | None


UNKNOWN = Groups(None, None)


def read_groups(text: str | None, devices: int | None) -> np.ndarray | None:
    """A table with one row of device numbers per group.

    Reads the three notations `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` and
    `mesh['a'=4,'b'=2] {'a'}`. Returns `None` for any other text, and if the groups do not
    contain every device exactly once.
    """
    if text is None:
        return None
    if re.fullmatch(r"\{\s*\}|\{\{\s*\}\}", text):
        return None if devices is None else np.arange(devices)[None]
    if re.fullmatch(r"\{\{[\d,\s]+\}(?:,\s*\{[\d,\s]+\})*\}", text):
        rows = [list(map(int, row.split(","))) for row in re.findall(r"\{([\d,\s]+)\}", text)]
        table = np.array(rows) if len({len(row) for row in rows}) == 1 else None
    elif (match := _IOTA.fullmatch(text)) is not None:
        order = _iota(match[2], match[3])
        shape = _numbers(match[1])
        table = None if order is None or order.size != math.prod(shape) else order.reshape(shape)
    elif (match := _MESH.fullmatch(text)) is not None:
        table = _along_axes(match[1], match[2], match[3])
    else:
        return None
    if table is None or table.ndim != 2 or not _each_once(table, devices):
        return None
    return table


def read_pairs(text: str | None) -> np.ndarray | None:
    """The (source, target) pairs of `{{0,1},{1,2}}`, shape `(pairs, 2)`."""
    if text is None or not re.fullmatch(r"\{(?:\{\d+,\s*\d+\},?\s*)*\}", text):
        return None
    return np.array([int(n) for n in re.findall(r"\d+", text)], int).reshape(-1, 2)


def axes_of_groups(table: np.ndarray, axes: Mapping[str, int] | None) -> Groups:
    """The mesh axes that groups span, if they span whole axes."""
    size = table.shape[1]
    if axes is None or math.prod(axes.values()) != table.size:
        return Groups(size, () if size == 1 else None)
    names = list(axes)
    numbers = np.arange(table.size).reshape(tuple(axes.values()))
    coordinates = np.stack(np.unravel_index(table[0], tuple(axes.values())))
    along = [n for n, row in zip(names, coordinates, strict=True) if len(set(row.tolist())) > 1]
    kept = [i for i, name in enumerate(names) if name not in along]
    expected = (
        numbers.transpose(*kept, *(names.index(name) for name in along)).reshape(-1, size)
        if math.prod(axes[name] for name in along) == size
        else None
    )
    if expected is None or not np.array_equal(_sorted(expected), _sorted(table)):
        return Groups(size, None)
    return Groups(size, tuple(along))


def axes_of_pairs(pairs: np.ndarray, axes: Mapping[str, int] | None) -> Groups:
    """The mesh axes along which messages are sent."""
    if axes is None or (pairs.size and pairs.max() >= math.prod(axes.values())):
        return UNKNOWN
    sizes = tuple(axes.values())
    source, target = (np.stack(np.unravel_index(ends, sizes)) for ends in pairs.T)
    along = [name for name, moved in zip(axes, (source != target).any(1), strict=True) if moved]
    return Groups(math.prod(axes[name] for name in along), tuple(along))


def _sorted(table: np.ndarray) -> np.ndarray:
    rows = np.sort(table, axis=1)
    return rows[np.argsort(rows[:, 0])]


def _each_once(table: np.ndarray, devices: int | None) -> bool:
    devices = table.size if devices is None else devices
    return table.size == devices and np.array_equal(np.sort(table, axis=None), np.arange(devices))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _iota(dims: str, order: str | None) -> Any:
    """The devices of `[2,4]T(1,0)`: 0 to 7 in shape `(2, 4)`, transposed."""
    shape = _numbers(dims)
    devices = np.arange(math.prod(shape)).reshape(shape)
    if order is None:
        return devices
    permutation = _numbers(order)
    return devices.transpose(permutation) if sorted(permutation) == [*range(len(shape))] else None


def _along_axes(mesh: str, devices: str | None, along: str) -> np.ndarray | None:
    """Groups along named axes, or parts of them: `'a':(2)4` is 4 of `a`, with stride `size / 8`."""
    sizes: dict[str, int] = {m[1]: int(m[4]) for m in _AXIS.finditer(mesh) if m[4]}
    order = np.arange(math.prod(sizes.values()))
    if devices is not None:
        order = _devices(devices)
    if order is None or order.size != math.prod(sizes.values()):
        return None
    dims: list[int] = []  # the mesh, its axes split into parts
    grouped: list[int] = []
    parts = {m[1]: (m[2], m[3]) for m in _AXIS.finditer(along)}
    if not set(parts) <= set(sizes) or len(parts) != len(_AXIS.findall(along)):
        return None
    for name, size in sizes.items():
        before, part = (int(n) if n else None for n in parts.get(name, (None, None)))
        if part is None or before is None:
            grouped += [len(dims)] if name in parts else []
            dims.append(size)
            continue
        if size % (before * part):
            return None
        grouped.append(len(dims) + 1)
        dims += [before, part, size // (before * part)]
    rest = [dim for dim in range(len(dims)) if dim not in grouped]
    count = math.prod(dims[dim] for dim in grouped)
    return order.reshape(dims).transpose(*rest, *grouped).reshape(-1, count)


def _devices(text: str) -> Any:
    """The order of a mesh's devices: `[2,4]T(1,0)`, `[8]`, or a list of numbers."""
    if (match := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)) is not None:
        order = _iota(match[1], match[2])
        return None if order is None else order.reshape(-1)
    if (match := _IOTA.fullmatch(text)) is not None:
        order = _iota(match[2], match[3])
        return None if order is None else order.reshape(-1)
    return np.array(_numbers(text)) if re.fullmatch(r"[\d,\s]+", text) else None


@lru_cache(maxsize=4096)
def _cached(
    text: str | None, devices: int | None, axes: tuple[tuple[str, int], ...] | None
) -> Groups:
    table = read_groups(text, devices)
    return UNKNOWN if table is None else axes_of_groups(table, None if axes is None else dict(axes))


def groups_of(text: str | None, devices: int | None, axes: Mapping[str, int] | None) -> Groups:
    """The groups in a text. Cached, since a program repeats the same few texts."""
    return _cached(text, devices, None if axes is None else tuple(axes.items()))


_TILES = re.compile(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}")


def axes_of_sharding(text: str | None, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that an argument is sharded over; `None` if its sharding cannot be read."""
    if text is None:
        return None
    if (named := re.search(r"#sdy\.sharding<@\w+, \[(.*?)\](?:,|>)", text)) is not None:
        return tuple(name for name in axes if f'"{name}"' in named[1])
    if text == "{replicated}":
        return ()
    match = _TILES.fullmatch(text)
    order = None if match is None else _iota(match[2], match[3])
    if match is None or order is None or order.size != math.prod(axes.values()):
        return None
    tiles = _numbers(match[1])
    rest = match[4].strip()
    if rest not in ("", "last_tile_dim_replicate") or math.prod(tiles) != order.size:
        return None
    copies = tiles[-1] if rest else 1
    tile_of = np.empty(order.size, int)
    tile_of[order.reshape(-1)] = np.arange(order.size) // copies
    grid = tile_of.reshape(tuple(axes.values()))
    return tuple(name for dim, name in enumerate(axes) if (grid != grid.take([0], axis=dim)).any())
