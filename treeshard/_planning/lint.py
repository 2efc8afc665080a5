"""The checks of a plan: errors and warnings about its leaves and its rules.

They read the decisions and decide nothing, so a plan can be made of rules with mistakes: all of
these are told at once, with what each costs, and not one per attempt as JAX raises them.

A plan has paths and shapes, and neither the model nor the batch. So the names of axes say which of
them split a batch, numbers in paths tell layers, the path and the shape of a parameter its state,
and shapes that only attention has together its heads.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.tree_util import tree_flatten

from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import is_wrapper, paths_of, shared_names
from treeshard._core.specs import (
    all_axes,
    axes_of,
    dim_entries,
    entries,
    entry_of,
    is_logical,
    part_count,
    trimmed,
)
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.axis_names import use_of
from treeshard._planning.findings import (
    Finding,
    decided_by,
    finding,
    finding_about,
    finding_of,
    grouped,
    rule_text,
)
from treeshard._planning.logical import lost_axes, read_logical_rules
from treeshard._planning.matching import SMALL, PlannedLeaf, parameters, state_with_parameters
from treeshard._planning.padding import padded_leaf
from treeshard._planning.rules import kind_of
from treeshard._planning.tactics import ByNames, Tactic
from treeshard.errors import counted, did_you_mean

if TYPE_CHECKING:
    from treeshard._planning.plan import Plan

# The number of paths searched for one that a misspelt pattern may mean.
MOST_NAMES = 1000

NamesLost = Callable[[PlannedLeaf], Sequence[str]]


def find(plan: "Plan") -> tuple[Finding, ...]:
    """All findings of a plan: errors first; replicated leaves ordered by what they waste.

    Of a plan that follows another one, only the leaves are checked: rules decided those of the
    other.
    """
    is_ruled = not plan._mirrors
    return (
        *_misfits(plan),
        *collisions(plan),
        *(unused_rules(plan) if is_ruled else ()),
        *_unused_specs(plan),
        *(all_too_small(plan) if is_ruled else ()),
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


def unused_rules(plan: "Plan") -> Iterator[Finding]:
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


# ------------------------------------------------------------------ what leaves take

# Leaves are reported if they waste at least this part of a device's bytes.
LARGE_PART = 0.01
# A path that a pattern without a name in it matches, and no other pattern.
_NO_NAME = "\N{LATIN LETTER DENTAL CLICK}/\N{LATIN LETTER LATERAL CLICK}"


def left_whole(plan: "Plan", names_lost: NamesLost) -> list[Finding]:
    """Large leaves that idle axes do not split, ordered by the bytes that an even split would save.

    Leaves with fewer elements than `min_size` are replicated on purpose, and so are those of a rule
    that names them and replicates. Leaves of one shape and decision, or of one rule that splits
    them over other axes, are reported together, if they waste at least `LARGE_PART` of what a
    device holds. `names_lost` says why logical names of a leaf got no axis.
    """
    mesh, sizes, free = plan.mesh, axis_sizes(plan.mesh), _free_axes(plan)
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    per_device = 0
    for members in kinds(plan.leaves):
        leaf = members[0]
        if leaf.decision.errors:
            continue
        per_device += leaf.bytes_per_device(mesh) * len(members)
        is_small = leaf.size < max(plan.min_size, 2)  # nothing splits a single element
        if is_small or (_is_intended(leaf, plan.rules) and not names_lost(leaf)):
            continue
        split = all_axes(entries(leaf.given))
        is_split = part_count(split, sizes) > 1
        is_vector = sum(length > 1 for length in leaf.shape) == 1
        if is_split and is_vector:  # a bias takes its axis from the matrix beside it
            continue
        # Its rule was to split it over these, whatever their names say.
        meant = {axis for note in leaf.adjustments if note.kind == "no-dim" for axis in note.axes}
        idle = tuple(
            axis
            for axis, size in sizes.items()
            if size > 1 and axis not in split and (axis in free or axis in meant)
        )
        by = (leaf.rule, leaf.adjustments) if is_split else (leaf.shape, leaf.decision)
        alike[idle, is_split, by] += members
    findings: list[Finding] = []
    for (idle, is_split, _), members in alike.items():
        now = sum(leaf.bytes_per_device(mesh) for leaf in members)
        parts = part_count(idle, sizes)
        wasted = now - sum(-(-leaf.bytes_per_device(mesh) // parts) for leaf in members)
        if wasted == 0 or wasted < LARGE_PART * per_device:
            continue
        why, fix = _why(members, idle, is_split, plan, names_lost)
        found = finding_about(
            "left-whole, in part" if is_split else "left-whole",
            members,
            wasted,
            idle=_with_sizes(idle, mesh),
            now=human_bytes(now),
            times=parts,
            waste=human_bytes(wasted),
            why=why,
            fix=fix,
        )
        findings.append(found)
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
    yield finding(
        "all-too-small",
        [],
        wasted=wasted,
        leaves=counted(len(leaves), "leaf"),
        min_size=f"{plan.min_size:,}",
        now=human_bytes(now),
        waste=human_bytes(wasted),
        axes=_with_sizes(axes, mesh),
    )


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
    return kind_of(action) != "tactic" or repr(action).startswith("replicate(")


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
    members: Sequence[PlannedLeaf],
    idle: Sequence[str],
    is_split: bool,
    plan: "Plan",
    names_lost: NamesLost,
) -> tuple[str, str]:
    """Why leaves are not split over idle axes, and the fix."""
    leaf, by = members[0], decided_by(members[0])
    if leaf.rule is None:
        no_counterpart = "it has no counterpart in the plan that this one follows."
        why = f"it has {leaf.given}." if is_split else no_counterpart
        return why, "Plan it by rules of its own."
    if lost := dict.fromkeys(fact for member in members for fact in names_lost(member)):
        return f"{by}: {' '.join(lost)}", "Give a name another axis, in the logical rules."
    split_another = f"Split another dim over {entry_of(idle)!r}."
    if leaf.adjustments:
        note = leaf.adjustments[-1]
        other = split_another if is_split else "Change the rule, or the shape."
        fix = _SHARD_IT.get(note.kind, other)
        if note.kind == "no-dim" and note.dim is not None and not is_split:
            length = padded_leaf(leaf, plan.mesh).shape[note.dim]
            how, _ = padding(members, plan.mesh)
            fix = f"Pad dim {note.dim} to {length}, or use another axis. {how}"
        return f"{by}, {note.why}", fix
    if not is_split:
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


# ------------------------------------------------------------------ layers

# The number of a layer: a key, as in `layers/3/w`, or the end of the key of a module that has
# modules, as in `block_3/mlp/w`. In `Dense_3/kernel` it tells weights apart, and not layers.
_NUMBER = re.compile(r"(?:^|(?<=/))\d+(?=/)|(?<=[A-Za-z_])\d+(?=/[^/]+/)")
# Layers are unlike the others if they are at most this part of them. One of three may differ, and
# half of them too, for a reason.
_UNLIKE_PART = 1 / 4


def unlike_siblings(plan: "Plan") -> Iterator[Finding]:
    """Layers that are sharded unlike most others, by a rule that is not about them alone.

    A rule whose pattern does not match all layers is meant for those that it matches, unless it
    stops amid a number: `layers/1` matches `layers/10` too.
    """
    numbered = [(_NUMBER.sub("*", x.path), x) for x in plan.leaves]
    layers = [
        (name, x) for name, x in numbered if name != x.path and x.shape and not x.decision.errors
    ]
    for pairs in grouped(layers, lambda pair: (pair[0], pair[1].shape, pair[1].dtype)):
        siblings = [leaf for _, leaf in pairs]  # the leaves of one name and shape
        specs = Counter(trimmed(leaf.given) for leaf in siblings)
        common, count = specs.most_common(1)[0]
        if count == len(siblings):
            continue
        typical = next(leaf for leaf in siblings if trimmed(leaf.given) == common)
        for members in grouped(siblings, lambda leaf: (leaf.rule, trimmed(leaf.given))):
            leaf, pattern = members[0], members[0].pattern
            if pattern is not None and not all(re.search(pattern, x.path) for x in siblings):
                yield from _with_cut_numbers(members, pattern)
            elif trimmed(leaf.given) != common and len(members) <= _UNLIKE_PART * len(siblings):
                by = "" if leaf.rule == typical.rule else f" by {decided_by(typical)}"
                others = {"count": count, "common": typical.given, "common_by": by}
                yield finding_about("unlike-siblings", members, **others)


def _with_cut_numbers(members: Sequence[PlannedLeaf], pattern: str) -> Iterator[Finding]:
    """The finding about layers that a rule takes for another one, whose number theirs contain."""
    by_length = sorted(members, key=lambda leaf: len(leaf.path))
    meant, others = by_length[0].path, by_length[1:]
    for match in _NUMBER.finditer(meant):
        before, number, after = meant[: match.start()], match[0], meant[match.end() :]
        # Other digits show that the pattern is not about the others, as `layers/(1|10)/` is.
        begins = re.search(pattern, f"{before}{number}777{after}")
        ends = re.search(pattern, f"{before}777{number}{after}")
        longer = []
        if begins:
            longer.append(rf"{number}\d+")
        if ends:
            longer.append(rf"\d+{number}")
        path = re.compile(f"{re.escape(before)}({'|'.join(longer)}){re.escape(after)}")
        # A pattern for every other layer matches several numbers that contain no other.
        if longer and others and all(path.fullmatch(leaf.path) for leaf in others):
            key = "/".join(f"{before}{number}".split("/")[-2:]) + "/"
            yield finding_about(
                "unlike-siblings, number", sorted(others, key=members.index), key=key
            )


# ------------------------------------------------------------------ optimizer state


def state_unlike_weights(plan: "Plan") -> Iterator[Finding]:
    """Optimizer state that is split unlike its parameter, and not further in the same dims.

    State that is split further is as in ZeRO-1.
    """
    sizes = axis_sizes(plan.mesh)
    unlike: list[tuple[PlannedLeaf, PlannedLeaf]] = []
    for leaf, parameter in state_with_parameters(plan.leaves):
        is_wrong = leaf.decision.errors or parameter.decision.errors
        if is_wrong or leaf.size < plan.min_size:
            continue
        dims = zip(_split_by(leaf, sizes), _split_by(parameter, sizes), strict=True)
        if not all(of_parameter <= own for own, of_parameter in dims):
            unlike.append((leaf, parameter))
    for pairs in grouped(unlike, lambda pair: tuple((x.rule, x.given) for x in pair)):
        parameter = pairs[0][1]
        yield finding_about(
            "state-unlike-weight",
            [leaf for leaf, _ in pairs],
            parameter=parameter.path,
            of_parameter=parameter.given,
            parameter_by=decided_by(parameter),
        )


def _split_by(leaf: PlannedLeaf, sizes: Mapping[str, int]) -> list[set[str]]:
    """The axes that split each dim."""
    dims = dim_entries(leaf.given, len(leaf.shape))
    return [{axis for axis in axes_of(entry) if sizes[axis] > 1} for entry in dims]


# ------------------------------------------------------------------ attention heads

_HEAD_NORM = re.compile(r"(?:^|/|_)(?:(?:q|k|query|key)_?(?:layer_?)?norm|norm_?[qk])(?:/|$)")


class _Heads(NamedTuple):
    """A dim that holds attention heads."""

    dim: int
    heads: int  # 1 if the dim is inside of a head
    size: int  # of a head


def cut_heads(plan: "Plan") -> Iterator[Finding]:
    """Dims of attention heads that are split into parts of heads.

    When weights are used, they are not split along the axes over which they are gathered. Heads are
    recognised in two ways: by projections to and from them, of shapes `(embed, heads, size)` and
    `(heads, size, embed)`; and, where heads are fused in one dim, by a norm of queries or keys,
    which has the size of a head.
    """
    sizes, gathered = axis_sizes(plan.mesh), plan.fsdp_axes()
    alike: dict[Any, list[PlannedLeaf]] = defaultdict(list)
    for leaf, heads in _with_heads(plan.leaves):
        entry = dim_entries(leaf.given, len(leaf.shape))[heads.dim]
        axes = tuple(axis for axis in axes_of(entry) if axis not in gathered)
        if heads.heads % part_count(axes, sizes):
            alike[leaf.rule, leaf.given, heads, axes].append(leaf)
    for (*_, heads, axes), members in alike.items():
        yield finding_about(
            "cuts-head",
            members,
            dim=heads.dim,
            heads=f"{counted(heads.heads, 'head')} of {heads.size}",
            parts=part_count(axes, sizes),
            axes=" and ".join(map(repr, axes)),
        )


def _with_heads(leaves: Sequence[PlannedLeaf]) -> Iterator[tuple[PlannedLeaf, _Heads]]:
    """The leaves with a dim of attention heads, and that dim."""
    # The leaves of each subtree that may be an attention module: `attn/q` or `attn/q/kernel`.
    blocks: dict[str, list[PlannedLeaf]] = defaultdict(list)
    for leaf in leaves:
        keys = leaf.path.split("/")
        for depth in (1, 2):
            if len(keys) > depth:
                blocks["/".join(keys[:-depth])].append(leaf)
    found: dict[str, tuple[PlannedLeaf, _Heads]] = {}
    for members in blocks.values():
        for leaf, heads in (*_separate_heads(members), *_fused_heads(members)):
            found.setdefault(leaf.path, (leaf, heads))
    yield from found.values()


def _separate_heads(block: Sequence[PlannedLeaf]) -> Iterator[tuple[PlannedLeaf, _Heads]]:
    """Of leaves `(embed, heads, size)` and `(heads, size, embed)`, the dim of a head's size."""
    ends = {leaf.shape[-3:] for leaf in block if len(leaf.shape) >= 3}
    for embed, heads, size in ends:
        if embed == size or (heads, size, embed) not in ends:
            continue
        for leaf in block:
            rank, end = len(leaf.shape), leaf.shape[-3:]
            if end[1:] == (size, embed):
                yield leaf, _Heads(rank - 2, 1, size)
            elif end[::2] == (embed, size):
                yield leaf, _Heads(rank - 1, 1, size)


def _fused_heads(block: Sequence[PlannedLeaf]) -> Iterator[tuple[PlannedLeaf, _Heads]]:
    """Of matrices beside a norm of queries or keys, the dim that is not that of the others."""
    norms = [leaf for leaf in block if leaf.shape and _HEAD_NORM.search(leaf.path)]
    matrices = [leaf for leaf in block if len(leaf.shape) >= 2 and leaf not in norms]
    head_sizes = {leaf.shape[-1] for leaf in norms}
    if not matrices or len(head_sizes) != 1:
        return
    common = set.intersection(*({*leaf.shape[-2:]} for leaf in matrices))
    if len(common) != 1:
        return
    [size], [embed] = head_sizes, common
    fused = [
        (leaf, dim, leaf.shape[dim])
        for leaf in matrices
        for dim in (len(leaf.shape) - 2, len(leaf.shape) - 1)
        if leaf.shape[dim] != embed
    ]
    # A norm over all heads, as in OLMo 2, has the length of the queries.
    longest = max((length for *_, length in fused), default=0)
    for leaf, dim, length in fused:
        if length % size == 0 and size < longest:
            yield leaf, _Heads(dim, length // size, size)
