"""Decides how every leaf of a tree is sharded, and records why. Needs no devices.

A plan is a value and not a tree of shardings: it keeps the rules and the shapes, so that it can be
made again for another mesh, explain itself, and be compared, before anything is allocated.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

import jax
from jax.tree_util import tree_flatten

from treeshard._core.arguments import check_tree
from treeshard._core.arrays import StaticSplit, device_dtype, has_shape, same_arrays
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    abstract_mesh,
    as_mesh,
    describe_mesh,
    parse_axes,
)
from treeshard._core.paths import PyTree, children_with_keys, path_under
from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import human_bytes
from treeshard._planning.copies import histories, plan_copies
from treeshard._planning.given_specs import decide_by_specs, is_spec_tree
from treeshard._planning.logical import ReadLogicalRules, current_logical_rules, logical_axis_rules
from treeshard._planning.matching import WARNED, PlannedLeaf, Row, decide
from treeshard._planning.planned import ArrayFacts, PlannedTree
from treeshard._planning.rules import (
    Rules,
    check_order,
    describe_moves,
    read_rules,
    rules_error,
    warn_of_moves,
)
from treeshard._planning.tactics import min_size_in_force
from treeshard.errors import (
    ShardingRuleError,
    SpecError,
    counted,
    did_you_mean,
    listed,
    warn,
)

if TYPE_CHECKING:  # a training loop needs neither
    from treeshard._planning.findings import Finding
    from treeshard._planning.plan_diff import PlanDiff


@dataclass(frozen=True)
class _ByRules:
    """The recipe of a plan that rules decided, or a tree of specs in their place."""

    # The rules for logical names that were in force.
    logical: ReadLogicalRules | None
    specs: SpecTree = None
    source: None = None

    def remake(self, planned: "Plan", mesh: MeshLike) -> "Plan":
        options = {"min_size": planned.min_size, "strict": planned.strict}
        with nullcontext() if self.logical is None else logical_axis_rules(self.logical):
            rules = planned.rules if self.specs is None else self.specs
            return plan(planned._bare_structs(), rules, mesh, **options)


@dataclass(frozen=True)
class _Copies:
    """The recipe of a plan that `Plan.follow` made of another one."""

    source: "Plan"
    extra_axis: str | Sequence[str]
    memory: str | None

    def remake(self, planned: "Plan", mesh: MeshLike) -> "Plan":
        options = {"extra_axis": self.extra_axis, "memory": self.memory}
        return self.source.on(mesh).follow(planned._bare_structs(), **options)


@dataclass(frozen=True)
class _PartOf:
    """The recipe of the plan of a subtree."""

    source: "Plan"
    path: str

    def remake(self, planned: "Plan", mesh: MeshLike) -> "Plan":
        return self.source.on(mesh)[self.path]


class _Place(jax.ShapeDtypeStruct):
    """The index of a leaf, with its type: some classes look at what they are rebuilt from."""

    def __init__(self, index: int, leaf: PlannedLeaf | None) -> None:
        super().__init__(*((leaf.shape, leaf.dtype) if leaf else ((), "bool")))
        self.index = index


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlannedTree):
    """How every leaf of a tree is to be sharded over a mesh, and why: see `plan`.

    Every function that takes specs takes a `Plan`. Two plans are equal if their meshes have
    the same axes and sizes, and their leaves the same paths, shapes, dtypes, specs and memories;
    their rules may differ.

    Attributes:
        mesh: The mesh that the plan is for.
        rules: The rules that decided; none if a tree of specs did.
        min_size: Leaves with fewer elements were not sharded.
        leaves: A `PlannedLeaf` for every array, in the order in which JAX flattens the tree.
        strict: Whether a plan with errors raises when it is applied, or warns: see
            `check_before_use`.
    """

    # How it is made again for another mesh, and the plan that it was made from, if any.
    _recipe: _ByRules | _Copies | _PartOf = _ByRules(None)
    # What it has warned of when it was applied, and plans made from it: one set for all of them.
    _told: set[str] = field(default_factory=set)

    @property
    def _follows(self) -> bool:
        return isinstance(self._recipe, _Copies)

    # -------------------------------------------------------------- subtrees

    def __getitem__(self, path: str | int) -> "Plan":
        """The plan of a subtree, by its path in the tree.

        A path has the keys of the tree, as JAX's key paths have them: `plan["model"]`, `plan[0]` of
        a tuple, `plan["model/layers/0"]`. Paths of the subtree's leaves begin there. `on`
        plans the whole tree again, and `findings` are the whole plan's, since rules are about whole
        paths. `check`, and functions that apply the subtree's plan, raise for its own leaves only.

        Raises:
            SpecError: If the tree has no such path. The message has the keys that there are.

        Examples:
            >>> state = {"model": {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}, "step": 0}
            >>> decided = plan(state, [("w", P("fsdp"))], make_mesh("fsdp=8"))
            >>> decided["model"].specs, decided["model/w"].specs
            ({'w': P('fsdp',)}, P('fsdp',))
        """
        of_tree = self.leaf_at_each_index()
        node = self._split.treedef.unflatten(map(_Place, range(len(of_tree)), of_tree))
        prefix, left = "", str(path)
        while left:
            key, node = _child(node, left, prefix, self)
            prefix, left = f"{prefix}{key}/", left[len(key) + 1 :]
        found, treedef = tree_flatten(node)
        indices = [place.index for place in found]
        leaves = [leaf for i in indices if (leaf := of_tree[i]) is not None]
        nodes = [self._split.static[i] if of_tree[i] is None else of_tree[i] for i in indices]
        return replace(
            self,
            leaves=tuple(x._replace(path=x.path[len(prefix) :]) for x in leaves),
            _split=StaticSplit(nodes, treedef, lambda x: isinstance(x, PlannedLeaf)),
            _recipe=_PartOf(self, str(path)),
        )

    @property
    def path(self) -> str:
        """Where the tree is in the tree of the plan that it was taken from by `plan[path]`, or
        empty."""
        part = self._recipe
        return path_under(part.source.path, part.path) if isinstance(part, _PartOf) else ""

    # With `__getitem__`, Python would iterate over a plan by asking for `plan[0]`, `plan[1]`, ...
    __iter__ = None

    # -------------------------------------------------------------- errors and warnings

    @cached_property
    def findings(self) -> "tuple[Finding, ...]":
        """The plan's errors and warnings, each with its fix: errors first.

        `check` raises the errors:

        - leaves that no rule matches;
        - specs that do not fit: unknown and repeated axes, dims that are not divisible, a dim of
          `shard_dim` that the leaf does not have;
        - leaves that share a path.

        The warnings:

        - rules that match no leaf, and rules whose leaves are all taken by earlier rules
          (except a last rule that matches every leaf, which is a fallback);
        - leaves of at least `min_size` elements that are not split over axes which are idle for
          them (`left-whole`), if splitting them evenly would save at least 1% of the memory that a
          device needs; largest saving first. An axis is idle for a leaf if neither the leaf nor,
          by the axis's name, the batch is split over it: see `jit_step`. Specs that are given in
          place of rules are meant as they are, and so are leaves that a rule names and replicates
          (`None`, `P()` or `replicate()`), unless its pattern matches every path;
        - optimizer state that a rule of its own shards unlike its parameter
          (`state-unlike-weight`);
        - specs that are not used because their leaves have fewer elements than `min_size`;
        - specs that lose an axis because their leaves have fewer dims than they have entries
          (`trimmed`);
        - `fsdp` that splits nothing, as this holds for all leaves (`all-too-small`);
        - arrays that are in the tree at two paths (`same-array`), which become two arrays. Shapes
          do not show them: the plan of `jax.eval_shape`'s result lacks this finding;
        - arrays of 64 bits without JAX's x64 mode (`narrowed`), which are planned, placed and
          stepped with 32 bits.

        A pattern with exponential backtracking can make this hang, as it can `plan`.
        """
        if isinstance(self._recipe, _PartOf):
            return self._recipe.source.findings
        from treeshard._planning.findings import find  # a training loop needs none of its modules

        return find(self)

    def _shared_path_error(self) -> ShardingRuleError | None:
        """The error if leaves share a path."""
        if len({leaf.path for leaf in self.leaves}) == len(self.leaves):
            return None
        from treeshard._planning.findings import shared_paths

        shared = list(map(str, shared_paths(self)))
        if not shared:
            return None
        return ShardingRuleError(listed(f"{len(shared)} paths belong to several leaves:", shared))

    def check(self) -> None:
        """Raises if there are errors among `findings`.

        Raises:
            ShardingRuleError: If leaves are unmatched, their specs do not fit, or they
                share a path. The message lists all of them. The error is also an
                `UnknownAxisError` if a rule names an axis that the mesh does not have.

        Warns:
            ShardingWarning: If leaves are replicated for `min_size` although their action is
                a spec, or specs are trimmed, as in `match_partition_rules`.
        """
        if self._error is not None:
            raise self._error
        warn_of_moves(self._adjusted_rows(), WARNED)

    def check_before_use(self) -> None:
        """Raises the plan's errors, as `check` does, before a function applies the plan.

        Every function that places, gathers, constrains, reads or steps by a plan calls it.
        `specs`, `shardings` and `structs` do not: they show what the plan gives.

        - `plan[path]` has the errors of its own leaves.
        - A plan by `follow` has the errors of the plan that it follows, whose rules decided it.
        - A plan made with `strict=False` warns instead, and what fits is applied.

        Raises:
            ShardingRuleError: As `check`.

        Warns:
            ShardingWarning: Once for each plan: of its errors if it is not strict; of rules that
                match no leaf; and of leaves that are replicated for `min_size` although their
                action is a spec, or whose spec loses an axis because it has more entries than the
                leaf has dims. The last two are about the whole plan, not about a subtree.
        """
        error = self._error
        if error is not None and self.strict:
            raise error
        of_error = [] if error is None else [f"The plan is applied as far as it fits. {error}"]
        for message in (*of_error, *self._decided_by_rules._unused):
            if message not in self._told:
                warn(message)
                self._told.add(message)

    @property
    def _error(self) -> ShardingRuleError | None:
        """One error for all errors of the plan, or `None`."""
        return None if self._error_text is None else self._error_text[0](self._error_text[1])

    @cached_property
    def _error_text(self) -> tuple[type[ShardingRuleError], str] | None:
        both = rules_error(self._adjusted_rows(), self.mesh), self._shared_path_error()
        errors = [error for error in both if error is not None]
        if errors:
            return type(errors[0]), "\n".join(map(str, errors))
        # The copies of a leaf with an error may fit, as a factored moment does, which has fewer
        # dims. They are still not sharded as the rule says.
        origin = self.whole
        return origin._recipe.source._error_text if isinstance(origin._recipe, _Copies) else None

    @cached_property
    def _unused(self) -> list[str]:
        """What its rules say and no leaf gets: warnings of a plan that is applied."""
        moves = describe_moves(self._adjusted_rows(), WARNED)
        messages = [] if moves is None else [moves]
        used = {leaf.rule for leaf in self.leaves if leaf.shape}
        if used and len(used - {None}) < len(self.rules):
            from treeshard._planning.findings import unused_rules

            # Scalars need no rule, so a rule that matches only them misses nothing.
            dead = [x for x in unused_rules(self) if x.code == "dead-rule" and not x.paths]
            facts = [f"the plan's {x.fact} {x.fix}" for x in dead]
            messages += [listed(f"{len(facts)} rules match no leaf:", facts)] if facts else []
        return messages

    @property
    def _decided_by_rules(self) -> "Plan":
        """The plan of the whole tree whose leaves the rules decided."""
        source = self._recipe.source
        return self if source is None else source._decided_by_rules

    @property
    def whole(self) -> "Plan":
        """The plan of the whole tree of which this is the plan of a part: see `plan[path]`."""
        return self._recipe.source.whole if isinstance(self._recipe, _PartOf) else self

    def _adjusted_rows(self) -> list[Row]:
        return [(x.path, x.shape, x.decision) for x in self.leaves if x.decision.adjustments]

    # -------------------------------------------------------------- other plans

    def on(self, mesh: MeshLike) -> "Plan":
        """Plans the same tree by the same rules for another mesh.

        Functions among the rules are called again, with `ShapeDtypeStruct`s. Use `diff` to
        see what changes.

        Args:
            mesh: The other mesh, or its axes as text, as in `plan`.

        Raises:
            MeshError: If text is not a mesh.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", fsdp("fsdp"))], make_mesh("fsdp=8")).on("fsdp=1024")
            <Plan: 1 leaf on fsdp=1024, 4.0 KiB per device>
        """
        # Planning again has shapes alone, which do not show what the arrays did.
        return replace(self._recipe.remake(self, mesh), _array_facts=self._array_facts)

    def follow(
        self, tree: PyTree, *, extra_axis: str | Sequence[str] = (), memory: str | None = None
    ) -> "Plan":
        """Plans a tree that holds copies of this plan's tree: optimizer state, an average,
        gradients.

        Each leaf is matched to the leaf of this plan whose path is the end of its own:

        - With the same shape, it gets the same spec.
        - A factored moment, of shape `(d0,)` or `(d1,)` for a parameter `(d0, d1)`, gets the
          axes of the dims that it keeps. If dims of equal length leave this open, the name of
          the field decides (`v_row`, `v_col`).
        - A history `(n, d0, d1)` is not sharded on its first dim.
        - A leaf without a counterpart is replicated.
        - If `logical_partitioning` or a tree of specs decided a parameter in an nnx variable with
          `optimizer_sharding`, its copies are sharded by that.

        Args:
            tree: The state of any optax optimizer, masked, partitioned or wrapped, or any other
                tree that contains trees like this plan's: arrays, or their
                `jax.ShapeDtypeStruct`s.
            extra_axis: A mesh axis, or several whose sizes multiply, that shards the copies
                further than the originals, as ZeRO-1 does: the largest free dim that is
                divisible. Leaves of fewer elements than the plan's `min_size` keep their spec,
                and axes that a leaf's spec already has are not added.
            memory: The kind of memory for the tree, as in `fsdp`, such as `"pinned_host"` for an
                average that no step computes with. Scalars stay on the devices. By default,
                each leaf is in the memory of its counterpart.

        Returns:
            A `Plan` for `tree` on the same mesh. Each leaf has the rule of its counterpart,
            and its adjustments if both have the same shape.

        Raises:
            UnknownAxisError: If the mesh does not have `extra_axis`.
            SpecError: If `extra_axis` has a name twice.
            TypeError: If `extra_axis` is neither a string nor a sequence of strings.
            ArgumentError: If the tree is an optimizer, a function or another opaque object.
            LeafError: If a leaf is a mutable reference (`jax.Ref`).

        Examples:
            >>> params = {"w": jax.numpy.zeros((512, 64))}
            >>> decided = plan(params, [("w", fsdp("fsdp"))], make_mesh("fsdp=8"))
            >>> decided.follow(optax.sgd(0.1, momentum=0.9).init(params)).specs
            (TraceState(trace={'w': P('fsdp',)}), EmptyState())

        Source:
            `optax.tree_map_params`, for states that hold copies of the parameters; ZeRO stage
            1: Rajbhandari et al. 2020, arXiv:1910.02054.
        """
        check_tree(tree, "Plan.follow", "plan.follow(optimizer.init(params))")
        of_tree, treedef = tree_flatten(tree)
        split = StaticSplit(of_tree, treedef, has_shape)
        leaves = plan_copies(tree, of_tree, split, self, extra_axis, memory)
        return replace(
            self,
            leaves=tuple(leaves),
            _split=split,
            _array_facts=_array_facts(leaves, split.dynamic(of_tree)),
            _recipe=_Copies(self, extra_axis, memory),
        )

    def with_same_arrays(self, pairs: Sequence[tuple[str, str]]) -> "Plan":
        """The plan of a tree that has one array at both paths of each pair."""
        return replace(self, _array_facts=self._array_facts._replace(same=tuple(pairs)))

    def diff(self, other: "Plan") -> "PlanDiff":
        """Compares this plan with another one, leaf by leaf, and says what a device receives.

        Leaves are matched by path. The bytes of a leaf are the part of its new shard that a
        device does not hold yet. If a mesh is abstract, they are an upper bound: if both meshes
        have the same axes and sizes, each device is assumed to keep its position in the mesh;
        otherwise every shard counts in full.

        Args:
            other: The plan to change to.

        Returns:
            A `PlanDiff`, which is false if nothing changes. Its `str()` has one line per
            change.

        Examples:
            >>> mesh = make_mesh("fsdp=8")
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> one, two = plan(tree, [("w", None)], mesh), plan(tree, [("w", P("fsdp"))], mesh)
            >>> one.diff(two).bytes, two.diff(one).bytes
            (0, 3670016)
        """
        from treeshard._planning.plan_diff import diff_plans

        return diff_plans(self, other)

    # -------------------------------------------------------------- text

    def to_json(self) -> str:
        """Returns the plan as JSON, one line per leaf, for other programs.

        It names no devices, has the rules as text, and cannot be read back as a plan.

        Raises:
            ShardingRuleError: If leaves share a path.
        """
        if error := self._shared_path_error():
            raise error
        from treeshard._planning.plan_text import to_json

        return to_json(self)

    def describe(self) -> str:
        """Returns the plan as text: one line per leaf, repeated layers folded, totals last.

        A line has the leaf's path, its dtype and shape, its spec, the bytes that it takes on
        a device (in total, for repeated layers), and the reason.
        """
        from treeshard._planning.plan_text import describe

        return describe(self)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        size = human_bytes(self.bytes_per_device())
        mesh = describe_mesh(self.mesh)
        return f"<Plan: {counted(len(self.leaves), 'leaf')} on {mesh}, {size} per device>"


def _child(node: Any, path: str, prefix: str, whole: Plan) -> tuple[str, Any]:
    """The first key of a path below a node, and what the node has there."""
    children = dict(children_with_keys(node))
    # A key may have a slash of its own: the longest one counts.
    keys = [key for key in children if key and f"{path}/".startswith(f"{key}/")]
    if keys:
        key = max(keys, key=len)
        return key, children[key]
    known = [key for key in children if key]
    shown = ", ".join(known[:10]) if known else "nothing: it is a leaf"
    where = f"Below {prefix[:-1]!r}" if prefix else "At its root"
    raise SpecError(
        f"{whole!r} has no {prefix + path!r}. {where} it has {shown}."
        f"{did_you_mean(path.partition('/')[0], known)}"
    )


def _mesh_of_text(text: str) -> AnyMesh:
    """The mesh of text: of the devices, if as many are attached; else abstract."""
    # Text with a size of -1 is about the devices.
    sizes = parse_axes(text).values()
    is_attached = -1 in sizes or math.prod(sizes) == jax.device_count()
    return make_mesh(text) if is_attached else abstract_mesh(text)


def plan(
    tree: PyTree,
    rules: Rules | SpecTree,
    mesh: MeshLike,
    *,
    min_size: SupportsIndex | None = None,
    strict: bool = True,
) -> Plan:
    """Decides how every leaf of a tree is sharded, by the first rule that matches its path.

    In place of rules, it takes the specs that you have: `plan(tree, specs, mesh)`.

    Examples:
        >>> params = {"norm": jax.numpy.ones(64), "weight": jax.numpy.ones((512, 64))}
        >>> decided = plan(params, [("norm", None), (".*", fsdp("fsdp"))], make_mesh("fsdp=8"))
        >>> decided.specs
        {'norm': P(), 'weight': P('fsdp',)}
        >>> plan(params, {"norm": None, "weight": P("fsdp")}, make_mesh("fsdp=8")) == decided
        True

    Nothing is moved and no values are read. A spec that does not fit its leaf raises no
    error: the plan records what was changed, as `adjustments` of the leaf. `Plan.check`
    raises for it, and so does every function that applies the plan, such as `shard`.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree. Non-array leaves are
            kept as they are.
        rules: As in `match_partition_rules`. Or a tree of specs with the structure of `tree`, or a
            prefix of it: each entry is a `PartitionSpec`, a `NamedSharding`, of which the spec and
            the memory count, a tuple of logical names, `None` to replicate, or a function of the
            subtree at its place that returns such an entry or a tree of them. `min_size` does not
            replicate leaves that have a spec. A list or tuple is a list of rules if it is empty, or
            has a string or a compiled pattern in it or in lists and tuples within it; anything else
            is a tree of specs. In a tree of specs whose root is a list or tuple, write
            `PartitionSpec`s for logical names.
        mesh: The mesh to plan for. No devices are needed: give an `AbstractMesh` of any
            size, or its axes as text, such as `"data=16,fsdp=256"`. Text is a mesh of the devices,
            as in `init_sharded`, where just as many are attached. To see that, JAX starts.
        min_size: As in `match_partition_rules`.
        strict: Whether applying the plan raises if it has errors. Otherwise it keeps what fits,
            and warns once when it is applied: see `Plan.check_before_use`.

    Returns:
        A `Plan`. Leaves that no rule matches are replicated. Parts of a spec that do not
        fit are dropped: unknown and repeated axes, axes that do not divide their dim. Specs are
        trimmed to the rank of their leaf. An array that is in the tree at two paths is planned as
        two arrays, with the finding `same-array`.

    Raises:
        ShardingRuleError: If a rule is malformed, a function does not return a spec, or the
            arguments are in another order.
        SpecError: If a tree of specs does not match `tree`, or an entry is not a spec.
        ArgumentError: If the tree is a class, a function or another opaque object.
        MeshError: If `mesh` is not one.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).
    """
    call = "plan(tree, rules, mesh)"
    check_order(rules, tree, "plan", call)
    check_order(rules, mesh, "plan", call)
    check_tree(tree, "plan", call)
    mesh = as_mesh(mesh, _mesh_of_text)
    by_specs = is_spec_tree(rules)
    if by_specs:
        decided = decide_by_specs(rules, tree, mesh)
    else:
        decided = decide(read_rules(rules), tree, mesh, min_size)
    warn_of_moves(decided.adjusted_rows(), ())
    columns = zip(decided.paths, decided.leaves, decided.shapes, decided.decisions, strict=True)
    leaves = [
        PlannedLeaf(path, shape, device_dtype(leaf.dtype), decision)
        for path, leaf, shape, decision in columns
        if shape is not None
    ]
    pairs = () if by_specs else tuple((pattern, action) for pattern, action in rules)
    for i, decision in histories(leaves).items():
        leaves[i] = leaves[i]._replace(decision=decision)
    split = StaticSplit(decided.leaves, decided.treedef, has_shape)
    return Plan(
        mesh,
        pairs,
        min_size_in_force(min_size),
        tuple(leaves),
        split,
        strict,
        _array_facts(leaves, split.dynamic(decided.leaves)),
        _recipe=_ByRules(current_logical_rules(), rules if by_specs else None),
    )


def _array_facts(leaves: Sequence[PlannedLeaf], arrays: Sequence[Any]) -> ArrayFacts:
    """What only the arrays of planned leaves tell."""
    pairs = zip(leaves, arrays, strict=True)
    narrowed = tuple(
        (leaf.path, x.dtype.name) for leaf, x in pairs if x.dtype.itemsize > leaf.dtype.itemsize
    )
    return ArrayFacts(same_arrays([leaf.path for leaf in leaves], arrays), narrowed)
