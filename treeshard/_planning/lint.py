"""The checks of a plan: errors and warnings about its leaves and its rules.

They read the decisions and decide nothing, so a plan can be made of rules with mistakes: all of
these are told at once, with what each costs, and not one per attempt as JAX raises them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.tree_util import tree_flatten

from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import is_wrapper, paths_of, shared_names
from treeshard._core.specs import is_logical
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.findings import (
    Finding,
    decided_by,
    finding,
    finding_about,
    finding_of,
    grouped,
    rule_text,
)
from treeshard._planning.lint_bytes import NamesLost, all_too_small, kinds, left_whole, padding
from treeshard._planning.lint_layers import cut_heads, state_unlike_weights, unlike_siblings
from treeshard._planning.logical import lost_axes, read_logical_rules
from treeshard._planning.matching import SMALL, PlannedLeaf
from treeshard._planning.tactics import ByNames, Tactic
from treeshard.errors import did_you_mean

if TYPE_CHECKING:
    from treeshard._planning.plan import Plan

# The adjustments of leaves that belong to another leaf.
RELATED = frozenset({"no-base", "cuts-block"})
# The number of paths searched for one that a misspelt pattern may mean.
MOST_NAMES = 1000


def find(plan: "Plan") -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste.

    Of a plan that follows another one, only the leaves are checked: rules decided those of the
    other.
    """
    is_ruled = not plan._mirrors
    return (
        *_misfits(plan),
        *collisions(plan),
        *(_unused_rules(plan) if is_ruled else ()),
        *_unused_specs(plan),
        *(all_too_small(plan) if is_ruled else ()),
        *_related(plan),
        *_same_arrays(plan),
        *_narrowed(plan),
        *left_whole(plan, _lost_names(plan)),
        *state_unlike_weights(plan),
        *unlike_siblings(plan),
        *cut_heads(plan),
        *_padded_state(plan),
    )


# ------------------------------------------------------------------ errors


def _misfits(plan: "Plan") -> Iterator[Finding]:
    """The errors that `match_partition_rules` raises for, one finding per kind of error."""
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for members in kinds(plan.leaves):
        leaf = members[0]
        for note in leaf.decision.errors:
            shape = leaf.shape if note.kind == "unmatched" else None
            alike[note, leaf.rule, shape] += members
    for (note, *_), members in alike.items():
        if note.kind == "unmatched":
            key = re.escape(members[0].path.rpartition("/")[2])
            yield finding_about("unmatched", members, key=key)
        elif note.kind == "indivisible":
            yield finding_of(note, members, *padding(members, plan.mesh))
        else:
            yield finding_of(note, members)


def collisions(plan: "Plan") -> Iterator[Finding]:
    """Paths that several leaves share, so that rules and files cannot distinguish them."""
    paths = [None if leaf is None else leaf.path for leaf in plan.leaf_at_each_index()]
    for path, key_paths in shared_names(paths, plan.specs).items():
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


def _padded_state(plan: "Plan") -> Iterator[Finding]:
    """Padded parameters beside state of an optimizer that does not treat each element by itself."""
    matches = (_NOT_ELEMENTWISE.search(leaf.path) for leaf in plan.leaves)
    # `opt_state/0/v_row/w`: its field stands beside others of one state, which begins above it.
    starts = {match.string[: match.start() + 1] for match in matches if match is not None}
    below = [leaf for leaf in plan.leaves if leaf.path.startswith(tuple(starts))]
    padded = [x.path for x in below if x.unpadded and "/matrices/" not in x.path]
    if padded:
        yield finding("not-elementwise", padded)


# ------------------------------------------------------------------ rules


def _unused_rules(plan: "Plan") -> Iterator[Finding]:
    """Rules that decided no leaf: dead if they match none, else shadowed by earlier ones.

    A last rule that matches every leaf is a fallback, and not reported.
    """
    used = {leaf.rule for leaf in plan.leaves}
    patterns = [re.compile(pattern) for pattern, _ in plan.rules]
    for index, pattern in enumerate(patterns):
        if index in used:
            continue
        by = rule_text(index, pattern.pattern)
        matched = [leaf for leaf in plan.leaves if pattern.search(leaf.path)]
        taken = [leaf for leaf in matched if leaf.shape]
        is_last = index == len(patterns) - 1
        if not matched:
            yield finding("dead-rule", [], index, by=by, hint=_meant(pattern.pattern, plan.leaves))
        elif not taken:
            yield finding("dead-rule, of scalars", [x.path for x in matched], index, by=by)
        elif not is_last or len(matched) < len(plan.leaves):
            yield _shadowed(index, by, taken)


def _shadowed(index: int, by: str, taken: Sequence[PlannedLeaf]) -> Finding:
    taker_of = {leaf.rule: leaf for leaf in taken if leaf.rule is not None}
    takers = sorted(taker_of)
    names = [decided_by(taker_of[taker]) for taker in takers[:3]]
    if len(takers) > 3:
        names.append(f"{len(takers) - 3} more")
    verb = "takes" if len(takers) == 1 else "take"
    return finding(
        "shadowed-rule",
        [leaf.path for leaf in taken],
        index,
        by=by,
        takers=f"{' and '.join(names)} {verb}",
        leaves="the only leaf" if len(taken) == 1 else f"all {len(taken)} leaves",
        first=takers[0],
    )


def _meant(pattern: str, leaves: Iterable[PlannedLeaf]) -> str:
    """A hint at the part of a path that a pattern may mean."""
    word = pattern.strip("^$/")
    count = word.count("/") + 1
    alike = {re.sub("[0-9]+", "0", leaf.path) for leaf in leaves}
    known: set[str] = set()
    for kind in sorted(alike)[:MOST_NAMES]:
        keys = kind.split("/")
        known.update("/".join(keys[i : i + count]) for i in range(len(keys) - count + 1))
    return did_you_mean(word, known)


def _unused_specs(plan: "Plan") -> Iterator[Finding]:
    """Specs that are not used because their leaves have fewer elements than `min_size`."""
    small = [x for x in plan.leaves if any(note.kind in SMALL for note in x.adjustments)]
    for members in grouped(small, lambda leaf: (leaf.rule, leaf.asked)):
        yield finding_about("explicit-spec-too-small", members, min_size=plan.min_size)


def _related(plan: "Plan") -> Iterator[Finding]:
    """Leaves that cannot have the spec of the leaf that they belong to."""
    for leaf in plan.leaves:
        for note in leaf.adjustments:
            if note.kind in RELATED:
                yield finding_of(note, [leaf])


def _same_arrays(plan: "Plan") -> Iterator[Finding]:
    """Arrays that are in the tree at two paths, one finding for each two branches that share some.

    Trees of JAX have value semantics: a function returns, and a device holds, an array for each
    path.
    """
    first_of = dict(plan._same_arrays)
    # numpy arrays of text are leaves that nothing places.
    later = [leaf for leaf in plan.leaves if leaf.path in first_of]
    for members in grouped(later, lambda x: _where_they_differ(x.path, first_of[x.path])):
        firsts = ", ".join(fold_paths([first_of[leaf.path] for leaf in members]))
        cost = human_bytes(sum(leaf.bytes_per_device(plan.mesh) for leaf in members))
        yield finding_about("same-array", members, firsts=firsts, cost=cost)


def _narrowed(plan: "Plan") -> Iterator[Finding]:
    """Arrays that devices hold in a narrower dtype, one finding for each pair of dtypes."""
    wide = dict(plan._narrowed)
    narrowed = [leaf for leaf in plan.leaves if leaf.path in wide]
    for members in grouped(narrowed, lambda leaf: (wide[leaf.path], leaf.dtype)):
        paths = [leaf.path for leaf in members]
        yield finding("narrowed", paths, wide=wide[paths[0]], narrow=members[0].dtype)


def _where_they_differ(path: str, other: str) -> tuple[str, str]:
    """Two paths without the keys at their ends that are equal."""
    keys, other_keys = path.split("/"), other.split("/")
    while keys and other_keys and keys[-1] == other_keys[-1]:
        keys.pop()
        other_keys.pop()
    return "/".join(keys), "/".join(other_keys)


# ------------------------------------------------------------------ logical names


def _lost_names(plan: "Plan") -> NamesLost:
    """A function that says why dims of a leaf are not sharded although they have logical names."""
    sizes = {axis: size for axis, size in axis_sizes(plan.mesh).items() if size > 1}
    boxes: dict[str, Any] = {}
    if any(isinstance(action, Tactic) and action.reads_boxes for _, action in plan.rules):
        nodes, treedef = tree_flatten(plan.structs, is_leaf=is_wrapper)
        boxes = {p: x for p, x in zip(paths_of(treedef), nodes, strict=True) if is_wrapper(x)}

    def names_lost(leaf: PlannedLeaf) -> list[str]:
        if leaf.rule is None:
            return []
        action = plan.rules[leaf.rule][1]
        if is_logical(action) and plan._logical is not None:
            return lost_axes(action, plan._logical, sizes)
        box: Any = boxes.get(leaf.path)
        # A box without an attribute `rules` names mesh axes, not logical names.
        if not isinstance(action, Tactic) or not hasattr(box, "rules"):
            return []
        facts: list[str] = []
        for step in action.steps:
            if isinstance(step, ByNames):
                own = step.rules if step.rules is not None else box.rules
                logical = plan._logical if own is None else read_logical_rules(own)
                if logical is not None:
                    facts += lost_axes(tuple(box.names), logical, sizes)
        return facts

    return names_lost
