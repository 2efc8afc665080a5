"""`treeshard plan`: how a tree is sharded, from shapes and rules in files.

It starts no backend and needs no devices. Rules are parsed as text and never executed, because a
file of rules may come from strangers.
"""

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax

from treeshard._cli.stored_trees import use_stored
from treeshard._core.mesh import abstract_mesh
from treeshard._core.text import (
    human_bytes,
    parse_bytes,
    parse_dtype,
    parse_names,
    parse_spec,
)
from treeshard._disk.untrusted import parse, read_file
from treeshard._planning.logical import logical_axis_rules
from treeshard._planning.plan import Plan, plan
from treeshard.compat._strategies import parse_strategy
from treeshard.errors import FormatError, TreeShardError, did_you_mean, listed


def run_plan(options: argparse.Namespace) -> tuple[str, int]:
    """Prints how a tree is sharded. Returns 1 if the plan has errors or does not fit."""
    memory = None if options.memory is None else parse_bytes(options.memory)
    shapes = _read_shapes(options.shapes)
    rules = _read_rules(options.rules)
    with nullcontext() if rules.logical is None else logical_axis_rules(rules.logical):
        decided = plan(shapes, rules.rules, abstract_mesh(options.mesh), min_size=rules.min_size)
    fits = memory is None or decided.bytes_per_device() <= memory
    has_errors = any(finding.severity == "error" for finding in decided.findings)
    to_text = _to_json if options.json else _to_text
    return to_text(decided, memory), int(has_errors or not fits)


def _to_text(decided: Plan, memory: int | None) -> str:
    parts = [str(decided)]
    if decided.findings:
        parts.append("\n".join(map(str, decided.findings)))
    if memory is not None:
        needed = decided.bytes_per_device()
        verb = "It fits" if needed <= memory else "It does NOT fit"
        parts.append(f"{verb}: {human_bytes(needed)} of {human_bytes(memory)} on a device.")
    return "\n\n".join(parts)


def _to_json(decided: Plan, memory: int | None) -> str:
    needed = decided.bytes_per_device()
    report: dict[str, Any] = {
        "plan": json.loads(decided.to_json()),
        "findings": [{"severity": x.severity, **x._asdict()} for x in decided.findings],
        "bytes_per_device": needed,
    }
    if memory is not None:
        report |= {"memory": memory, "fits": needed <= memory}
    return json.dumps(report)


# ------------------------------------------------------------------ shapes


_SHAPES = 'Write an object of path: {"shape": [8, 4], "dtype": "float32"}.'


def _read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Reads the shapes of a tree from JSON, safetensors or a checkpoint."""
    if path.is_dir() or path.name.endswith((".safetensors", ".safetensors.index.json")):
        # Headers are enough: an unfinished download works too.
        contents = use_stored(str(path), None, lambda tree: tree.contents, shapes_only=True)
        arrays = [leaf for leaf in contents.leaves if leaf.dtype]
        return {x.path: jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype)) for x in arrays}
    try:
        entries = _check_type(parse(read_file(path, pipes=True)), dict, "the file", "an object")
    except FormatError as error:
        raise FormatError(f"{path}: {error} {_SHAPES}") from None
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    bad: list[str] = []
    for name, entry in entries.items():
        try:
            structs[name] = _struct(entry)
        except FormatError as error:
            bad.append(f"{name}: {error}")
    if bad:
        raise FormatError(f"{path}: {listed(f'{len(bad)} entries are invalid:', bad)}")
    return structs


def _struct(entry: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype"}:
        raise FormatError(f"{entry!r} is not a shape and a dtype. {_SHAPES}")
    shape, dtype = entry["shape"], entry["dtype"]
    # Python's booleans are integers, and JSON has `true`.
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError(f"the shape is {shape!r}, not a list of lengths.")
    return jax.ShapeDtypeStruct(shape, parse_dtype(_check_type(dtype, str, "the dtype", "a name")))


# ------------------------------------------------------------------ rules


# Parsing TOML takes about a second a megabyte.
_LONGEST_RULES = 2**20


class _Rules(NamedTuple):
    """The contents of a file of rules."""

    rules: list[tuple[str, Any]]  # patterns and actions, as `ts.plan` takes them
    min_size: int | None  # elements; `None` for the default of `ts.plan`
    logical: list[tuple[str, Any]] | None  # names and mesh axes; `None` if there are no names


def _read_rules(path: Path) -> _Rules:
    try:
        raw = tomllib.loads(read_file(path, _LONGEST_RULES, pipes=True).decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        raise FormatError(f"{path}: {error}") from None
    try:
        _check_keys(raw, ("rules", "min_size", "logical"), "the file")
        rules = _check_type(raw.get("rules", []), list, "rules", "[[rules]] tables")
        min_size = raw.get("min_size")
        if min_size is not None:
            _check_type(min_size, int, "min_size", "a number of elements")
        logical = raw.get("logical")
        if logical is not None:
            logical = list(_check_type(logical, dict, "logical", "a table of axes by name").items())
        return _Rules([_rule(x, f"rules[{i}]") for i, x in enumerate(rules)], min_size, logical)
    except TreeShardError as error:
        raise FormatError(f"{path}: {error}") from None


def _rule(raw: Any, where: str) -> tuple[str, Any]:
    _check_keys(_check_type(raw, dict, where, "a table"), ("pattern", "action"), where)
    pattern = _check_type(raw.get("pattern"), str, f"{where}.pattern", "a string")
    action = _check_type(raw.get("action"), str, f"{where}.action", "a string")
    try:
        return pattern, _parse_action(action.strip())
    except TreeShardError as error:
        raise FormatError(f"{where}.action: {error}") from None


def _parse_action(text: str) -> Any:
    if text == "None":
        return None
    if text.startswith(("P(", "PartitionSpec(")):  # P('fsdp', None)
        return parse_spec(text)
    if text.startswith("("):  # ('embed', 'heads')
        return parse_names(text)
    return parse_strategy(text)  # shard_dim('tensor', -1) | fsdp('fsdp')


def _check_type(value: Any, kind: type, where: str, what: str) -> Any:
    """Returns a value of a file. Raises if its type is not `kind`, which `what` names."""
    if type(value) is not kind:
        raise FormatError(f"{where} is {value!r} ({type(value).__name__}), not {what}.")
    return value


def _check_keys(raw: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in raw.keys() - set(known):
        hint = did_you_mean(name, known) or f" The keys are {', '.join(known)}."
        raise FormatError(f"{where} has an unknown key {name!r}.{hint}")
