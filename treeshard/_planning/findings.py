"""The findings of a plan: its errors and warnings, each with its fix.

The checks only read decisions. A plan can therefore be made from rules with mistakes, and reports
all mistakes at once, each with its cost. JAX raises one per attempt. The checks use the rules, the
shapes and the mesh. They use names for two conventions only: the use of a mesh axis (`axis_names`),
and which leaves are optimizer state.

    check                        codes
    1. _specs_that_do_not_fit    unmatched, rank, axis-not-in-mesh, axis-already-used,
                                 already-sharded, indivisible, reduced-type
    2. shared_paths              path-collision
    3. unused_rules              dead-rule, shadowed-rule
    4. _unused_specs             explicit-spec-too-small
    5. _only_small_leaves        all-too-small
    6. _trimmed_specs            trimmed
    7. _same_arrays              same-array
    8. _narrowed_arrays          narrowed
    9. _left_whole               left-whole
    10. _state_unlike_weights    state-unlike-weight

Each check is a function of the plan that yields findings. They run in this order.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import shared_names
from treeshard._core.specs import (
    Adjustment,
    all_axes,
    axes_of,
    dim_entries,
    entries,
    entry_of,
    part_count,
)
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.axis_names import idle_axes, use_of
from treeshard._planning.matching import (
    WARNED,
    PlannedLeaf,
    parameters,
    state_with_parameters,
)
from treeshard._planning.planned import PlannedTree
from treeshard._planning.rules import ERRORS, kind_of
from treeshard._planning.tactics import Tactic
from treeshard.errors import counted, did_you_mean

T = TypeVar("T")

_ERRORS = ERRORS | {"path-collision"}


class Finding(NamedTuple):
    """One error or warning about a plan.

    Attributes:
        code: Errors: `"unmatched"`, `"rank"`, `"axis-not-in-mesh"`, `"axis-already-used"`,
            `"already-sharded"`, `"indivisible"`, `"reduced-type"`, `"path-collision"`. Warnings:
            `"dead-rule"`, `"shadowed-rule"`, `"explicit-spec-too-small"`, `"all-too-small"`,
            `"trimmed"`, `"same-array"`, `"narrowed"`, `"left-whole"`, `"state-unlike-weight"`.
        fact: The problem, in words.
        fix: The way to fix the problem.
        paths: The paths of the leaves; empty for a rule that matches no leaf.
        rule: The index of the rule, or `None`.
        wasted: For `"left-whole"` and `"all-too-small"`, the bytes that each device could save.
    """

    code: str
    fact: str
    fix: str
    paths: tuple[str, ...] = ()
    rule: int | None = None
    wasted: int = 0

    @property
    def severity(self) -> Literal["error", "warning"]:
        """`"error"` if `Plan.check` raises for the finding, else `"warning"`."""
        return "error" if self.code in _ERRORS else "warning"

    def __str__(self) -> str:
        """One line, with the paths of repeated layers folded: `layers/{0..79}/attn/q`."""
        paths = fold_paths(self.paths)
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" * (len(paths) > 5))
        # The line of a shadowed rule starts with the rule, because its leaves are sharded well.
        where = f"{shown}: " if shown and self.code != "shadowed-rule" else ""
        return f"{self.severity} {self.code}: {where}{self.fact} {self.fix}"


def find(plan: PlannedTree) -> tuple[Finding, ...]:
    """All findings of a plan: errors first, and unsplit leaves by the bytes that they waste."""
    # Rules did not decide the leaves of a plan by `Plan.follow`, so its rules are not checked.
    of_rules = (unused_rules, _unused_specs, _only_small_leaves)
    of_leaves = (
        _trimmed_specs,
        _same_arrays,
        _narrowed_arrays,
        _left_whole,
        _state_unlike_weights,
    )
    checks = (_specs_that_do_not_fit, shared_paths, *(() if plan._follows else of_rules))
    return tuple(found for check in (*checks, *of_leaves) for found in check(plan))


def _paths(leaves: Iterable[PlannedLeaf]) -> tuple[str, ...]:
    return tuple(leaf.path for leaf in leaves)


def _rule_text(rule: int | None, pattern: str | None) -> str:
    """`rule 2 'attn/out'`."""
    return "no rule" if rule is None else f"rule {rule} {pattern!r}"


def _decided_by(leaf: PlannedLeaf) -> str:
    return "its spec" if leaf.decision.by_spec else _rule_text(leaf.rule, leaf.pattern)


def _with_sizes(axes: Sequence[str], plan: PlannedTree) -> str:
    """`'fsdp' (4) and 'tensor' (8)`."""
    sizes = axis_sizes(plan.mesh)
    return " and ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)


def _group(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """The items with equal keys together, in the order in which they appear."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _group_by_note(
    plan: PlannedTree, kinds: Container[str]
) -> Iterator[tuple[Adjustment, list[PlannedLeaf]]]:
    """Each adjustment of these kinds, with the leaves for which one rule made it."""
    notes = [
        (note, leaf) for leaf in plan.leaves for note in leaf.adjustments if note.kind in kinds
    ]
    # Leaves that no rule matches have no rule in common, and are grouped by shape.
    for pairs in _group(notes, lambda x: (x[0], x[1].rule, x[1].rule is None and x[1].shape)):
        yield pairs[0][0], [leaf for _, leaf in pairs]


# ------------------------------------------------------------------ errors


def _specs_that_do_not_fit(plan: PlannedTree) -> Iterator[Finding]:
    """The errors of `match_partition_rules`: one finding for each mistake of a rule."""
    for error, leaves in _group_by_note(plan, _ERRORS):
        leaf = leaves[0]
        if error.kind == "unmatched":
            key = re.escape(leaf.path.rpartition("/")[2])
            fact = f"shape {leaf.shape}, no rule matches."
            fix = f'Add a rule such as ("{key}", ...), or a last one (".*", None).'
        else:
            # "... is not divisible by 4. Pad it to 8, or use another dim."
            why, _, fix = error.why.partition(". ")
            fact = f"{_decided_by(leaf)}: {why.rstrip('.')}."
        change = "Change the spec." if leaf.decision.by_spec else "Change the rule."
        yield Finding(error.kind, fact, fix or change, _paths(leaves), leaf.rule)


def shared_paths(plan: PlannedTree) -> Iterator[Finding]:
    """Paths that several leaves share, so that rules and files cannot distinguish them."""
    paths = [None if leaf is None else leaf.path for leaf in plan.leaf_at_each_index()]
    for path, key_paths in shared_names(paths, plan.specs).items():
        fact = f"{' and '.join(key_paths)} share this path."
        fix = "Rename a key: rules cannot distinguish these leaves, and files cannot hold both."
        yield Finding("path-collision", fact, fix, (path,))


# ------------------------------------------------------------------ rules


def unused_rules(plan: PlannedTree) -> Iterator[Finding]:
    """Rules that decided no leaf: dead if they match no leaf, otherwise shadowed by earlier rules.

    A last rule that matches every leaf is a fallback, and is not reported.
    """
    # Patterns are searched only for rules that decided no leaf, which are few.
    used = {leaf.rule for leaf in plan.leaves}
    patterns = [re.compile(pattern) for pattern, _ in plan.rules]
    for index, pattern in enumerate(patterns):
        if index in used:
            continue
        by = _rule_text(index, pattern.pattern)
        matched = [leaf for leaf in plan.leaves if pattern.search(leaf.path)]
        taken = [leaf for leaf in matched if leaf.shape]
        is_fallback = index == len(patterns) - 1 and len(matched) == len(plan.leaves)
        if not matched:
            fact = f"{by} matches no leaf.{_similar_path(pattern.pattern, plan.leaves)}"
            yield Finding("dead-rule", fact, "Correct the pattern, or remove the rule.", rule=index)
        elif not taken:
            fact = f"{by} matches only scalars, which need no rule."
            yield Finding("dead-rule", fact, "Remove it.", _paths(matched), index)
        elif not is_fallback:
            takers = sorted({(leaf.rule or 0, leaf.pattern) for leaf in taken})
            by_takers = " and ".join(_rule_text(*taker) for taker in takers)
            leaves = counted(len(taken), "leaf")
            fact = f"{by} decides no leaf: it matches {leaves}, decided by {by_takers}."
            fix = f"Move it above rule {takers[0][0]}, or remove it."
            yield Finding("shadowed-rule", fact, fix, _paths(taken), index)


def _similar_path(pattern: str, leaves: Iterable[PlannedLeaf]) -> str:
    """A hint at a part of a path that a misspelt pattern resembles."""
    word = pattern.strip("^$/")
    count = word.count("/") + 1
    parts: dict[str, None] = {}
    first: dict[str, str] = {}  # layers differ only in numbers
    for leaf in leaves:
        first.setdefault(re.sub("[0-9]+", "0", leaf.path), leaf.path)
    for path in first.values():
        keys = path.split("/")
        for start in range(len(keys) - count + 1):
            parts["/".join(keys[start : start + count])] = None
    return did_you_mean(word, parts)


# ------------------------------------------------------------------ small leaves


def _unused_specs(plan: PlannedTree) -> Iterator[Finding]:
    """Specs that are not used because their leaves have fewer elements than `min_size`."""
    kind = "explicit-spec-too-small"
    small = [x for x in plan.leaves if any(note.kind == kind for note in x.adjustments)]
    for leaves in _group(small, lambda leaf: (leaf.rule, leaf.asked)):
        fact = (
            f"{_decided_by(leaves[0])}: {leaves[0].asked} is not used for leaves of fewer than"
            f" {plan.min_size} elements (`min_size`)."
        )
        yield Finding(kind, fact, WARNED[kind], _paths(leaves), leaves[0].rule)


def _only_small_leaves(plan: PlannedTree) -> Iterator[Finding]:
    """One finding if `fsdp` splits no leaf, because all have fewer elements than `min_size`."""
    leaves = plan.leaves
    if any(leaf.size >= plan.min_size for leaf in leaves):
        return
    by_fsdp: set[str] = set()  # the axes over which fsdp would split a larger leaf
    for _, small in _group_by_note(plan, {"too-small"}):
        action = None if small[0].rule is None else plan.rules[small[0].rule][1]
        by_fsdp |= action.fsdp_axes if isinstance(action, Tactic) else set()
    axes = [axis for axis in idle_axes(plan.mesh, ()) if axis in by_fsdp]
    split = {axis for leaf in leaves for axis in all_axes(entries(leaf.given))}
    if not axes or not split.isdisjoint(axes):
        return
    now = sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves)
    wasted = now - -(-now // part_count(axes, axis_sizes(plan.mesh)))
    fact = (
        f"fsdp splits no leaf: all {counted(len(leaves), 'leaf')} have fewer than"
        f" {plan.min_size:,} elements (`min_size`). They take {human_bytes(now)} per device,"
        f" {human_bytes(wasted)} more than an even split over {_with_sizes(axes, plan)}."
    )
    fix = "To split them, pass a smaller `min_size`."
    yield Finding("all-too-small", fact, fix, wasted=wasted)


# ------------------------------------------------------------------ single leaves


def _trimmed_specs(plan: PlannedTree) -> Iterator[Finding]:
    """One finding for all leaves whose spec names an axis for a dim that they do not have."""
    kind = "trimmed"
    leaves = [x for x in plan.leaves if any(note.kind == kind for note in x.adjustments)]
    if not leaves:
        return
    notes = [note for leaf in leaves for note in leaf.adjustments if note.kind == kind]
    axes = dict.fromkeys(axis for note in notes for axis in note.axes)
    rules = {leaf.rule: _decided_by(leaf) for leaf in leaves}
    fact = (
        f"{' and '.join(rules.values())}: the spec has more entries than these leaves have dims,"
        f" so {' and '.join(map(repr, axes))} {'is' if len(axes) == 1 else 'are'} dropped."
    )
    rule = leaves[0].rule if len(rules) == 1 else None
    yield Finding(kind, fact, WARNED[kind], _paths(leaves), rule)


def _same_arrays(plan: PlannedTree) -> Iterator[Finding]:
    """Arrays at two paths of the tree, one finding for each pair of branches that share arrays.

    Trees of JAX have value semantics: functions return, and devices hold, one array per path.
    """
    first_of = dict(plan._array_facts.same)
    later = [leaf for leaf in plan.leaves if leaf.path in first_of]
    for leaves in _group(later, lambda x: _differing_branches(x.path, first_of[x.path])):
        firsts = ", ".join(fold_paths([first_of[leaf.path] for leaf in leaves]))
        cost = human_bytes(sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves))
        fact = (
            f"shares memory with {firsts}. Sharding or stepping makes a second copy, {cost} more on"
            " each device."
        )
        fix = "To keep one array, use `equinox.nn.Shared`."
        yield Finding("same-array", fact, fix, _paths(leaves), leaves[0].rule)


def _differing_branches(path: str, other: str) -> tuple[str, str]:
    """Two paths without their common last keys."""
    keys, other_keys = path.split("/"), other.split("/")
    while keys and other_keys and keys[-1] == other_keys[-1]:
        keys.pop()
        other_keys.pop()
    return "/".join(keys), "/".join(other_keys)


def _narrowed_arrays(plan: PlannedTree) -> Iterator[Finding]:
    """Arrays that devices hold in a narrower dtype, one finding for each pair of dtypes."""
    wide = dict(plan._array_facts.narrowed)
    narrowed = [leaf for leaf in plan.leaves if leaf.path in wide]
    for leaves in _group(narrowed, lambda leaf: (wide[leaf.path], leaf.dtype)):
        own = wide[leaves[0].path]
        fact = f"{own} in the tree, and {leaves[0].dtype} on devices, since JAX's x64 mode is off."
        fix = (
            f"To keep {own}, call `jax.config.update('jax_enable_x64', True)` first; otherwise"
            " convert them with `.astype`."
        )
        yield Finding("narrowed", fact, fix, _paths(leaves))


# ------------------------------------------------------------------ wasted memory

# Leaves are reported if they waste at least this part of a device's bytes.
LARGE_PART = 0.01


def _left_whole(plan: PlannedTree) -> list[Finding]:
    """Large leaves that idle axes do not split, ordered by the bytes that an even split would save.

    1. Leaves with fewer elements than `min_size` are replicated on purpose, and so are leaves
       that a rule names and replicates (`_is_intended`).
    2. A vector that is split already is left out: a bias has the axis of its matrix.
    3. Leaves that miss the same axes for the same reason are one finding, if they waste at least
       `LARGE_PART` of a device's bytes.
    """
    fitting = [leaf for leaf in plan.leaves if not leaf.decision.errors]
    per_device = sum(leaf.bytes_per_device(plan.mesh) for leaf in fitting)
    usually_idle = _axes_idle_for_leaves(plan)
    # The axes, and the reason as words -> the leaves.
    missed: dict[tuple[Any, ...], list[PlannedLeaf]] = defaultdict(list)
    # A model has few kinds of leaves, so this looks at each kind once.
    for alike in _group(fitting, lambda x: (x.shape, x.dtype, id(x.decision))):
        if axes := _missed_axes(alike[0], usually_idle, plan):
            missed[axes, alike[0].rule, *_explain_unsplit(alike[0], axes, plan)] += alike
    findings: list[Finding] = []
    for (axes, rule, why, fix), leaves in missed.items():
        parts = part_count(axes, axis_sizes(plan.mesh))
        sizes = [leaf.bytes_per_device(plan.mesh) for leaf in leaves]
        wasted = sum(size - -(-size // parts) for size in sizes)
        if wasted and wasted >= LARGE_PART * per_device:
            fact = (
                f"not split over the idle {_with_sizes(axes, plan)}: {human_bytes(sum(sizes))} per"
                f" device, {parts}x an even split, {human_bytes(wasted)} more: {why}"
            )
            findings.append(Finding("left-whole", fact, fix, _paths(leaves), rule, wasted))
    return sorted(findings, key=lambda finding: -finding.wasted)


def _missed_axes(
    leaf: PlannedLeaf, usually_idle: Sequence[str], plan: PlannedTree
) -> tuple[str, ...]:
    """The idle axes that do not split a leaf. Empty if it is small, or sharded as intended."""
    is_small = leaf.size < max(plan.min_size, 2)  # a single element cannot be split
    if is_small or _is_intended(leaf, plan):
        return ()
    split = all_axes(entries(leaf.given))
    is_vector = sum(length > 1 for length in leaf.shape) == 1
    if is_vector and part_count(split, axis_sizes(plan.mesh)) > 1:
        return ()
    # The axes over which its rule should have split it are idle, whatever their names.
    meant = {axis for note in leaf.adjustments if note.kind == "no-dim" for axis in note.axes}
    idle = idle_axes(plan.mesh, split)
    return tuple(axis for axis in idle if axis in usually_idle or axis in meant)


# A path that only patterns without a name match.
_NO_NAME = "\N{LATIN LETTER DENTAL CLICK}/\N{LATIN LETTER LATERAL CLICK}"


def _is_intended(leaf: PlannedLeaf, plan: PlannedTree) -> bool:
    """Whether a leaf is sharded as intended: by its spec, or by a rule that names it."""
    if leaf.decision.by_spec:
        return True
    if leaf.rule is None or leaf.asked is None or leaf.adjustments:
        return False
    if all_axes((*entries(leaf.asked), *entries(leaf.given))):
        return False
    pattern, action = plan.rules[leaf.rule]
    if re.search(pattern, _NO_NAME):
        return False
    return kind_of(action) != "tactic" or repr(action).startswith("replicate(")


def _axes_idle_for_leaves(plan: PlannedTree) -> list[str]:
    """The axes that are idle for a leaf that they do not split.

    Other axes replicate leaves by convention. Axes for data and sequences split the batch, unless
    they also split most of the parameters. Axes for experts and pipelines split only some leaves.
    """
    # Neither a spec nor a plan shows which axes split the batch.
    weights = parameters(plan.leaves)
    bytes_split: Counter[str] = Counter()
    for leaf in weights:
        bytes_split.update(dict.fromkeys(all_axes(entries(leaf.given)), leaf.bytes))
    half = max(sum(leaf.bytes for leaf in weights) / 2, 1)
    idle: list[str] = []
    for axis in idle_axes(plan.mesh, ()):
        use = use_of(axis)
        splits_batch = use in ("data", "sequence") and bytes_split[axis] < half
        splits_some = use in ("expert", "stage") and bytes_split[axis] > 0
        if not splits_batch and not splits_some:
            idle.append(axis)
    return idle


# The fix for a leaf that its rule did not split, by its last adjustment.
_FIXES = {
    "too-small": "Lower `min_size`.",
    "no-dim": "Free a dim, use another axis, or pad a dim in the model.",
    "no-logical-rule": "Add a logical rule for it.",
    "logical-axis-not-in-mesh": "Correct the logical rule.",
}


def _explain_unsplit(leaf: PlannedLeaf, idle: Sequence[str], plan: PlannedTree) -> tuple[str, str]:
    """Why a leaf is not split over idle axes, and the fix."""
    if leaf.rule is None:
        why = "it has no counterpart in the plan that this one follows."
        return why, "Plan it by rules of its own."
    by = _decided_by(leaf)
    fix = "Give it a spec or `fsdp`; if this is intended, a rule that names it, with None."
    if all_axes(entries(leaf.given)):
        fix = f"Split another dim over {entry_of(idle)!r}."
    if leaf.adjustments:
        note = leaf.adjustments[-1]
        return f"{by}, {note.why}", _FIXES.get(note.kind, fix)
    action = plan.rules[leaf.rule][1]
    return f"{by}, {action if isinstance(action, Tactic) else leaf.given}.", fix


# ------------------------------------------------------------------ optimizer state


def _state_unlike_weights(plan: PlannedTree) -> Iterator[Finding]:
    """Optimizer state that is split unlike its parameter.

    State that is split further in the same dims, as in ZeRO-1, is not reported.
    """
    unlike: list[tuple[PlannedLeaf, PlannedLeaf]] = []
    for leaf, parameter in state_with_parameters(plan.leaves):
        is_wrong = leaf.decision.errors or parameter.decision.errors
        if is_wrong or leaf.size < plan.min_size:
            continue
        dims = zip(_axes_of_dims(leaf, plan), _axes_of_dims(parameter, plan), strict=True)
        if not all(of_parameter <= own for own, of_parameter in dims):
            unlike.append((leaf, parameter))
    for pairs in _group(unlike, lambda pair: tuple((x.rule, x.given) for x in pair)):
        leaf, parameter = pairs[0]
        fact = (
            f"{leaf.given} by {_decided_by(leaf)}, while its parameter, {parameter.path}, has"
            f" {parameter.given} by {_decided_by(parameter)}. Each step reshards one of them."
        )
        fix = "Use one rule for both, or `Plan.follow`."
        paths = _paths(leaf for leaf, _ in pairs)
        yield Finding("state-unlike-weight", fact, fix, paths, leaf.rule)


def _axes_of_dims(leaf: PlannedLeaf, plan: PlannedTree) -> list[set[str]]:
    """The axes of several devices that split each dim."""
    sizes = axis_sizes(plan.mesh)
    dims = dim_entries(leaf.given, len(leaf.shape))
    return [{axis for axis in axes_of(entry) if sizes[axis] > 1} for entry in dims]
