"""Stored leaves: their description, Python values as text, and reports about them.

Python scalars are stored as text in a table. As an array, `7` would come back as an `int32[]`, on
which Python code in a traced function cannot branch. The text is parsed as a value of its kind, and
never evaluated.
"""

import base64
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, Flag
from functools import lru_cache, partial, reduce
from inspect import ismemberdescriptor
from operator import or_
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import tree_leaves

from treeshard._core.arguments import check_no_refs, describe_argument
from treeshard._core.arrays import array_text, has_shape, is_key
from treeshard._core.paths import PyTree, leaf_paths
from treeshard._core.text import columns, fold, human_bytes, parse_dtype
from treeshard.errors import (
    DamagedError,
    FormatError,
    LeafError,
    MismatchError,
    TreeShardError,
    counted,
    listed,
    short,
)

Shape = tuple[int, ...]


class SavedLeaf(NamedTuple):
    """A leaf in a checkpoint.

    Attributes:
        path: The path of the leaf, as in `leaf_paths`.
        kind: `"array"`, `"key"`, `"bool"`, `"int"`, `"float"`, `"complex"`, `"str"`, `"bytes"`
            or `"none"`.
        shape: The shape of an array, or of an array of keys.
        dtype: The name of the dtype, `key<fry>` for keys. Empty for other kinds.
        spec: The spec of the array when it was saved, such as `P('fsdp', None)`. `None` without a
            mesh.
        stored: The dtype of the values in the array store. `None` without values there.
        chunk: The shape of a stored chunk, which is the shape of a shard or of the array. `None`
            without values in the array store.
        impl: The PRNG implementation of keys, such as `threefry2x32`.
        value: A Python scalar, string or bytes, as text.
    """

    path: str
    kind: str
    shape: Shape = ()
    dtype: str = ""
    spec: str | None = None
    stored: str | None = None
    chunk: Shape | None = None
    impl: str | None = None
    value: str | None = None

    @property
    def stored_shape(self) -> Shape:
        """The shape of its values in the array store."""
        return self.shape if self.impl is None else (*self.shape, *key_shape(self.impl))

    @property
    def bytes(self) -> int:
        """The bytes of an array in memory, or for other kinds the length of the text."""
        if self.kind == "array":
            return math.prod(self.shape) * parse_dtype(self.dtype).itemsize
        if self.kind == "key":
            return math.prod(self.stored_shape) * 4
        return len(self.value or "")


def kind_of(x: Any) -> str | None:
    """The kind of a leaf or its `ShapeDtypeStruct`. `None` if it is static."""
    if has_shape(x):
        return "key" if is_key(x) else "array"
    return "none" if x is None else _SCALAR_KINDS.get(type(_plain(x)))


def _plain(x: Any) -> Any:
    """Converts a subclass of a built-in scalar to the built-in class, and an enum to its name."""
    if isinstance(x, Enum):
        return _name_of(x)
    base = next((kind for kind in _SCALAR_KINDS if isinstance(x, kind)), None)
    return x if base is None else base(x)


def convert_to_class(value: Any, leaf: Any, path: str) -> Any:
    """Converts a value of `_plain` back to the class of `leaf`."""
    kind: Any = type(leaf)
    if type(value) is kind or type(value) not in _SCALAR_KINDS:
        return value
    try:
        again = _member(kind, value) if isinstance(leaf, Enum) else kind(value)
        # The constructor may take other arguments, or change the value.
        if value_text(again) == value_text(value):
            return again
    except (TypeError, ValueError, KeyError):
        pass
    raise MismatchError(f"{path}: saved as {value!r}, which {kind.__name__} does not have.")


# Enums are saved by name, because `enum.auto` changes the values when a member is inserted. A
# combination of flags without its own name is saved as `A|B`, and an empty one as the empty text.


def _name_of(member: Any) -> str:
    if not isinstance(member, Flag) or member._name_ in type(member).__members__:
        return str(member._name_)  # `name` may be a property of the class
    return "|".join(str(flag._name_) for flag in member if flag)


def _member(kind: Any, name: str) -> Any:
    """The member that `_name_of` named. Raises `KeyError` if the class does not have it."""
    members = kind.__members__
    if name in members or not issubclass(kind, Flag):
        return members[name]
    return reduce(or_, (members[part] for part in name.split("|") if part), kind(0))


def _is_named(member: Enum) -> bool:
    """Whether the name determines the member. An `IntFlag` may have bits without a flag."""
    try:
        return _member(type(member), _name_of(member)) == member
    except KeyError:  # names of flags may have a `|` themselves
        return False


# The classes of leaves whose values are saved, and the classes of leaves that a program recreates
# from its source. Leaves of all other classes are rejected: their values would silently be lost.
_SAVED = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_SAVED += (bool, int, float, complex, str, bytes)
_KNOWN = (*_SAVED, type, ModuleType, np.dtype, Mesh)


def is_opaque(x: Any) -> bool:
    """Whether a leaf may hold values that are neither saved nor code."""
    if isinstance(x, Enum):  # first, since it may also be an `int` or a `str`
        return not _is_named(x)
    if x is None or isinstance(x, _KNOWN):
        return False
    if callable(x):
        return not _is_code(x, set())
    # `equinox.nn.Shared` leaves an object of a plain class where an array was.
    is_plain = type(x).__mro__[1:] == (object,)
    return not (is_plain and getattr(x, "__dict__", None) == {})


def _is_code(x: Any, seen: set[int]) -> bool:
    """Whether a callable, or an object that it holds, is code and its configuration.

    Attributes, slots, the arguments of a `partial` and the object of a method may hold no values of
    a state, at any depth:

    1. Arrays are values.
    2. Numbers are configuration. In objects without a hash, such as plain dataclasses, they may be
       a step, and are values.
    3. Other objects may hold values. The exceptions are code, objects that are hashed by value, and
       what a wrapper such as `jit` keeps beside its function.

    Variables of a closure are ignored: an optax schedule has arrays there, which the program
    recreates.
    """
    if id(x) in seen:  # objects may refer to each other
        return True
    seen.add(id(x))
    bound, is_wrapper = getattr(x, "__self__", None), hasattr(x, "__wrapped__")
    for y in tree_leaves(_held_by(x)):
        if isinstance(y, np.ndarray) or kind_of(y) in ("array", "key"):  # 1
            return False
        if kind_of(y) in ("int", "float", "complex") and type(x).__hash__ is None:  # 2
            return False
        if isinstance(y, (*_KNOWN, PartitionSpec)) or (is_wrapper and not callable(y)):
            continue
        is_bound = y is bound and hasattr(y, "__dict__")  # one of a built-in class shows no values
        is_inner = callable(y) or is_bound or _is_hashed_by_value(y)
        if not _is_code(y, seen) if is_inner else is_opaque(y):  # 3
            return False
    return True


def _held_by(x: Any) -> list[Any]:
    """The attributes and slots of an object, the arguments of a partial, the parts of a method."""
    arguments = (x.func, x.args, x.keywords) if isinstance(x, partial) else ()
    slotted = [vars(kind) for kind in type(x).__mro__ if "__slots__" in vars(kind)]
    # The class has the names as Python mangles them.
    names = [name for kind in slotted for name in kind if ismemberdescriptor(kind[name])]
    held = [arguments, *(getattr(x, name, None) for name in names)]
    if (bound := getattr(x, "__self__", None)) is not None:
        # A method shows the attributes of its function as its own.
        return [*held, bound, getattr(x, "__func__", None)]
    if is_dataclass(x) and _is_hashed_by_value(x):
        # Flax modules have mutable attributes that are not fields.
        return [*held, *(getattr(x, field.name, None) for field in fields(x))]
    attributes = {**getattr(x, "__dict__", {})}
    attributes.pop("__annotations__", None)  # types, of which many are callable
    return [*held, attributes]


def _is_hashed_by_value(x: Any) -> bool:
    return type(x).__hash__ not in (None, object.__hash__)


def check_known(tree: PyTree, where: str, error: type[TreeShardError] = LeafError) -> None:
    """Raises if leaves may hold values that are neither saved nor code."""
    check_no_refs(tree, where)
    leaves = tree_leaves(tree)
    # A tree has few types, and nearly always all are known.
    if all(
        issubclass(kind, _KNOWN) and not issubclass(kind, Enum) for kind in {*map(type, leaves)}
    ):
        return
    # `...` in a like-tree stands for a leaf that is left out.
    is_read = error is MismatchError
    unknown = [is_opaque(x) and not (is_read and x is ...) for x in leaves]
    if not any(unknown):
        return
    facts = [
        f"{path or 'the tree'}: {describe_argument(x)}."
        for path, x, is_unknown in zip(leaf_paths(tree), leaves, unknown, strict=True)
        if is_unknown
    ]
    leaves = counted(len(facts), "leaf")
    headline = f"{where}: {leaves} cannot be saved, because JAX does not know the class:"
    raise error(
        f"{listed(headline, facts, headed=True)}\nRegister the class as a pytree"
        " (`jax.tree_util.register_dataclass`, `equinox.Module`), use a dict or a list, or put"
        " `None` in its place."
    )


@lru_cache
def key_shape(impl: str) -> Shape:
    """The shape of the data of one key of a PRNG implementation."""
    try:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    except ValueError:
        raise FormatError(f"this JAX has no PRNG implementation {impl!r}.") from None
    return jax.eval_shape(jax.random.key_data, key).shape


def is_none(x: Any) -> bool:
    """Whether `x` is `None`, which counts as a leaf in requests and tables."""
    return x is None


# ------------------------------------------------------------------ values as text


def value_text(x: Any) -> tuple[str, str]:
    """The kind of a Python scalar, string or bytes, and its exact value as text."""
    x = _plain(x)
    kind = _SCALAR_KINDS[type(x)]
    return kind, _SCALARS[kind].write(x)


def value_of(kind: str, text: str) -> Any:
    """Parses a value from the text of `value_text`. Raises `FormatError` for other text."""
    try:
        return _SCALARS[kind].read(text)
    except (ValueError, KeyError, TypeError, OverflowError):
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise FormatError(f"value is {shown!r}, which is not of kind {kind}.") from None


def empty_value(kind: str) -> Any:
    """A value of a kind that is not an array: `None`, zero or empty."""
    return None if kind == "none" else _SCALARS[kind].type()


def _complex_of(text: str) -> complex:
    real, imag = text.split(" ")
    return complex(float.fromhex(real), float.fromhex(imag))


class _Scalar(NamedTuple):
    """A built-in class, and how its values are written and read."""

    type: type
    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _int_text(x: int) -> str:
    # Python writes and reads at most 4,300 decimal digits. Hexadecimal digits have no limit.
    return str(x) if abs(x) < 2**64 else hex(x)


_SCALARS = {
    "bool": _Scalar(bool, str, {"True": True, "False": False}.__getitem__),
    "int": _Scalar(int, _int_text, lambda text: int(text, 0)),
    # Decimal text would round.
    "float": _Scalar(float, float.hex, float.fromhex),
    "complex": _Scalar(complex, lambda x: f"{x.real.hex()} {x.imag.hex()}", _complex_of),
    "str": _Scalar(str, str, str),
    "bytes": _Scalar(
        bytes,
        lambda x: base64.b64encode(x).decode(),
        partial(base64.b64decode, validate=True),
    ),
}
_SCALAR_KINDS = {scalar.type: kind for kind, scalar in _SCALARS.items()}


# ------------------------------------------------------------------ reports


class ReadLeaf(NamedTuple):
    """A leaf in host memory. `damage` is empty if the leaf is intact.

    `array` has the values, the data of keys, or the bytes of packed numbers. Otherwise it is
    `None`.
    """

    row: SavedLeaf
    array: np.ndarray | None
    damage: str


def raise_damages(
    path: str | os.PathLike[str], damages: Mapping[str, str], other_files: Mapping[str, str] = {}
) -> None:
    """Raises one `DamagedError` that lists all damages.

    `damages` has reasons by leaf path. `other_files` has files without leaves, by name.
    """
    facts = [f"{leaf}: {why}" for leaf, why in damages.items()]
    facts += [f"{file} {why}." for file, why in other_files.items()]
    others = f" and {counted(len(other_files), 'other file')}" if other_files else ""
    headline = f"{len(damages)} leaves{others} are damaged:"
    if facts:
        raise DamagedError(
            f"{path}: {listed(headline, facts, headed=not damages)}\nRead an earlier"
            " checkpoint, or copy this one again from where it is intact."
        )


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint. `print` shows a line per leaf, with repeated layers folded.

    Attributes:
        path: The path of the checkpoint.
        leaves: A `SavedLeaf` for each leaf that is not static, in the order in which JAX
            flattens the tree.
        meshes: The axes and sizes of the meshes of the arrays, usually one mesh.
    """

    path: str
    leaves: tuple[SavedLeaf, ...]
    meshes: tuple[dict[str, int], ...]

    @property
    def bytes(self) -> int:
        """The total bytes of all leaves in memory."""
        return sum(leaf.bytes for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [("path", "leaf", "spec", "bytes")]
        items = ((x.path, (x.kind, x.shape, x.dtype, x.spec, x.value), x) for x in self.leaves)
        for path, alike in fold(items):
            first = alike[0]
            size = human_bytes(sum(leaf.bytes for leaf in alike))
            rows.append((short(path) or "(the tree)", describe_leaf(first), first.spec or "", size))
        return f"{columns(rows)}\n{self._total()}"

    def _total(self) -> str:
        total = f"{counted(len(self.leaves), 'leaf')}, {human_bytes(self.bytes)}."
        meshes = [", ".join(f"{axis}={n}" for axis, n in axes.items()) for axes in self.meshes]
        if any(meshes):
            total += f" Saved on {' and '.join(meshes)}."
        return total


def describe_leaf(leaf: SavedLeaf) -> str:
    """A leaf's type, and its value if it is not an array."""
    if leaf.dtype:
        return array_text(leaf)
    if leaf.value is None:
        return "None"
    is_number = leaf.kind in ("bool", "int")  # whose text is the number
    text = leaf.value if is_number else repr(value_of(leaf.kind, leaf.value))
    return f"{leaf.kind} {text if len(text) <= 40 else f'{text[:40]}...'}"
