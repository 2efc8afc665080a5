"""Every leaf's decision, with its reason, before any device is touched."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.tree_util import tree_flatten, tree_structure

from treeshard._decision import PlannedLeaf as PlannedLeaf
from treeshard._describe import describe, describe_html, human_bytes, rich_table
from treeshard._errors import FormatError, ShardingRuleError, listed
from treeshard._findings import find
from treeshard._leaf_findings import Finding, collisions
from treeshard._logical import ReadLogicalRules, current_logical_rules, logical_axis_rules
from treeshard._make_mesh import abstract_mesh
from treeshard._matching import decide
from treeshard._mesh import AnyMesh, describe_mesh
from treeshard._paths import is_box, leaf_paths, same_path_keys
from treeshard._plan_diff import PlanDiff, diff
from treeshard._plan_follow import followed_leaves
from treeshard._plan_text import PlanText, from_text, laid_out, to_text
from treeshard._planned_tree import PlannedTree
from treeshard._rules import Rules, read_rules, rules_error, warn_of_moves
from treeshard._rules_text import check_told
from treeshard._tactics import Tactic, min_size_in_force


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlannedTree):
    """How every leaf of a tree is to be sharded over a mesh, and why: see `plan`.

    It goes wherever specs go. Two plans are equal if their mesh shapes are, and the path,
    shape, dtype and placement of every leaf; the rules may differ.

    Attributes:
        mesh: The mesh that was planned for.
        rules: The rules that decided.
        min_size: The floor that was in force, in elements.
        leaves: A `PlannedLeaf` for every array, in the order in which JAX flattens the tree.
    """

    # The rules for logical names that were in force.
    _logical: ReadLogicalRules | None = None
    # The plan that this one follows, if it is known, and whether there is one.
    _source: "Plan | None" = None
    _mirrors: bool = False

    # What is wrong with it.

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the plan or looks wrong, each with its fix: errors first.

        Errors, which `check` raises: leaves that no rule matches, specs that do not fit
        (unknown and repeated axes, dims that do not divide, entries beyond the rank), and
        leaves that share a path. Warnings: rules that match nothing, and rules all of whose
        leaves are taken by earlier ones (but no last rule that matches every leaf); leaves
        of at least `min_size` elements that are whole on every device, by what they waste,
        if that is 1% of what a device holds; leaves that seem to be layers stacked on dim 0
        and are sharded on it; logical names without a rule.

        A pattern that backtracks without end hangs this, as it would `plan`.
        """
        boxes: dict[str, Any] = {}
        if any(isinstance(action, Tactic) and action.reads_boxes for _, action in self.rules):
            found, treedef = tree_flatten(self.structs, is_leaf=is_box)
            paths = leaf_paths(treedef.unflatten(range(len(found))))
            boxes = {path: x for path, x in zip(paths, found, strict=True) if is_box(x)}
        rules = () if self._mirrors else self.rules  # they did not decide
        return find(
            self.leaves, rules, self.mesh, self.min_size, self._logical, self._key_paths, boxes
        )

    def _key_paths(self, path: str) -> list[str]:
        return same_path_keys(self.specs, path)

    def check(self) -> None:
        """Raises for the errors among `findings`, and else does nothing.

        Raises:
            ShardingRuleError: If leaves are unmatched, their specs do not fit, or they
                share a path: all are listed. It is an `UnknownAxisError` too if the mesh
                lacks an axis.
        """
        rows = ((leaf.path, leaf.shape, leaf.decision) for leaf in self.leaves)
        error = rules_error(rows, self.mesh)
        shared = list(map(str, collisions(self.leaves, self._key_paths)))
        if shared:
            message = listed(f"{len(shared)} paths are shared by leaves:", shared)
            raise type(error)(f"{error}\n{message}") if error else ShardingRuleError(message)
        if error:
            raise error

    # Other plans.

    def on(self, mesh: AnyMesh | str) -> "Plan":
        """Decides the same tree by the same rules for another mesh.

        Functions among the rules are asked again, with `ShapeDtypeStruct`s. `diff` then says
        what changes.

        Args:
            mesh: The other mesh, or its axes as text, as in `plan`.

        Raises:
            MeshError: As `plan`.
            FormatError: If the plan was read from JSON, and a rule was a function or the
                plan followed another: text cannot carry these.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", fsdp("fsdp"))], make_mesh("fsdp=8")).on("fsdp=1024")
            <Plan: 1 leaves on fsdp=1024, 4.0 KiB per device>
        """
        if self._source is not None:
            return self._source.on(mesh).follow(self.bare())
        if self._mirrors:
            raise FormatError(
                "The plan follows another one, and its JSON does not say which. Follow again,"
                " with `plan.on(mesh).follow(tree)` of that one."
            )
        check_told(self.rules)
        with nullcontext() if self._logical is None else logical_axis_rules(self._logical):
            return plan(self.bare(), self.rules, mesh, min_size=self.min_size)

    def follow(self, tree: Any) -> "Plan":
        """Plans a tree that mirrors this one's: optimizer state, an average, gradients.

        A leaf goes with the one whose path its own ends in, as in `optimizer_state_specs`;
        one that goes with none is replicated.

        Args:
            tree: Arrays, or their `jax.ShapeDtypeStruct`s.

        Returns:
            A `Plan` for `tree` on the same mesh. Its leaves name the rules that decided
            the leaves that they go with, and have the adjustments of those of their shape.

        Examples:
            >>> params = {"w": jax.numpy.zeros((512, 64))}
            >>> decided = plan(params, [("w", fsdp("fsdp"))], make_mesh("fsdp=8"))
            >>> decided.follow(optax.sgd(0.1, momentum=0.9).init(params)).specs
            (TraceState(trace={'w': P('fsdp',)}), EmptyState())
        """
        leaves, others = followed_leaves(self, tree)
        return replace(
            self,
            leaves=leaves,
            treedef=tree_structure(tree),
            _others=others,
            _source=self,
            _mirrors=True,
        )

    def diff(self, other: "Plan") -> PlanDiff:
        """Returns what changes from this plan to another one, leaf by leaf, and what moves.

        Leaves are matched by path. The bytes are those of a leaf's new shard that a device
        does not hold yet, at most: devices are taken to keep their place in a mesh with
        the same axes and sizes; in another mesh nothing is known of them and every shard
        counts in full.

        Args:
            other: The plan to get to.

        Returns:
            A `PlanDiff`, false if nothing changes; `str()` of it is a line a change.

        Examples:
            >>> mesh = make_mesh("fsdp=8")
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> whole, split = plan(tree, [("w", None)], mesh), plan(tree, [("w", P("fsdp"))], mesh)
            >>> whole.diff(split).bytes, split.diff(whole).bytes
            (0, 3670016)
        """
        return diff(self.leaves, other.leaves, (self.mesh, other.mesh))

    def to_json(self) -> str:
        """Returns the plan as JSON, a line a leaf, for `from_json` and for other programs.

        It has no devices, and of functions among the rules only their names.

        Raises:
            ShardingRuleError: If leaves share a path.
        """
        if shared := list(map(str, collisions(self.leaves, self._key_paths))):
            raise ShardingRuleError(listed(f"{len(shared)} paths are shared:", shared))
        written = (self.mesh, self.rules, self.min_size, self.leaves, self._mirrors, self._logical)
        return to_text(PlanText(*written))

    @staticmethod
    def from_json(text: str, *, like: Any = None) -> "Plan":
        """Reads a plan that `to_json` wrote. Its mesh has no devices; `on` gives it some.

        Args:
            text: The JSON.
            like: A tree with the plan's paths, shapes and dtypes, for its structure and its
                leaves that are no arrays. Without it the plan is of a flat dict by path.

        Raises:
            FormatError: If the text is no plan of this version: the place is named. If
                `like` is another tree: all leaves that differ are listed.

        Examples:
            >>> tree = {"mlp": {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}}
            >>> text = plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8")).to_json()
            >>> Plan.from_json(text).specs, Plan.from_json(text, like=tree).specs
            ({'mlp/w': P('fsdp',)}, {'mlp': {'w': P('fsdp',)}})
        """
        read = from_text(text)
        if like is None:
            leaves, others = tuple(sorted(read.leaves, key=lambda leaf: leaf.path)), {}
            treedef = tree_structure({leaf.path: 0 for leaf in leaves})
        else:
            leaves, others = laid_out(read.leaves, like)
            treedef = tree_structure(like)
        return Plan(
            read.mesh,
            read.rules,
            read.min_size,
            leaves,
            treedef,
            others,
            _logical=read.logical,
            _mirrors=read.mirrors,
        )

    # As text.

    def describe(self) -> str:
        """Returns the plan as text: a line a leaf, repeated layers folded, totals last.

        A line has the leaf's path, its dtype and shape, its spec, the bytes that a device
        holds of it (of all the leaves that the line stands for), and the reason.
        """
        return describe(self.leaves, self.rules, self.mesh)

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        """The plan as a table, for notebooks."""
        return describe_html(self.leaves, self.rules, self.mesh)

    def __rich__(self) -> Any:
        """The plan as a table, for `rich.print`."""
        return rich_table(self.leaves, self.rules, self.mesh)

    def __repr__(self) -> str:
        held = human_bytes(self.bytes_per_device())
        mesh = describe_mesh(self.mesh)
        return f"<Plan: {len(self.leaves)} leaves on {mesh}, {held} per device>"


def plan(tree: Any, rules: Rules, mesh: AnyMesh | str, *, min_size: int | None = None) -> Plan:
    """Plans how every leaf of a tree is sharded, by the first rule that its path matches.

    Nothing is moved and no values are read. What does not fit is recorded with the leaf
    (its `adjustments`) instead of raised; `Plan.check` raises it.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree. Leaves that are no
            arrays are kept as they are.
        rules: Pairs `(pattern, action)`, as in `match_partition_rules`.
        mesh: The mesh to plan for. No devices are needed: an `AbstractMesh` of any size will
            do, or its axes as text, such as `"data=16,fsdp=256"`.
        min_size: Leaves with fewer elements stay whole, unless a tactic has a floor of its
            own. By default `MIN_SHARDING_SIZE` from the environment, else 16384.

    Returns:
        A `Plan`. Leaves that no rule matches are replicated, and what of a spec does not
        fit is dropped: unknown and repeated axes, axes that do not divide their dim,
        entries beyond the rank.

    Raises:
        ShardingRuleError: If a rule is malformed, or a function returns no spec.
        MeshError: If text does not say the size of every axis.

    Examples:
        >>> params = {"norm": jax.numpy.ones(64), "weight": jax.numpy.ones((512, 64))}
        >>> decided = plan(params, [("norm", None), (".*", fsdp("fsdp"))], make_mesh("fsdp=8"))
        >>> decided.specs
        {'norm': P(), 'weight': P('fsdp',)}
    """
    if isinstance(mesh, str):
        mesh = abstract_mesh(mesh)
    read = read_rules(rules)
    decided = decide(read, tree, mesh, min_size)
    warn_of_moves(zip(decided.paths, decided.shapes, decided.decisions, strict=True), frozenset())
    columns = zip(decided.paths, decided.leaves, decided.shapes, decided.decisions, strict=True)
    leaves = tuple(
        [
            PlannedLeaf(path, shape, leaf.dtype, decision)
            for path, leaf, shape, decision in columns
            if shape is not None
        ]
    )
    others = {}
    if len(leaves) < len(decided.leaves):
        pairs = enumerate(zip(decided.leaves, decided.shapes, strict=True))
        others = {place: leaf for place, (leaf, shape) in pairs if shape is None}
    # Strings were read, and stand for what they mean.
    pairs = tuple((rule[0], action) for rule, (_, action) in zip(rules, read, strict=True))
    floor, logical = min_size_in_force(min_size), current_logical_rules()
    return Plan(mesh, pairs, floor, leaves, decided.treedef, others, logical)
