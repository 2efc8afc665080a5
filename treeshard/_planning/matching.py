"""Applies rules to the leaves of a tree, and records a decision for each.

A mistake in one leaf does not raise. The decision records it, so that a plan can show all mistakes
together.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from treeshard._core.arrays import StaticSplit, has_shape
from treeshard._core.mesh import AnyMesh, current_or_given
from treeshard._core.paths import Flat, name_leaves
from treeshard._core.spec_trees import ResolvedSpec
from treeshard._core.specs import (
    Adjustment,
    entries,
    is_logical,
    project,
    shard_size,
    trim_spec,
)
from treeshard._planning.logical import (
    current_logical_rules,
    notes_on_names,
    resolve_names,
)
from treeshard._planning.named_dims import leaves_with_names, value_of
from treeshard._planning.tactics import (
    Refined,
    Tactic,
    min_size_in_force,
    too_small,
)
from treeshard.errors import ShardingRuleError, SpecError, listed

Shape = tuple[int, ...]
ReadRules = list[tuple[re.Pattern[str], Any]]  # compiled patterns and their actions

# ------------------------------------------------------------------ records


class PlannedLeaf(NamedTuple):
    """The plan of one array.

    Attributes:
        path: The path of the array, as in `leaf_paths`.
        shape: The full shape.
        dtype: The dtype, which may be a dtype of PRNG keys.
        decision: The result of the rules, which the properties below show. Leaves with equal
            results share one object.
        role: What a step does with the array, such as `"trained, gathered"`; see `Step.plan_of`.
    """

    path: str
    shape: Shape
    dtype: Any
    decision: ResolvedSpec
    role: str | None = None

    @property
    def asked(self) -> PartitionSpec | None:
        """The spec that the rule requests; `None` if no rule matched."""
        is_unmatched = any(x.kind == "unmatched" for x in self.adjustments)
        return None if is_unmatched else self.decision.requested

    @property
    def given(self) -> PartitionSpec:
        """The spec that the leaf gets."""
        return self.decision.spec

    @property
    def rule(self) -> int | None:
        """The index of the rule that matched; `None` for scalars and unmatched leaves."""
        return self.decision.rule

    @property
    def pattern(self) -> str | None:
        """The pattern of the rule that matched, or `None`."""
        return self.decision.pattern

    @property
    def adjustments(self) -> tuple[Adjustment, ...]:
        """The differences between `asked` and `given`, with reasons."""
        return self.decision.adjustments

    @property
    def memory(self) -> str | None:
        """The kind of memory, such as `"pinned_host"`; `None` for device memory."""
        return self.decision.memory_kind

    def placement_text(self) -> str:
        """`P('fsdp',) in pinned_host`."""
        return str(self.given) if self.memory is None else f"{self.given} in {self.memory}"

    @property
    def size(self) -> int:
        """The number of elements of the full array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size of the full array in bytes."""
        return self.size * self.dtype.itemsize

    def bytes_per_device(self, mesh: AnyMesh) -> int:
        """The size of the largest shard in bytes."""
        return shard_size(self.shape, self.given, mesh) * self.dtype.itemsize


Row = tuple[str, Shape, ResolvedSpec]  # a leaf's path, its shape, and its decision

# The kinds of adjustments that `Plan.check` warns of, each with its fix.
WARNED = {
    "explicit-spec-too-small": (
        "To shard small leaves by such a spec, pass `min_size=0`. To replicate them, give them a"
        " rule with None."
    ),
    "trimmed": (
        "To silence this, give such leaves a rule of their own, whose spec has at most one entry"
        " for each dim."
    ),
}
_UNMATCHED = ResolvedSpec(
    PartitionSpec(), PartitionSpec(), adjustments=(Adjustment("unmatched", "no rule matches."),)
)
_REPLICATED = ResolvedSpec(PartitionSpec(), PartitionSpec())  # scalars


class Decided(NamedTuple):
    """A tree's arrays, in the order in which JAX flattens it, and their decisions."""

    split: StaticSplit
    arrays: list[Any]
    paths: list[str]
    shapes: list[Shape]
    decisions: list[ResolvedSpec]

    def specs_of_leaves(self) -> Sequence[PartitionSpec]:
        """The specs of all leaves of the tree; `P()` for leaves that are not arrays."""
        return self.split.fill_leaves([x.spec for x in self.decisions], PartitionSpec())

    def adjusted_rows(self) -> list[Row]:
        """The arrays whose decisions have adjustments."""
        rows = zip(self.paths, self.shapes, self.decisions, strict=True)
        return [row for row in rows if row[2].adjustments]


def split_arrays(flat: Flat) -> tuple[StaticSplit, list[Any], list[Shape]]:
    """Splits the arrays of a tree from its other leaves; returns also the arrays and shapes."""
    leaves, treedef = flat
    split = StaticSplit(leaves, treedef, has_shape)
    arrays = split.dynamic(leaves)
    return split, arrays, [tuple(x.shape) for x in arrays]


# ------------------------------------------------------------------ the rule of each leaf


def decide(
    read: ReadRules,
    tree: Any,
    flat: Flat,
    mesh: AnyMesh | None,
    min_size: SupportsIndex | None,
    *,
    whole_paths: bool = False,
) -> Decided:
    """Decides every array of a tree; with `whole_paths`, by patterns that match its full path.

    Raises for actions that do not return a spec, for names that do not resolve, and for
    tactics without a mesh. All other errors are recorded in the decisions.
    """
    rules = _Rules(read, mesh, min_size_in_force(min_size))
    split, arrays, shapes = split_arrays(flat)
    paths = split.dynamic(name_leaves(tree, split.treedef))
    shown = split.dynamic(leaves_with_names(tree)) if rules.read_boxes else arrays
    need_rule = [path for path, shape in zip(paths, shapes, strict=True) if shape]
    found = iter(_first_matches([pattern for pattern, _ in read], need_rule, whole_paths))
    # A model has few shapes, so most leaves share the decision of another leaf.
    known: dict[tuple[int, Shape, int], ResolvedSpec] = {}
    decisions: list[ResolvedSpec] = []
    for path, shape, array, in_box in zip(paths, shapes, arrays, shown, strict=True):
        # EasyLM replicates scalars before it tries a rule, so its lists have no rules for counters.
        if not shape:
            decisions.append(_REPLICATED)
            continue
        rule = next(found)
        if rule is None:
            decisions.append(_UNMATCHED)
            continue
        key = rule, shape, array.dtype.itemsize
        decision = known.get(key)
        if decision is None:
            decision = rules.decide(rule, path, shape, in_box)
            if rules.rules[rule].by_shape:
                known[key] = decision
        decisions.append(decision)
    if rules.not_specs:
        headline = f"The actions of rules returned no spec for {len(rules.not_specs)} leaves:"
        raise ShardingRuleError(listed(headline, rules.not_specs))
    return Decided(split, arrays, paths, shapes, decisions)


# The parts of patterns that distinguish digits: a digit, also in a range, in an escape or as the
# number of a group; a character by its name; and a reference to a named group.
_TELLS_DIGITS_APART = re.compile(r"\d|\\N|\(\?P=")
_SAME_DIGITS = "".join("0" if chr(i).isdigit() else chr(i) for i in range(128))


def _first_matches(
    patterns: Sequence[re.Pattern[str]], paths: Sequence[str], whole_paths: bool
) -> list[int | None]:
    """The index of the first pattern that matches each path; `None` if no pattern does.

    The paths of layers differ only in digits, so most patterns match either all layers or no layer.
    """
    # Translating the paths one by one takes ten times as long.
    alike = "\n".join(paths).translate(_SAME_DIGITS).split("\n")
    if len(alike) != len(paths):  # a path has a line break
        alike = list(paths)
    of_alike, of_path = dict[str, int](), dict[str, int]()
    left = dict.fromkeys(alike)
    paths_left, count = dict(zip(paths, alike, strict=True)), len(left)
    for index, pattern in enumerate(patterns):
        # `filter` is a quarter faster than a loop.
        matches = pattern.fullmatch if whole_paths else pattern.search
        if not _TELLS_DIGITS_APART.search(pattern.pattern):
            for same in list(filter(matches, left)):
                of_alike[same] = index
                del left[same]
            continue
        if len(left) < count:
            paths_left = {path: same for path, same in paths_left.items() if same in left}
        for path in list(filter(matches, paths_left)):
            of_path[path] = index
            del paths_left[path]
        left = dict.fromkeys(paths_left.values())
        count = len(left)
    found = list(map(of_alike.get, alike))
    # A pattern that distinguishes digits comes before the patterns that match the paths left.
    return [of_path.get(path, rule) for path, rule in zip(paths, found, strict=True)]


# ------------------------------------------------------------------ the decision of a rule


class _Rule(NamedTuple):
    """A rule on a mesh."""

    pattern: re.Pattern[str]
    # Logical names are resolved to a spec.
    action: Any
    # Whether leaves of one shape and itemsize share a decision. Functions, and tactics that read
    # boxes, may distinguish them.
    by_shape: bool
    # The names or axes that its logical rules lack.
    notes: tuple[Adjustment, ...]


def _resolve_rules(read: ReadRules, mesh: AnyMesh | None) -> list[_Rule]:
    """The rules on a mesh. Raises `ShardingRuleError` that lists all names that do not resolve."""
    logical = current_logical_rules()
    rules: list[_Rule] = []
    bad: list[str] = []
    for index, (pattern, action) in enumerate(read):
        by_shape, notes = not callable(action), ()
        if isinstance(action, Tactic):
            by_shape = action.by_shape
        elif is_logical(action):
            notes = tuple(notes_on_names(action, logical, mesh))
            try:
                action = trim_spec(resolve_names(action, mesh))
            except SpecError as error:
                bad.append(f"rule {index}, {pattern.pattern!r}: {error}")
        rules.append(_Rule(pattern, action, by_shape, notes))
    if bad:
        headline = f"{len(bad)} rules have logical names that do not resolve:"
        raise ShardingRuleError(listed(headline, bad))
    return rules


class _Rules:
    """Decides the leaves that rules match."""

    def __init__(self, read: ReadRules, mesh: AnyMesh | None, min_size: int):
        self.rules, self.mesh, self.min_size = _resolve_rules(read, mesh), mesh, min_size
        tactics = [rule for rule in self.rules if isinstance(rule.action, Tactic)]
        # Only `match_partition_rules` takes rules without a mesh.
        self.tactic_mesh = current_or_given(mesh, "match_partition_rules") if tactics else None
        self.read_boxes = not all(rule.by_shape for rule in tactics)
        self.not_specs: list[str] = []  # the errors of actions that did not return a spec

    def decide(self, index: int, path: str, shape: Shape, leaf: Any) -> ResolvedSpec:
        pattern, action, _, notes = self.rules[index]
        memory = None
        if isinstance(action, Tactic):
            asked, notes = self._refine(index, path, leaf)
            memory = action.memory
            given, dropped = project(asked, self.mesh, shape)
        elif math.prod(shape) < self.min_size:
            asked, notes = self._too_small(action, shape)
            given, dropped = PartitionSpec(), ()
        else:
            asked = self._call_function(index, path, leaf) if callable(action) else action
            asked = PartitionSpec() if asked is None else asked
            # As in EasyLM, a rule serves leaves of several ranks: matrices and their biases.
            given, dropped = project(asked, self.mesh, shape, for_any_rank=True)
        return ResolvedSpec(
            asked,
            given,
            memory_kind=memory,
            adjustments=(*notes, *dropped),
            rule=index,
            pattern=pattern.pattern,
        )

    def _refine(self, index: int, path: str, leaf: Any) -> Refined:
        """The result of a tactic for a leaf."""
        pattern, tactic, *_ = self.rules[index]
        assert self.tactic_mesh is not None  # set if there are tactics
        try:
            return tactic.refine(PartitionSpec(), self.tactic_mesh, path, leaf, self.min_size)
        except SpecError as error:
            self.not_specs.append(f"{path}: rule {index}, {pattern.pattern!r}: {error}")
            return PartitionSpec(), ()

    def _call_function(self, index: int, path: str, leaf: Any) -> PartitionSpec | None:
        """The spec that a function returns for a leaf. Without one, `None` and a recorded error."""
        pattern, function, *_ = self.rules[index]
        asked = function(path, value_of(leaf))
        if asked is None or isinstance(asked, PartitionSpec):
            return asked
        self.not_specs.append(
            f"{path}: the function of rule {index}, {pattern.pattern!r}, returned"
            f" {asked!r} ({type(asked).__name__}). Return a PartitionSpec, or None to replicate."
        )
        return None

    def _too_small(self, action: Any, shape: Shape) -> Refined:
        """The spec that an action requests for a leaf below `min_size`, and the adjustment."""
        size = math.prod(shape)
        note = too_small(size, self.min_size)
        # A function is not called for small leaves, so it counts as sharding them.
        if callable(action):
            return PartitionSpec(), (note,)
        asked = PartitionSpec() if action is None else action
        if all(entry is None for entry in entries(asked)):
            return asked, ()
        possible, misfits = project(asked, self.mesh, shape, for_any_rank=True)
        is_split = self.mesh is None or shard_size(shape, possible, self.mesh) < size
        if size > 1 and (is_split or misfits):
            why = " ".join([note.why, *(misfit.why for misfit in misfits)])
            note = Adjustment("explicit-spec-too-small", why)
        return asked, (note,)


# ------------------------------------------------------------------ which leaves are parameters

# If rules decide a state as one tree, its structure does not show which leaves are parameters.
# Paths do: the path of a copy ends in the parameter's path without the first key.
# `opt_state/0/mu/mlp/w` is a copy of `params/mlp/w`.


def parameters(leaves: Sequence[PlannedLeaf]) -> list[PlannedLeaf]:
    """The leaves that have gradients: floats outside of branches that mirror another branch.

    In a state of `params/mlp/w` and `opt_state/0/mu/mlp/w`, the branch `opt_state` mirrors
    `params`, because all its paths end in paths of `params`.
    """
    # jax.numpy counts bfloat16 and float8 as inexact, and numpy does not.
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    by_tail: dict[str, dict[str, Shape]] = defaultdict(dict)  # tail -> branch -> shape
    for leaf in floats:
        branch, _, tail = leaf.path.partition("/")
        if leaf.shape:
            by_tail[tail][branch] = leaf.shape
    sources: dict[str, set[str]] = {}  # the branches that each branch may be a copy of
    for leaf in floats:
        branch = leaf.path.partition("/")[0]
        if leaf.shape:
            of_leaf = _possible_sources(leaf, by_tail)
            sources[branch] = sources.get(branch, of_leaf) & of_leaf
    return [leaf for leaf in floats if not sources.get(leaf.path.partition("/")[0])]


def _possible_sources(leaf: PlannedLeaf, by_tail: dict[str, dict[str, Shape]]) -> set[str]:
    """The branches with a leaf that this leaf may be a copy of."""
    # A moment has the shape of its parameter, or fewer dims if it is factored. A leaf with more
    # dims is another parameter whose path has the same end, as `q/weight` and `norm/weight` do.
    return {
        branch
        for tail in _tails(leaf.path)
        for branch, shape in by_tail.get(tail, {}).items()
        if leaf.shape == shape or len(leaf.shape) < max(len(shape), 2)
    }


def state_with_parameters(
    leaves: Sequence[PlannedLeaf],
) -> list[tuple[PlannedLeaf, PlannedLeaf]]:
    """Each leaf of the optimizer state that has the shape of a parameter, and that parameter."""
    weights = parameters(leaves)
    paths = {leaf.path for leaf in weights}
    by_tail = {leaf.path.partition("/")[2]: leaf for leaf in weights}
    pairs: list[tuple[PlannedLeaf, PlannedLeaf]] = []
    for leaf in leaves:
        if leaf.path in paths or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        parameter = next((by_tail[tail] for tail in _tails(leaf.path) if tail in by_tail), None)
        if parameter is not None and parameter.shape == leaf.shape:
            pairs.append((leaf, parameter))
    return pairs


def _tails(path: str) -> list[str]:
    """The tails of a path without its first two keys or more, longest first."""
    keys = path.split("/")
    return ["/".join(keys[start:]) for start in range(2, len(keys))]
