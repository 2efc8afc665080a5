"""Reads the device groups and shardings in a program's text, and names them by mesh axes.

Every notation becomes a table of device numbers. The coordinates of these devices in the mesh give
the axes. The names in the text do not help: XLA numbers its axes (`axis_0`, `axis_1`), splits and
joins the axes of the mesh, and older notations have no names.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

# `[2,4]<=[8]`, or `[4,2]<=[2,4]T(1,0)`
_TILED_GROUPS = re.compile(r"(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)")
# `mesh['axis_0'=8,'axis_1'=1] {'axis_0'}`, from XLA's Shardy; if the mesh does not number its
# devices row-major, `mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}`
_MESH = r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\)(?=\s*[{,]))?"
_ALONG_MESH = re.compile(_MESH + r"\s*\{([^}]*)\}")
# The order of devices: `[2,4]T(1,0)`, or `0,4,1,5,2,6,3,7`
_ORDER = re.compile(r"(\[[\d,]+\])(?:T\(([\d,]+)\))?")
# A used axis: `'axis_0'`, or the part `'axis_0':(2)4` of it
_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_SIZE = re.compile(r"'([^']+)'=(\d+)")

# What parsing and NumPy raise for a text in an unknown or inconsistent notation.
_UNREADABLE = (ValueError, LookupError)


# ------------------------------------------------------------------ groups


class Groups(NamedTuple):
    """The size of each device group, and the mesh axes that it spans; `None` if unknown.

    If a group spans only a part of its axes, `within` has the axes along which its devices differ,
    and `stride` has their distance along these axes, or `None` if the distances differ.
    """

    size: int | None
    axes: tuple[str, ...] | None
    within: tuple[str, ...] | None = None
    stride: int | None = None


UNKNOWN = Groups(None, None)


def groups_of(text: str, devices: int | None, axes: Mapping[str, int]) -> Groups:
    """The groups in a text. Their axes are unknown if `axes` do not cover all devices."""
    try:
        table = _group_table(text, devices)
    except _UNREADABLE:
        return UNKNOWN
    size = table.shape[1]
    if math.prod(axes.values()) != table.size:
        return Groups(size, None)
    along = _axes_within(table, axes)
    # The other coordinates do not change within a group, so a group as large as the axes together
    # spans them in full.
    if math.prod(axes[name] for name in along) == size:
        return Groups(size, along)
    return Groups(size, None, along, _stride(table, axes, along))


def groups_of_pairs(text: str, axes: Mapping[str, int]) -> Groups:
    """The mesh axes along which messages are sent: `{{0,1},{1,2}}` is from 0 to 1, from 1 to 2."""
    try:
        along = _axes_within(_parse_list(text).reshape(-1, 2), axes)
    except _UNREADABLE:
        return UNKNOWN
    return Groups(math.prod(axes[name] for name in along), along)


def _group_table(text: str, devices: int | None) -> np.ndarray:
    """The devices of each group, one row per group. Raises unless each device occurs once."""
    if text in ("{}", "{{}}"):
        text = f"[1,{devices}]<=[{devices}]"
    if tiled := _TILED_GROUPS.fullmatch(text):
        shape, order = tiled.groups()
        table = _device_order(order).reshape(json.loads(shape))
    elif along := _ALONG_MESH.fullmatch(text):
        table = _along_axes(*along.groups())
    else:
        table = _parse_list(text)
    rows, size = table.shape
    if devices not in (None, rows * size):
        raise ValueError(f"{text} has {rows * size} devices, the program has {devices}")
    _check_permutation(table)
    return table


def _axes_within(groups: np.ndarray, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the devices of a row differ."""
    coordinates = np.stack(np.unravel_index(groups, tuple(axes.values())))
    # Groups do not span an axis along which no device differs from the first device of its group.
    differs = (coordinates != coordinates[..., :1]).any(axis=(1, 2))
    return tuple(compress(axes, differs))


def _stride(groups: np.ndarray, axes: Mapping[str, int], along: Sequence[str]) -> int | None:
    """The distance of the devices of each row along some axes; `None` if distances differ."""
    coordinates = dict(zip(axes, np.unravel_index(groups, tuple(axes.values())), strict=True))
    sizes = tuple(axes[axis] for axis in along)
    places = np.ravel_multi_index([coordinates[axis] for axis in along], sizes)
    steps = np.unique(np.diff(np.sort(places, axis=1), axis=1))
    return int(steps[0]) if steps.size == 1 else None


# ------------------------------------------------------------------ notation


def _parse_list(text: str) -> np.ndarray:
    """`{{0,1},{2,3}}` as an array."""
    return np.array(json.loads(text.replace("{", "[").replace("}", "]")), int)


def _device_order(text: str) -> np.ndarray:
    """The devices of `[2,4]T(1,0)` (0 to 7 in shape `(2, 4)`, transposed), or of a list."""
    ordered = _ORDER.fullmatch(text)
    if ordered is None:
        order = _parse_list(f"{{{text}}}")
        _check_permutation(order)
        return order
    shape, transposed = json.loads(ordered[1]), ordered[2]
    devices = np.arange(math.prod(shape)).reshape(shape)
    if transposed is None:
        return devices.reshape(-1)
    return devices.transpose(json.loads(f"[{transposed}]")).reshape(-1)


def _check_permutation(devices: np.ndarray) -> None:
    if not np.array_equal(np.sort(devices, axis=None), np.arange(devices.size)):
        raise ValueError(f"not all devices, each once: {devices}")


def _along_axes(mesh: str, devices: str | None, axes: str) -> np.ndarray:
    """The devices that differ along named axes only, or parts of them, one group per row.

    `'a':(2)4` has 4 positions of `a` inside each of 2, so each stands for `size / 8` devices.
    """
    sizes = {name: int(size) for name, size in _SIZE.findall(mesh)}
    count = math.prod(sizes.values())
    strides: dict[str, int] = {}  # the row-major stride of each axis
    stride = count
    for name, size in sizes.items():
        stride //= size
        strides[name] = stride
    places = np.arange(count)
    position, rest, length = np.zeros_like(places), places, 1
    for name, outer, part in _USED.findall(axes):
        before, parts = int(outer or 1), int(part or sizes[name])
        inner, odd = divmod(sizes[name], before * parts)
        if odd:
            raise ValueError(f"{axes} does not divide {mesh}")
        stride = strides[name] * inner
        digit = places // stride % parts
        position, rest, length = position * parts + digit, rest - digit * stride, length * parts
    groups = np.lexsort((position, rest)).reshape(-1, length)
    return groups if devices is None else _device_order(devices).reshape(count)[groups]
