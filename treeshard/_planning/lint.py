"""The checks of a plan: errors and warnings about its leaves and its rules.

They read the decisions and decide nothing, so a plan can be made of rules with mistakes: all of
these are told at once, with what each costs, and not one per attempt as JAX raises them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import axes_of, entries, is_logical, part_count
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.findings import Finding, finding, finding_of, rule_text
from treeshard._planning.lint_state import (
    axis_orders,
    matrix_optimizers,
    padded_state,
    unsharded_state,
)
from treeshard._planning.logical import ReadLogicalRules, names_without_rule, read_logical_rules
from treeshard._planning.matching import SMALL, PlannedLeaf, Shape
from treeshard._planning.padding import padded_leaf
from treeshard._planning.tactics import ByNames, Tactic
from treeshard.errors import did_you_mean

# Replicated leaves are reported if they waste at least this part of a device's bytes.
LARGE_PART = 0.01
# The adjustments of leaves that belong to another leaf.
RELATED = frozenset({"no-base", "cuts-block"})
# The number of paths searched for one that a misspelt pattern may mean.
MOST_NAMES = 1000


def find(
    leaves: Sequence[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    mesh: AnyMesh,
    min_size: int,
    logical_rules: ReadLogicalRules | None,
    shared: Mapping[str, Sequence[str]],
    boxes: Mapping[str, Any],
    same_arrays: Sequence[tuple[str, str]],
) -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste.

    Without `rules`, only the leaves are checked. `shared` has the key paths of leaves that
    share a path, `boxes` the Flax boxes of leaves, by path, and `same_arrays` the paths of
    leaves that were one object, the later path first.
    """
    return (
        *_misfits(leaves, mesh),
        *collisions(shared),
        *_unused_rules(leaves, rules),
        *_unused_specs(leaves, min_size),
        *_related(leaves),
        *_same_arrays(leaves, same_arrays, mesh),
        *_left_whole(leaves, mesh, min_size),
        *_scan_dims(leaves, mesh),
        *axis_orders(leaves, mesh),
        *unsharded_state(leaves, rules, mesh),
        *matrix_optimizers(leaves, mesh),
        *padded_state(leaves),
        *(_names_without_rule(leaves, rules, logical_rules, boxes) if rules else ()),
    )


# ------------------------------------------------------------------ errors


def _misfits(leaves: Iterable[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """The errors that `match_partition_rules` raises for, one finding per kind of error."""
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for members in _kinds(leaves):
        leaf = members[0]
        for note in leaf.decision.errors:
            shape = leaf.shape if note.kind == "unmatched" else None
            alike[note, leaf.rule, shape] += members
    for (note, rule, shape), members in alike.items():
        paths = [leaf.path for leaf in members]
        pattern = members[0].pattern
        if note.kind == "unmatched":
            key = re.escape(paths[0].rpartition("/")[2])
            yield finding("unmatched", paths, shape=shape, key=key)
        elif note.kind == "indivisible":
            how, saved = _padding(members, mesh)
            yield finding_of(note, rule, pattern, paths, how, saved)
        else:
            yield finding_of(note, rule, pattern, paths)


def _kinds(leaves: Iterable[PlannedLeaf]) -> list[list[PlannedLeaf]]:
    """Groups leaves by shape, dtype and decision. Most models have few groups."""
    kinds: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf in leaves:
        kinds[leaf.shape, leaf.dtype, id(leaf.decision)].append(leaf)
    return list(kinds.values())


def collisions(shared: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Paths that several leaves share, so that rules and files cannot distinguish them."""
    for path, key_paths in shared.items():
        yield finding("path-collision", [path], places=" and ".join(key_paths))


# ------------------------------------------------------------------ rules


def _unused_rules(
    leaves: Sequence[PlannedLeaf], rules: Sequence[tuple[Any, Any]]
) -> Iterator[Finding]:
    """Rules that decided no leaf: dead if they match none, else shadowed by earlier ones.

    A last rule that matches every leaf is a fallback, and not reported.
    """
    used = {leaf.rule for leaf in leaves}
    names = [re.compile(pattern).pattern for pattern, _ in rules]
    for index, (pattern, _) in enumerate(rules):
        if index in used:
            continue
        search = re.compile(pattern).search
        matched = [leaf for leaf in leaves if search(leaf.path)]
        taken = [leaf for leaf in matched if leaf.shape]
        is_last = index == len(rules) - 1
        if not taken:
            yield _dead(index, names[index], matched, leaves)
        elif not is_last or len(matched) < len(leaves):
            yield _shadowed(index, names, taken)


def _dead(
    index: int, pattern: str, scalars: Sequence[PlannedLeaf], leaves: Iterable[PlannedLeaf]
) -> Finding:
    rule = rule_text(index, pattern)
    if scalars:
        return finding("dead-rule, of scalars", [leaf.path for leaf in scalars], index, by=rule)
    return finding("dead-rule", [], index, by=rule, hint=_meant(pattern, leaves))


def _shadowed(index: int, patterns: Sequence[str], taken: Sequence[PlannedLeaf]) -> Finding:
    takers = sorted({leaf.rule for leaf in taken if leaf.rule is not None})
    names = [rule_text(taker, patterns[taker]) for taker in takers[:3]]
    if len(takers) > 3:
        names.append(f"{len(takers) - 3} more")
    verb = "takes" if len(takers) == 1 else "take"
    return finding(
        "shadowed-rule",
        [leaf.path for leaf in taken],
        index,
        by=rule_text(index, patterns[index]),
        takers=f"{' and '.join(names)} {verb}",
        leaves="the only leaf" if len(taken) == 1 else f"all {len(taken)} leaves",
        first=takers[0],
    )


def _meant(pattern: str, leaves: Iterable[PlannedLeaf]) -> str:
    """A hint at the part of a path that a pattern may mean."""
    word = pattern.strip("^$/")
    count = word.count("/") + 1
    kinds = {re.sub("[0-9]+", "0", leaf.path) for leaf in leaves}
    known: set[str] = set()
    for kind in sorted(kinds)[:MOST_NAMES]:
        keys = kind.split("/")
        known.update("/".join(keys[i : i + count]) for i in range(len(keys) - count + 1))
    return did_you_mean(word, known)


def _unused_specs(leaves: Iterable[PlannedLeaf], min_size: int) -> Iterator[Finding]:
    """Specs that are not used because their leaves have fewer elements than `min_size`."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for leaf in leaves:
        if any(note.kind in SMALL for note in leaf.adjustments):
            alike[leaf.rule, leaf.pattern, leaf.asked].append(leaf.path)
    for (index, pattern, asked), paths in alike.items():
        rule = rule_text(index, pattern)
        yield finding(
            "explicit-spec-too-small", paths, index, by=rule, asked=asked, min_size=min_size
        )


def _related(leaves: Iterable[PlannedLeaf]) -> Iterator[Finding]:
    """Leaves that cannot have the spec of the leaf that they belong to."""
    for leaf in leaves:
        for note in leaf.adjustments:
            if note.kind in RELATED:
                yield finding_of(note, leaf.rule, leaf.pattern, [leaf.path])


def _same_arrays(
    leaves: Iterable[PlannedLeaf], pairs: Sequence[tuple[str, str]], mesh: AnyMesh
) -> Iterator[Finding]:
    """Arrays that are in the tree at two paths, one finding for each two branches that share some.

    Trees of JAX have value semantics: a function returns, and a device holds, an array for each
    path.
    """
    if not pairs:
        return
    by_path = {leaf.path: leaf for leaf in leaves}
    of_branches: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for later, first in pairs:
        if later in by_path:  # numpy arrays of text are leaves that nothing places
            of_branches[_where_they_differ(later, first)].append((later, first))
    for members in of_branches.values():
        paths = [later for later, _ in members]
        firsts = ", ".join(fold_paths([first for _, first in members]))
        cost = human_bytes(sum(by_path[path].bytes_per_device(mesh) for path in paths))
        yield finding("same-array", paths, by_path[paths[0]].rule, firsts=firsts, cost=cost)


def _where_they_differ(path: str, other: str) -> tuple[str, str]:
    """Two paths without the keys at their ends that are equal."""
    keys, other_keys = path.split("/"), other.split("/")
    while keys and other_keys and keys[-1] == other_keys[-1]:
        keys.pop()
        other_keys.pop()
    return "/".join(keys), "/".join(other_keys)


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
        if leaf.rule is None:
            continue
        action, box = rules[leaf.rule][1], boxes.get(leaf.path)
        for names, by in _named(action, box, logical_rules):
            if isinstance(by, tuple):
                known.update(name for name, _ in by)
            for name in names_without_rule(names, by):
                paths[leaf.rule, leaf.pattern, name].append(leaf.path)
    for (index, pattern, name), members in paths.items():
        rule, hint = rule_text(index, pattern), did_you_mean(name, known)
        yield finding("name-without-rule", members, index, by=rule, name=name, hint=hint)


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


# ------------------------------------------------------------------ replicated leaves


def _left_whole(leaves: Iterable[PlannedLeaf], mesh: AnyMesh, min_size: int) -> list[Finding]:
    """Large leaves that are replicated, ordered by the bytes that an even split would save.

    Leaves with fewer elements than `min_size` are replicated on purpose. Leaves of one
    shape and decision are reported together, if they waste at least `LARGE_PART` of what a
    device holds.
    """
    devices = math.prod(axis_sizes(mesh).values())
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    per_device = 0
    for members in _kinds(leaves):
        leaf = members[0]
        if leaf.decision.errors:
            continue
        per_device += leaf.bytes_per_device(mesh) * len(members)
        if leaf.shape and leaf.size >= max(min_size, 1) and not _split_dims(leaf, mesh):
            alike[leaf.shape, leaf.decision] += members
    findings: list[Finding] = []
    for members in alike.values():
        leaf = members[0]
        wasted = sum(member.bytes - -(-member.bytes // devices) for member in members)
        if wasted == 0 or wasted < LARGE_PART * per_device:
            continue
        paths = [member.path for member in members]
        why, fix = _why_replicated(members, mesh)
        values = {"shape": leaf.shape, "waste": human_bytes(wasted), "why": why, "fix": fix}
        findings.append(finding("left-whole", paths, leaf.rule, wasted, **values))
    return sorted(findings, key=lambda finding: -finding.wasted)


# What to do about a leaf that its rule left whole, by the last adjustment.
_SHARD_IT = {
    "too-small": "Lower `min_size`.",
    "no-dim": "Free a dim, or use another axis.",
    "no-dim, padded": "Pad dim {dim} to {length}, or use another axis. {how}",
}


def _why_replicated(members: Sequence[PlannedLeaf], mesh: AnyMesh) -> tuple[str, str]:
    """Why leaves of one shape and decision are replicated, and the fix."""
    leaf = members[0]
    if leaf.rule is None:
        why = "it has no counterpart in the plan that this one follows."
        return why, "Plan it by rules of its own."
    by = rule_text(leaf.rule, leaf.pattern)
    if not leaf.adjustments:
        return f"{by} says so.", "Give it a spec or `fsdp`, unless this is intended."
    note = leaf.adjustments[-1]
    why = f"{by}, {note.why}"
    if note.kind != "no-dim" or note.dim is None:
        return why, _SHARD_IT.get(note.kind, "Change the rule, or the shape.")
    length = padded_leaf(leaf, mesh).shape[note.dim]
    how, _ = _padding(members, mesh)
    return why, _SHARD_IT["no-dim, padded"].format(dim=note.dim, length=length, how=how)


def _padding(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> tuple[str, int]:
    """Both ways of padding leaves and what they cost, as a sentence; and the bytes that each
    device saves by it."""
    padded = [padded_leaf(leaf, mesh) for leaf in leaves]
    before, after = (sum(x.bytes_per_device(mesh) for x in each) for each in (leaves, padded))
    more = sum(x.bytes for x in padded) - sum(x.bytes for x in leaves)
    text = (
        f"`Plan.padded` does so under `jit`, `manual.shard_params(..., pad=True)` by hand:"
        f" {human_bytes(after)} per device instead of {human_bytes(before)}, with"
        f" {human_bytes(more)} of padding in all."
    )
    return text, before - after


def _split_dims(leaf: PlannedLeaf, mesh: AnyMesh) -> list[int]:
    """The dims that are split into more than one part."""
    sizes = axis_sizes(mesh)
    specs = enumerate(entries(leaf.given))
    return [dim for dim, entry in specs if part_count(axes_of(entry), sizes) > 1]


# ------------------------------------------------------------------ stacked layers


def _scan_dims(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """Leaves that seem to be layers stacked on dim 0 for a scan, and are sharded on dim 0.

    Stacked layers are recognised by their shapes: all arrays of a subtree have the same
    length above 1 on dim 0, each has at least one more dim, and they have at least two
    different ranks, as stacked vectors and matrices do. Dims of length 1 do not count: the
    bias of a convolution has them. Stacked experts and the heads of an attention have such shapes
    too, but are sharded on dim 0 on purpose: see `_EXPERTS` and `_are_heads`.
    """
    split = [members for members in _kinds(leaves) if 0 in _split_dims(members[0], mesh)]
    suspects = [leaf for members in split for leaf in members if not _EXPERTS.search(leaf.path)]
    if not suspects:
        return
    stacks = _stacks(leaves)
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf in suspects:
        stack = next((path for path in _ancestors(leaf.path) if path in stacks), None)
        if stack is not None:
            alike[stack, leaf.rule, leaf.shape[0], leaf.given].append(leaf)
    for (_, rule, length, given), members in alike.items():
        by = "" if rule is None else f", by {rule_text(rule, members[0].pattern)}"
        paths = [leaf.path for leaf in members]
        yield finding("scan-dim", paths, rule, spec=given, by=by, length=length)


_EXPERTS = re.compile("expert|moe", re.IGNORECASE)
# Words in the names of stacked layers, and of the weights of an attention.
_LAYERS = re.compile("layer(?!_?norm)|block|stack|scan|repeat", re.IGNORECASE)
_ATTENTION = re.compile(
    "att(ention|n)|heads?(_|/|$)|query|(^|/)(w_?)?(q|k|v|qkv|kv)(_proj|_einsum)?(/|$)",
    re.IGNORECASE,
)


def _stacks(leaves: Iterable[PlannedLeaf]) -> set[str]:
    """The paths of subtrees that look like stacked layers."""
    members: dict[str, dict[tuple[str, Shape], None]] = defaultdict(dict)
    for leaf in leaves:
        if leaf.size == 1:  # a step count, or the epsilon of a norm
            continue
        for path in _ancestors(leaf.path):
            members[path][leaf.path, leaf.shape] = None
    return {path for path, inside in members.items() if _is_stack(path, list(inside))}


def _is_stack(path: str, inside: Sequence[tuple[str, Shape]]) -> bool:
    lengths = {shape[0] for _, shape in inside}
    if len(lengths) > 1 or max(lengths) == 1:
        return False
    ranks = {sum(length != 1 for length in shape) for _, shape in inside}
    if len(ranks) == 1 or min(ranks) == 1:
        return False
    return not _are_heads(path, inside)


def _are_heads(path: str, inside: Sequence[tuple[str, Shape]]) -> bool:
    """Whether the leaves of a subtree are an attention's, `(heads, embed, dims of a head)`.

    Their names tell, or else their shapes: `heads * dims == embed`, and vectors of `dims`.
    """
    if _LAYERS.search(path):
        return False
    if all(_ATTENTION.search(leaf) for leaf, _ in inside):
        return True
    matrices = [shape for _, shape in inside if len(shape) == 3]
    vectors = {shape[1] for _, shape in inside if len(shape) == 2}
    if len(matrices) + sum(len(shape) == 2 for _, shape in inside) < len(inside):
        return False
    dims = {tuple(sorted(shape[1:])) for shape in matrices}
    if len(dims) != 1:
        return False
    of_head, embed = dims.pop()
    return vectors <= {of_head} and inside[0][1][0] * of_head == embed


def _ancestors(path: str) -> list[str]:
    keys = path.split("/")[:-1]
    return ["/".join(keys[:count]) for count in range(len(keys) + 1)]
