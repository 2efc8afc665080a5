"""Groups of devices in a program's text, turned into mesh axes."""

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
    """Who takes part together.

    Attributes:
        size: How many devices in a group; `None` if it cannot be told.
        axes: The mesh axes that a group runs along, in the mesh's order; `None` if it is no
            set of axes, or the mesh is not known.
    """

    size: int | None
    axes: tuple[str, ...] | None


UNKNOWN = Groups(None, None)


def read_groups(text: str | None, devices: int | None) -> np.ndarray | None:
    """Reads the three spellings of groups: one row of device numbers per group.

    `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` and `mesh['a'=4,'b'=2] {'a'}`. `None` if the text
    is none of them, or does not name every device once.
    """
    if text is None:
        return None
    if re.fullmatch(r"\{\s*\}|\{\{\s*\}\}", text):
        return None if devices is None else np.arange(devices)[None]
    if re.fullmatch(r"\{\{[\d,\s]+\}(?:,\s*\{[\d,\s]+\})*\}", text):
        rows = [list(map(int, row.split(","))) for row in re.findall(r"\{([\d,\s]+)\}", text)]
        table = np.array(rows) if len({len(row) for row in rows}) == 1 else None
    elif (match := _IOTA.fullmatch(text)) is not None:
        laid = _iota(match[2], match[3])
        shape = _numbers(match[1])
        table = None if laid is None or laid.size != math.prod(shape) else laid.reshape(shape)
    elif (match := _MESH.fullmatch(text)) is not None:
        table = _along_axes(match[1], match[2], match[3])
    else:
        return None
    if table is None or table.ndim != 2 or not _each_once(table, devices):
        return None
    return table


def read_pairs(text: str | None) -> np.ndarray | None:
    """Reads `{{0,1},{1,2}}`, source and target of each message."""
    if text is None or not re.fullmatch(r"\{(?:\{\d+,\s*\d+\},?\s*)*\}", text):
        return None
    return np.array([int(n) for n in re.findall(r"\d+", text)], int).reshape(-1, 2)


def axes_of_groups(table: np.ndarray, axes: Mapping[str, int] | None) -> Groups:
    """The axes along which groups run, if they are whole axes of the mesh."""
    size = table.shape[1]
    if axes is None or math.prod(axes.values()) != table.size:
        return Groups(size, () if size == 1 else None)
    names = list(axes)
    numbers = np.arange(table.size).reshape(tuple(axes.values()))
    places = np.stack(np.unravel_index(table[0], tuple(axes.values())))
    along = [name for name, row in zip(names, places, strict=True) if len(set(row.tolist())) > 1]
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
    """The axes along which messages travel."""
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
    shape = _numbers(dims)
    laid = np.arange(math.prod(shape)).reshape(shape)
    if order is None:
        return laid
    permuted = _numbers(order)
    return laid.transpose(permuted) if sorted(permuted) == list(range(len(shape))) else None


def _along_axes(mesh: str, devices: str | None, along: str) -> np.ndarray | None:
    """Groups along named axes, or parts of axes: `'a':(2)4` is 4 of `a`, of stride `size/8`."""
    sizes: dict[str, int] = {m[1]: int(m[4]) for m in _AXIS.finditer(mesh) if m[4]}
    laid = np.arange(math.prod(sizes.values()))
    if devices is not None:
        laid = _devices(devices)
    if laid is None or laid.size != math.prod(sizes.values()):
        return None
    dims: list[int] = []  # the mesh with its axes split into their parts
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
    return laid.reshape(dims).transpose(*rest, *grouped).reshape(-1, count)


def _devices(text: str) -> Any:
    """The order of devices in a mesh: `[2,4]T(1,0)`, `[8]`, or a list of numbers."""
    if (match := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)) is not None:
        laid = _iota(match[1], match[2])
        return None if laid is None else laid.reshape(-1)
    if (match := _IOTA.fullmatch(text)) is not None:
        laid = _iota(match[2], match[3])
        return None if laid is None else laid.reshape(-1)
    return np.array(_numbers(text)) if re.fullmatch(r"[\d,\s]+", text) else None


@lru_cache(maxsize=4096)
def _cached(
    text: str | None, devices: int | None, axes: tuple[tuple[str, int], ...] | None
) -> Groups:
    table = read_groups(text, devices)
    return UNKNOWN if table is None else axes_of_groups(table, None if axes is None else dict(axes))


def groups_of(text: str | None, devices: int | None, axes: Mapping[str, int] | None) -> Groups:
    """The groups that a text names. Programs name the same ones again and again."""
    return _cached(text, devices, None if axes is None else tuple(axes.items()))


_TILES = re.compile(r"\{devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(.*)\}")


def axes_of_sharding(text: str | None, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The axes that an argument is split over; `None` if its text cannot be read."""
    if text is None:
        return None
    if (named := re.search(r"#sdy\.sharding<@\w+, \[(.*?)\](?:,|>)", text)) is not None:
        return tuple(name for name in axes if f'"{name}"' in named[1])
    if text == "{replicated}":
        return ()
    match = _TILES.fullmatch(text)
    laid = None if match is None else _iota(match[2], match[3])
    if match is None or laid is None or laid.size != math.prod(axes.values()):
        return None
    tiles = _numbers(match[1])
    rest = match[4].strip()
    if rest not in ("", "last_tile_dim_replicate") or math.prod(tiles) != laid.size:
        return None
    copies = tiles[-1] if rest else 1
    tile_of = np.empty(laid.size, int)
    tile_of[laid.reshape(-1)] = np.arange(laid.size) // copies
    places = tile_of.reshape(tuple(axes.values()))
    return tuple(
        name for dim, name in enumerate(axes) if (places != places.take([0], axis=dim)).any()
    )
