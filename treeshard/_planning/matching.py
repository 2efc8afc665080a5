"""Applies rules to the leaves of a tree."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten

from treeshard._core.mesh import AnyMesh, current_or_given
from treeshard._core.paths import is_box
from treeshard._core.specs import Adjustment, entries, is_logical, project, with_entries
from treeshard._planning.decision import Decision, Shape
from treeshard._planning.logical import resolve_names
from treeshard._planning.tactics import Tactic, min_size_in_force, too_small
from treeshard._planning.tree_walk import Open, TreeDef, Walk, read_pattern, shape_of_each, zeroed
from treeshard.errors import ShardingRuleError, SpecError, listed

ReadRules = list[tuple[re.Pattern[str], Any]]  # compiled patterns and their actions


_UNMATCHED = Adjustment("unmatched", "no rule matches.")
_WHOLE = Decision(PartitionSpec(), PartitionSpec())  # scalars, and what has no shape


class Decided(NamedTuple):
    """A tree's leaves, in the order in which JAX flattens it, and their decisions."""

    treedef: TreeDef
    leaves: list[Any]
    shapes: list[Shape | None]
    decisions: list[Decision]
    adjusted: bool  # whether any decision has adjustments
    boxed: bool  # whether there are boxes in the tree
    walk: Walk

    @property
    def paths(self) -> list[str]:
        """The path of each leaf, built on first use."""
        return self.walk.paths


class _Rule:
    """A rule, and its decisions so far by shape (and itemsize)."""

    def __init__(self, index: int | None, pattern: re.Pattern[str] | None, action: Any):
        self.index = index
        self.pattern = None if pattern is None else pattern.pattern
        self.action = action
        looks_at = "leaf" if callable(action) else "shape"
        if isinstance(action, Tactic):
            looks_at = action.looks_at
        # Whether leaves of equal shape may be decided differently: not while walking.
        self.by_leaf, self.by_bytes = looks_at != "shape", looks_at == "bytes"
        self.decisions: dict[Any, Decision] = {}


class _Check(NamedTuple):
    needed: str  # what must occur in a path
    search: Callable[[str], Any]  # what must match then
    rule: _Rule
    tells_indices_apart: bool


def decide(
    read: ReadRules,
    tree: Any,
    mesh: AnyMesh | None,
    min_size: int | None,
    *,
    whole_paths: bool = False,
) -> Decided:
    """Decides every leaf; with `whole_paths`, by patterns that match its full path.

    Raises for actions that do not return a spec, for names that do not resolve, and for
    tactics without a mesh. All other errors are recorded in the decisions.
    """
    tactics = [action for _, action in read if isinstance(action, Tactic)]
    leaves, treedef = tree_flatten(tree)
    shown = _in_boxes(tree) if any(tactic.reads_boxes for tactic in tactics) else leaves
    tactic_mesh = current_or_given(mesh) if tactics else None
    rules = _resolved(read, mesh)
    walk = _Decider(rules, shape_of_each(leaves), shown, mesh, tactic_mesh, min_size, whole_paths)
    walk.walk(treedef, tree)
    walk.settle()
    return Decided(treedef, leaves, walk.shapes, walk.decisions, walk.adjusted, walk.boxed, walk)


def _resolved(read: ReadRules, mesh: AnyMesh | None) -> ReadRules:
    """The rules, with logical names replaced by specs."""
    found: ReadRules = []
    bad: list[str] = []
    for index, (pattern, action) in enumerate(read):
        try:
            if is_logical(action):
                action = resolve_names(action, mesh)
                action = with_entries(action, entries(action))
            found.append((pattern, action))
        except SpecError as error:
            bad.append(f"rule {index}, {pattern.pattern!r}: {error}")
    if bad:
        headline = f"{len(bad)} rules have logical names that do not resolve:"
        raise ShardingRuleError(listed(headline, bad))
    return found


def _in_boxes(tree: Any) -> list[Any]:
    """The leaves, with those that are alone in a box as the box."""
    shown: list[Any] = []
    for leaf in tree_flatten(tree, is_leaf=is_box)[0]:
        inside = tree_flatten(leaf)[0] if is_box(leaf) else [leaf]
        shown += [leaf] if len(inside) == 1 else inside
    return shown


class _Decider(Walk):
    """Decides the leaves as they are walked.

    Rules are matched on paths with zeros for their digits; those that tell digits apart are
    then tried on the true paths.
    """

    def __init__(
        self,
        read: ReadRules,
        shapes: list[Shape | None],
        leaves: list[Any],
        mesh: AnyMesh | None,
        tactic_mesh: AnyMesh | None,
        min_size: int | None,
        whole_paths: bool,
    ):
        super().__init__(shapes)
        self.leaves, self.mesh, self.tactic_mesh = leaves, mesh, tactic_mesh
        self.floor = min_size_in_force(min_size)
        self.found: dict[str, tuple[tuple[_Check, ...], _Rule]] = {}  # by path with zeros
        self.adjusted = False
        self.bad_answers: list[str] = []
        self.unmatched = _Rule(None, None, None)
        self.checks: list[_Check] = []  # on true paths, in the rules' order
        self.zero_checks: list[tuple[str, Callable[[str], Any] | None, _Check]] = []
        for index, (pattern, action) in enumerate(read):
            rule = _Rule(index, pattern, action)
            reading = read_pattern(pattern)
            search = pattern.fullmatch if whole_paths else pattern.search
            for needed in reading.needs:
                check = _Check(needed, search, rule, reading.tells_indices_apart)
                self.checks.append(check)
                on_zeros = None if reading.tells_digits_apart else search
                self.zero_checks.append((zeroed(needed), on_zeros, check))

    def leaf(self, path: str, zeros: str | None) -> None:
        index = len(self.decisions)
        shape = self.shapes[index]
        if not shape:
            self.decisions.append(_WHOLE)
            return
        if zeros is None:
            self.open.append((index, None, self.unmatched))
            self.decisions.append(_WHOLE)
            return
        found = self.found.get(zeros)
        if found is None:
            found = self.found[zeros] = self._first_of_zeros(zeros)
        checks, rule = found
        if checks or rule.by_leaf:
            self.open.append((index, checks, rule))
            self.decisions.append(_WHOLE)
            return
        decision = rule.decisions.get(shape)
        self.decisions.append(self._outcome(rule, index, path) if decision is None else decision)

    def _first_of_zeros(self, zeros: str) -> tuple[tuple[_Check, ...], _Rule]:
        """What to try on the true path, and the rule that holds if nothing of that matches."""
        to_try: list[_Check] = []
        for needed, search, check in self.zero_checks:
            if needed in zeros:
                if search is None:
                    to_try.append(check)
                elif search(zeros):
                    return tuple(to_try), check.rule
        return tuple(to_try), self.unmatched

    def settled_for_all(self, open_: list[Open]) -> list[Open]:
        still: list[Open] = []
        for index, checks, rule in open_:
            if any(check.tells_indices_apart for check in checks):
                still.append((index, checks, rule))
                continue
            path = self.paths[index]
            first = _first(checks, path, rule)
            if first.by_leaf:
                still.append((index, (), first))
            else:
                self.decisions[index] = self._outcome(first, index, path)
        return still

    def settle(self) -> None:
        """Decides the leaves that were left open. Raises for answers that are no specs."""
        if not self.open:
            return
        paths = self.paths
        # What no path needs is sorted out in one search through all of them.
        text = "\n".join([paths[index] for index, checks, _ in self.open if checks is None])
        live = [check for check in self.checks if check.needed in text]
        for index, checks, rule in self.open:
            path = paths[index]
            first = _first(live if checks is None else checks, path, rule)
            self.decisions[index] = self._outcome(first, index, path)
        if self.bad_answers:
            headline = f"The actions of rules returned no spec for {len(self.bad_answers)} leaves:"
            raise ShardingRuleError(listed(headline, self.bad_answers))

    # What comes of a rule.

    def _outcome(self, rule: _Rule, index: int, path: str) -> Decision:
        shape = self.shapes[index]
        assert shape  # leaves without one need no rule
        key = (shape, self.leaves[index].dtype.itemsize) if rule.by_bytes else shape
        decision = rule.decisions.get(key)
        if decision is None:
            decision = self._decide(rule, shape, index, path)
            self.adjusted = self.adjusted or bool(decision.adjustments)
            if rule.by_bytes or not rule.by_leaf:
                rule.decisions[key] = decision
        return decision

    def _decide(self, rule: _Rule, shape: Shape, index: int, path: str) -> Decision:
        if rule.index is None:
            return Decision(None, PartitionSpec(), adjustments=(_UNMATCHED,))
        if isinstance(rule.action, Tactic):
            asked, notes = self._refined(rule, index, path)
        elif math.prod(shape) < self.floor:
            asked = PartitionSpec() if rule.by_leaf or rule.action is None else rule.action
            kept = rule.by_leaf or entries(with_entries(asked, entries(asked)))
            notes = (too_small(math.prod(shape), self.floor),) if kept else ()
            return Decision(asked, PartitionSpec(), rule.index, rule.pattern, notes)
        else:
            asked = self._answer(rule, index, path) if rule.by_leaf else rule.action
            asked, notes = PartitionSpec() if asked is None else asked, ()
        given, lost = project(asked, self.mesh, shape)
        return Decision(asked, given, rule.index, rule.pattern, notes + lost)

    def _refined(
        self, rule: _Rule, index: int, path: str
    ) -> tuple[PartitionSpec, tuple[Adjustment, ...]]:
        assert self.tactic_mesh is not None  # found before the walk began
        whole, leaf = PartitionSpec(), self.leaves[index]
        try:
            return rule.action.refine(whole, self.tactic_mesh, path, leaf, self.floor)
        except SpecError as error:
            self.bad_answers.append(f"{path}: rule {rule.index}, {rule.pattern!r}: {error}")
            return whole, ()

    def _answer(self, rule: _Rule, index: int, path: str) -> PartitionSpec | None:
        answer = rule.action(path, self.leaves[index])
        if answer is None or isinstance(answer, PartitionSpec):
            return answer
        self.bad_answers.append(
            f"{path}: the function of rule {rule.index}, {rule.pattern!r}, returned {answer!r}"
            f" ({type(answer).__name__}). Return a PartitionSpec, or None to replicate."
        )
        return None


def _first(checks: Iterable[_Check], path: str, otherwise: _Rule) -> _Rule:
    for needed, search, rule, _ in checks:
        if needed in path and search(path):
            return rule
    return otherwise
