"""The safetensors format: writes and reads its header.

A file is the length of its header (8 bytes), the header (JSON, padded with spaces to a multiple of
8), and the bytes of its tensors, without gaps between them: little-endian, in C order.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import numpy as np

from treeshard._core.text import check_keys, parse_dtype, parse_json
from treeshard.errors import DamagedError, FormatError, did_you_mean, listed

# The format's own limit.
LONGEST_HEADER = 100_000_000
# In the order of the format, which also sorts the tensors of a file.
DTYPES = {
    "BOOL": "bool", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
    "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
# Bits of the dtypes that the format packs and numpy does not.
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
# The key that no tensor can have as its name.
METADATA = "__metadata__"

_RANKS = {code: rank for rank, code in enumerate(DTYPES)}
_CODES = {name: code for code, name in DTYPES.items() if code not in PACKED}
_KEYS = ("dtype", "shape", "data_offsets")
# What numpy can hold: dims of an array, and bytes.
_MOST_DIMS, _MOST_BYTES = 64, 2**63 - 1


class Tensor(NamedTuple):
    """A tensor, as the header describes it.

    Attributes:
        name: Its name.
        code: The format's code for its dtype, such as `F32`.
        shape: Its shape.
        start: Where its data begins, in bytes after the header.
        stop: Where its data ends.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def dtype(self) -> np.dtype:
        """Its dtype in numpy or `ml_dtypes`."""
        return parse_dtype(DTYPES[self.code])


class Header(NamedTuple):
    """The header of a file.

    Attributes:
        tensors: Its tensors by name, in the order of their bytes.
        length: The number of bytes before the first tensor.
        size: The number of bytes of all tensors.
    """

    tensors: dict[str, Tensor]
    length: int
    size: int


def code_of(dtype: Any) -> str | None:
    """The format's code for a dtype; `None` if the format does not have that dtype."""
    return _CODES.get(dtype.name)


def byte_size(code: str, shape: Iterable[int]) -> int:
    """The number of bytes of a tensor."""
    return math.prod(shape) * _bits(code) // 8


def _bits(code: str) -> int:
    return PACKED.get(code) or 8 * parse_dtype(DTYPES[code]).itemsize


# ------------------------------------------------------------------ write


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[Tensor]:
    """Assigns offsets to tensors of these names, dtypes and shapes.

    The order is the one of the safetensors package: large items first, so that all are aligned,
    then by name.
    """
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
    """Reads and checks the header of an open file. The file may have no data (yet).

    Raises:
        FormatError: If the header is invalid. The message names the file and all bad tensors.
    """
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    room = os.fstat(file.fileno()).st_size - 8
    if not 0 < length <= min(room, LONGEST_HEADER):
        raise FormatError(
            f"{file.name} is not a safetensors file: it says that its header has {length} bytes,"
            f" and {max(room, 0)} follow."
        )
    try:
        return parse_header(file.read(length))
    except FormatError as error:
        raise FormatError(f"{file.name}: {error}") from None


def check_complete(file: BinaryIO, header: Header) -> None:
    """Raises `DamagedError` unless an open file has exactly the bytes that its header lists."""
    data_bytes = os.fstat(file.fileno()).st_size - header.length
    if data_bytes != header.size:
        raise DamagedError(
            f"{file.name} is {'cut short' if data_bytes < header.size else 'too long'}: its header"
            f" lists {header.size} bytes of tensors, and the file has {data_bytes}. Copy it again."
        )


def parse_header(text: bytes) -> Header:
    """Reads the JSON of a header.

    Raises:
        FormatError: If it is invalid or contradicts itself. The message names all bad tensors.
    """
    try:
        raw = parse_json(text)
    except FormatError as error:
        raise FormatError(f"the header is {error}") from None
    if not isinstance(raw, dict):
        raise FormatError(f"the header is {type(raw).__name__}, not an object.")
    metadata = raw.pop(METADATA, None)
    if metadata is not None and not is_text_by_text(metadata):
        raise FormatError(f"{METADATA} is {short(metadata)}, not an object of strings.")
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
        near = did_you_mean(str(code), DTYPES) or f" The format has {', '.join(DTYPES)}."
        raise FormatError(f"{short(code)} is not a dtype.{near}")
    if not _naturals(shape):
        raise FormatError(f"the shape is {short(shape)}, not a list of lengths.")
    if len(shape) > _MOST_DIMS:
        raise FormatError(f"the shape has {len(shape)} dims, and numpy allows {_MOST_DIMS}.")
    # Without the zeros, as numpy counts.
    if math.prod(n for n in shape if n) * _bits(code) // 8 > _MOST_BYTES:
        raise FormatError(f"the shape is {short(shape)}, which is too large for any memory.")
    if math.prod(shape) * _bits(code) % 8:
        raise FormatError(f"{code}{shape} does not end at a full byte.")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"the offsets are {short(offsets)}, not its start and stop.")
    start, stop = offsets
    if stop - start != byte_size(code, shape):
        raise FormatError(
            f"{code}{shape} takes {byte_size(code, shape)} bytes, and the offsets {offsets} span"
            f" {stop - start}."
        )
    return Tensor(name, code, tuple(shape), start, stop)


def is_text_by_text(x: Any) -> TypeGuard[dict[str, str]]:
    """Whether parsed JSON is an object of strings."""
    return isinstance(x, dict) and all(isinstance(value, str) for value in x.values())


def _naturals(x: Any) -> bool:
    return isinstance(x, list) and all(type(n) is int and n >= 0 for n in x)


def _check_gapless(tensors: list[Tensor]) -> None:
    stop, before = 0, "the header"
    facts: list[str] = []
    for tensor in tensors:
        if tensor.start != stop:
            what = "overlaps" if tensor.start < stop else "leaves a gap after"
            facts.append(
                f"{tensor.name} begins at byte {tensor.start} and {what} {before}, which ends at"
                f" {stop}."
            )
        stop, before = tensor.stop, tensor.name
    if facts:
        raise FormatError(listed(f"{len(facts)} tensors do not follow each other:", facts))
