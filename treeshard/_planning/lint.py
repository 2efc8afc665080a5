"""The checks of a plan: errors and warnings about its leaves and its rules.

They read the decisions and decide nothing, so a plan can be made of rules with mistakes: all of
these are told at once, with what each costs, and not one per attempt as JAX raises them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import all_axes, axes_of, entries, is_logical, part_count, without_axes
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.findings import Finding, finding, finding_of, rule_text
from treeshard._planning.lint_bytes import kinds, left_whole, padding
from treeshard._planning.lint_layers import cut_heads, unlike_siblings
from treeshard._planning.lint_state import (
    axis_orders,
    matrix_optimizers,
    padded_state,
    state_unlike_weights,
    unsharded_state,
)
from treeshard._planning.logical import (
    PartitionAxis,
    ReadLogicalRules,
    by_other_order,
    lost_axes,
    names_without_rule,
    read_logical_rules,
    resolve_by,
)
from treeshard._planning.matching import SMALL, PlannedLeaf, Shape
from treeshard._planning.tactics import ByNames, Tactic
from treeshard.errors import did_you_mean

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
    gathered: Collection[str],
    *,
    mirrors: bool,
) -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste.

    Of a plan that `mirrors` another one, only the leaves are checked: `rules` decided those of the
    other. `shared` has the key paths of leaves that share a path, `boxes` the Flax boxes of leaves,
    by path, `same_arrays` the paths of leaves that were one object, the later path first, and
    `gathered` the axes along which parameters are gathered for use.
    """
    names = _Names(rules, logical_rules, boxes, mesh)
    own_rules = () if mirrors else rules
    return (
        *_misfits(leaves, mesh),
        *collisions(shared),
        *(() if mirrors else _unused_rules(leaves, rules)),
        *_unused_specs(leaves, min_size),
        *_related(leaves),
        *_same_arrays(leaves, same_arrays, mesh),
        *left_whole(leaves, rules, mesh, min_size, names.lost),
        *_scan_dims(leaves, mesh),
        *axis_orders(leaves, mesh),
        *unsharded_state(leaves, own_rules, mesh),
        *state_unlike_weights(leaves, mesh, min_size),
        *matrix_optimizers(leaves, mesh),
        *padded_state(leaves),
        *unlike_siblings(leaves),
        *cut_heads(leaves, mesh, gathered),
        *(() if mirrors else names.without_rule(leaves)),
        *(() if mirrors else names.contested(leaves)),
    )


# ------------------------------------------------------------------ errors


def _misfits(leaves: Sequence[PlannedLeaf], mesh: AnyMesh) -> Iterator[Finding]:
    """The errors that `match_partition_rules` raises for, one finding per kind of error."""
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for members in kinds(leaves):
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
            how, saved = padding(members, mesh)
            yield finding_of(note, rule, pattern, paths, how, saved)
        else:
            yield finding_of(note, rule, pattern, paths)


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


class _Names:
    """The logical names that decide leaves, and the rules for them."""

    def __init__(
        self,
        rules: Sequence[tuple[Any, Any]],
        in_force: ReadLogicalRules | None,
        boxes: Mapping[str, Any],
        mesh: AnyMesh,
    ) -> None:
        self.rules, self.in_force, self.boxes = rules, in_force, boxes
        self.sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}

    def of(self, leaf: PlannedLeaf) -> Iterator[tuple[tuple[Any, ...], ReadLogicalRules]]:
        """The names of a leaf's dims, and the rules for them."""
        if leaf.rule is None:
            return
        action = self.rules[leaf.rule][1]
        box: Any = self.boxes.get(leaf.path)
        if is_logical(action) and self.in_force is not None:
            yield action, self.in_force
        # A box without an attribute `rules` names mesh axes, not logical names.
        elif isinstance(action, Tactic) and hasattr(box, "rules"):
            for step in action.steps:
                if isinstance(step, ByNames):
                    own = step.rules if step.rules is not None else box.rules
                    by = self.in_force if own is None else read_logical_rules(own)
                    if by is not None:
                        yield tuple(box.names), by

    def lost(self, leaf: PlannedLeaf) -> list[str]:
        """Why dims of a leaf are not sharded although their names have axes."""
        return [fact for names, by in self.of(leaf) for fact in lost_axes(names, by, self.sizes)]

    def without_rule(self, leaves: Iterable[PlannedLeaf]) -> Iterator[Finding]:
        """Logical names without a logical rule, whose dims are therefore not sharded."""
        paths: dict[Any, list[str]] = defaultdict(list)
        known: set[str] = set()
        for leaf in leaves:
            for names, by in self.of(leaf):
                if isinstance(by, tuple):
                    known.update(name for name, _ in by)
                for name in names_without_rule(names, by):
                    paths[leaf.rule, leaf.pattern, name].append(leaf.path)
        for (index, pattern, name), members in paths.items():
            rule, hint = rule_text(index, pattern), did_you_mean(name, known)
            yield finding("name-without-rule", members, index, by=rule, name=name, hint=hint)

    def contested(self, leaves: Iterable[PlannedLeaf]) -> Iterator[Finding]:
        """Axes that two names of a leaf want, and that a list of rules gives to one of them and a
        `PartitionAxis` to the other."""
        paths: dict[Any, list[str]] = defaultdict(list)
        for leaf in leaves:
            for names, by in self.of(leaf):
                paths[leaf.rule, leaf.pattern, names, by].append(leaf.path)
        for (index, pattern, names, by), members in paths.items():
            other = by_other_order(names, by)
            given = resolve_by(by, names)
            if other is None or self._on_mesh(given) == self._on_mesh(other):
                continue
            forms = ["The list, by the order of rules,", "a `PartitionAxis`, by that of dims,"]
            if isinstance(by, PartitionAxis):
                forms = ["The `PartitionAxis`, by the order of dims,", "a list, by that of rules,"]
            rule = rule_text(index, pattern)
            values = {"order": forms[0], "given": self._on_mesh(given)}
            values |= {"other_order": forms[1], "other": self._on_mesh(other)}
            yield finding("contested-axis", members, index, by=rule, names=names, **values)

    def _on_mesh(self, spec: PartitionSpec) -> PartitionSpec:
        """A spec without the axes that split nothing on this mesh."""
        return without_axes(spec, set(all_axes(entries(spec))) - self.sizes.keys())


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
    split = [members for members in kinds(leaves) if 0 in _split_dims(members[0], mesh)]
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
