"""Writes a plan as JSON, and reads what was decided back.

The JSON names no devices and holds no code. Rules are written as text, for people and for other
programs, and are not read back as rules: a function has no text, so a plan that was read could
apply some of its rules and not others.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.tree_util import tree_leaves

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import PyTree, leaf_paths, pair
from treeshard._core.specs import Adjustment, is_logical, project
from treeshard._core.text import parse_dtype, parse_spec
from treeshard._planning.logical import PartitionAxis, ReadLogicalRules
from treeshard._planning.matching import Decision, PlannedLeaf, Shape
from treeshard._planning.tactics import Tactic
from treeshard.errors import FormatError, TreeShardError, counted, listed

VERSION = 1
_MORE = {"memory", "unpadded"}  # what most leaves do not have
_OF_DECISION = {"asked", "given", "rule", "adjustments", "memory"}


class StoredPlan(NamedTuple):
    """The parts of a plan that JSON can store, as `Plan` has them."""

    mesh: AnyMesh
    rules: tuple[tuple[Any, Any], ...]  # actions are read as `StoredAction`s
    min_size: int
    leaves: tuple[PlannedLeaf, ...]
    mirrors: bool
    logical: ReadLogicalRules | dict[str, Any] | None  # a dict is what was read


# ------------------------------------------------------------------ writing


def to_json(plan: StoredPlan) -> str:
    """Writes a plan as JSON, one line per leaf."""
    mesh = zip(axis_sizes(plan.mesh).items(), plan.mesh.axis_types, strict=True)
    head = {
        "treeshard_plan": VERSION,
        "mesh": [{"axis": a, "size": n, "type": kind.name.lower()} for (a, n), kind in mesh],
        "min_size": plan.min_size,
        "mirrors": plan.mirrors,
        "logical": _logical_to_json(plan.logical),
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
        **{key: value for key in sorted(_MORE) if (value := getattr(leaf, key)) is not None},
    }


# {"pattern": "w", "flags": 0, "kind": "tactic", "action": "fsdp('fsdp')", "fsdp_axes": ["fsdp"]}
def _rule_to_json(pattern: Any, action: Any) -> dict[str, Any]:
    compiled = re.compile(pattern)
    kind = kind_of(action)
    text = repr(action)
    if kind == "function" and not isinstance(action, StoredAction):
        text = getattr(action, "__qualname__", type(action).__qualname__)
    flags = int(compiled.flags & ~re.UNICODE)
    rule: dict[str, Any] = {"pattern": compiled.pattern, "flags": flags}
    rule |= {"kind": kind, "action": text}
    if kind == "tactic":
        rule["fsdp_axes"] = sorted(action.fsdp_axes)
    return rule


def _logical_to_json(
    rules: ReadLogicalRules | dict[str, Any] | None,
) -> dict[str, Any] | None:
    """Rules for logical names; their axes are written as specs of one dim."""
    # {"kind": "rules", "axes": [["batch", "P(('data', 'fsdp'),)"], ["embed", "P(None,)"]]}
    if rules is None or isinstance(rules, dict):
        return rules
    fields = dataclasses.asdict(rules).items() if isinstance(rules, PartitionAxis) else rules
    kind = "PartitionAxis" if isinstance(rules, PartitionAxis) else "rules"
    return {"kind": kind, "axes": [[name, repr(PartitionSpec(axes))] for name, axes in fields]}


# ------------------------------------------------------------------ stored actions


@dataclasses.dataclass(frozen=True, repr=False)
class StoredAction:
    """The action of a rule, as JSON has it: what it was, to be shown and not to be applied.

    Attributes:
        kind: As `kind_of` says it.
        text: How the plan shows it.
        fsdp_axes: Those of a tactic.
    """

    kind: str
    text: str
    fsdp_axes: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return self.text


def kind_of(action: Any) -> str:
    """`"replicate"`, `"spec"`, `"names"`, `"tactic"` or `"function"`."""
    if isinstance(action, StoredAction):
        return action.kind
    return next((kind for kind, test in _KINDS.items() if test(action)), "function")


# The kind of an action is the first whose test it passes, else "function".
_KINDS: dict[str, Callable[[Any], bool]] = {
    "replicate": lambda action: action is None,
    "spec": lambda action: isinstance(action, PartitionSpec),
    "names": is_logical,
    "tactic": lambda action: isinstance(action, Tactic),
}


# ------------------------------------------------------------------ reading


def from_json(text: str) -> StoredPlan:
    """Reads what `to_json` wrote. Raises `FormatError`, which says where the text is wrong."""
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
    match raw:
        case {
            "mesh": list(axes),
            "min_size": int(min_size),
            "mirrors": bool(mirrors),
            "logical": dict() | None as logical,
            "rules": list(rules),
            "leaves": list(leaves),
        } if len(raw) == 7:
            mesh = _read("mesh", _read_mesh, axes)
            rules = tuple(_read(f"rules[{i}]", _read_rule, rule) for i, rule in enumerate(rules))
            read_leaf = _LeafReader(mesh, rules).leaf
            leaves = tuple(_read(f"leaves[{i}]", read_leaf, x) for i, x in enumerate(leaves))
        case _:
            raise FormatError(
                f"The plan has the keys {', '.join(raw)}. It must have treeshard_plan, mesh (a"
                " list), min_size (a number), mirrors (true or false), logical (an object or"
                " null), rules and leaves (lists)."
            )
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise FormatError("leaves: two have the same path. Paths must be unique.")
    return StoredPlan(mesh, rules, min_size, leaves, mirrors, logical)


# What reading a part of a plan may raise. Python's parser of patterns recurses at each bracket, and
# a large count, `a{9999999999}`, overflows.
_UNREADABLE = (
    TreeShardError,
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    RecursionError,
    re.error,
)


def _read(where: str, read: Callable[[Any], Any], raw: Any) -> Any:
    """`read(raw)`, with one error for everything that may be wrong in `raw`."""
    try:
        return read(raw)
    except _UNREADABLE as error:
        text = json.dumps(raw)
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        why = str(error).rstrip(".")
        raise FormatError(f"{where} cannot be read: {why}. It is {shown}") from None


def _read_mesh(raw: list[Any]) -> AbstractMesh:
    types = {kind.name.lower(): kind for kind in AxisType}
    axes: dict[str, tuple[int, AxisType]] = {}
    for axis in raw:
        match axis:
            case {"axis": str(name), "size": int(size), "type": str(kind)} if (
                size > 0 and kind in types and name not in axes
            ):
                axes[name] = size, types[kind]
            case _:
                raise FormatError(
                    "every axis has a unique name ('axis'), a positive 'size', and a 'type' that"
                    f" is one of {', '.join(types)}."
                )
    sizes, kinds = zip(*axes.values(), strict=True) if axes else ((), ())
    return AbstractMesh(sizes, tuple(axes), axis_types=kinds)


class _LeafReader:
    """Reads leaves. Leaves with equal decisions share one `Decision` object, as in `plan`."""

    def __init__(self, mesh: AnyMesh, rules: Sequence[tuple[Any, Any]]):
        self.mesh = mesh
        self.patterns = [re.compile(pattern).pattern for pattern, _ in rules]
        self.decisions: dict[str, Decision] = {}
        self.dtypes: dict[str, Any] = {}

    def leaf(self, raw: Any) -> PlannedLeaf:
        match raw:
            case {
                "path": str(path),
                "shape": list(lengths),
                "dtype": str(dtype),
                "asked": str() | None,
                "given": str(),
                "rule": int() | None,
                "adjustments": list(),
                **more,
            } if more.keys() <= _MORE and all(type(n) is int and n >= 0 for n in lengths):
                shape = tuple(lengths)
            case _:
                raise FormatError(
                    "a leaf has a path, a shape, a dtype, the specs 'asked' and 'given', a rule,"
                    " and adjustments."
                )
        if dtype not in self.dtypes:
            self.dtypes[dtype] = parse_dtype(dtype)
        decision = {key: value for key, value in raw.items() if key in _OF_DECISION}
        key = repr((lengths, decision))
        if key not in self.decisions:
            self.decisions[key] = self._decision(shape, **decision)
        unpadded = None if "unpadded" not in more else _read_unpadded(more["unpadded"], shape)
        return PlannedLeaf(path, shape, self.dtypes[dtype], self.decisions[key], unpadded)

    def _decision(
        self,
        shape: Shape,
        asked: str | None,
        given: str,
        rule: int | None,
        adjustments: list[Any],
        memory: str | None = None,
    ) -> Decision:
        spec = parse_spec(given)
        _, misfits = project(spec, self.mesh, shape)
        if misfits:
            raise FormatError(f"{spec} does not fit: {misfits[0].why}")
        if rule is not None and rule not in range(len(self.patterns)):
            raise FormatError(f"rule {rule} is none of {counted(len(self.patterns), 'rule')}.")
        pattern = None if rule is None else self.patterns[rule]
        requested = None if asked is None else parse_spec(asked)
        notes = tuple(map(_read_adjustment, adjustments))
        return Decision(requested, spec, rule, pattern, notes, memory)


def _read_unpadded(raw: Any, shape: Shape) -> Shape:
    unpadded = tuple(raw)
    pairs = zip(unpadded, shape, strict=True)  # raises for another rank
    # `True` is an int of Python, and a number of JSON is not.
    if all(type(n) is int and 0 < n <= padded for n, padded in pairs):
        return unpadded
    raise FormatError("'unpadded' is not a shape within 'shape'.")


def _read_adjustment(raw: Any) -> Adjustment:
    match raw:
        case {
            "kind": str(kind),
            "why": str(why),
            "axes": list(axes),
            "dim": int() | None as dim,
        }:
            return Adjustment(kind, why, tuple(map(str, axes)), dim)
    raise FormatError("an adjustment has a kind, a 'why', axes, and a dim or null.")


def _read_rule(raw: Any) -> tuple[Any, StoredAction]:
    match raw:
        case {
            "pattern": str(pattern),
            "flags": int(flags),
            "kind": str(kind),
            "action": str(text),
            **more,
        }:
            compiled = re.compile(pattern, flags & ~re.DEBUG)  # re.DEBUG prints
        case _:
            raise FormatError("a rule has a pattern, flags, a kind, and an action.")
    if kind not in (*_KINDS, "function"):
        raise FormatError(f"the kind is not one of {', '.join([*_KINDS, 'function'])}.")
    action = StoredAction(kind, text, frozenset(map(str, more.get("fsdp_axes", ()))))
    has_flags = flags and compiled.flags != re.compile(pattern).flags
    return (compiled if has_flags else pattern), action


def arrange(leaves: Iterable[PlannedLeaf], like: PyTree) -> tuple[PlannedLeaf, ...]:
    """The planned leaves in the order of the arrays of `like`.

    Raises `FormatError` unless the arrays of `like` are those of the plan.
    """
    like_leaves = zip(leaf_paths(like), tree_leaves(like), strict=True)
    arrays = [(path, x) for path, x in like_leaves if has_shape(x)]
    if len(dict(arrays)) < len(arrays):
        raise FormatError("`like` has arrays that share a path. Rename a key.")
    planned = {leaf.path: leaf for leaf in leaves}
    facts: list[str] = []
    for path, leaf, array in pair(planned.items(), arrays):
        if leaf is not None and array is not None and leaf.unpadded == tuple(array.shape):
            leaf = leaf._replace(shape=leaf.unpadded)  # `like` may have the true shapes
        in_plan, in_like = ("missing" if x is None else array_text(x) for x in (leaf, array))
        if in_plan != in_like:
            facts.append(f"{path}: {in_plan} in the plan, {in_like} in `like`.")
    if facts:
        raise FormatError(listed(f"{len(facts)} leaves of `like` differ from the plan:", facts))
    return tuple(planned[path] for path, _ in arrays)
