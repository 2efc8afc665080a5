"""Writes rules as JSON, and reads them back. Only the names of functions are stored."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from jax.sharding import PartitionSpec

from treeshard._errors import FormatError, ShardingRuleError, listed
from treeshard._literals import check_keys, parse_names, parse_spec, typed
from treeshard._logical import ReadLogicalRules, read_logical_rules
from treeshard._partition_axis import PartitionAxis
from treeshard._specs import entries, is_logical
from treeshard._strategies import parse_strategy
from treeshard._tactics import Tactic

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
