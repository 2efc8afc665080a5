"""`match_partition_rules`: specs for a tree from a list of rules, and its errors.

One error lists all leaves. In other projects, the functions of this name raise for the first leaf,
and fixing a list of rules takes a run per mistake.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

from jax.sharding import PartitionSpec

from treeshard._core.arguments import check_tree, describe_argument, takes
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh, describe_mesh
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import SpecTree
from treeshard._core.specs import MISFITS, is_logical
from treeshard._planning.matching import WARNED, ReadRules, Row, decide
from treeshard._planning.tactics import Tactic
from treeshard.errors import MeshError, ShardingRuleError, listed, misfit_error, warn

Rules = Sequence[Any]  # of (pattern, action) pairs, checked by `read_rules`

_ACTIONS = (
    "An action is a PartitionSpec, a tuple of logical names, None to replicate, a tactic such as"
    " fsdp('fsdp'), or a function (path, leaf) -> PartitionSpec."
)


def match_partition_rules(
    rules: Rules,
    tree: PyTree,
    mesh: MeshLike | None = None,
    *,
    min_size: SupportsIndex | None = None,
    strict: bool = True,
) -> SpecTree:
    """Returns a spec for every leaf of a tree, from the first rule that matches the leaf's path.

    Examples:
        >>> params = {"mlp": {"weight": jax.numpy.zeros((256, 64)), "bias": jax.numpy.zeros(64)}}
        >>> match_partition_rules([("bias", None), (".*", P("fsdp"))], params)
        {'mlp': {'bias': P(), 'weight': P('fsdp',)}}

    Paths are as in `leaf_paths`. A pattern may match anywhere in a path (`re.search`). One list of
    rules therefore shards parameters and their copies in optimizer state. A pattern that starts
    with `^` matches parameters only; `Plan.follow` gives copies the specs of their parameters.

    Scalars and leaves without a shape get `P()` without a rule. A spec is trimmed to the rank of
    each leaf: `P("fsdp", "tensor")` gives a vector `P("fsdp")`. The function reads shapes only.

    Args:
        rules: Pairs `(pattern, action)`. An action is a `PartitionSpec`; a tuple of logical
            names, resolved by the rules of `logical_axis_rules` (without axes that the mesh
            lacks); `None` to replicate; a tactic; or a function
            `(path, leaf) -> PartitionSpec`.
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree.
        mesh: The mesh to check the specs against, or its axes as text. Without it, specs are not
            checked, and tactics use the current mesh.
        min_size: Leaves with fewer elements are replicated, unless a tactic has its own
            `min_size`. By default `MIN_SHARDING_SIZE` from the environment, else 16384.
        strict: Whether to raise if a leaf is unmatched or a spec does not fit. Otherwise unmatched
            leaves are replicated, and axes that do not fit are dropped.

    Returns:
        A tree of `PartitionSpec`s with the structure of `tree`.

    Raises:
        ShardingRuleError: If a rule is malformed, logical names do not resolve, or a
            function does not return a spec. If `strict`, also if leaves are unmatched or
            their specs do not fit. The message lists all leaves. The error is also an
            `UnknownAxisError` if rules use an axis that the mesh lacks.
        ArgumentError: If the tree is a class, a function or another opaque object.
        MeshError: If `mesh` is not a mesh.
        NoMeshError: If the rules contain tactics, and there is no mesh.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Warns:
        ShardingWarning: If a spec loses a mesh axis because it has more entries than the leaf has
            dims, or if `min_size` replicates a leaf whose action is a spec. One warning lists all
            leaves. Tactics and functions replicate small leaves silently.

    Source:
        The function of this name in EasyLM and EasyDeL.
    """
    call = "match_partition_rules(rules, tree)"
    check_order(rules, tree, "match_partition_rules", call)
    flat = check_tree(tree, "match_partition_rules", call)
    if isinstance(mesh, int):  # eformer's third argument
        raise MeshError(
            f"match_partition_rules: the mesh is the int {mesh}. If it is the smallest size of a"
            f" leaf that is sharded, write `match_partition_rules(rules, tree, min_size={mesh})`."
        )
    mesh = as_mesh(mesh)
    # Decisions record mistakes, and one error then lists all of them.
    decided = decide(read_rules(rules), tree, flat, mesh, min_size)
    rows = decided.adjusted_rows()
    if strict and (error := rules_error(rows, mesh)):
        raise error
    warn_of_moves(rows, WARNED)
    return decided.split.treedef.unflatten(decided.specs_of_leaves())


# ------------------------------------------------------------------ strictness


# The kinds of adjustments that `Plan.check` raises for.
ERRORS = MISFITS | {"unmatched"}


def rules_error(rows: Iterable[Row], mesh: AnyMesh | None) -> ShardingRuleError | None:
    """One error for all leaves that do not follow the rules, or `None`."""
    rows = list(rows)
    facts, kinds = _facts_and_kinds(rows, ERRORS)
    if not facts:
        return None
    by_specs = all(decision.by_spec for *_, decision in rows)
    where = f"The mesh has {describe_mesh(mesh)}." if mesh is not None else "No mesh was given."
    what = "fit their specs" if by_specs else "follow the rules"
    message = listed(f"{len(facts)} leaves do not {what}. {where}", facts)
    if len(facts) == 1 and "axis-not-in-mesh" not in kinds:  # it names the axes of the mesh
        message = f"{message} {where}"
    if "unmatched" in kinds:
        message += '\nTo replicate leaves that no other rule matches, add a last rule (".*", None).'
    return misfit_error(kinds, ShardingRuleError)(message)


def warn_of_moves(rows: Iterable[Row], kinds: Iterable[str]) -> None:
    """Warns once about all leaves with adjustments of these kinds, by `describe_moves`."""
    if message := describe_moves(rows, kinds):
        warn(message)


def logs_moves() -> bool:
    """Whether `LOG_SHARDING_MOVE` is on in the environment, by the words that EasyDeL accepts."""
    return os.environ.get("LOG_SHARDING_MOVE", "").strip().lower() in ("true", "yes", "1", "on")


def describe_moves(rows: Iterable[Row], kinds: Iterable[str]) -> str | None:
    """One message about all leaves with adjustments of these kinds; `None` if there are none.

    If `LOG_SHARDING_MOVE` is on in the environment, the message also lists trimmed specs and leaves
    that are replicated for their size.
    """
    shown = frozenset(kinds)
    if logs_moves():
        shown |= {*MISFITS, *WARNED, "too-small"}
    facts, found = _facts_and_kinds(rows, shown)
    if not facts:
        return None
    message = listed(f"{len(facts)} leaves are not sharded as their rules say:", facts)
    fixes = [fix for kind, fix in WARNED.items() if kind in found]
    return "\n".join([message, *fixes])


def _facts_and_kinds(
    rows: Iterable[Row], kinds: frozenset[str]
) -> tuple[list[str], frozenset[str]]:
    """A line for each leaf with adjustments of these kinds, and the kinds that occur."""
    facts: list[str] = []
    found: set[str] = set()
    for path, shape, decision in rows:
        notes = [note for note in decision.adjustments if note.kind in kinds]
        if not notes:
            continue
        found.update(note.kind for note in notes)
        why = " ".join(note.why for note in notes)
        if decision.rule is not None:
            by = f"{decision.requested} by rule {decision.rule}, {decision.pattern!r}"
            why = f"{by}: {why}"
        elif decision.by_spec:
            why = f"{decision.requested}: {why}"
        facts.append(f"{path}: shape {shape}, {why}")
    return facts, frozenset(found)


# ------------------------------------------------------------------ actions


def kind_of(action: Any) -> str:
    """`"replicate"`, `"spec"`, `"names"`, `"tactic"` or `"function"`."""
    if action is None:
        return "replicate"
    if isinstance(action, PartitionSpec):
        return "spec"
    if isinstance(action, Tactic):
        return "tactic"
    return "names" if is_logical(action) else "function"


# ------------------------------------------------------------------ reading rules


def check_action(action: Any) -> Any:
    """Returns an action. Raises `ShardingRuleError` if it is not an action of a rule."""
    is_spec = action is None or isinstance(action, PartitionSpec | Tactic)
    if is_spec or is_logical(action) or (callable(action) and takes(action, 2)):
        return action
    raise ShardingRuleError(f"the action is {action!r} ({type(action).__name__}). {_ACTIONS}")


def check_order(rules: Any, other: Any, where: str, call: str) -> None:
    """Raises `ShardingRuleError` if the rules are in the position of another argument."""
    if is_list_of_rules(other) and not is_list_of_rules(rules):
        raise ShardingRuleError(
            f"{where}: the arguments are in the wrong order: the rules are"
            f" {describe_argument(rules)}, and the list of rules is elsewhere. Call `{call}`."
        )


def _is_pattern(x: Any) -> bool:
    return isinstance(x, str | bytes | re.Pattern)


def is_list_of_rules(x: Any) -> bool:
    """Whether each item of a list or tuple is a pair that begins with a pattern."""
    if not isinstance(x, list | tuple) or not x:
        return False
    pairs = [rule for rule in x if isinstance(rule, tuple | list) and len(rule) == 2]
    return len(pairs) == len(x) and all(_is_pattern(rule[0]) for rule in pairs)


def read_rules(rules: Any, read_action: Callable[[Any], Any] = check_action) -> ReadRules:
    """Compiles the patterns of rules, and reads their actions.

    Raises `ShardingRuleError` listing all bad rules.
    """
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise ShardingRuleError(
            f"rules are {type(rules).__name__}. Give a list of (pattern, action) pairs, such as"
            ' [("norm|bias", None), (".*", P("fsdp"))].'
        )
    read: ReadRules = []
    bad: list[str] = []
    # All bad rules are reported at once.
    for index, rule in enumerate(rules):
        try:
            read.append(_read_rule(rule, read_action))
        except ShardingRuleError as error:
            bad.append(f"rule {index}{error}")
    if bad:
        raise ShardingRuleError(listed(f"{len(bad)} rules are malformed:", bad))
    return read


def _is_window(pattern: Any) -> bool:
    """Whether it is a tuple of patterns for neighbouring keys: `("attention", "kernel")`."""
    return (
        isinstance(pattern, tuple | list)
        and bool(pattern)
        and all(isinstance(key, str) for key in pattern)
    )


def _group_alternatives(pattern: str) -> str:
    is_group = re.fullmatch(r"\([^()]*\)", pattern)
    return f"({pattern})" if "|" in pattern and not is_group else pattern


def _read_rule(rule: Any, read_action: Callable[[Any], Any]) -> tuple[re.Pattern[str], Any]:
    """Reads one rule. Errors continue a line that starts with the number of the rule."""
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        raise ShardingRuleError(
            f" is not a pair: {rule!r}. A rule is a pair (pattern, action), such as"
            ' ("norm|bias", None).'
        )
    pattern, action = rule
    if isinstance(action, str) and not _is_pattern(pattern):
        raise ShardingRuleError(
            f": the action {pattern!r} and the pattern {action!r} are swapped. The pattern comes"
            f" first: ({action!r}, {pattern!r})."
        )
    if _is_window(pattern):
        joined = "/".join(_group_alternatives(part) for part in pattern)
        raise ShardingRuleError(
            f": {pattern!r} has a pattern for each key, as rules of t5x have. Join them to one that"
            f' matches the path: "(^|/){joined}(/|$)".'
        )
    try:
        compiled = re.compile(pattern)
    # A large count, `a{9999999999}`, overflows, and deep nesting recurses.
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        advice = "To match a special character, put a backslash before it."
        if isinstance(pattern, str) and pattern.startswith("*"):
            regex = re.sub(r"\*+", ".*", pattern)
            advice = f"A pattern is a regular expression, not a glob: write {regex!r}."
        raise ShardingRuleError(
            f": the pattern {pattern!r} does not compile: {error}. {advice}"
        ) from None
    if not isinstance(compiled.pattern, str):
        raise ShardingRuleError(f": the pattern {pattern!r} is bytes. Paths are str.")
    try:
        return compiled, read_action(action)
    except ShardingRuleError as error:
        raise ShardingRuleError(f", {pattern!r}: {error}") from None
