"""The checks of a plan: errors and warnings about its leaves and its rules.

They read the decisions and decide nothing, so a plan can be made of rules with mistakes: all of
these are told at once, with what each costs, and not one per attempt as JAX raises them.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import is_logical
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.findings import Finding, finding, finding_of, rule_text
from treeshard._planning.lint_bytes import all_too_small, kinds, left_whole, padding
from treeshard._planning.lint_layers import cut_heads, state_unlike_weights, unlike_siblings
from treeshard._planning.logical import ReadLogicalRules, lost_axes, read_logical_rules
from treeshard._planning.matching import SMALL, PlannedLeaf
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
    narrowed: Sequence[tuple[str, str]],
    gathered: Collection[str],
    *,
    mirrors: bool,
) -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste.

    Of a plan that `mirrors` another one, only the leaves are checked: `rules` decided those of the
    other. `shared` has the key paths of leaves that share a path, `boxes` the Flax boxes of leaves,
    by path, `same_arrays` the paths of leaves that were one object, the later path first,
    `narrowed` the paths of arrays that devices hold in a narrower dtype, with their own dtype, and
    `gathered` the axes along which parameters are gathered for use.
    """
    sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}

    def names_lost(leaf: PlannedLeaf) -> list[str]:
        return _lost_names(leaf, rules, logical_rules, boxes, sizes)

    return (
        *_misfits(leaves, mesh),
        *collisions(shared),
        *(() if mirrors else _unused_rules(leaves, rules)),
        *_unused_specs(leaves, min_size),
        *(() if mirrors else all_too_small(leaves, rules, mesh, min_size)),
        *_related(leaves),
        *_same_arrays(leaves, same_arrays, mesh),
        *_narrowed(leaves, narrowed),
        *left_whole(leaves, rules, mesh, min_size, names_lost),
        *state_unlike_weights(leaves, mesh, min_size),
        *unlike_siblings(leaves),
        *cut_heads(leaves, mesh, gathered),
        *_padded_state(leaves),
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


# ------------------------------------------------------------------ padding

# How optax names the state of optimizers that compute the update of an element from others:
# `opt_state/inner_states/muon/...`, `v_row` of Adafactor, `GG` of SOAP.
# `by_matrix` keeps stacks below `matrices`: their padding is matrices that no other sees.
_NOT_ELEMENTWISE = re.compile(
    r"(^|/)(\w*(adafactor|muon|shampoo|soap)\w*"
    r"|ns_coeffs|GG|v_row|v_col|preconditioners?|statistics)(/|$)",
    re.IGNORECASE,
)


def _padded_state(leaves: Sequence[PlannedLeaf]) -> Iterator[Finding]:
    """Padded parameters beside state of an optimizer that does not treat each element by itself."""
    matches = (_NOT_ELEMENTWISE.search(leaf.path) for leaf in leaves)
    # `opt_state/0/v_row/w`: its field stands beside others of one state, which begins above it.
    starts = {match.string[: match.start() + 1] for match in matches if match is not None}
    below = [x for x in leaves if x.path.startswith(tuple(starts))]
    padded = [x.path for x in below if x.unpadded and "/matrices/" not in x.path]
    if padded:
        yield finding("not-elementwise", padded)


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


def _narrowed(
    leaves: Iterable[PlannedLeaf], narrowed: Sequence[tuple[str, str]]
) -> Iterator[Finding]:
    """Arrays that devices hold in a narrower dtype, one finding for each pair of dtypes."""
    if not narrowed:
        return
    on_devices = {leaf.path: leaf.dtype for leaf in leaves}
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, dtype in narrowed:
        alike[dtype, str(on_devices[path])].append(path)
    for (wide, narrow), paths in alike.items():
        yield finding("narrowed", paths, wide=wide, narrow=narrow)


def _where_they_differ(path: str, other: str) -> tuple[str, str]:
    """Two paths without the keys at their ends that are equal."""
    keys, other_keys = path.split("/"), other.split("/")
    while keys and other_keys and keys[-1] == other_keys[-1]:
        keys.pop()
        other_keys.pop()
    return "/".join(keys), "/".join(other_keys)


# ------------------------------------------------------------------ logical names


def _lost_names(
    leaf: PlannedLeaf,
    rules: Sequence[tuple[Any, Any]],
    in_force: ReadLogicalRules | None,
    boxes: Mapping[str, Any],
    sizes: Mapping[str, int],
) -> list[str]:
    """Why dims of a leaf are not sharded although they have logical names."""
    if leaf.rule is None:
        return []
    action = rules[leaf.rule][1]
    if is_logical(action) and in_force is not None:
        return lost_axes(action, in_force, sizes)
    box: Any = boxes.get(leaf.path)
    # A box without an attribute `rules` names mesh axes, not logical names.
    if not isinstance(action, Tactic) or not hasattr(box, "rules"):
        return []
    facts: list[str] = []
    for step in action.steps:
        if isinstance(step, ByNames):
            own = step.rules if step.rules is not None else box.rules
            logical = in_force if own is None else read_logical_rules(own)
            if logical is not None:
                facts += lost_axes(tuple(box.names), logical, sizes)
    return facts
