"""The check of what leaves take: large leaves that are not split over axes that are idle for them.

An axis is idle for a leaf if neither the leaf nor the batch is split over it. A plan does not know
the batch, so the names of axes say which of them split it. What a device holds is compared with an
even split over the idle axes, in bytes, and not with a list of leaves that are replicated: a
leaf that `fsdp` splits into 4 parts on 32 devices wastes as much as four that it does not split.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import all_axes, entries, entry_of, part_count
from treeshard._core.text import human_bytes
from treeshard._planning.axis_names import use_of
from treeshard._planning.findings import Finding, decided_by, finding, finding_about, grouped
from treeshard._planning.matching import PlannedLeaf, parameters
from treeshard._planning.padding import padded_leaf
from treeshard._planning.rules import kind_of
from treeshard._planning.tactics import Tactic
from treeshard.errors import counted

if TYPE_CHECKING:
    from treeshard._planning.plan import Plan

# Leaves are reported if they waste at least this part of a device's bytes.
LARGE_PART = 0.01
# A path that a pattern without a name in it matches, and no other pattern.
_NO_NAME = "\N{LATIN LETTER DENTAL CLICK}/\N{LATIN LETTER LATERAL CLICK}"

NamesLost = Callable[[PlannedLeaf], Sequence[str]]


def left_whole(plan: "Plan", names_lost: NamesLost) -> list[Finding]:
    """Large leaves that idle axes do not split, ordered by the bytes that an even split would save.

    Leaves with fewer elements than `min_size` are replicated on purpose, and so are those of a rule
    that names them and replicates. Leaves of one shape and decision, or of one rule that splits
    them over other axes, are reported together, if they waste at least `LARGE_PART` of what a
    device holds. `names_lost` says why logical names of a leaf got no axis.
    """
    mesh, free = plan.mesh, _free_axes(plan)
    alike: dict[_Kind, list[PlannedLeaf]] = defaultdict(list)
    per_device = 0
    for members in kinds(plan.leaves):
        leaf = members[0]
        if leaf.decision.errors:
            continue
        per_device += leaf.bytes_per_device(mesh) * len(members)
        is_small = leaf.size < max(plan.min_size, 2)  # nothing splits a single element
        if is_small or (_is_intended(leaf, plan.rules) and not names_lost(leaf)):
            continue
        kind = _kind(leaf, free, mesh)
        if kind is not None:
            alike[kind] += members
    findings: list[Finding] = []
    for kind, members in alike.items():
        now = sum(leaf.bytes_per_device(mesh) for leaf in members)
        parts = part_count(kind.idle, axis_sizes(mesh))
        wasted = now - sum(-(-leaf.bytes_per_device(mesh) // parts) for leaf in members)
        if wasted == 0 or wasted < LARGE_PART * per_device:
            continue
        why, fix = _why(members, kind, plan, names_lost)
        values = {"idle": _with_sizes(kind.idle, mesh), "times": parts, "why": why, "fix": fix}
        values |= {"waste": human_bytes(wasted), "now": human_bytes(now)}
        row = "left-whole, in part" if kind.is_split else "left-whole"
        findings.append(finding_about(row, members, wasted, **values))
    return sorted(findings, key=lambda finding: -finding.wasted)


def all_too_small(plan: "Plan") -> Iterator[Finding]:
    """One finding if `fsdp` splits nothing, as all leaves have fewer elements than `min_size`."""
    leaves, mesh = plan.leaves, plan.mesh
    if any(leaf.size >= plan.min_size for leaf in leaves):
        return
    by_fsdp: set[str] = set()
    split: set[str] = set()
    for leaf in leaves:
        split.update(all_axes(entries(leaf.given)))
        action = None if leaf.rule is None else plan.rules[leaf.rule][1]
        if isinstance(action, Tactic) and any(x.kind == "too-small" for x in leaf.adjustments):
            by_fsdp |= action.fsdp_axes
    sizes = axis_sizes(mesh)
    axes = [axis for axis, size in sizes.items() if size > 1 and axis in by_fsdp]
    if not axes or not split.isdisjoint(axes):
        return
    now = sum(leaf.bytes_per_device(mesh) for leaf in leaves)
    wasted = now - -(-now // part_count(axes, sizes))
    values = {"now": human_bytes(now), "waste": human_bytes(wasted)}
    values |= {"leaves": counted(len(leaves), "leaf"), "min_size": f"{plan.min_size:,}"}
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
    return grouped(leaves, lambda leaf: (leaf.shape, leaf.dtype, id(leaf.decision)))


def _is_intended(leaf: PlannedLeaf, rules: Sequence[tuple[Any, Any]]) -> bool:
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


def _free_axes(plan: "Plan") -> list[str]:
    """The axes that are idle for a leaf that they do not split.

    Others replicate leaves by convention: those for data and sequences split the batch, unless they
    split most of the parameters too; those for experts and pipelines split some of them alone.
    """
    chosen = parameters(plan.leaves)
    bytes_split: Counter[str] = Counter()
    for leaf in chosen:
        bytes_split.update(dict.fromkeys(all_axes(entries(leaf.given)), leaf.bytes))
    most = sum(leaf.bytes for leaf in chosen) / 2
    free: list[str] = []
    for axis, size in axis_sizes(plan.mesh).items():
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


# What to do about a leaf that its rule did not split, by its last adjustment.
_SHARD_IT = {
    "too-small": "Lower `min_size`.",
    "no-dim": "Free a dim, or use another axis.",
}


def _why(
    members: Sequence[PlannedLeaf], kind: _Kind, plan: "Plan", names_lost: NamesLost
) -> tuple[str, str]:
    """Why leaves are not split over idle axes, and the fix."""
    leaf, by = members[0], decided_by(members[0])
    if leaf.rule is None:
        no_counterpart = "it has no counterpart in the plan that this one follows."
        why = f"it has {leaf.given}." if kind.is_split else no_counterpart
        return why, "Plan it by rules of its own."
    if lost := dict.fromkeys(fact for member in members for fact in names_lost(member)):
        return f"{by}: {' '.join(lost)}", "Give a name another axis, in the logical rules."
    split_another = f"Split another dim over {entry_of(kind.idle)!r}."
    if leaf.adjustments:
        note = leaf.adjustments[-1]
        other = split_another if kind.is_split else "Change the rule, or the shape."
        fix = _SHARD_IT.get(note.kind, other)
        if note.kind == "no-dim" and note.dim is not None and not kind.is_split:
            length = padded_leaf(leaf, plan.mesh).shape[note.dim]
            how, _ = padding(members, plan.mesh)
            fix = f"Pad dim {note.dim} to {length}, or use another axis. {how}"
        return f"{by}, {note.why}", fix
    if not kind.is_split:
        fix = "Give it a spec or `fsdp`; if this is intended, a rule that names it, with None."
        return f"{by} says so.", fix
    action = plan.rules[leaf.rule][1]
    specs = {member.given for member in members}
    if isinstance(action, Tactic):
        return f"{by}, {action!r}.", split_another
    return (f"{by}, {leaf.given}." if len(specs) == 1 else f"{by}."), split_another


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
