"""The files that the command line reads: shapes, and rules."""

import json
import math
import struct
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from treeshard._errors import FormatError, TreeShardError, did_you_mean, listed
from treeshard._literals import parse_dtype, parse_names, parse_spec, typed
from treeshard._strategies import parse_strategy

Shapes = dict[str, jax.ShapeDtypeStruct]

# The format's own limit.
LONGEST_HEADER = 100_000_000
_SAFETENSORS_DTYPES = {
    "BOOL": "bool", "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn", "C64": "complex64",
}  # fmt: skip


class RulesFile(NamedTuple):
    """What a rules file says.

    Attributes:
        rules: Pairs of a pattern and an action.
        min_size: Its floor in elements, if it has one.
        logical: Its rules for logical names, if it has any.
    """

    rules: list[tuple[str, Any]]
    min_size: int | None
    logical: dict[str, Any] | None


# ------------------------------------------------------------------ shapes


def read_shapes(path: Path) -> Shapes:
    """Reads the shapes of a tree: JSON of path -> `{"shape": [8, 4], "dtype": "float32"}` or
    `[[8, 4], "float32"]`, or the header of a file that ends in `.safetensors`.

    Raises:
        FormatError: If the file is neither: the place is named.
        OSError: If it cannot be read.
    """
    if path.is_dir():
        raise FormatError(f"{path} is a directory. Give a JSON file or a .safetensors file.")
    tensors = path.suffix == ".safetensors"
    text = _header(path) if tensors else path.read_bytes()
    try:
        raw = json.loads(text, object_pairs_hook=_each_key_once)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{path} holds {type(raw).__name__}. {_SHAPES}")
    if tensors:
        raw.pop("__metadata__", None)
    found: Shapes = {}
    bad: list[str] = []
    for name, value in raw.items():
        try:
            found[name] = _struct(value, tensors)
        except FormatError as error:
            bad.append(f"{name}: {error}")
    if bad:
        raise FormatError(f"{path}: {listed(f'{len(bad)} entries are wrong:', bad)}")
    return found


_SHAPES = (
    'Write an object of path: {"shape": [8, 4], "dtype": "float32"}, or of path:'
    ' [[8, 4], "float32"].'
)


def _each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice")
    return found


def _header(path: Path) -> bytes:
    """The JSON at the head of a safetensors file, which begins with its length."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        room = path.stat().st_size - 8
        if not 0 < length <= min(room, LONGEST_HEADER):
            raise FormatError(
                f"{path} is no safetensors file: it says that its header has {length} bytes, and"
                f" there are {max(room, 0)}."
            )
        return file.read(length)


def _struct(value: Any, tensors: bool) -> jax.ShapeDtypeStruct:
    if isinstance(value, dict) and value.keys() >= {"shape", "dtype"}:
        if not tensors and (extra := value.keys() - {"shape", "dtype"}):
            raise FormatError(f"unknown key {min(extra)!r}. {_SHAPES}")
        shape, dtype = value["shape"], value["dtype"]
    elif isinstance(value, list) and len(value) == 2 and not tensors:
        shape, dtype = value
    else:
        raise FormatError(f"{value!r} has no shape and dtype. {_SHAPES}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"the shape is {shape!r}, not a list of lengths.")
    if not isinstance(dtype, str) or (tensors and dtype not in _SAFETENSORS_DTYPES):
        raise FormatError(f"the dtype is {dtype!r}, which is none.")
    return jax.ShapeDtypeStruct(
        shape, parse_dtype(_SAFETENSORS_DTYPES[dtype] if tensors else dtype)
    )


# ------------------------------------------------------------------ rules


def read_rules_file(path: Path) -> RulesFile:
    """Reads rules as TOML: `[[rules]]` tables of a pattern and an action, an optional
    `min_size`, and an optional table `[logical]` of axes by logical name.

    Actions are written as in Python: `"None"`, `"P('fsdp', None)"`, a tuple of logical names,
    or a strategy string.

    Raises:
        FormatError: If the file is no TOML (line and column are named) or holds something
            else (its key is named).
        OSError: If it cannot be read.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is one, and says the place
        raise FormatError(f"{path}: {error}") from None
    try:
        _known(raw, ("rules", "min_size", "logical"), "the file")
        rules = typed(raw.get("rules", []), list, "rules", "[[rules]] tables")
        min_size = raw.get("min_size")
        if min_size is not None:
            typed(min_size, int, "min_size", "a number of elements")
        logical = raw.get("logical")
        if logical is not None:
            typed(logical, dict, "logical", "a table of axes by name")
        return RulesFile([_rule(x, f"rules[{i}]") for i, x in enumerate(rules)], min_size, logical)
    except TreeShardError as error:
        raise FormatError(f"{path}: {error}") from None


def _rule(raw: Any, key: str) -> tuple[str, Any]:
    typed(raw, dict, key, "a table")
    _known(raw, ("pattern", "action"), key)
    for name in ("pattern", "action"):
        if name not in raw:
            raise FormatError(f"{key} lacks {name!r}. Every rule has a pattern and an action.")
        typed(raw[name], str, f"{key}.{name}", "a string")
    try:
        return raw["pattern"], _action(raw["action"].strip())
    except TreeShardError as error:
        raise FormatError(f"{key}.action: {error}") from None


def _action(text: str) -> Any:
    if text == "None":
        return None
    if text.startswith(("P(", "PartitionSpec(")):
        return parse_spec(text)
    return parse_names(text) if text.startswith("(") else parse_strategy(text)


def _known(raw: Mapping[str, Any], known: Sequence[str], key: str) -> None:
    for name in raw.keys() - set(known):
        hint = did_you_mean(name, known) or f" There are {', '.join(known)}."
        raise FormatError(f"{key} has an unknown key {name!r}.{hint}")


# ------------------------------------------------------------------ sizes


def parse_bytes(text: str) -> int:
    """Reads `80GB` (of 1000 each) or `80GiB` (of 1024). Raises `FormatError`."""
    number, unit = text.strip(), ""
    while number and not number[-1].isdigit():
        number, unit = number[:-1], number[-1] + unit
    base, letters = (1024, "KiB MiB GiB TiB") if "i" in unit else (1000, "kB MB GB TB")
    powers = {"": 0, "B": 0} | {name: i + 1 for i, name in enumerate(letters.split())}
    powers["KB"] = 1
    try:
        count = float(number) * base ** powers[unit.strip()]
    except (KeyError, ValueError):
        count = 0.0
    if not 0 < count < math.inf:
        raise FormatError(f"{text!r} is no amount of memory. Write it as 80GB or 80GiB.")
    return int(count)
