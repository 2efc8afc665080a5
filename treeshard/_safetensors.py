"""The safetensors format: its header, made and read.

A file is the length of its header (8 bytes), the header (JSON, then spaces up to a multiple of 8),
and the bytes of its tensors, one after the other without gaps: little-endian, in C order.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from treeshard._errors import DamagedError, FormatError, did_you_mean, listed
from treeshard._literals import check_keys, parse_dtype, parse_json

# The format's own limit.
LONGEST_HEADER = 100_000_000
# In the order of the format, by which tensors are sorted.
DTYPES = {
    "BOOL": "bool", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
    "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
# Bits of those that the format packs and numpy does not.
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
# The key that no tensor can have.
METADATA = "__metadata__"

_RANKS = {code: rank for rank, code in enumerate(DTYPES)}
_CODES = {name: code for code, name in DTYPES.items() if code not in PACKED}
_KEYS = ("dtype", "shape", "data_offsets")
# What numpy can hold: dims of an array, and bytes.
_MOST_DIMS, _MOST_BYTES = 64, 2**63 - 1


class Tensor(NamedTuple):
    """What the header says of a tensor.

    Attributes:
        name: Its name.
        code: Its dtype, as the format calls it.
        shape: Its shape.
        start: Where it begins, in bytes after the header.
        stop: Where it ends.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype:
        """Its dtype, as numpy and `ml_dtypes` call it."""
        return parse_dtype(DTYPES[self.code])


class Header(NamedTuple):
    """What a file says of itself.

    Attributes:
        tensors: Its tensors by name, in the order of their bytes.
        length: The bytes before the first tensor.
        size: The bytes of all tensors.
    """

    tensors: dict[str, Tensor]
    length: int
    size: int


def code_of(dtype: Any) -> str | None:
    """What the format calls a dtype; `None` if it does not have it."""
    return _CODES.get(dtype.name)


def byte_size(code: str, shape: Iterable[int]) -> int:
    """The bytes of a tensor."""
    return math.prod(shape) * _bits(code) // 8


def _bits(code: str) -> int:
    return PACKED.get(code) or 8 * parse_dtype(DTYPES[code]).itemsize


# ------------------------------------------------------------------ made


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Tensor]:
    """Gives names, dtypes and shapes their places, in the order that the format's own package
    has: large items first, so that all are aligned, then by name."""
    placed: list[Tensor] = []
    stop = 0
    for name, code, shape in sorted(tensors, key=lambda x: (-_RANKS[x[1]], x[0].encode())):
        start, stop = stop, stop + byte_size(code, shape)
        placed.append(Tensor(name, code, shape, start, stop))
    return placed


def make_header(tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file before its first tensor.

    Raises:
        FormatError: If the header would be longer than the format allows.
    """
    raw: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, *row, start, stop in tensors:
        raw[name] = dict(zip(_KEYS, (*row, (start, stop)), strict=True))
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LONGEST_HEADER:
        raise FormatError(
            f"The header would have {len(text)} bytes, and the format allows {LONGEST_HEADER}."
            " Split the file (`max_file_size=`), or shorten names."
        )
    return struct.pack("<Q", len(text)) + text


# ------------------------------------------------------------------ read


def read_header(file: BinaryIO) -> Header:
    """Reads and checks the header of an open file; its data may not be there (yet).

    Raises:
        FormatError: If it is no header, naming the file and all tensors at fault.
    """
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    room = os.fstat(file.fileno()).st_size - 8
    if not 0 < length <= min(room, LONGEST_HEADER):
        raise FormatError(
            f"{file.name} is no safetensors file: it says that its header has {length} bytes, and"
            f" there are {max(room, 0)}."
        )
    try:
        return parse_header(file.read(length))
    except FormatError as error:
        raise FormatError(f"{file.name}: {error}") from None


def check_complete(file: BinaryIO, header: Header) -> None:
    """Raises `DamagedError` unless an open file has all bytes that its header speaks of."""
    there = os.fstat(file.fileno()).st_size - header.length
    if there != header.size:
        raise DamagedError(
            f"{file.name} is {'cut short' if there < header.size else 'too long'}: its header"
            f" speaks of {header.size} bytes of tensors, and there are {there}. Copy it again."
        )


def parse_header(text: bytes) -> Header:
    """Reads the JSON of a header.

    Raises:
        FormatError: If it is none, or contradicts itself: all tensors at fault are named.
    """
    try:
        raw = parse_json(text)
    except FormatError as error:
        raise FormatError(f"the header is {error}") from None
    if not isinstance(raw, dict):
        raise FormatError(f"the header is {type(raw).__name__}, not an object.")
    about = raw.pop(METADATA, None)
    if about is not None and not is_text_by_text(about):
        raise FormatError(f"{METADATA} is {short(about)}, not an object of texts.")
    tensors: list[Tensor] = []
    bad: list[str] = []
    for name, value in raw.items():
        try:
            tensors.append(_tensor(name, value))
        except FormatError as error:
            bad.append(f"{name}: {error}")
    if bad:
        raise FormatError(listed(f"{len(bad)} tensors are wrong:", bad))
    tensors.sort(key=lambda x: (x.start, x.stop))
    _check_gapless(tensors)
    size = tensors[-1].stop if tensors else 0
    return Header({x.name: x for x in tensors}, 8 + len(text), size)


def _tensor(name: str, raw: Any) -> Tensor:
    check_keys(raw, _KEYS, "its entry")
    code, shape, offsets = (raw[key] for key in _KEYS)
    if not isinstance(code, str) or code not in DTYPES:
        near = did_you_mean(str(code), DTYPES) or f" There are {', '.join(DTYPES)}."
        raise FormatError(f"the dtype is {short(code)}, which is none.{near}")
    if not _naturals(shape):
        raise FormatError(f"the shape is {short(shape)}, not a list of lengths.")
    if len(shape) > _MOST_DIMS:
        raise FormatError(f"the shape has {len(shape)} dims, more than the {_MOST_DIMS} there are.")
    # Zeros left out: numpy counts that way too.
    if math.prod(n for n in shape if n) * _bits(code) // 8 > _MOST_BYTES:
        raise FormatError(f"the shape is {short(shape)}, which no memory could hold.")
    if math.prod(shape) * _bits(code) % 8:
        raise FormatError(f"{code}{shape} ends within a byte.")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"the offsets are {short(offsets)}, not where it begins and ends.")
    start, stop = offsets
    if stop - start != byte_size(code, shape):
        raise FormatError(
            f"{code}{shape} has {byte_size(code, shape)} bytes, and the offsets {offsets} span"
            f" {stop - start}."
        )
    return Tensor(name, code, tuple(shape), start, stop)


def is_text_by_text(x: Any) -> TypeGuard[dict[str, str]]:
    """Whether JSON held an object whose values are texts."""
    return isinstance(x, dict) and all(isinstance(value, str) for value in x.values())


def _naturals(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def _check_gapless(tensors: list[Tensor]) -> None:
    stop, before = 0, "the header"
    facts: list[str] = []
    for one in tensors:
        if one.start != stop:
            what = "overlaps" if one.start < stop else "leaves a gap after"
            facts.append(
                f"{one.name} begins at byte {one.start} and {what} {before}, which ends at {stop}."
            )
        stop, before = one.stop, one.name
    if facts:
        raise FormatError(listed(f"{len(facts)} tensors do not follow each other:", facts))
