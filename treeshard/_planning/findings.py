"""The findings of a plan: its errors and warnings, each with its fix.

The checks read decisions and decide nothing. So a plan can be made of rules with mistakes, and
tells all of them at once, with what each costs; JAX raises them one per attempt. What a check says
follows from the rules, the shapes and the mesh. Nothing is concluded from the names of leaves, but
for two conventions: what a mesh axis is for (`axis_names`), and which leaves are optimizer state.

    check                        codes
    1. _specs_that_do_not_fit    unmatched, rank, axis-not-in-mesh, axis-already-used,
                                 already-sharded, indivisible, reduced-type
    2. shared_paths              path-collision
    3. unused_rules              dead-rule, shadowed-rule
    4. _unused_specs             explicit-spec-too-small
    5. _only_small_leaves        all-too-small
    6. _same_arrays              same-array
    7. _narrowed_arrays          narrowed
    8. _left_whole               left-whole
    9. _state_unlike_weights     state-unlike-weight

Each is a function of the plan that yields findings, in this order.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from treeshard._core.mesh import axis_sizes
from treeshard._core.paths import shared_names
from treeshard._core.specs import (
    MISFITS,
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
    SMALL,
    SMALL_FIX,
    PlannedLeaf,
    parameters,
    state_with_parameters,
)
from treeshard._planning.planned import PlannedTree
from treeshard._planning.rules import kind_of
from treeshard._planning.tactics import Tactic
from treeshard.errors import counted, did_you_mean

T = TypeVar("T")


class Finding(NamedTuple):
    """One error or warning about a plan.

    Attributes:
        code: Errors: `"unmatched"`, `"rank"`, `"axis-not-in-mesh"`, `"axis-already-used"`,
            `"already-sharded"`, `"indivisible"`, `"reduced-type"`, `"path-collision"`. Warnings:
            `"dead-rule"`, `"shadowed-rule"`, `"explicit-spec-too-small"`, `"all-too-small"`,
            `"same-array"`, `"narrowed"`, `"left-whole"`, `"state-unlike-weight"`.
        severity: `"error"` if `Plan.check` raises for it, else `"warning"`.
        fact: What is wrong.
        fix: What to do about it.
        paths: The paths of the leaves concerned; empty for a rule that matches no leaf.
        rule: The index of the rule concerned, or `None`.
        wasted: For `"left-whole"` and `"all-too-small"`, the bytes that each device could save.
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
        paths = fold_paths(self.paths)
        shown = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" * (len(paths) > 5))
        # A shadowed rule is the subject of its own line, and its leaves are sharded well.
        where = f"{shown}: " if shown and self.code != "shadowed-rule" else ""
        return f"{self.severity} {self.code}: {where}{self.fact} {self.fix}"


def find(plan: PlannedTree) -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste."""
    # The leaves of a plan by `Plan.follow` were not decided by rules, so its rules are not checked.
    of_rules = () if plan._follows else (unused_rules, _unused_specs, _only_small_leaves)
    of_leaves = (_same_arrays, _narrowed_arrays, _left_whole, _state_unlike_weights)
    checks = (_specs_that_do_not_fit, shared_paths, *of_rules, *of_leaves)
    return tuple(found for check in checks for found in check(plan))


_ERRORS = MISFITS | {"unmatched", "path-collision"}


def _finding_about(
    code: str, leaves: Sequence[PlannedLeaf], fact: str, fix: str, wasted: int = 0
) -> Finding:
    """A finding about leaves that one rule decided alike."""
    severity = "error" if code in _ERRORS else "warning"
    return Finding(code, severity, fact, fix, _paths(leaves), leaves[0].rule, wasted)


def _paths(leaves: Iterable[PlannedLeaf]) -> tuple[str, ...]:
    return tuple(leaf.path for leaf in leaves)


def _rule_text(rule: int | None, pattern: str | None) -> str:
    """`rule 2 'attn/out'`."""
    return "no rule" if rule is None else f"rule {rule} {pattern!r}"


def _decided_by(leaf: PlannedLeaf) -> str:
    return _rule_text(leaf.rule, leaf.pattern)


def _group(items: Iterable[T], key: Callable[[T], Any]) -> list[list[T]]:
    """The items with equal keys together, in the order in which they appear."""
    groups: dict[Any, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


# ------------------------------------------------------------------ errors


def _specs_that_do_not_fit(plan: PlannedTree) -> Iterator[Finding]:
    """What `match_partition_rules` raises for: one finding for each mistake of a rule."""
    mistakes = [(error, leaf) for leaf in plan.leaves for error in leaf.decision.errors]
    for pairs in _group(mistakes, lambda x: (x[0], x[1].rule, _group_by_shape(*x))):
        error, leaf = pairs[0]
        leaves = [leaf for _, leaf in pairs]
        if error.kind == "unmatched":
            key = re.escape(leaf.path.rpartition("/")[2])
            fact = f"shape {leaf.shape}, no rule matches."
            fix = f'Add a rule such as ("{key}", ...), or a last one (".*", None).'
            yield _finding_about("unmatched", leaves, fact, fix)
        else:
            yield _finding_about(error.kind, leaves, *_as_finding(error.why, leaf))


def _group_by_shape(error: Any, leaf: PlannedLeaf) -> Any:
    # Unmatched leaves have no rule in common, and are grouped by shape.
    return leaf.shape if error.kind == "unmatched" else None


def _as_finding(why: str, leaf: PlannedLeaf) -> tuple[str, str]:
    """The fact and the fix of a finding: the text of an adjustment has one after the other."""
    # "... is not divisible by 4. Pad it to 8, or use another dim."
    fact, _, fix = why.partition(". ")
    return f"{_decided_by(leaf)}: {fact.rstrip('.')}.", fix or "Change the rule."


def shared_paths(plan: PlannedTree) -> Iterator[Finding]:
    """Paths that several leaves share, so that rules and files cannot distinguish them."""
    paths = [None if leaf is None else leaf.path for leaf in plan.leaf_at_each_index()]
    for path, key_paths in shared_names(paths, plan.specs).items():
        fact = f"{' and '.join(key_paths)} share this path."
        fix = "Rename a key: rules cannot distinguish these leaves, and files cannot hold both."
        yield Finding("path-collision", "error", fact, fix, (path,))


# ------------------------------------------------------------------ rules


def unused_rules(plan: PlannedTree) -> Iterator[Finding]:
    """Rules that decided no leaf: dead if they match none, else shadowed by earlier ones.

    A last rule that matches every leaf is a fallback, and not reported.
    """
    # Patterns are searched only for rules that decided nothing: most decided something.
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
            fact = f"{by} matches no leaf.{_meant(pattern.pattern, plan.leaves)}"
            fix = "Correct the pattern, or remove the rule."
            yield Finding("dead-rule", "warning", fact, fix, rule=index)
        elif not taken:
            fact = f"{by} matches only scalars, which need no rule."
            yield Finding("dead-rule", "warning", fact, "Remove it.", _paths(matched), index)
        elif not is_fallback:
            takers = sorted({(leaf.rule or 0, leaf.pattern) for leaf in taken})
            by_takers = " and ".join(_rule_text(*taker) for taker in takers)
            leaves = counted(len(taken), "leaf")
            fact = f"{by} decides no leaf: it matches {leaves}, decided by {by_takers}."
            fix = f"Move it above rule {takers[0][0]}, or remove it."
            yield Finding("shadowed-rule", "warning", fact, fix, _paths(taken), index)


# The number of paths searched for one that a misspelt pattern may mean.
MOST_NAMES = 1000


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


# ------------------------------------------------------------------ small leaves


def _unused_specs(plan: PlannedTree) -> Iterator[Finding]:
    """Specs that are not used because their leaves have fewer elements than `min_size`."""
    small = [x for x in plan.leaves if any(note.kind in SMALL for note in x.adjustments)]
    for leaves in _group(small, lambda leaf: (leaf.rule, leaf.asked)):
        fact = (
            f"{_decided_by(leaves[0])}: {leaves[0].asked} is not used for leaves of fewer than"
            f" {plan.min_size} elements (`min_size`)."
        )
        yield _finding_about("explicit-spec-too-small", leaves, fact, SMALL_FIX)


def _only_small_leaves(plan: PlannedTree) -> Iterator[Finding]:
    """One finding if `fsdp` splits nothing, as all leaves have fewer elements than `min_size`."""
    leaves, sizes = plan.leaves, axis_sizes(plan.mesh)
    if any(leaf.size >= plan.min_size for leaf in leaves):
        return
    # Replicated for their size, and not for another reason.
    small = [leaf for leaf in leaves if any(x.kind == "too-small" for x in leaf.adjustments)]
    actions = [plan.rules[leaf.rule][1] for leaf in small if leaf.rule is not None]
    by_fsdp = {a for action in actions if isinstance(action, Tactic) for a in action.fsdp_axes}
    axes = [axis for axis in idle_axes(plan.mesh, ()) if axis in by_fsdp]
    split = {axis for leaf in leaves for axis in all_axes(entries(leaf.given))}
    if not axes or not split.isdisjoint(axes):
        return
    now = sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves)
    wasted = now - -(-now // part_count(axes, sizes))
    fact = (
        f"fsdp splits no leaf: all {counted(len(leaves), 'leaf')} have fewer than"
        f" {plan.min_size:,} elements (`min_size`). They take {human_bytes(now)} per device,"
        f" {human_bytes(wasted)} more than an even split over {_with_sizes(axes, plan)}."
    )
    fix = "To split them, pass a smaller `min_size`."
    yield Finding("all-too-small", "warning", fact, fix, wasted=wasted)


def _with_sizes(axes: Sequence[str], plan: PlannedTree) -> str:
    """`'fsdp' (4) and 'tensor' (8)`."""
    sizes = axis_sizes(plan.mesh)
    return " and ".join(f"{axis!r} ({sizes[axis]})" for axis in axes)


# ------------------------------------------------------------------ single leaves


def _same_arrays(plan: PlannedTree) -> Iterator[Finding]:
    """Arrays that are in the tree at two paths, one finding for each two branches that share some.

    Trees of JAX have value semantics: a function returns, and a device holds, an array for each
    path.
    """
    first_of = dict(plan._array_facts.same)
    later = [leaf for leaf in plan.leaves if leaf.path in first_of]
    for leaves in _group(later, lambda x: _differing_branches(x.path, first_of[x.path])):
        firsts = ", ".join(fold_paths([first_of[leaf.path] for leaf in leaves]))
        cost = human_bytes(sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves))
        fact = (
            f"the same array as {firsts} now, and an array of its own once it is placed or"
            f" stepped: {cost} more on each device."
        )
        fix = "To keep one array, use `equinox.nn.Shared`."
        yield _finding_about("same-array", leaves, fact, fix)


def _differing_branches(path: str, other: str) -> tuple[str, str]:
    """Two paths without the keys at their ends that are equal."""
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
        yield Finding("narrowed", "warning", fact, fix, _paths(leaves))


# ------------------------------------------------------------------ what leaves take

# Leaves are reported if they waste at least this part of a device's bytes.
LARGE_PART = 0.01


class _Unsplit(NamedTuple):
    """How a large leaf misses axes. Leaves that miss them alike are one finding."""

    # The axes that could split it and do not.
    idle: tuple[str, ...]
    # Whether other axes split it.
    is_split: bool
    # The rule, and why it does no more; of replicated leaves, the shape and the decision.
    reason: Any


def _left_whole(plan: PlannedTree) -> list[Finding]:
    """Large leaves that idle axes do not split, ordered by the bytes that an even split would save.

    1. Leaves with fewer elements than `min_size` are replicated on purpose, and so are leaves
       that a rule names and replicates (`_is_intended`).
    2. A vector that is split already is left out: a bias takes its axis from the matrix beside it.
    3. Leaves that miss the same axes for the same reason are one finding, if they waste at least
       `LARGE_PART` of what a device holds.
    """
    groups: dict[_Unsplit, list[PlannedLeaf]] = defaultdict(list)
    usually_idle = axes_idle_for_leaves(plan)
    # A model has few kinds of leaves, so this looks at each kind once.
    for leaves in _group(plan.leaves, lambda x: (x.shape, x.dtype, id(x.decision))):
        if (unsplit := _unsplit(leaves[0], usually_idle, plan)) is not None:
            groups[unsplit] += leaves
    per_device = sum(
        leaf.bytes_per_device(plan.mesh) for leaf in plan.leaves if not leaf.decision.errors
    )
    findings: list[Finding] = []
    for unsplit, leaves in groups.items():
        parts = part_count(unsplit.idle, axis_sizes(plan.mesh))
        sizes = [leaf.bytes_per_device(plan.mesh) for leaf in leaves]
        wasted = sum(size - -(-size // parts) for size in sizes)
        if wasted and wasted >= LARGE_PART * per_device:
            findings.append(_about_unsplit(unsplit, leaves, sum(sizes), wasted, plan))
    return sorted(findings, key=lambda finding: -finding.wasted)


def _unsplit(leaf: PlannedLeaf, usually_idle: Sequence[str], plan: PlannedTree) -> _Unsplit | None:
    """How a leaf misses axes; `None` if it is small, meant to be replicated, or split."""
    is_small = leaf.size < max(plan.min_size, 2)  # nothing splits a single element
    if leaf.decision.errors or is_small or _is_intended(leaf, plan):
        return None
    split = all_axes(entries(leaf.given))
    is_split = part_count(split, axis_sizes(plan.mesh)) > 1
    is_vector = sum(length > 1 for length in leaf.shape) == 1
    if is_split and is_vector:
        return None
    # If its rule was to split it over some axes, these are idle whatever their names say.
    meant = {axis for note in leaf.adjustments if note.kind == "no-dim" for axis in note.axes}
    idle = [axis for axis in idle_axes(plan.mesh, split) if axis in usually_idle or axis in meant]
    reason = (leaf.rule, leaf.adjustments) if is_split else (leaf.shape, leaf.decision)
    return _Unsplit(tuple(idle), is_split, reason) if idle else None


# A path that a pattern without a name in it matches, and no other pattern.
_NO_NAME = "\N{LATIN LETTER DENTAL CLICK}/\N{LATIN LETTER LATERAL CLICK}"


def _is_intended(leaf: PlannedLeaf, plan: PlannedTree) -> bool:
    """Whether a leaf is replicated on purpose: by a rule that names it and replicates."""
    if leaf.rule is None or leaf.asked is None or leaf.adjustments:
        return False
    if all_axes((*entries(leaf.asked), *entries(leaf.given))):
        return False
    pattern, action = plan.rules[leaf.rule]
    if re.search(pattern, _NO_NAME):
        return False
    return kind_of(action) != "tactic" or repr(action).startswith("replicate(")


def axes_idle_for_leaves(plan: PlannedTree) -> list[str]:
    """The axes that are idle for a leaf that they do not split.

    Others replicate leaves by convention: those for data and sequences split the batch, unless they
    split most of the parameters too; those for experts and pipelines split some of them alone.
    """
    # A spec does not say whether its axis splits the batch, and a plan has no batch.
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


def _about_unsplit(
    unsplit: _Unsplit, leaves: Sequence[PlannedLeaf], now: int, wasted: int, plan: PlannedTree
) -> Finding:
    over = _with_sizes(unsplit.idle, plan)
    why, fix = _explain_unsplit(leaves, unsplit, plan)
    if unsplit.is_split:
        fact = (
            f"not split over the idle {over}: {human_bytes(now)} per device,"
            f" {part_count(unsplit.idle, axis_sizes(plan.mesh))}x an even split,"
            f" {human_bytes(wasted)} more: {why}"
        )
    else:
        fact = (
            f"shape {leaves[0].shape} is replicated, {human_bytes(wasted)} more per device than an"
            f" even split over {over}: {why}"
        )
    return _finding_about("left-whole", leaves, fact, fix, wasted)


# What to do about a leaf that its rule did not split, by its last adjustment.
_FIXES = {
    "too-small": "Lower `min_size`.",
    "no-dim": "Free a dim, use another axis, or pad a dim in the model.",
    "no-logical-rule": "Add a logical rule for it.",
}


def _explain_unsplit(
    leaves: Sequence[PlannedLeaf], unsplit: _Unsplit, plan: PlannedTree
) -> tuple[str, str]:
    """Why leaves are not split over idle axes, and the fix."""
    leaf, by = leaves[0], _decided_by(leaves[0])
    if leaf.rule is None:
        no_counterpart = "it has no counterpart in the plan that this one follows."
        why = f"it has {leaf.given}." if unsplit.is_split else no_counterpart
        return why, "Plan it by rules of its own."
    if unsplit.is_split:
        otherwise = f"Split another dim over {entry_of(unsplit.idle)!r}."
    else:
        otherwise = "Change the rule, or the shape."
    if leaf.adjustments:
        note = leaf.adjustments[-1]
        return f"{by}, {note.why}", _FIXES.get(note.kind, otherwise)
    if not unsplit.is_split:
        fix = "Give it a spec or `fsdp`; if this is intended, a rule that names it, with None."
        return f"{by} says so.", fix
    action = plan.rules[leaf.rule][1]
    specs = {member.given for member in leaves}
    what = action if isinstance(action, Tactic) else leaf.given
    is_clear = isinstance(action, Tactic) or len(specs) == 1
    return (f"{by}, {what}." if is_clear else f"{by}."), otherwise


# ------------------------------------------------------------------ optimizer state


def _state_unlike_weights(plan: PlannedTree) -> Iterator[Finding]:
    """Optimizer state that is split unlike its parameter, and not further in the same dims.

    State that is split further is as in ZeRO-1.
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
            f" {parameter.given} by {_decided_by(parameter)}: each step moves one of them to the"
            " sharding of the other."
        )
        fix = "Use one rule for both, or `Plan.follow`."
        yield _finding_about("state-unlike-weight", [x for x, _ in pairs], fact, fix)


def _axes_of_dims(leaf: PlannedLeaf, plan: PlannedTree) -> list[set[str]]:
    """The axes of several devices that split each dim."""
    sizes = axis_sizes(plan.mesh)
    dims = dim_entries(leaf.given, len(leaf.shape))
    return [{axis for axis in axes_of(entry) if sizes[axis] > 1} for entry in dims]
