"""Reads the device groups and shardings in a program's text, and names them by mesh axes."""

import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_IOTA = re.compile(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_ORDER = re.compile(r"(?:(?:\[[\d,]+\])?<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_TILES = re.compile(r"\{devices=\[([\d,]+)\](<=\S+|[\d,]+)( last_tile_dim_replicate)?\}")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?(?:=(\d+))?")
_MESH = r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\)(?=\s*[{,]))?"
_ALONG_MESH = re.compile(_MESH + r"\s*\{([^}]*)\}")
_ON_MESH = re.compile(r"\{" + _MESH + r",\s*\[(.*?)\](?:,\s*replicated=\{[^}]*\})?\}")


# ------------------------------------------------------------------ groups


class Groups(NamedTuple):
    """The size of each device group, and the mesh axes that it spans; `None` if unknown."""

    size: int | None
    axes: tuple[str, ...] | None


UNKNOWN = Groups(None, None)


def groups_of(text: str | None, devices: int | None, axes: Mapping[str, int] | None) -> Groups:
    """The groups in a text. Cached, since a program repeats the same few texts."""
    return _groups_of(text, devices, None if axes is None else tuple(axes.items()))


@lru_cache(maxsize=4096)
def _groups_of(
    text: str | None, devices: int | None, axes: tuple[tuple[str, int], ...] | None
) -> Groups:
    table = read_groups(text, devices)
    return (
        UNKNOWN if table is None else _axes_of_groups(table, None if axes is None else dict(axes))
    )


def read_groups(text: str | None, devices: int | None) -> np.ndarray | None:
    """The devices of each group, one row per group; `None` if they are not all devices, each once.

    Reads `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` and `mesh['a'=4,'b'=2] {'a'}`.
    """
    if text is None:
        return None
    if re.fullmatch(r"\{\s*\}|\{\{\s*\}\}", text):
        return None if devices is None else np.arange(devices)[None]
    table = None
    if re.fullmatch(r"\{\{[\d,\s]+\}(?:,\s*\{[\d,\s]+\})*\}", text):
        rows = [_numbers(row) for row in re.findall(r"\{([\d,\s]+)\}", text)]
        table = np.array(rows) if len({len(row) for row in rows}) == 1 else None
    elif (match := _IOTA.fullmatch(text)) is not None:
        shape, order = _numbers(match[1]), _device_order(match[2])
        if order is not None and len(shape) == 2 and order.size == math.prod(shape):
            table = order.reshape(shape)
    elif (match := _ALONG_MESH.fullmatch(text)) is not None:
        along = _along_axes(match[1], match[2], match[3])
        table = None if along is None else along.groups()
    if table is None or table.size != (table.size if devices is None else devices):
        return None
    return table if _is_permutation(table) else None


def read_pairs(text: str | None) -> np.ndarray | None:
    """The (source, target) pairs of `{{0,1},{1,2}}`, shape `(pairs, 2)`."""
    if text is None or not re.fullmatch(r"\{(?:\{\d+,\s*\d+\},?\s*)*\}", text):
        return None
    return np.array([int(n) for n in re.findall(r"\d+", text)], int).reshape(-1, 2)


def axes_of_pairs(pairs: np.ndarray, axes: Mapping[str, int] | None) -> Groups:
    """The mesh axes along which messages are sent."""
    if axes is None or (pairs.size and pairs.max() >= math.prod(axes.values())):
        return UNKNOWN
    sizes = tuple(axes.values())
    source, target = (np.stack(np.unravel_index(ends, sizes)) for ends in pairs.T)
    along = [name for name, moved in zip(axes, (source != target).any(1), strict=True) if moved]
    return Groups(math.prod(axes[name] for name in along), tuple(along))


def _axes_of_groups(table: np.ndarray, axes: Mapping[str, int] | None) -> Groups:
    """The mesh axes that groups span, if they span whole axes."""
    size = table.shape[1]
    if axes is None or math.prod(axes.values()) != table.size:
        return Groups(size, () if size == 1 else None)
    names = list(axes)
    numbers = np.arange(table.size).reshape(tuple(axes.values()))
    coordinates = np.stack(np.unravel_index(table[0], tuple(axes.values())))
    along = [n for n, row in zip(names, coordinates, strict=True) if len(set(row.tolist())) > 1]
    if math.prod(axes[name] for name in along) != size:
        return Groups(size, None)
    kept = [i for i, name in enumerate(names) if name not in along]
    expected = numbers.transpose(*kept, *map(names.index, along)).reshape(-1, size)
    same = np.array_equal(_sorted(expected), _sorted(table))
    return Groups(size, tuple(along) if same else None)


def _sorted(table: np.ndarray) -> np.ndarray:
    rows = np.sort(table, axis=1)
    return rows[np.argsort(rows[:, 0])]


# ------------------------------------------------------------------ shardings


class Along(NamedTuple):
    """How many positions there are along some axes, and that of each device, by device number.

    `rest` is the same for all devices that differ in their position only.
    """

    parts: int
    position: np.ndarray
    rest: np.ndarray

    def groups(self) -> np.ndarray:
        """The devices that differ in `position` only, one group per row."""
        return np.lexsort((self.position, self.rest)).reshape(-1, self.parts)


def read_sharding(text: str | None, devices: int) -> list[Along] | None:
    """How a sharding in the compiler's notation splits each dim; `None` if it cannot be read.

    - `{replicated}`
    - `{devices=[2,1,4]<=[8]}` splits dim 0 into 2 parts and dim 2 into 4. Tiles are assigned to
      devices in the order of `<=[...]`, transposed by `T(...)`, or in the order of a list. With
      `last_tile_dim_replicate`, the last number counts copies.
    - `{mesh['data'=2,'fsdp'=4], [{'data'}, {}]}` splits dim 0 along `data`.
    """
    if text == "{replicated}":
        return []
    if (match := _TILES.fullmatch(text or "")) is not None:
        tiles, order = _numbers(match[1]), _device_order(match[2])
        if order is None or math.prod(tiles) != order.size or order.size != devices:
            return None
        tile_of = np.argsort(order)
        indices = np.unravel_index(tile_of, tiles)
        dims = [Along(parts, index, tile_of) for parts, index in zip(tiles, indices, strict=True)]
        return dims[:-1] if match[3] else dims
    if (match := _ON_MESH.fullmatch(text or "")) is not None:
        axes_of_dims = re.findall(r"\{([^}]*)\}", match[3])
        dims = [_along_axes(match[1], match[2], axes) for axes in axes_of_dims]
        known = [dim for dim in dims if dim is not None and dim.position.size == devices]
        return known if len(known) == len(dims) else None
    return None


def axes_of_sharding(text: str | None, axes: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes that a sharding splits dims along; `None` if it cannot be read."""
    dims = read_sharding(text, math.prod(axes.values()))
    if dims is None:
        return None
    grids = [dim.position.reshape(tuple(axes.values())) for dim in dims]
    split = {axis for grid in grids for axis in axes_that_change(grid, axes)}
    return tuple(axis for axis in axes if axis in split)


def axes_that_change(grid: np.ndarray, axes: Iterable[str]) -> set[str]:
    """The axes along which the entries of an array, with a dim for each axis, differ."""
    return {a for i, a in enumerate(axes) if (grid != grid.take([0], axis=i)).any()}


# ------------------------------------------------------------------ notation


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _is_permutation(devices: np.ndarray) -> bool:
    return np.array_equal(np.sort(devices, axis=None), np.arange(devices.size))


def _device_order(text: str) -> np.ndarray | None:
    """The devices of `[2,4]T(1,0)` (0 to 7 in shape `(2, 4)`, transposed), or of a list."""
    if (match := _ORDER.fullmatch(text)) is not None:
        shape = _numbers(match[1])
        axes = _numbers(match[2]) if match[2] else [*range(len(shape))]
        if sorted(axes) != [*range(len(shape))]:
            return None
        return np.arange(math.prod(shape)).reshape(shape).transpose(axes).reshape(-1)
    order = np.array(_numbers(text)) if re.fullmatch(r"[\d,\s]+", text) else None
    return order if order is not None and _is_permutation(order) else None


def _along_axes(mesh: str, devices: str | None, axes: str) -> Along | None:
    """The positions along named axes, or parts of them.

    `'a':(2)4` is 4 positions of `a` inside of 2, so that each stands for `size / 8` devices.
    """
    sizes = {match[1]: int(match[4]) for match in _AXIS.finditer(mesh) if match[4]}
    order = np.arange(math.prod(sizes.values())) if devices is None else _device_order(devices)
    chosen = {match[1]: (match[2], match[3]) for match in _AXIS.finditer(axes)}
    if order is None or order.size != math.prod(sizes.values()) or not set(chosen) <= set(sizes):
        return None
    if len(chosen) != len(_AXIS.findall(axes)):
        return None
    in_mesh = np.argsort(order)  # the place of each device, row-major
    parts, position, rest = 1, np.zeros_like(in_mesh), in_mesh
    for name, (outer, count) in chosen.items():
        before, size = int(outer or 1), int(count or sizes[name])
        if sizes[name] % (before * size):
            return None
        names = list(sizes)
        inner = math.prod(sizes[axis] for axis in names[names.index(name) + 1 :])
        stride = inner * sizes[name] // (before * size)
        digit = in_mesh // stride % size
        parts, position, rest = parts * size, position * size + digit, rest - digit * stride
    return Along(parts, position, rest)
