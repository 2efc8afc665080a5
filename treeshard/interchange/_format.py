"""The safetensors format: writes the header of a file, and reads it with the safetensors package.

A file has the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces
to a multiple of 8 bytes), and the bytes of its tensors, little-endian in C order. Offsets count
from the end of the header and leave no gaps:

    {"__metadata__":{"format":"pt"},
     "head.weight":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},
     "head.bias":{"dtype":"BF16","shape":[8],"data_offsets":[128,144]}}

The package writes full arrays from memory, so this module writes the header itself. It reads a
header with all checks of the package, because files may come from strangers.
"""

import json
import math
import operator
import os
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain, pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from treeshard._core.memory import available_memory
from treeshard._core.text import human_bytes, parse_dtype
from treeshard._disk.untrusted import MOST_BYTES, check_size
from treeshard.errors import CheckpointError, DamagedError, FormatError, listed, short

# In the order of the enum of dtypes in the package, which sorts the tensors of a file by it.
DTYPES = {
    "BOOL": "bool", "F4": "float4_e2m1fn", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
    "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
# Dtypes that the format packs, unlike numpy.
PACKED = {"F4", "F6_E2M3", "F6_E3M2"}
# The key of the metadata, which no tensor can have as its name.
METADATA = "__metadata__"

_RANKS = {code: rank for rank, code in enumerate(DTYPES)}
_NUMPY = {code: parse_dtype(name) for code, name in DTYPES.items()}
_CODES = {dtype: code for code, dtype in _NUMPY.items() if code not in PACKED}
# The limits of numpy: dims of an array, and bytes.
_MOST_DIMS, _MOST_BYTES = 64, 2**63 - 1


class Tensor(NamedTuple):
    """A tensor of a file: its dtype code, such as `F32`, its shape, its size, and the byte at which
    its data starts."""

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int
    start: int = 0

    @property
    def dtype(self) -> np.dtype:
        """The dtype in numpy or `ml_dtypes`."""
        return _NUMPY[self.code]


def code_of(dtype: Any) -> str | None:
    """The code of a dtype in the format, or `None` if the format lacks the dtype."""
    code = _CODES.get(dtype)
    if code is None and isinstance(dtype, np.dtype):
        # numpy treats a dtype in another byte order as a different dtype.
        code = _CODES.get(dtype.newbyteorder("="))
    return code


def lay_out(
    tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Tensor]]:
    """Lays out a file: returns the bytes before the data, and the tensors in their order.

    The order is as in the safetensors package: large items first, for alignment, and then by name.
    """
    ordered = sorted(tensors, key=lambda x: (-_RANKS[x.code], x.name))
    offsets = [0, *accumulate(x.nbytes for x in ordered)]
    _check_metadata(metadata)
    raw: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for x, span in zip(ordered, pairwise(offsets), strict=True):
        raw[x.name] = {"dtype": x.code, "shape": x.shape, "data_offsets": span}
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        check_size(text)
    except FormatError as error:
        raise FormatError(
            f"The header would be {error} Split the file (`max_file_size=`), or shorten names."
        ) from None
    head = len(text).to_bytes(8, "little") + text
    first = len(head)
    rows = zip(ordered, offsets, strict=False)
    return head, [Tensor(x.name, x.code, x.shape, x.nbytes, first + start) for x, start in rows]


def _check_metadata(metadata: Any) -> None:
    """Raises `FormatError` for what the safetensors package could not read."""
    try:
        "".join(chain.from_iterable(dict(metadata or {}).items())).encode()
    except (TypeError, ValueError):
        raise FormatError(
            f"metadata={short(repr(metadata))}: the format has text by name, such as"
            ' `metadata={"step": "7"}`.'
        ) from None


def read_header(file: BinaryIO, shapes_only: bool = False) -> list[Tensor]:
    """Reads the tensors of an open file, in the order of their data. Raises as `load_safetensors`.

    With `shapes_only`, the data may be missing, as in a download that was cut short.
    """
    text = _header(file)
    problem = _problem_by_package(file.name)
    # The package opens the path again.
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
        raise CheckpointError(f"{file.name} was replaced while it was opened. Load it again.")
    # The last check of the package raises "Error while deserializing header: incomplete metadata,
    # file not fully covered".
    if problem and "not fully covered" not in problem:
        raise FormatError(f"{file.name} is not a safetensors file: {problem}.")
    entries = json.loads(text)
    entries.pop(METADATA, None)
    facts = [f"{name}: {why}" for name, x in entries.items() if (why := _explain_unreadable(x))]
    if facts:
        raise FormatError(f"{file.name}: {listed(f'{len(facts)} tensors cannot be read:', facts)}")
    # The package has compared the offsets with the shapes.
    first, spans = 8 + len(text), [x["data_offsets"] for x in entries.values()]
    size, full = os.fstat(file.fileno()).st_size, first + max((end for _, end in spans), default=0)
    if size > full or (size < full and not shapes_only):
        raise DamagedError(
            f"{file.name} is cut short or too long: it has {size} bytes, and by its header"
            f" {full}. Copy it again."
        )
    rows = sorted(zip(spans, entries.items(), strict=True), key=operator.itemgetter(0))
    return [
        Tensor(name, x["dtype"], tuple(x["shape"]), end - start, first + start)
        for (start, end), (name, x) in rows
    ]


def _header(file: BinaryIO) -> bytes:
    """The JSON of a file. Raises `FormatError` if it is too large to parse."""
    length = int.from_bytes(file.read(8), "little")
    text = file.read(min(length, MOST_BYTES + 1))
    try:
        check_size(text)
    except FormatError as error:
        raise FormatError(f"{file.name} has a header that is {error}") from None
    return text


def _problem_by_package(path: str) -> str:
    """Why the package rejects a file. Empty if it does not."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ImportError(
            "Reading safetensors files needs the package safetensors. Install it with"
            " `pip install 'treeshard[checkpoint]'`."
        ) from None
    except ImportError as error:  # such as "failed to map segment from shared object"
        raise CheckpointError(
            f"{path}: the package safetensors is installed, but cannot be loaded: {error}."
        ) from None
    try:
        safe_open(path, "np")
    except SafetensorError as error:
        return str(error)
    except MemoryError:  # the package maps the file
        size, free = os.path.getsize(path), available_memory()
        available = "" if free is None else f", and {human_bytes(max(free, 0))} are available"
        raise CheckpointError(
            f"{path}: its {human_bytes(size)} are mapped into memory{available}. Raise the limit"
            " of this process (`ulimit -v`)."
        ) from None
    return ""


def _explain_unreadable(entry: Any) -> str:
    # The package also reads `["U8", [8], [0, 8]]` and `{"dtype": {"U8": null}, ...}`.
    if not (isinstance(entry, dict) and isinstance(entry["dtype"], str)):
        return "its entry is not of the form that the format describes."
    dtype = _NUMPY.get(entry["dtype"])
    if dtype is None:
        return f"treeshard does not know the dtype {entry['dtype']!r}."
    shape = entry["shape"]
    if len(shape) > _MOST_DIMS:
        return f"the shape has {len(shape)} dims, and numpy allows {_MOST_DIMS}."
    # numpy leaves out zeros when it computes the size.
    if math.prod(filter(None, shape)) * dtype.itemsize > _MOST_BYTES:
        return f"the shape is {tuple(shape)}, which is too large for numpy."
    return ""
