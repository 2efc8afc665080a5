"""The safetensors format: writes the header of a file, and reads it with the safetensors package.

A file is the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces to
a multiple of 8), and the bytes of its tensors, little-endian and in C order. Offsets count from the
end of the header, and leave no gaps:

    {"__metadata__":{"format":"pt"},
     "head.weight":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},
     "head.bias":{"dtype":"BF16","shape":[8],"data_offsets":[128,144]}}

The package writes from full arrays in memory, so the header is written here. It reads one with all
the checks that files of strangers need; two parsers could disagree about what a file has.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from treeshard._core.text import human_bytes, parse_dtype
from treeshard._disk.untrusted import MOST_BYTES, MOST_ITEMS, check_size
from treeshard.errors import CheckpointError, DamagedError, FormatError, listed

# In the order of the package's enum of dtypes, by which it sorts the tensors of a file.
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
_BITS = {code: PACKED.get(code) or 8 * parse_dtype(x).itemsize for code, x in DTYPES.items()}
# The limits of numpy: dims of an array, and bytes.
_MOST_DIMS, _MOST_BYTES = 64, 2**63 - 1


class Tensor(NamedTuple):
    """A tensor of a file: its dtype in the format, such as `F32`, and the byte where its data
    begins."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def dtype(self) -> np.dtype:
        """Its dtype in numpy or `ml_dtypes`."""
        return parse_dtype(DTYPES[self.code])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.code] // 8


def code_of(dtype: Any) -> str | None:
    """The format's code for a dtype; `None` if the format does not have that dtype."""
    return _CODES.get(dtype.name)


# The fewest values of an entry, as `check_size` counts them: `"b":{"dtype":"F32","shape":[8],
# "data_offsets":[0,32]},` has 4 commas, 2 brackets and a brace that open.
_ITEMS_OF_TENSOR = 7


def check_count(count: int) -> None:
    """Raises `FormatError` if one file cannot hold so many tensors, before their names are made."""
    if count * _ITEMS_OF_TENSOR > MOST_ITEMS:
        raise FormatError(
            f"{count:,} tensors in one file have a header of more values than the {MOST_ITEMS:,}"
            " that are read. Split the file (`max_file_size=`)."
        )


def lay_out(
    tensors: Iterable[Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[Tensor]]:
    """Lays out a file: returns all bytes before the data, and the tensors in their order.

    The order is the one of the safetensors package: large items first, so that all are aligned,
    then by name.
    """
    ordered = sorted(tensors, key=lambda x: (-_RANKS[x.code], x.name.encode()))
    raw: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for x in _one_after_another(ordered, 0):
        offsets = x.start, x.start + x.nbytes
        raw[x.name] = {"dtype": x.code, "shape": x.shape, "data_offsets": offsets}
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        check_size(text)
    except FormatError as error:
        raise FormatError(
            f"The header would be {error} Split the file (`max_file_size=`), or shorten names."
        ) from None
    head = len(text).to_bytes(8, "little") + text
    return head, _one_after_another(ordered, len(head))


def read_header(file: BinaryIO, shapes_only: bool = False) -> list[Tensor]:
    """The tensors of an open file, in the order of their data. Raises as `load_safetensors` does.

    With `shapes_only`, the data may be missing, as in a download that was cut short.
    """
    try:
        from safetensors import SafetensorError
    except ImportError:
        raise ImportError(
            "Reading safetensors files needs the package safetensors. Install it with"
            " `pip install 'treeshard[checkpoint]'`."
        ) from None
    size = os.fstat(file.fileno()).st_size
    _check_header_size(file, size)
    try:
        tensors = _tensors_by_package(file.name)
    except SafetensorError as error:
        # "Error while deserializing header: incomplete metadata, file not fully covered"
        if "not fully covered" not in str(error):
            raise FormatError(f"{file.name} is not a safetensors file: {error}.") from None
        tensors, full = _tensors_by_header(file)
        if not shapes_only or size > full:
            raise DamagedError(
                f"{file.name} is cut short or too long: it has {size} bytes, and by its header"
                f" {full}. Copy it again."
            ) from None
        size = full
    # The package opens the path again.
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)):
        raise CheckpointError(f"{file.name} was replaced while it was opened. Load it again.")
    bad = [f"{x.name}: {why}" for x in tensors if (why := _why_unreadable(x))]
    if bad:
        raise FormatError(f"{file.name}: {listed(f'{len(bad)} tensors cannot be read:', bad)}")
    # The package does not say where the data begins, but it has checked that the data is without
    # gaps and ends the file.
    return _one_after_another(tensors, size - sum(x.nbytes for x in tensors))


def _tensors_by_package(path: str) -> list[Tensor]:
    """The tensors of a file, without their positions."""
    from safetensors import safe_open

    try:
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
    except MemoryError:  # the package maps the file
        raise CheckpointError(
            f"{path} is larger than this process may map into memory (`ulimit -v`)."
        ) from None
    return [Tensor(name, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()]


def _tensors_by_header(file: BinaryIO) -> tuple[list[Tensor], int]:
    """The tensors of a file of another size than its header says, and that size.

    The package has checked the header by then: it compares sizes last.
    """
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    raw = json.loads(file.read(length))
    raw.pop(METADATA, None)
    entries = sorted(raw.items(), key=lambda item: item[1]["data_offsets"])
    ends = [entry["data_offsets"][1] for _, entry in entries]
    tensors = [Tensor(name, entry["dtype"], tuple(entry["shape"])) for name, entry in entries]
    return tensors, 8 + length + max(ends, default=0)


def _check_header_size(file: BinaryIO, size: int) -> None:
    """Refuses a header that would take long to parse, and much memory."""
    length = int.from_bytes(file.read(8), "little")
    if length > size:  # which the package refuses before it reads the header
        return
    if length > MOST_BYTES:
        raise FormatError(
            f"{file.name} has a header of {human_bytes(length)}. At most"
            f" {human_bytes(MOST_BYTES)} are read."
        )
    try:
        check_size(file.read(length))
    except FormatError as error:
        raise FormatError(f"{file.name} has a header that is {error}") from None


def _one_after_another(tensors: Sequence[Tensor], first: int) -> list[Tensor]:
    starts = accumulate((x.nbytes for x in tensors), initial=first)
    return [x._replace(start=start) for x, start in zip(tensors, starts, strict=False)]


def _why_unreadable(tensor: Tensor) -> str:
    if tensor.code not in DTYPES:
        return f"treeshard does not know the dtype {tensor.code!r}."
    if len(tensor.shape) > _MOST_DIMS:
        return f"the shape has {len(tensor.shape)} dims, and numpy allows {_MOST_DIMS}."
    # Without the zeros, as numpy counts.
    if math.prod(n for n in tensor.shape if n) * tensor.dtype.itemsize > _MOST_BYTES:
        return f"the shape is {tensor.shape}, which is too large for numpy."
    return ""
