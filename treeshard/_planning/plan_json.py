"""Writes a plan as JSON, and reads it back. The JSON names no devices and holds no code."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.tree_util import tree_leaves

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import leaf_paths
from treeshard._core.specs import Adjustment, entries, is_logical, project
from treeshard._core.text import check_keys, parse_dtype, parse_names, parse_spec, typed
from treeshard._planning.decision import Decision, PlannedLeaf
from treeshard._planning.logical import PartitionAxis, ReadLogicalRules, read_logical_rules
from treeshard._planning.strategies import parse_strategy
from treeshard._planning.tactics import Tactic
from treeshard.errors import FormatError, ShardingRuleError, listed

# ------------------------------------------------------------------
# Writes rules as JSON, and reads them back. Only the names of functions are stored.

_RULE = ("pattern", "flags", "kind", "action")
_LOGICAL = ("kind", "axes")


class Untold:
    """An action that JSON cannot store: a function, or a tactic defined by the user."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def __call__(self, path: str, leaf: Any) -> NoReturn:
        raise FormatError(
            f"{path}: JSON stores only the name of {self.text}. Give the rules again."
        )


def check_told(rules: Iterable[tuple[Any, Any]]) -> None:
    """Raises if the action of a rule was not stored in JSON."""
    facts = [
        f"rule {index} {pattern!r} was {action!r}, which JSON cannot store."
        for index, (pattern, action) in enumerate(rules)
        if isinstance(action, Untold)
    ]
    if facts:
        message = listed(f"The actions of {len(facts)} rules were not stored:", facts)
        raise FormatError(f"{message} Make the plan again, with `plan(tree, rules, mesh)`.")


# ------------------------------------------------------------------ rules


def rule_to_text(pattern: Any, action: Any) -> dict[str, Any]:
    """A rule as a JSON object."""
    compiled = re.compile(pattern)
    flags = int(compiled.flags & ~re.UNICODE)
    kind = next((kind for kind, test in _KINDS.items() if test(action)), "function")
    text = action.text if isinstance(action, Tactic) else repr(action)
    if kind == "function" and not isinstance(action, Untold):
        text = getattr(action, "__qualname__", type(action).__qualname__)
    return dict(zip(_RULE, (compiled.pattern, flags, kind, text), strict=True))


# The kind of an action is the first whose test it passes, else "function".
_KINDS: dict[str, Callable[[Any], bool]] = {
    "replicate": lambda action: action is None,
    "spec": lambda action: isinstance(action, PartitionSpec),
    "names": is_logical,
    "tactic": lambda action: isinstance(action, Tactic),
}


def rule_from_text(raw: Any, where: str) -> tuple[Any, Any]:
    """The rule that `rule_to_text` wrote. Raises `FormatError` that starts with `where`."""
    check_keys(raw, _RULE, where)
    pattern, flags = typed(raw["pattern"], str, where), typed(raw["flags"], int, where)
    text = typed(raw["action"], str, f"{where}.action")
    try:
        compiled = re.compile(pattern, flags & ~re.DEBUG)  # re.DEBUG prints
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"{where}.pattern {pattern!r} does not compile: {error}.") from None
    try:
        action = _action(raw["kind"], text)
    except FormatError as error:
        raise FormatError(f"{where}.action: {error}") from None
    return (compiled if flags and compiled.flags != re.compile(pattern).flags else pattern), action


def _action(kind: Any, text: str) -> Any:
    match kind:
        case "replicate":
            return None
        case "spec":
            return parse_spec(text)
        case "names":
            return parse_names(text)
        case "tactic":
            try:
                return parse_strategy(text)
            except ShardingRuleError:  # a user's tactic, unknown here or not made of literals
                return Untold(text)
        case "function":
            return Untold(text)
    raise FormatError(f"the kind is {kind!r}, not one of {[*_KINDS, 'function']}.")


# ------------------------------------------------------------------ rules for logical names


def logical_to_text(rules: ReadLogicalRules | None) -> dict[str, Any] | None:
    """Rules for logical names as a JSON object, which writes their axes as specs of one dim."""
    if rules is None:
        return None
    fields = dataclasses.asdict(rules).items() if isinstance(rules, PartitionAxis) else rules
    kind = "PartitionAxis" if isinstance(rules, PartitionAxis) else "rules"
    return {"kind": kind, "axes": [[name, repr(PartitionSpec(axes))] for name, axes in fields]}


def logical_from_text(raw: Any) -> ReadLogicalRules | None:
    """The rules that `logical_to_text` wrote. Raises `FormatError`."""
    if raw is None:
        return None
    check_keys(raw, _LOGICAL, "logical")
    pairs: list[tuple[str, Any]] = []
    for row in typed(raw["axes"], list, "logical.axes"):
        if not isinstance(row, list) or [type(x) for x in row] != [str, str]:
            raise FormatError(f"logical.axes: {row!r} is not a pair of a name and a spec.")
        pairs.append((row[0], entries(parse_spec(row[1]))[0]))
    try:
        if raw["kind"] == "rules":
            return read_logical_rules(pairs)
        names = [field.name for field in dataclasses.fields(PartitionAxis)]
        check_keys(dict(pairs), names, "logical.axes")
        return PartitionAxis(**dict(pairs))
    except ShardingRuleError as error:
        raise FormatError(f"logical: {error}") from None


VERSION = 1

_PLAN = ("treeshard_plan", "mesh", "min_size", "mirrors", "logical", "rules", "leaves")
_AXIS = ("axis", "size", "type")
_LEAF = ("path", "shape", "dtype", "asked", "given", "rule", "adjustments")
_NOTE = ("kind", "why", "axes", "dim")


class PlanText(NamedTuple):
    """The parts of a plan that JSON can store.

    Attributes:
        mesh: The mesh; abstract if it was read from JSON.
        rules: The rules. Functions are read as `Untold`.
        min_size: Leaves with fewer elements were not sharded.
        leaves: The leaves.
        mirrors: Whether the plan was made by `Plan.follow`, so that rules did not decide it.
        logical: The rules for logical names that were in force.
    """

    mesh: AnyMesh
    rules: tuple[tuple[Any, Any], ...]
    min_size: int
    leaves: tuple[PlannedLeaf, ...]
    mirrors: bool
    logical: ReadLogicalRules | None


# ------------------------------------------------------------------ writing


def to_text(plan: PlanText) -> str:
    """Writes a plan as JSON, one line per leaf."""
    types = {kind: kind.name.lower() for kind in AxisType}
    axes = zip(axis_sizes(plan.mesh).items(), plan.mesh.axis_types, strict=True)
    head = {
        "treeshard_plan": VERSION,
        "mesh": [dict(zip(_AXIS, (*axis, types[kind]), strict=True)) for axis, kind in axes],
        "min_size": plan.min_size,
        "mirrors": plan.mirrors,
        "logical": logical_to_text(plan.logical),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rules = [json.dumps(rule_to_text(*rule)) for rule in plan.rules]
    leaves = [json.dumps(_leaf_out(leaf)) for leaf in plan.leaves]
    for name, rows in (("rules", rules), ("leaves", leaves)):
        lines.append(f'"{name}": [\n  ' + ",\n  ".join(rows) + "\n]" if rows else f'"{name}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _leaf_out(leaf: PlannedLeaf) -> dict[str, Any]:
    asked = None if leaf.asked is None else repr(leaf.asked)
    notes = [note._asdict() for note in leaf.adjustments]
    row = (leaf.path, leaf.shape, str(leaf.dtype), asked, repr(leaf.given), leaf.rule, notes)
    return dict(zip(_LEAF, row, strict=True))


# ------------------------------------------------------------------ reading


def from_text(text: str) -> PlanText:
    """Reads what `to_text` wrote. Raises `FormatError`, which says where the text is wrong."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"The plan is not JSON: {error}.") from None
    if not isinstance(raw, dict) or "treeshard_plan" not in raw:
        raise FormatError(
            "The JSON is not a plan: it has no key 'treeshard_plan'. Use what `Plan.to_json` wrote."
        )
    if raw["treeshard_plan"] != VERSION:
        raise FormatError(
            f"The plan has version {raw['treeshard_plan']!r}, and this treeshard reads version"
            f" {VERSION}. Make the plan again, or read it with the treeshard that wrote it."
        )
    check_keys(raw, _PLAN, "the plan")
    mesh = _mesh(raw["mesh"])
    rules = tuple(rule_from_text(rule, f"rules[{i}]") for i, rule in enumerate(_rows(raw, "rules")))
    reader = _LeafReader(mesh, rules)
    leaves = tuple(reader.leaf(x, f"leaves[{i}]") for i, x in enumerate(_rows(raw, "leaves")))
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise FormatError("leaves: two have the same path. Paths must be unique.")
    min_size = typed(raw["min_size"], int, "min_size")
    mirrors, logical = typed(raw["mirrors"], bool, "mirrors"), logical_from_text(raw["logical"])
    return PlanText(mesh, rules, min_size, leaves, mirrors, logical)


def _rows(raw: Mapping[str, Any], key: str) -> list[Any]:
    return typed(raw[key], list, key)


def _mesh(raw: Any) -> AbstractMesh:
    types = {kind.name.lower(): kind for kind in AxisType}
    for i, axis in enumerate(typed(raw, list, "mesh")):
        check_keys(axis, _AXIS, f"mesh[{i}]")
        typed(axis["axis"], str, f"mesh[{i}].axis")
        if typed(axis["size"], int, f"mesh[{i}].size") < 1:
            raise FormatError(f"mesh[{i}].size is {axis['size']}. It must be positive.")
        if axis["type"] not in types:
            raise FormatError(f"mesh[{i}].type is {axis['type']!r}, not one of {list(types)}.")
    names = tuple(axis["axis"] for axis in raw)
    if len(set(names)) < len(names):
        raise FormatError(f"mesh: an axis appears twice: {', '.join(names)}.")
    kinds = tuple(types[axis["type"]] for axis in raw)
    return AbstractMesh(tuple(axis["size"] for axis in raw), names, axis_types=kinds)


class _LeafReader:
    """Reads leaves. Leaves with equal decisions share one `Decision` object, as in `plan`."""

    def __init__(self, mesh: AnyMesh, rules: Sequence[tuple[Any, Any]]):
        self.mesh, self.rules = mesh, rules
        self.decisions: dict[str, Decision] = {}
        self.dtypes: dict[str, Any] = {}

    def leaf(self, raw: Any, where: str) -> PlannedLeaf:
        check_keys(raw, _LEAF, where)
        path = typed(raw["path"], str, f"{where}.path")
        shape = tuple(typed(raw["shape"], list, f"{where}.shape"))
        if any(type(length) is not int or length < 0 for length in shape):
            raise FormatError(f"{where} ({path}): {shape} is not a shape.")
        key = repr([raw[name] for name in ("shape", *_LEAF[3:])])
        try:
            if raw["dtype"] not in self.dtypes:
                self.dtypes[raw["dtype"]] = parse_dtype(typed(raw["dtype"], str, "dtype"))
            if key not in self.decisions:
                self.decisions[key] = self._decision(raw, shape)
        except FormatError as error:
            raise FormatError(f"{where} ({path}): {error}") from None
        return PlannedLeaf(path, shape, self.dtypes[raw["dtype"]], self.decisions[key])

    def _decision(self, raw: Mapping[str, Any], shape: tuple[int, ...]) -> Decision:
        asked = None if raw["asked"] is None else parse_spec(typed(raw["asked"], str, "asked"))
        given = parse_spec(typed(raw["given"], str, "given"))
        if adjustments := project(given, self.mesh, shape)[1]:
            raise FormatError(f"given is {given}: {adjustments[0].why}")
        rule, pattern = raw["rule"], None
        if rule is not None:
            if typed(rule, int, "rule") not in range(len(self.rules)):
                raise FormatError(f"rule is {rule}, but there are {len(self.rules)} rules.")
            pattern = re.compile(self.rules[int(rule)][0]).pattern
        notes = tuple(map(_note, typed(raw["adjustments"], list, "adjustments")))
        return Decision(asked, given, rule, pattern, notes)


def _note(raw: Any) -> Adjustment:
    check_keys(raw, _NOTE, "an adjustment")
    kind, why = typed(raw["kind"], str, "kind"), typed(raw["why"], str, "why")
    axes = tuple(typed(axis, str, "axes") for axis in typed(raw["axes"], list, "axes"))
    dim = None if raw["dim"] is None else typed(raw["dim"], int, "dim")
    return Adjustment(kind, why, axes, dim)


def laid_out(
    leaves: Iterable[PlannedLeaf], like: Any
) -> tuple[tuple[PlannedLeaf, ...], dict[int, Any]]:
    """The planned leaves in the order of the arrays of `like`, and its other leaves by index.

    Raises `FormatError` unless the arrays of `like` are those of the plan.
    """
    like_leaves = tree_leaves(like)
    paths = leaf_paths(like)
    arrays = {path: x for path, x in zip(paths, like_leaves, strict=True) if has_shape(x)}
    planned = {leaf.path: leaf for leaf in leaves}
    facts: list[str] = []
    if len(arrays) < sum(map(has_shape, like_leaves)):
        raise FormatError("`like` has arrays that share a path. Rename a key.")
    for path in dict.fromkeys((*planned, *arrays)):
        in_plan, in_like = _array(planned.get(path)), _array(arrays.get(path))
        if in_plan != in_like:
            facts.append(f"{path}: {in_plan} in the plan, {in_like} in `like`.")
    if facts:
        raise FormatError(listed(f"{len(facts)} leaves of `like` differ from the plan:", facts))
    others = {index: x for index, x in enumerate(like_leaves) if not has_shape(x)}
    return tuple(planned[path] for path in arrays), others


def _array(x: Any) -> str:
    return "missing" if x is None else array_text(x)
