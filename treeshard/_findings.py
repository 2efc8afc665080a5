"""The findings of a plan: errors and warnings about its leaves and its rules."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeshard._by_names import ByNames
from treeshard._decision import PlannedLeaf
from treeshard._errors import did_you_mean
from treeshard._leaf_findings import Finding, collisions, left_whole, misfits, scan_dims
from treeshard._logical import ReadLogicalRules, names_without_rule, read_logical_rules
from treeshard._mesh import AnyMesh
from treeshard._patterns import read_pattern, zeroed
from treeshard._specs import is_logical
from treeshard._tactics import Tactic

# The time limit for finding the leaves that unused rules match.
SECONDS = 2.0
# The number of paths searched for one that a misspelt pattern may mean.
MOST_NAMES = 1000

_NUMBERS = re.compile("[0-9]+")


def find(
    leaves: Sequence[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    mesh: AnyMesh,
    min_size: int,
    logical_rules: ReadLogicalRules | None,
    key_paths: Callable[[str], Sequence[str]],
    boxes: Mapping[str, Any],
) -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste.

    Without `rules`, only the leaves are checked. `key_paths` returns the key paths of all
    leaves that share a path; `boxes` has the Flax boxes of leaves by path.
    """
    return (
        *misfits(leaves),
        *collisions(leaves, key_paths),
        *_unused_rules(leaves, rules),
        *left_whole(leaves, mesh, min_size),
        *scan_dims(leaves, mesh),
        *(_names_without_rule(leaves, rules, logical_rules, boxes) if rules else ()),
    )


# ------------------------------------------------------------------ rules


def _unused_rules(
    leaves: Sequence[PlannedLeaf], rules: Sequence[tuple[Any, Any]]
) -> Iterator[Finding]:
    """Rules that decided no leaf: dead if they match none, else shadowed by earlier ones.

    A last rule that matches every leaf is a fallback, and not reported.
    """
    used = {leaf.rule for leaf in leaves}
    unused = [index for index in range(len(rules)) if index not in used]
    takers = {leaf.path: leaf.rule for leaf in leaves} if unused else {}
    arrays = {leaf.path for leaf in leaves if leaf.shape}
    until = time.monotonic() + SECONDS
    for index in unused:
        pattern = re.compile(rules[index][0])
        matched = _matched(pattern, takers, until)
        if matched is None:
            fact = (
                f"rule {index} {pattern.pattern!r} decides no leaf. The search for leaves that it"
                f" matches was stopped after {SECONDS:g} s."
            )
            yield Finding("dead-rule", "warning", fact, "Remove or simplify it.", rule=index)
            continue
        shadows = [path for path in matched if path in arrays]
        if not shadows:
            # Looking for a similar name takes time too.
            names = takers if time.monotonic() < until else ()
            yield _dead(index, pattern.pattern, matched, names)
        elif index < len(rules) - 1 or len(matched) < len(takers):
            yield _shadowed(index, rules, shadows, {takers[path] for path in shadows})


def _matched(pattern: re.Pattern[str], paths: Iterable[str], until: float) -> list[str] | None:
    """The paths that a pattern matches; `None` if time runs out.

    A single search is not bounded.
    """
    by_digits = read_pattern(pattern).tells_digits_apart
    matches: dict[str, bool] = {}
    matched: list[str] = []
    for path in paths:
        key = path if by_digits else zeroed(path)
        if key not in matches:
            if time.monotonic() > until:
                return None
            matches[key] = pattern.search(path) is not None
        if matches[key]:
            matched.append(path)
    return matched


def _dead(index: int, pattern: str, scalars: Sequence[str], paths: Iterable[str]) -> Finding:
    if scalars:
        fact = f"rule {index} {pattern!r} matches only scalars, which need no rule."
        return Finding("dead-rule", "warning", fact, "Remove it.", tuple(scalars), index)
    word = pattern.strip("^$/")
    count = word.count("/") + 1
    kinds = {_NUMBERS.sub("0", path) for path in paths}
    keys = [kind.split("/") for kind in sorted(kinds)[:MOST_NAMES]]
    known = {"/".join(k[i : i + count]) for k in keys for i in range(len(k) - count + 1)}
    near = did_you_mean(word, known)
    fact = f"rule {index} {pattern!r} matches no leaf.{near}"
    fix = "Correct the pattern, or remove the rule."
    return Finding("dead-rule", "warning", fact, fix, rule=index)


def _shadowed(
    index: int, rules: Sequence[tuple[Any, Any]], paths: Sequence[str], takers: set[Any]
) -> Finding:
    by = sorted(taker for taker in takers if taker is not None)
    names = " and ".join(f"rule {taker} {_text(rules[taker][0])!r}" for taker in by[:3])
    names += f" and {len(by) - 3} more" * (len(by) > 3)
    fact = (
        f"rule {index} {_text(rules[index][0])!r} decides no leaf: earlier rules take all"
        f" {len(paths)} leaves that it matches ({names})."
    )
    fix = f"Move it above rule {by[0]}, or remove it."
    return Finding("shadowed-rule", "warning", fact, fix, tuple(paths), index)


def _text(pattern: Any) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


# ------------------------------------------------------------------ logical names


def _names_without_rule(
    leaves: Iterable[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    logical_rules: ReadLogicalRules | None,
    boxes: Mapping[str, Any],
) -> Iterator[Finding]:
    """Logical names without a logical rule, whose dims are therefore not sharded."""
    paths: dict[Any, list[str]] = defaultdict(list)
    known: set[str] = set()
    for leaf in leaves:
        if leaf.rule is not None:
            action, box = rules[leaf.rule][1], boxes.get(leaf.path)
            for names, by in _named(action, box, logical_rules):
                if isinstance(by, tuple):
                    known.update(name for name, _ in by)
                for name in names_without_rule(names, by):
                    paths[leaf.rule, name].append(leaf.path)
    for (index, name), members in paths.items():
        fact = (
            f"rule {index} {_text(rules[index][0])!r} uses the logical name {name!r}, which has no"
            f" logical rule, so its dim is not sharded.{did_you_mean(name, known)}"
        )
        fix = f"Add ({name!r}, None) to the logical rules if this is intended."
        yield Finding("name-without-rule", "warning", fact, fix, tuple(members), index)


def _named(
    action: Any, box: Any, in_force: ReadLogicalRules | None
) -> Iterator[tuple[Sequence[Any], ReadLogicalRules]]:
    """The logical names that decide a leaf, and the rules for them."""
    if is_logical(action) and in_force is not None:
        yield action, in_force
    # A box without an attribute `rules` names mesh axes, not logical names.
    elif isinstance(action, Tactic) and hasattr(box, "rules"):
        for step in action.steps:
            if isinstance(step, ByNames):
                own = step.rules if step.rules is not None else box.rules
                by = in_force if own is None else read_logical_rules(own)
                if by is not None:
                    yield box.names, by
