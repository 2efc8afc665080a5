"""What is wrong with the leaves of a plan, or looks wrong, and what to do about it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from treeshard._decision import PlannedLeaf
from treeshard._describe import fold_paths, human_bytes
from treeshard._mesh import AnyMesh, axis_sizes, get_axes_size_in_mesh
from treeshard._rules import errors_of
from treeshard._specs import axes_of, entries

# What of a device's bytes a group of whole leaves must waste to be worth a line.
LARGE_PART = 0.01


class Finding(NamedTuple):
    """One thing that is wrong with a plan, or looks wrong.

    Attributes:
        code: Errors: `"unmatched"`, `"rank"`, `"axis-not-in-mesh"`, `"axis-already-used"`,
            `"already-sharded"`, `"indivisible"`, `"path-collision"`. Warnings: `"dead-rule"`,
            `"shadowed-rule"`, `"left-whole"`, `"scan-dim"`, `"name-without-rule"`.
        severity: `"error"` if `Plan.check` raises for it, else `"warning"`.
        fact: What was found.
        fix: The way out.
        paths: The leaves that it concerns; none for a rule that matches nothing.
        rule: The index of the rule that it concerns, if it is one.
        wasted: For leaves left whole, the bytes that each device could save.
    """

    code: str
    severity: Literal["error", "warning"]
    fact: str
    fix: str
    paths: tuple[str, ...] = ()
    rule: int | None = None
    wasted: int = 0

    def __str__(self) -> str:
        """One line, the paths of repeated layers folded: `layers/{0..79}/attn/q`."""
        folded = fold_paths(self.paths)
        shown = ", ".join(folded[:5]) + (f" and {len(folded) - 5} more" * (len(folded) > 5))
        where = f"{shown}: " if shown and self.code != "shadowed-rule" else ""
        return f"{self.severity} {self.code}: {where}{self.fact} {self.fix}"


# ------------------------------------------------------------------ errors


def misfits(leaves: Iterable[PlannedLeaf]) -> Iterator[Finding]:
    """What `match_partition_rules` raises, leaves with one trouble in one finding."""
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for members in _kinds(leaves):
        leaf = members[0]
        for note in errors_of(leaf.decision):
            shape = leaf.shape if note.kind == "unmatched" else None
            alike[note, leaf.rule, shape] += members
    for (note, rule, shape), members in alike.items():
        paths = tuple(leaf.path for leaf in members)
        if note.kind == "unmatched":
            fix = f'Add a rule such as ("{_last_key(paths[0])}", ...), or a last one (".*", None).'
            yield Finding("unmatched", "error", f"shape {shape}, no rule matches.", fix, paths)
        else:
            # The adjustment's own text ends with the way out.
            fact, _, fix = note.why.partition(". ")
            fact = f"rule {rule} {members[0].pattern!r}: {fact.rstrip('.')}."
            yield Finding(note.kind, "error", fact, fix or "Change the rule.", paths, rule)


def _kinds(leaves: Iterable[PlannedLeaf]) -> list[list[PlannedLeaf]]:
    """Leaves of one shape and dtype that share a decision, together: most models have few."""
    kinds: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf in leaves:
        kinds[leaf.shape, leaf.dtype, id(leaf.decision)].append(leaf)
    return list(kinds.values())


def _last_key(path: str) -> str:
    return re.escape(path.rpartition("/")[2])


def collisions(
    leaves: Iterable[PlannedLeaf], key_paths: Callable[[str], Sequence[str]]
) -> Iterator[Finding]:
    """Leaves that share a path, so that no rule and no file can tell them apart."""
    counts = Counter(leaf.path for leaf in leaves)
    for path in (path for path, count in counts.items() if count > 1):
        fact = f"{' and '.join(key_paths(path))} share this path."
        fix = "Rename a key: rules decide such leaves alike, and files cannot hold both."
        yield Finding("path-collision", "error", fact, fix, (path,))


# ------------------------------------------------------------------ leaves left whole


def left_whole(leaves: Iterable[PlannedLeaf], mesh: AnyMesh, min_size: int) -> list[Finding]:
    """Leaves that every device holds whole, ranked by what an even split would save.

    Those of fewer elements than `min_size` are meant to be. What leaves of one shape, decided
    alike, waste together must be 1% of what a device holds, or nobody would miss it.
    """
    devices = math.prod(axis_sizes(mesh).values())
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    held = 0
    for members in _kinds(leaves):
        leaf = members[0]
        if errors_of(leaf.decision):
            continue
        held += leaf.bytes_per_device(mesh) * len(members)
        if leaf.shape and leaf.size >= max(min_size, 1) and not _split_dims(leaf, mesh):
            alike[leaf.shape, leaf.decision] += members
    found: list[Finding] = []
    for members in alike.values():
        leaf, paths = members[0], tuple(member.path for member in members)
        wasted = sum(member.bytes - -(-member.bytes // devices) for member in members)
        if wasted > 0 and wasted >= LARGE_PART * held:
            why, fix = _why_whole(leaf, mesh)
            more = f"{human_bytes(wasted)} more than an even split"
            fact = f"shape {leaf.shape} is whole on every device, {more}: {why}"
            found.append(Finding("left-whole", "warning", fact, fix, paths, leaf.rule, wasted))
    return sorted(found, key=lambda finding: -finding.wasted)


def _why_whole(leaf: PlannedLeaf, mesh: AnyMesh) -> tuple[str, str]:
    if leaf.rule is None:
        return "it goes with no leaf of the plan that it follows.", "Plan it by rules of its own."
    by = f"rule {leaf.rule} {leaf.pattern!r}"
    if not leaf.adjustments:
        return f"{by} says so.", "Give it a spec or `fsdp`, if that is not meant."
    note = leaf.adjustments[-1]
    if note.kind == "too-small":
        return f"{by}, {note.why}", "Lower `min_size`."
    if note.kind == "no-dim":
        return f"{by}, {note.why}", _pad(leaf.shape, get_axes_size_in_mesh(note.axes, mesh))
    return f"{by}, {note.why}", "Change the rule, or the shape."


def _pad(shape: tuple[int, ...], count: int) -> str:
    """The least padding that makes a dim divisible. (Those that are were taken, or skipped.)"""
    missing = [(-length % count, dim) for dim, length in enumerate(shape) if length % count]
    if not missing:
        return "Free a dim, or use another axis."
    least, dim = min(missing)
    return f"Pad dim {dim} to {shape[dim] + least}, or use another axis."


def _split_dims(leaf: PlannedLeaf, mesh: AnyMesh) -> list[int]:
    """The dims that are in more than one part."""
    sizes = axis_sizes(mesh)
    specs = enumerate(entries(leaf.given))
    return [d for d, entry in specs if math.prod(sizes[axis] for axis in axes_of(entry)) > 1]


# ------------------------------------------------------------------ stacked layers


def scan_dims(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """Leaves that seem to be layers stacked on dim 0, for a scan, and are sharded on it.

    Nothing says that layers are stacked. A subtree is taken for a stack if all its arrays
    have the same length above 1 on dim 0, each has another dim, and they have at least two
    ranks, as stacked vectors and matrices do. (Dims of length 1 do not count: a
    convolution's bias has them.) Experts look the same, and are meant to be sharded so;
    they are told by their name.
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
            f"{given} shards dim 0{by}, where {length} layers seem to be stacked: a scan over"
            " them needs every layer on every device."
        )
        fix = "Shard another dim: P(None, ...), or `skip=(0,)` of `fsdp`."
        yield Finding("scan-dim", "warning", fact, fix, tuple(x.path for x in members), rule)


_EXPERTS = re.compile("expert|moe", re.IGNORECASE)


def _stacks(leaves: Iterable[PlannedLeaf]) -> set[str]:
    """The subtrees that look like stacked layers, by path."""
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
        for path, found in lengths.items()
        if len(found) == 1 and max(found) > 1 and len(ranks[path]) > 1 and min(ranks[path]) > 1
    }


def _ancestors(path: str) -> list[str]:
    keys = path.split("/")[:-1]
    return ["/".join(keys[:count]) for count in range(len(keys) + 1)]
