"""What is written of one leaf: its row in the table, and its numbers as an array store has them."""

import base64
import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote
from zlib import crc32

import jax

from treeshard._errors import FormatError
from treeshard._literals import parse_dtype
from treeshard._specs import has_shape

Shape = tuple[int, ...]

# What array stores have beyond numpy's own types. Of all others they get the bytes.
_STORED = {"bfloat16", "int4", "float8_e4m3fn", "float8_e5m2"}
_STORED |= {"float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz"}


class SavedLeaf(NamedTuple):
    """A leaf as it is saved.

    Attributes:
        path: Its name, as `leaf_paths` gives it.
        kind: `"array"`, `"key"`, `"bool"`, `"int"`, `"float"`, `"complex"`, `"str"`, `"bytes"`
            or `"none"`.
        shape: The shape of an array, or of an array of keys.
        dtype: Its dtype by name, `key<fry>` for keys; nothing for other kinds.
        spec: How it lay on a mesh, such as `P('fsdp', None)`; `None` if on no mesh.
        stored: The dtype that its numbers have in the array store; `None` if none are there.
        impl: The PRNG implementation of keys, such as `threefry2x32`.
        value: A Python scalar, a string or bytes, as text.
        crc: The CRC-32 of its bytes, or of `value`; `None` if it was not asked for.
    """

    path: str
    kind: str
    shape: Shape = ()
    dtype: str = ""
    spec: str | None = None
    stored: str | None = None
    impl: str | None = None
    value: str | None = None
    crc: int | None = None

    @property
    def key(self) -> str:
        """What the array store calls it."""
        return store_key(self.path)

    @property
    def stored_shape(self) -> Shape:
        """The shape that its numbers have in the array store."""
        return self.shape if self.impl is None else (*self.shape, *key_shape(self.impl))

    @property
    def bytes(self) -> int:
        """The bytes of an array in memory; of other kinds, those of the text of the value."""
        if self.kind == "array":
            return math.prod(self.shape) * parse_dtype(self.dtype).itemsize
        if self.kind == "key":
            return math.prod(self.stored_shape) * 4
        return len(self.value or "")


def kind_of(x: Any) -> str | None:
    """The kind of a leaf, or of a `ShapeDtypeStruct` that stands for one; `None` if static.

    Subclasses of Python's scalars (enums, named constants) are static: text would lose them.
    """
    if has_shape(x):
        return "key" if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else "array"
    return "none" if x is None else _SCALAR_KINDS.get(type(x))


def stored_dtype(dtype: str) -> str:
    """The dtype that the numbers of an array have in the array store."""
    return dtype if dtype in _STORED or parse_dtype(dtype).kind != "V" else "uint8"


def store_key(path: str) -> str:
    """What the array store calls a leaf: its path with `.` for `/`, safe as the name of a file.

    No two paths have the same. `layers/0/w` becomes `layers.0.w`, as in a nested tree.
    """
    parts = [quote(part, safe="").replace(".", "%2E") for part in path.split("/")]
    key = ".".join(parts)
    if len(key) > 200:  # names of files end at 255 bytes
        return f"{key[:120]}%{hashlib.sha256(path.encode()).hexdigest()}"
    # What folders and the store call their own begins with `%` instead, as no other name does.
    own = not key.strip(".") or key.startswith("_") or key == "array_metadatas"
    return f"%{key}" if own else key


@lru_cache
def key_dtype(impl: str) -> str:
    """The dtype of keys of a PRNG implementation, by name."""
    return str(_key(impl).dtype)


@lru_cache
def key_shape(impl: str) -> Shape:
    """The shape of the numbers that one key of a PRNG implementation is."""
    return jax.eval_shape(jax.random.key_data, _key(impl)).shape


def _key(impl: str) -> Any:
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    except ValueError:
        raise FormatError(f"there is no PRNG implementation {impl!r} here.") from None


# ------------------------------------------------------------------ values as text


def value_text(x: Any) -> str:
    """A Python scalar, a string or bytes, as text that has every bit of it."""
    return _SCALARS[_SCALAR_KINDS[type(x)]][1](x)


def value_of(kind: str, text: str) -> Any:
    """What `value_text` wrote. Raises `FormatError`."""
    _, write, read = _SCALARS[kind]
    try:
        value = read(text)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise FormatError(f"value is {_short(text)}, which is no {kind}.") from None
    if write(value) != text:
        raise FormatError(f"value is {_short(text)}; a {kind} is not written like that.")
    return value


def text_crc(text: str) -> int:
    """The CRC-32 of a value's text."""
    return crc32(text.encode())


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _int_text(x: int) -> str:
    return str(x) if abs(x) < 2**64 else hex(x)  # Python limits the digits of decimal text


def _complex_of(text: str) -> complex:
    real, imag = text.split(" ")
    return complex(float.fromhex(real), float.fromhex(imag))


_SCALARS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bool": (bool, str, {"True": True, "False": False}.__getitem__),
    "int": (int, _int_text, lambda text: int(text, 0)),
    "float": (float, float.hex, float.fromhex),
    "complex": (complex, lambda x: f"{x.real.hex()} {x.imag.hex()}", _complex_of),
    "str": (str, str, str),
    "bytes": (bytes, lambda x: base64.b64encode(x).decode(), base64.b64decode),
}
_SCALAR_KINDS = {row[0]: kind for kind, row in _SCALARS.items()}
SCALARS = tuple(_SCALARS)
