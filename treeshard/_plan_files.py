"""The files that the command line reads: shapes, and rules."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from treeshard._errors import FormatError, TreeShardError, did_you_mean, listed
from treeshard._literals import parse_dtype, parse_json, parse_names, parse_spec, typed
from treeshard._safetensors import read_header
from treeshard._stored_trees import open_stored
from treeshard._strategies import parse_strategy

Shapes = dict[str, jax.ShapeDtypeStruct]


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
    `[[8, 4], "float32"]`; the header of a file that ends in `.safetensors`, or the index of
    several; or a checkpoint.

    Raises:
        FormatError: If the file is none of these: the place is named.
        CheckpointError: As `open_stored`.
        OSError: If it cannot be read.
    """
    if path.is_dir() or path.name.endswith(".safetensors.index.json"):
        with open_stored(str(path)) as tree:
            arrays = [leaf for leaf in tree.contents.leaves if leaf.dtype]
        return {x.path: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for x in arrays}
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            tensors = read_header(file).tensors
        return {x.name: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors.values()}
    try:
        raw = parse_json(path.read_bytes())
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{path} holds {type(raw).__name__}. {_SHAPES}")
    found: Shapes = {}
    bad: list[str] = []
    for name, value in raw.items():
        try:
            found[name] = _struct(value)
        except FormatError as error:
            bad.append(f"{name}: {error}")
    if bad:
        raise FormatError(f"{path}: {listed(f'{len(bad)} entries are wrong:', bad)}")
    return found


_SHAPES = (
    'Write an object of path: {"shape": [8, 4], "dtype": "float32"}, or of path:'
    ' [[8, 4], "float32"].'
)


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    if isinstance(value, dict) and value.keys() >= {"shape", "dtype"}:
        if extra := value.keys() - {"shape", "dtype"}:
            raise FormatError(f"unknown key {min(extra)!r}. {_SHAPES}")
        shape, dtype = value["shape"], value["dtype"]
    elif isinstance(value, list) and len(value) == 2:
        shape, dtype = value
    else:
        raise FormatError(f"{value!r} has no shape and dtype. {_SHAPES}")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"the shape is {shape!r}, not a list of lengths.")
    if not isinstance(dtype, str):
        raise FormatError(f"the dtype is {dtype!r}, which is none.")
    return jax.ShapeDtypeStruct(shape, parse_dtype(dtype))


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
