"""`treeshard plan`: how a tree is sharded, from shapes and rules in files.

Starts no backend and needs no devices. Rules are text that is read and never code that is run: a
file of rules may come with a checkpoint of strangers.
"""

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax

from treeshard._cli.stored_trees import use_stored
from treeshard._core.mesh import abstract_mesh
from treeshard._core.text import (
    human_bytes,
    parse_bytes,
    parse_dtype,
    parse_names,
    parse_spec,
    typed,
)
from treeshard._disk.untrusted import parse, read_file
from treeshard._planning.logical import logical_axis_rules
from treeshard._planning.plan import plan
from treeshard.compat._strategies import parse_strategy
from treeshard.errors import FormatError, TreeShardError, did_you_mean, listed


def run_plan(options: argparse.Namespace) -> tuple[str, int]:
    """Prints how a tree is sharded. Returns 1 if the plan has errors or does not fit."""
    memory = None if options.memory is None else parse_bytes(options.memory)
    shapes = _read_shapes(options.shapes)
    rules, min_size, logical = _read_rules(options.rules)
    with nullcontext() if logical is None else logical_axis_rules(logical):
        decided = plan(shapes, rules, abstract_mesh(options.mesh), min_size=min_size)
    needed = decided.bytes_per_device()
    fits = memory is None or needed <= memory
    has_errors = any(finding.severity == "error" for finding in decided.findings)
    code = int(has_errors or not fits)
    if options.json:
        report: dict[str, Any] = {
            "plan": json.loads(decided.to_json()),
            "findings": [finding._asdict() for finding in decided.findings],
            "bytes_per_device": needed,
        }
        if memory is not None:
            report |= {"memory": memory, "fits": fits}
        return json.dumps(report), code
    parts = [str(decided)]
    if decided.findings:
        parts.append("\n".join(map(str, decided.findings)))
    if memory is not None:
        verb = "It fits" if fits else "It does NOT fit"
        parts.append(f"{verb}: {human_bytes(needed)} of {human_bytes(memory)} on a device.")
    return "\n\n".join(parts), code


# ------------------------------------------------------------------ shapes


_SHAPES = (
    'Write an object of path: {"shape": [8, 4], "dtype": "float32"}, or of path:'
    ' [[8, 4], "float32"].'
)


def _read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads the shapes of a tree from JSON, safetensors or a checkpoint.

    The headers of safetensors are enough: a download that was cut short has them.
    """
    if path.is_dir() or path.name.endswith((".safetensors", ".safetensors.index.json")):
        contents = use_stored(str(path), None, lambda tree: tree.contents, shapes_only=True)
        arrays = [leaf for leaf in contents.leaves if leaf.dtype]
        return {x.path: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for x in arrays}
    data = read_file(path, pipes=True)
    try:
        raw = parse(data)
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{path} is {type(raw).__name__}, not an object. {_SHAPES}")
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    bad: list[str] = []
    for name, value in raw.items():
        try:
            structs[name] = _struct(value)
        except FormatError as error:
            bad.append(f"{name}: {error}")
    if bad:
        raise FormatError(f"{path}: {listed(f'{len(bad)} entries are invalid:', bad)}")
    return structs


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    if isinstance(value, list) and len(value) == 2:  # [[8, 4], "float32"]
        shape, dtype = value
    elif isinstance(value, dict) and value.keys() >= {"shape", "dtype"}:
        shape, dtype = value["shape"], value["dtype"]
        extra = value.keys() - {"shape", "dtype"}
        if extra:
            raise FormatError(f"unknown key {min(extra)!r}. {_SHAPES}")
    else:
        raise FormatError(f"{value!r} has no shape and dtype. {_SHAPES}")
    # Python's booleans are integers, and JSON has `true`.
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"the shape is {shape!r}, not a list of lengths.")
    if not isinstance(dtype, str):
        raise FormatError(f"{dtype!r} is not a dtype.")
    return jax.ShapeDtypeStruct(shape, parse_dtype(dtype))


# ------------------------------------------------------------------ rules


# Parsing TOML takes about a second a megabyte.
_LONGEST_RULES = 2**20


def _read_rules(
    path: Path,
) -> tuple[list[tuple[str, Any]], int | None, list[tuple[str, Any]] | None]:
    """Reads rules, `min_size` and logical names from a TOML file; `None` for what it lacks."""
    try:
        raw = tomllib.loads(read_file(path, _LONGEST_RULES, pipes=True).decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise FormatError(f"{path}: {error}") from None
    try:
        _known(raw, ("rules", "min_size", "logical"), "the file")
        rules = typed(raw.get("rules", []), list, "rules", "[[rules]] tables")
        min_size = raw.get("min_size")
        if min_size is not None:
            typed(min_size, int, "min_size", "a number of elements")
        logical = raw.get("logical")
        if logical is not None:
            typed(logical, dict, "logical", "a table of mesh axes by name")
            logical = list(logical.items())
        return [_rule(x, f"rules[{i}]") for i, x in enumerate(rules)], min_size, logical
    except TreeShardError as error:
        raise FormatError(f"{path}: {error}") from None


def _rule(raw: Any, key: str) -> tuple[str, Any]:
    typed(raw, dict, key, "a table")
    _known(raw, ("pattern", "action"), key)
    for name in ("pattern", "action"):
        if name not in raw:
            raise FormatError(f"{key} lacks {name!r}. Every rule needs a pattern and an action.")
        typed(raw[name], str, f"{key}.{name}", "a string")
    try:
        return raw["pattern"], _action(raw["action"].strip())
    except TreeShardError as error:
        raise FormatError(f"{key}.action: {error}") from None


def _action(text: str) -> Any:
    if text == "None":
        return None
    if text.startswith(("P(", "PartitionSpec(")):  # P('fsdp', None)
        return parse_spec(text)
    if text.startswith("("):  # ('embed', 'heads')
        return parse_names(text)
    return parse_strategy(text)  # shard_dim('tensor', -1) | fsdp('fsdp')


def _known(raw: Mapping[str, Any], known: Sequence[str], key: str) -> None:
    for name in raw.keys() - set(known):
        hint = did_you_mean(name, known) or f" The keys are {', '.join(known)}."
        raise FormatError(f"{key} has an unknown key {name!r}.{hint}")
