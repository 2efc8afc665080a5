"""The check of what leaves take: large leaves that are not split over axes that are idle for them.

An axis is idle for a leaf if neither the leaf nor the batch is split over it. A plan does not know
the batch, so the names of axes say which of them split it. What a device holds is compared with an
even split over the idle axes, in bytes, and not with a list of leaves that are replicated: a
leaf that `fsdp` splits into 4 parts on 32 devices wastes as much as four that it does not split.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import all_axes, entries, entry_of, part_count
from treeshard._core.text import human_bytes
from treeshard._planning.axis_names import use_of
from treeshard._planning.findings import Finding, finding, rule_text
from treeshard._planning.matching import PlannedLeaf, parameters
from treeshard._planning.padding import padded_leaf
from treeshard._planning.plan_json import kind_of
from treeshard._planning.tactics import Tactic
from treeshard.errors import counted

# Leaves are reported if they waste at least this part of a device's bytes.
LARGE_PART = 0.01
# A path that a pattern without a name in it matches, and no other pattern.
_NO_NAME = "\N{LATIN LETTER DENTAL CLICK}/\N{LATIN LETTER LATERAL CLICK}"

NamesLost = Callable[[PlannedLeaf], Sequence[str]]


def left_whole(
    leaves: Sequence[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    mesh: AnyMesh,
    min_size: int,
    names_lost: NamesLost,
) -> list[Finding]:
    """Large leaves that idle axes do not split, ordered by the bytes that an even split would save.

    Leaves with fewer elements than `min_size` are replicated on purpose, and so are those of a rule
    that names them and replicates. Leaves of one shape and decision, or of one rule that splits
    them over other axes, are reported together, if they waste at least `LARGE_PART` of what a
    device holds. `names_lost` says why logical names of a leaf got no axis.
    """
    free = _free_axes(leaves, mesh)
    alike: dict[_Kind, list[PlannedLeaf]] = defaultdict(list)
    per_device = 0
    for members in kinds(leaves):
        leaf = members[0]
        if leaf.decision.errors:
            continue
        per_device += leaf.bytes_per_device(mesh) * len(members)
        if leaf.size < max(min_size, 1) or (is_intended(leaf, rules) and not names_lost(leaf)):
            continue
        kind = _kind(leaf, free, mesh)
        if kind is not None:
            alike[kind] += members
    findings: list[Finding] = []
    for kind, members in alike.items():
        now = [leaf.bytes_per_device(mesh) for leaf in members]
        parts = part_count(kind.idle, axis_sizes(mesh))
        wasted = sum(size - -(-size // parts) for size in now)
        if wasted == 0 or wasted < LARGE_PART * per_device:
            continue
        values = {"idle": _with_sizes(kind.idle, mesh), "waste": human_bytes(wasted)}
        if kind.is_split:
            row = "left-whole, in part"
            values |= {"now": human_bytes(sum(now)), "times": str(parts)}
            why, fix = _why_in_part(members, rules, kind.idle, mesh, names_lost)
        else:
            row = "left-whole"
            values |= {"shape": str(members[0].shape)}
            why, fix = _why_replicated(members, mesh, names_lost)
        paths = [member.path for member in members]
        values |= {"why": why, "fix": fix}
        findings.append(finding(row, paths, members[0].rule, wasted, **values))
    return sorted(findings, key=lambda finding: -finding.wasted)


def all_too_small(
    leaves: Sequence[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    mesh: AnyMesh,
    min_size: int,
) -> Iterator[Finding]:
    """One finding if `fsdp` splits nothing, as all leaves have fewer elements than `min_size`."""
    if any(leaf.size >= min_size for leaf in leaves):
        return
    small = [leaf for leaf in leaves if any(note.kind == "too-small" for note in leaf.adjustments)]
    actions = [rules[leaf.rule][1] for leaf in small if leaf.rule is not None]
    by_fsdp = {axis for x in actions if isinstance(x, Tactic) for axis in x.fsdp_axes}
    sizes = axis_sizes(mesh)
    axes = [axis for axis in sizes if axis in by_fsdp and sizes[axis] > 1]
    split = {axis for leaf in leaves for axis in all_axes(entries(leaf.given))}
    if not axes or split & {*axes}:
        return
    now = sum(leaf.bytes_per_device(mesh) for leaf in leaves)
    wasted = now - -(-now // part_count(axes, sizes))
    values = {"now": human_bytes(now), "waste": human_bytes(wasted)}
    values |= {"leaves": counted(len(leaves), "leaf"), "min_size": f"{min_size:,}"}
    values |= {"axes": _with_sizes(axes, mesh)}
    yield finding("all-too-small", [], None, wasted, **values)


class _Kind(NamedTuple):
    """What the leaves of one finding have in common.

    Attributes:
        idle: The axes that are idle for them.
        by: What decided them: the shape too, where that is why they are not split at all.
        is_split: Whether other axes split them.
    """

    idle: tuple[str, ...]
    by: tuple[Any, ...]
    is_split: bool


def _kind(leaf: PlannedLeaf, free: Sequence[str], mesh: AnyMesh) -> _Kind | None:
    """The kind of a leaf, where it may be reported."""
    split = all_axes(entries(leaf.given))
    # Its rule was to split it over these, whatever their names say.
    meant = {axis for note in leaf.adjustments if note.kind == "no-dim" for axis in note.axes}
    sizes = axis_sizes(mesh)
    may_split = {*free, *(axis for axis in meant if sizes[axis] > 1)} - {*split}
    idle = tuple(axis for axis in sizes if axis in may_split)
    if part_count(split, sizes) == 1:
        return _Kind(idle, (leaf.shape, leaf.decision), False)
    # A bias takes its axis from the matrix beside it.
    is_vector = sum(length > 1 for length in leaf.shape) == 1
    return None if is_vector else _Kind(idle, (leaf.rule, leaf.adjustments), True)


def kinds(leaves: Sequence[PlannedLeaf]) -> list[list[PlannedLeaf]]:
    """Groups leaves by shape, dtype and decision. Most models have few groups."""
    groups: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf in leaves:
        groups[leaf.shape, leaf.dtype, id(leaf.decision)].append(leaf)
    return list(groups.values())


def is_intended(leaf: PlannedLeaf, rules: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a leaf is replicated on purpose: by a rule that names it and replicates."""
    if leaf.rule is None or leaf.asked is None or leaf.adjustments:
        return False
    if all_axes((*entries(leaf.asked), *entries(leaf.given))):
        return False
    pattern, action = rules[leaf.rule]
    if re.search(pattern, _NO_NAME):
        return False
    # A tactic is printed as the call that makes it, also where it was read from JSON.
    kind = kind_of(action)
    is_tactic = kind == "tactic" and repr(action).startswith("replicate(")
    return is_tactic or kind in ("replicate", "spec", "names", "function")


def _free_axes(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> list[str]:
    """The axes that are idle for a leaf that they do not split.

    Others replicate leaves by convention: those for data and sequences split the batch, unless they
    split most of the parameters too; those for experts and pipelines split some of them alone.
    """
    chosen = parameters(leaves)
    bytes_split: Counter[str] = Counter()
    for leaf in chosen:
        bytes_split.update(dict.fromkeys(all_axes(entries(leaf.given)), leaf.bytes))
    most = sum(leaf.bytes for leaf in chosen) / 2
    free: list[str] = []
    for axis, size in axis_sizes(mesh).items():
        use = use_of(axis)
        splits_batch = use in ("data", "sequence") and bytes_split[axis] < max(most, 1)
        splits_some = use in ("expert", "stage") and bytes_split[axis] > 0
        if size > 1 and not splits_batch and not splits_some:
            free.append(axis)
    return free


def _with_sizes(axes: Sequence[str], mesh: AnyMesh) -> str:
    sizes = axis_sizes(mesh)
    return " and ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)


# ------------------------------------------------------------------ why, and what to do


# What to do about a leaf that its rule left whole, by the last adjustment.
_SHARD_IT = {
    "too-small": "Lower `min_size`.",
    "no-dim": "Free a dim, or use another axis.",
    "no-dim, padded": "Pad dim {dim} to {length}, or use another axis. {how}",
}
_OTHER_AXIS = "Give a name another axis, in the logical rules."


def _why_replicated(
    members: Sequence[PlannedLeaf], mesh: AnyMesh, names_lost: NamesLost
) -> tuple[str, str]:
    """Why leaves of one shape and decision are replicated, and the fix."""
    leaf = members[0]
    if leaf.rule is None:
        why = "it has no counterpart in the plan that this one follows."
        return why, "Plan it by rules of its own."
    by = rule_text(leaf.rule, leaf.pattern)
    if lost := names_lost(leaf):
        return f"{by}: {' '.join(lost)}", _OTHER_AXIS
    if not leaf.adjustments:
        fix = "Give it a spec or `fsdp`; if this is intended, a rule that names it, with None."
        return f"{by} says so.", fix
    note = leaf.adjustments[-1]
    why = f"{by}, {note.why}"
    if note.kind != "no-dim" or note.dim is None:
        return why, _SHARD_IT.get(note.kind, "Change the rule, or the shape.")
    length = padded_leaf(leaf, mesh).shape[note.dim]
    how, _ = padding(members, mesh)
    return why, _SHARD_IT["no-dim, padded"].format(dim=note.dim, length=length, how=how)


def _why_in_part(
    members: Sequence[PlannedLeaf],
    rules: Sequence[tuple[Any, Any]],
    idle: Sequence[str],
    mesh: AnyMesh,
    names_lost: NamesLost,
) -> tuple[str, str]:
    """Why leaves of one rule are not split over idle axes, and the fix."""
    leaf = members[0]
    if leaf.rule is None:
        return f"it has {leaf.given}.", "Plan it by rules of its own."
    action = rules[leaf.rule][1]
    by, axes = rule_text(leaf.rule, leaf.pattern), entry_of(idle)
    if lost := dict.fromkeys(fact for member in members for fact in names_lost(member)):
        return f"{by}: {' '.join(lost)}", _OTHER_AXIS
    if leaf.adjustments:
        note = leaf.adjustments[-1]
        return f"{by}, {note.why}", _SHARD_IT.get(note.kind, f"Split another dim over {axes!r}.")
    given = {member.given for member in members}
    what = f"{action!r}" if isinstance(action, Tactic) else f"{leaf.given}" * (len(given) == 1)
    return f"{by}, {what}." if what else f"{by}.", f"Split another dim over {axes!r}."


def padding(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> tuple[str, int]:
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
