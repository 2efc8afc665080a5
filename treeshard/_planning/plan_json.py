"""Writes a plan as JSON, and reads what was decided back.

The JSON names no devices and holds no code. Rules are written as text, for people and for other
programs, and are not read back as rules: a function has no text, so a plan that was read could
apply some of its rules and not others.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from jax import ShapeDtypeStruct
from jax.sharding import AbstractMesh, AxisType
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import StaticSplit, array_text, has_shape
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import PyTree, leaf_paths, pair
from treeshard._core.specs import Adjustment, project
from treeshard._core.text import parse_dtype, parse_spec, typed
from treeshard._planning.matching import Decision, PlannedLeaf, Shape
from treeshard._planning.rules import StoredAction, kind_of
from treeshard.errors import FormatError, TreeShardError, counted, listed, short

if TYPE_CHECKING:
    from treeshard._planning.plan import Plan

VERSION = 1
_MORE = ("memory", "unpadded")  # what most leaves do not have


# ------------------------------------------------------------------ writing


def to_json(plan: "Plan") -> str:
    """Writes a plan as JSON, one line per leaf."""
    mesh = zip(axis_sizes(plan.mesh).items(), plan.mesh.axis_types, strict=True)
    head = {
        "treeshard_plan": VERSION,
        "mesh": [{"axis": a, "size": n, "type": kind.name.lower()} for (a, n), kind in mesh],
        "min_size": plan.min_size,
        "mirrors": plan._mirrors,
        **({} if plan.strict else {"strict": False}),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rules = [json.dumps(_rule_to_json(*rule)) for rule in plan.rules]
    leaves = [json.dumps(_leaf_to_json(leaf)) for leaf in plan.leaves]
    for name, rows in (("rules", rules), ("leaves", leaves)):
        lines.append(f'"{name}": [\n  ' + ",\n  ".join(rows) + "\n]" if rows else f'"{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


# {"path": "mlp/w", "shape": [512, 64], "dtype": "float32", "asked": "P('fsdp',)",
#  "given": "P('fsdp',)", "rule": 0, "adjustments": []}
def _leaf_to_json(leaf: PlannedLeaf) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": leaf.shape,
        "dtype": str(leaf.dtype),
        "asked": None if leaf.asked is None else repr(leaf.asked),
        "given": repr(leaf.given),
        "rule": leaf.rule,
        "adjustments": [note._asdict() for note in leaf.adjustments],
        **{key: value for key in _MORE if (value := getattr(leaf, key)) is not None},
    }


# {"pattern": "w", "flags": 0, "kind": "tactic", "action": "fsdp('fsdp')", "fsdp_axes": ["fsdp"]}
def _rule_to_json(pattern: Any, action: Any) -> dict[str, Any]:
    compiled = re.compile(pattern)
    kind = kind_of(action)
    text = repr(action)
    if kind == "function" and not isinstance(action, StoredAction):
        text = getattr(action, "__qualname__", type(action).__qualname__)
    flags = int(compiled.flags & ~re.UNICODE)
    rule = {"pattern": compiled.pattern, "flags": flags, "kind": kind, "action": text}
    return rule | ({"fsdp_axes": sorted(action.fsdp_axes)} if kind == "tactic" else {})


# ------------------------------------------------------------------ reading

# What reading a part of a plan may raise. Python's parser of patterns recurses at each bracket, and
# a large count, `a{9999999999}`, overflows.
_UNREADABLE = (
    TreeShardError,
    AttributeError,
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    RecursionError,
    re.error,
)


def from_json(plan_of: Callable[..., "Plan"], text: str, like: PyTree | None) -> "Plan":
    """Reads what `to_json` wrote, as `Plan.from_json` says. `plan_of` is `Plan`."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"The plan is not JSON: {error}.") from None
    if not isinstance(raw, dict) or raw.get("treeshard_plan") != VERSION:
        raise FormatError(
            f"The JSON is not a plan of version {VERSION}. Use what `Plan.to_json` of this"
            " treeshard wrote."
        )
    axes = _read_each(raw, "mesh", _read_axis)
    names, sizes, types = zip(*axes, strict=True) if axes else ((), (), ())
    if len(set(names)) < len(names):
        raise FormatError("mesh: two axes have the same name.")
    mesh = AbstractMesh(sizes, names, axis_types=types)
    rules = _read_each(raw, "rules", _read_rule)
    patterns = [re.compile(pattern).pattern for pattern, _ in rules]
    read_leaf = partial(_read_leaf, mesh, patterns, {})
    leaves = {leaf.path: leaf for leaf in _read_each(raw, "leaves", read_leaf)}
    if len(leaves) < len(raw["leaves"]):
        raise FormatError("leaves: two have the same path. Paths must be unique.")
    min_size = typed(raw.get("min_size"), int, "min_size", "a number of elements")
    mirrors = typed(raw.get("mirrors"), bool, "mirrors", "true or false")
    if like is None:
        like = {path: ShapeDtypeStruct(x.shape, x.dtype) for path, x in leaves.items()}
        paths = sorted(leaves)
    else:
        paths = _paths_like(leaves, like)
    split = StaticSplit(*tree_flatten(like), has_shape)
    in_order = tuple(leaves[path] for path in paths)
    strict = typed(raw.get("strict", True), bool, "strict", "true or false")
    return plan_of(mesh, tuple(rules), min_size, in_order, split, strict, _mirrors=mirrors)


def _read_each(raw: dict[str, Any], key: str, read: Callable[[Any], Any]) -> list[Any]:
    """Reads each row of a list, with one error for everything that may be wrong in it."""
    parts: list[Any] = []
    for index, row in enumerate(typed(raw.get(key), list, key, "a list")):
        try:
            parts.append(read(row))
        except _UNREADABLE as error:
            why = repr(error) if type(error) is KeyError else str(error)
            row_text = short(json.dumps(row))
            raise FormatError(
                f"{key}[{index}] cannot be read: {why.rstrip('.')}. It is {row_text}"
            ) from None
    return parts


def _read_axis(raw: Any) -> tuple[str, int, AxisType]:
    name = typed(raw["axis"], str, "axis", "a name")
    size = typed(raw["size"], int, "size", "a number")
    if size < 1:
        raise FormatError(f"the size is {size}, not a positive number.")
    return name, size, AxisType[raw["type"].capitalize()]


def _read_rule(raw: Any) -> tuple[Any, StoredAction]:
    compiled = re.compile(raw["pattern"], raw["flags"] & ~re.DEBUG)  # re.DEBUG prints
    axes = frozenset(map(str, raw.get("fsdp_axes", ())))
    has_flags = compiled.flags != re.compile(raw["pattern"]).flags
    pattern = compiled if has_flags else compiled.pattern
    return pattern, StoredAction(str(raw["kind"]), str(raw["action"]), axes)


_parse_spec = lru_cache(4096)(parse_spec)  # most leaves share a few


def _read_leaf(
    mesh: AnyMesh, patterns: list[str], known: dict[Decision, Decision], raw: Any
) -> PlannedLeaf:
    """Reads a leaf. Equal decisions are one object, which `known` has, as in `plan`."""
    path = typed(raw["path"], str, "path", "text")
    shape = _read_shape(raw["shape"])
    unpadded = None if "unpadded" not in raw else _read_shape(raw["unpadded"])
    if unpadded is not None:
        pairs = zip(unpadded, shape, strict=True)  # raises for another rank
        if not all(0 < length <= padded for length, padded in pairs):
            raise FormatError("'unpadded' is not a shape within 'shape'.")
    asked = None if raw["asked"] is None else _parse_spec(raw["asked"])
    given = _parse_spec(raw["given"])
    _, misfits = project(given, mesh, shape)
    if misfits:
        raise FormatError(f"{given} does not fit: {misfits[0].why}")
    rule = raw["rule"]
    if rule is not None and rule not in range(len(patterns)):
        raise FormatError(f"rule {rule} is none of {counted(len(patterns), 'rule')}.")
    pattern = None if rule is None else patterns[rule]
    notes: list[Adjustment] = []
    for note in raw["adjustments"]:
        axes = tuple(map(str, note["axes"]))
        notes.append(Adjustment(str(note["kind"]), str(note["why"]), axes, note["dim"]))
    decision = Decision(asked, given, rule, pattern, tuple(notes), raw.get("memory"))
    decision = known.setdefault(decision, decision)
    return PlannedLeaf(path, shape, parse_dtype(raw["dtype"]), decision, unpadded)


def _read_shape(raw: Any) -> Shape:
    # `True` is an int of Python, and not a number of JSON.
    if not isinstance(raw, list) or not all(type(n) is int and n >= 0 for n in raw):
        raise FormatError(f"{raw} is not a shape.")
    return tuple(raw)


def _paths_like(leaves: Mapping[str, PlannedLeaf], like: PyTree) -> list[str]:
    """The paths of the arrays of `like`. Raises `FormatError` unless they are those of the plan."""
    like_leaves = zip(leaf_paths(like), tree_leaves(like), strict=True)
    arrays = [(path, x) for path, x in like_leaves if has_shape(x)]
    if len(dict(arrays)) < len(arrays):
        raise FormatError("`like` has arrays that share a path. Rename a key.")
    facts: list[str] = []
    for path, leaf, array in pair(leaves.items(), arrays):
        if leaf is not None and array is not None and leaf.unpadded == tuple(array.shape):
            leaf = leaf._replace(shape=leaf.unpadded)  # `like` may have the true shapes
        in_plan, in_like = ("missing" if x is None else array_text(x) for x in (leaf, array))
        if in_plan != in_like:
            facts.append(f"{path}: {in_plan} in the plan, {in_like} in `like`.")
    if facts:
        raise FormatError(listed(f"{len(facts)} leaves of `like` differ from the plan:", facts))
    return [path for path, _ in arrays]
