"""The findings of a plan: errors and warnings about its leaves and its rules."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import axes_of, entries, is_logical
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.lint_state import (
    Finding,
    axis_orders,
    matrix_optimizers,
    padded_state,
    unsharded_state,
)
from treeshard._planning.logical import ReadLogicalRules, names_without_rule, read_logical_rules
from treeshard._planning.matching import SMALL, SMALL_FIX, PlannedLeaf
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
        paths = tuple(leaf.path for leaf in members)
        if note.kind == "unmatched":
            last_key = re.escape(paths[0].rpartition("/")[2])
            fix = f'Add a rule such as ("{last_key}", ...), or a last one (".*", None).'
            yield Finding("unmatched", "error", f"shape {shape}, no rule matches.", fix, paths)
        else:
            # The text of an adjustment is a fact, followed by its fix.
            fact, _, fix = note.why.partition(". ")
            fact = f"rule {rule} {members[0].pattern!r}: {fact.rstrip('.')}."
            wasted = 0
            if note.kind == "indivisible":
                how, wasted = _padding(members, mesh)
                fix = f"{fix} {how}"
            fix = fix or "Change the rule."
            yield Finding(note.kind, "error", fact, fix, paths, rule, wasted)


def _kinds(leaves: Iterable[PlannedLeaf]) -> list[list[PlannedLeaf]]:
    """Groups leaves by shape, dtype and decision. Most models have few groups."""
    kinds: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf in leaves:
        kinds[leaf.shape, leaf.dtype, id(leaf.decision)].append(leaf)
    return list(kinds.values())


def collisions(shared: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Paths that several leaves share, so that rules and files cannot distinguish them."""
    for path, key_paths in shared.items():
        fact = f"{' and '.join(key_paths)} share this path."
        fix = "Rename a key: rules cannot distinguish these leaves, and files cannot hold both."
        yield Finding("path-collision", "error", fact, fix, (path,))


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
    for index in unused:
        pattern = re.compile(rules[index][0])
        matched = [path for path in takers if pattern.search(path)]
        shadows = [path for path in matched if path in arrays]
        if not shadows:
            yield _dead(index, pattern.pattern, matched, takers)
        elif index < len(rules) - 1 or len(matched) < len(takers):
            yield _shadowed(index, rules, shadows, {takers[path] for path in shadows})


def _dead(index: int, pattern: str, scalars: Sequence[str], paths: Iterable[str]) -> Finding:
    if scalars:
        fact = f"rule {index} {pattern!r} matches only scalars, which need no rule."
        return Finding("dead-rule", "warning", fact, "Remove it.", tuple(scalars), index)
    word = pattern.strip("^$/")
    count = word.count("/") + 1
    kinds = {re.sub("[0-9]+", "0", path) for path in paths}
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
    names = " and ".join(_name(rules, taker) for taker in by[:3])
    names += f" and {len(by) - 3} more" * (len(by) > 3)
    leaves = "the only leaf" if len(paths) == 1 else f"all {len(paths)} leaves"
    verb = "takes" if len(by) == 1 else "take"
    fact = f"{_name(rules, index)} decides no leaf: {names} {verb} {leaves} that it matches."
    fix = f"Move it above rule {by[0]}, or remove it."
    return Finding("shadowed-rule", "warning", fact, fix, tuple(paths), index)


def _name(rules: Sequence[tuple[Any, Any]], index: int) -> str:
    return f"rule {index} {re.compile(rules[index][0]).pattern!r}"


def _unused_specs(leaves: Iterable[PlannedLeaf], min_size: int) -> Iterator[Finding]:
    """Specs that are not used because their leaves have fewer elements than `min_size`."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for leaf in leaves:
        if any(note.kind in SMALL for note in leaf.adjustments):
            alike[leaf.rule, leaf.pattern, leaf.asked].append(leaf.path)
    for (rule, pattern, asked), paths in alike.items():
        fact = (
            f"rule {rule} {pattern!r}: {asked} is not used for leaves of fewer than"
            f" {min_size} elements (`min_size`)."
        )
        yield Finding("explicit-spec-too-small", "warning", fact, SMALL_FIX, tuple(paths), rule)


def _related(leaves: Iterable[PlannedLeaf]) -> Iterator[Finding]:
    """Leaves that cannot have the spec of the leaf that they belong to."""
    for leaf in leaves:
        for note in leaf.adjustments:
            if note.kind in RELATED:
                fact, _, fix = note.why.partition(". ")
                fact = f"rule {leaf.rule} {leaf.pattern!r}: {fact.rstrip('.')}."
                yield Finding(note.kind, "warning", fact, fix, (leaf.path,), leaf.rule)


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
        of_branches[_where_they_differ(later, first)].append((later, first))
    for members in of_branches.values():
        paths = tuple(later for later, _ in members)
        firsts = ", ".join(fold_paths([first for _, first in members]))
        cost = sum(by_path[path].bytes_per_device(mesh) for path in paths)
        fact = (
            f"the same array as {firsts} now, and an array of its own once it is placed or"
            f" stepped: {human_bytes(cost)} more on each device."
        )
        fix = "To keep one array, use `equinox.nn.Shared`."
        yield Finding("same-array", "warning", fact, fix, paths, by_path[paths[0]].rule)


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
        if leaf.rule is not None:
            action, box = rules[leaf.rule][1], boxes.get(leaf.path)
            for names, by in _named(action, box, logical_rules):
                if isinstance(by, tuple):
                    known.update(name for name, _ in by)
                for name in names_without_rule(names, by):
                    paths[leaf.rule, name].append(leaf.path)
    for (index, name), members in paths.items():
        fact = (
            f"{_name(rules, index)} uses the logical name {name!r}, which has no"
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
        leaf, paths = members[0], tuple(member.path for member in members)
        wasted = sum(member.bytes - -(-member.bytes // devices) for member in members)
        if wasted > 0 and wasted >= LARGE_PART * per_device:
            why, fix = _why_replicated(leaf, members, mesh)
            more = f"{human_bytes(wasted)} more per device than an even split"
            fact = f"shape {leaf.shape} is replicated, {more}: {why}"
            findings.append(Finding("left-whole", "warning", fact, fix, paths, leaf.rule, wasted))
    return sorted(findings, key=lambda finding: -finding.wasted)


def _why_replicated(
    leaf: PlannedLeaf, members: Sequence[PlannedLeaf], mesh: AnyMesh
) -> tuple[str, str]:
    """Why a leaf is replicated, and the fix."""
    if leaf.rule is None:
        why = "it has no counterpart in the plan that this one follows."
        return why, "Plan it by rules of its own."
    by = f"rule {leaf.rule} {leaf.pattern!r}"
    if not leaf.adjustments:
        return f"{by} says so.", "Give it a spec or `fsdp`, unless this is intended."
    note = leaf.adjustments[-1]
    if note.kind == "too-small":
        return f"{by}, {note.why}", "Lower `min_size`."
    if note.kind == "no-dim":
        if note.dim is None:
            return f"{by}, {note.why}", "Free a dim, or use another axis."
        length = padded_leaf(leaf, mesh).shape[note.dim]
        fix = f"Pad dim {note.dim} to {length}, or use another axis. {_padding(members, mesh)[0]}"
        return f"{by}, {note.why}", fix
    return f"{by}, {note.why}", "Change the rule, or the shape."


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
    return [d for d, entry in specs if math.prod(sizes[axis] for axis in axes_of(entry)) > 1]


# ------------------------------------------------------------------ stacked layers


def _scan_dims(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """Leaves that seem to be layers stacked on dim 0 for a scan, and are sharded on dim 0.

    Stacked layers are recognised by their shapes: all arrays of a subtree have the same
    length above 1 on dim 0, each has at least one more dim, and they have at least two
    different ranks, as stacked vectors and matrices do. Dims of length 1 do not count: the
    bias of a convolution has them. Stacked experts have such shapes too, but are sharded on
    dim 0 on purpose; they are recognised by their name.
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
        by = "" if rule is None else f", by rule {rule} {members[0].pattern!r}"
        fact = (
            f"{given} shards dim 0{by}, on which {length} layers seem to be stacked. A scan over"
            " them would gather every layer on every device."
        )
        fix = "Shard another dim: P(None, ...), or `skip=(0,)` of `fsdp`."
        yield Finding("scan-dim", "warning", fact, fix, tuple(x.path for x in members), rule)


_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def _stacks(leaves: Iterable[PlannedLeaf]) -> set[str]:
    """The paths of subtrees that look like stacked layers."""
    lengths: dict[str, set[int]] = defaultdict(set)
    ranks: dict[str, set[int]] = defaultdict(set)
    for leaf in leaves:
        if leaf.size == 1:
            continue
        rank = sum(length != 1 for length in leaf.shape)
        for path in _ancestors(leaf.path):
            lengths[path].add(leaf.shape[0])
            ranks[path].add(rank)
    return {
        path
        for path, on_dim_0 in lengths.items()
        if len(on_dim_0) == 1
        and max(on_dim_0) > 1
        and len(ranks[path]) > 1
        and min(ranks[path]) > 1
    }


def _ancestors(path: str) -> list[str]:
    keys = path.split("/")[:-1]
    return ["/".join(keys[:count]) for count in range(len(keys) + 1)]
