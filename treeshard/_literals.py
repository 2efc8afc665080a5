"""Specs, names, dtypes and amounts from text. Literals only: nothing is evaluated."""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from treeshard._errors import FormatError, did_you_mean
from treeshard._partition_axis import is_mesh_axes
from treeshard._specs import UNCONSTRAINED, is_logical


def parse_dtype(name: str) -> Any:
    """A dtype by its name, `key<fry>` included. Starts no backend."""
    try:
        if key := re.fullmatch("key<(.+)>", name):
            impl = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}.get(key[1], key[1])
            return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
        return jax.numpy.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # numpy reads shapes and counts in it too
        raise FormatError(f"dtype is {name!r}, which is none.") from None


def parse_spec(text: str) -> PartitionSpec:
    """Reads `P('data', None, ('fsdp', 'tensor'))`."""
    node = _parsed(text)
    if not isinstance(node, ast.Call) or _name(node.func) not in ("P", "PartitionSpec"):
        raise FormatError(f"{text!r} is no spec. Write it as P('data', None, ('fsdp', 'tensor')).")
    entries = [
        UNCONSTRAINED if _name(arg) == "UNCONSTRAINED" else _literal(arg, text) for arg in node.args
    ]
    more = {str(word.arg): _literal(word.value, text) for word in node.keywords}
    if bad := [entry for entry in entries if not (entry is UNCONSTRAINED or is_mesh_axes(entry))]:
        raise FormatError(f"{text!r} is no spec: {bad[0]!r} is neither an axis nor several.")
    try:
        return PartitionSpec(*[tuple(e) if isinstance(e, list) else e for e in entries], **more)
    except Exception as error:  # whatever JAX refuses
        raise FormatError(f"{text!r} is no spec: {error}") from None


def parse_names(text: str) -> tuple[Any, ...]:
    """Reads a tuple of logical names, `('batch', None, 'embed')`."""
    names = _literal(_parsed(text), text)
    if not is_logical(names):
        raise FormatError(f"{text!r} is no tuple of names. Write it as ('batch', None, 'embed').")
    return names


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{text!r} cannot be read: {error}.") from None


def _literal(node: ast.expr, text: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        part = ast.get_source_segment(text, node)  # `ast.unparse` would recurse
        raise FormatError(f"{text!r}: {part!r} is no literal.") from None


def _name(node: ast.expr) -> str | None:
    """The name that stands there, or its last part: `UNCONSTRAINED` of `P.UNCONSTRAINED`."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)


def parse_bytes(text: str) -> int:
    """Reads `80GB` (of 1000 each) or `80GiB` (of 1024)."""
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


# ------------------------------------------------------------------ what JSON and TOML hold


def parse_json(text: bytes) -> Any:
    """Reads JSON as its standard has it: UTF-8, each key once, no NaN."""
    try:
        found = json.loads(
            text.decode(),
            object_pairs_hook=_each_key_once,
            parse_constant=_no_number,
            parse_int=_integer,
        )
        if b"\\u" in text:  # half of a character, of which Python makes a string
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"no JSON: {error}.") from None
    return found


def _each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _integer(text: str) -> int:
    return _no_number(text) if text == "-0" else int(text)


def check_keys(raw: Any, known: Sequence[str], where: str) -> None:
    """Raises `FormatError` unless `raw` is an object of exactly these keys."""
    if not isinstance(raw, dict):
        raise FormatError(f"{where} is {type(raw).__name__}, not an object.")
    facts = [f"has an unknown key {key!r}.{did_you_mean(key, known)}" for key in raw.keys() - known]
    facts += [f"lacks {key!r}." for key in known if key not in raw]
    if facts:
        raise FormatError(f"{where} {' It '.join(sorted(facts))} Its keys are {', '.join(known)}.")


def typed(value: Any, kind: type, where: str, what: str = "") -> Any:
    """The value; raises `FormatError` if it is of another type, `what` it should be."""
    if type(value) is not kind:
        raise FormatError(
            f"{where} is {value!r} ({type(value).__name__}), not {what or kind.__name__}."
        )
    return value
