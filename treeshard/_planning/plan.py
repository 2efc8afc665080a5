"""Decides how every leaf of a tree is sharded, and records why. Needs no devices.

A plan keeps the rules and the shapes, not only a tree of shardings. Before any allocation, it can
therefore be remade for another mesh, explain its decisions, and be compared.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import starmap
from typing import TYPE_CHECKING, Any, SupportsIndex

import jax
from jax.tree_util import tree_flatten

from treeshard._core.arguments import check_tree
from treeshard._core.arrays import StaticSplit, device_dtype, same_arrays
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
from treeshard._planning.matching import WARNED, Decided, PlannedLeaf, Row, decide
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

if TYPE_CHECKING:  # not needed by training loops
    from treeshard._planning.findings import Finding
    from treeshard._planning.plan_diff import PlanDiff


@dataclass(frozen=True)
class _ByRules:
    """The recipe of a plan that rules or a tree of specs decided."""

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
    """The recipe of a plan that `Plan.follow` made from another plan."""

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
    """The index of a leaf, with its type, because some classes inspect their new children."""

    def __init__(self, index: int, leaf: PlannedLeaf | None) -> None:
        super().__init__(*((leaf.shape, leaf.dtype) if leaf else ((), "bool")))
        self.index = index


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlannedTree):
    """The sharding of every leaf of a tree on a mesh, with the reasons; made by `plan`.

    Every function that takes specs takes a `Plan`. Two plans are equal if their meshes have
    the same axes and sizes, and their leaves have the same paths, shapes, dtypes, specs and
    memories. Their rules may differ.

    Attributes:
        mesh: The mesh that the plan is for.
        rules: The rules, or `()` if the plan was made from a tree of specs.
        min_size: The number of elements below which leaves stay replicated.
        leaves: A `PlannedLeaf` for every array, in the order in which JAX flattens the tree.
        strict: Whether functions that apply a plan with errors raise; otherwise they warn. See
            `check_before_use`.
    """

    # How to remake it for another mesh, with the plan that it was made from, if any.
    _recipe: _ByRules | _Copies | _PartOf = _ByRules(None)
    # The warnings that it has given when it was applied. Plans made from it share the set.
    _told: set[str] = field(default_factory=set)

    @property
    def _follows(self) -> bool:
        return isinstance(self._recipe, _Copies)

    # -------------------------------------------------------------- subtrees

    def __getitem__(self, path: str | int) -> "Plan":
        """Returns the plan of a subtree.

        Args:
            path: The subtree's path, as in JAX's key paths: `plan["model"]`,
                `plan["model/layers/0"]`, or `plan[0]` for an element of a tuple.

        Returns:
            A `Plan` whose paths start at the subtree. `check` and functions that apply the plan
            raise for the subtree's leaves only. `findings` lists the findings of the full plan, and
            `on` plans the full tree again, because rules match full paths.

        Raises:
            SpecError: If the tree does not have the path. The message lists the existing keys.

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
        """The path of the subtree, if the plan was made by `plan[path]`; otherwise `""`."""
        part = self._recipe
        return path_under(part.source.path, part.path) if isinstance(part, _PartOf) else ""

    # With `__getitem__`, Python would iterate over a plan by asking for `plan[0]`, `plan[1]`, ...
    __iter__ = None

    # -------------------------------------------------------------- errors and warnings

    @cached_property
    def findings(self) -> "tuple[Finding, ...]":
        """The errors and warnings of the plan, each with its fix; errors come first.

        `check` raises for errors:

        - No rule matches a leaf.
        - A spec does not fit: it names an unknown axis, repeats an axis, splits a dim that is not
          divisible, or `shard_dim` names a dim that the leaf does not have.
        - Several leaves share a path.

        Warnings are about plans that can be applied:

        - A rule matches no leaf, or earlier rules decide all of its leaves. A last rule that
          matches every leaf is exempt.
        - `left-whole`: a leaf of at least `min_size` elements is not sharded over idle axes, and
          sharding it evenly would save at least 1% of the memory per device. The largest saving
          comes first. An axis is idle for a leaf if it shards neither the leaf nor, by its name,
          the batch: see `jit_step`. Exempt are specs instead of rules, and leaves that a rule
          replicates (`None`, `P()` or `replicate()`), unless its pattern matches every path.
        - `state-unlike-weight`: a rule shards optimizer state unlike its parameter.
        - `explicit-spec-too-small`: a spec is ignored, because the leaf has fewer elements than
          `min_size`.
        - `trimmed`: a spec loses an axis, because it has more entries than the leaf has dims.
        - `all-too-small`: `fsdp` shards no leaf, because all leaves are too small.
        - `same-array`: one array is at two paths, and becomes two arrays. A plan of shapes, as from
          `jax.eval_shape`, cannot have this finding.
        - `narrowed`: an array has 64 bits and JAX's x64 mode is off, so it is placed with 32 bits.

        A pattern with exponential backtracking can hang here and in `plan`.
        """
        if isinstance(self._recipe, _PartOf):
            return self._recipe.source.findings
        from treeshard._planning.findings import find  # not needed by training loops

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
        """Raises one error for all errors among `findings`.

        Raises:
            ShardingRuleError: If leaves are unmatched, their specs do not fit, or they
                share a path. The message lists all leaves. The error is also an
                `UnknownAxisError` if a rule names an axis that the mesh does not have.

        Warns:
            ShardingWarning: If `min_size` replicates leaves whose action is a spec, or specs are
                trimmed, as in `match_partition_rules`.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((50257, 64), "float32")}
            >>> plan(tree, [("w", P("fsdp"))], "fsdp=8").check()
            Traceback (most recent call last):
            ...
            treeshard.errors.ShardingRuleError: ...
        """
        if self._error is not None:
            raise self._error
        warn_of_moves(self._adjusted_rows(), WARNED)

    def check_before_use(self) -> None:
        """Raises as `check`, before a function applies the plan.

        Every function that places, gathers, constrains, restores or steps by a plan calls this
        method. `specs`, `shardings` and `structs` do not call it.

        - `plan[path]` raises for its own leaves.
        - A plan from `follow` raises for the errors of the plan that it follows.
        - A plan with `strict=False` warns instead, and the caller applies what fits.

        Raises:
            ShardingRuleError: As `check`.

        Warns:
            ShardingWarning: Once per plan. If the plan is not strict, the warning lists its errors.
                It also lists rules that match no leaf, leaves that `min_size` replicates although
                their action is a spec, and specs that lose an axis because the leaf has fewer
                dims. The last three concern the full plan, not a subtree.
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
        # The copies of a leaf with an error may fit, such as a factored moment with fewer dims.
        # They are still not sharded by the rule.
        origin = self.whole
        return origin._recipe.source._error_text if isinstance(origin._recipe, _Copies) else None

    @cached_property
    def _unused(self) -> list[str]:
        """Warnings about the parts of rules that no leaf gets, for a plan that is applied."""
        moves = describe_moves(self._adjusted_rows(), WARNED)
        messages = [] if moves is None else [moves]
        used = {leaf.rule for leaf in self.leaves if leaf.shape}
        if used and len(used - {None}) < len(self.rules):
            from treeshard._planning.findings import unused_rules

            # A rule that matches only scalars, which do not need rules, is not reported.
            dead = [x for x in unused_rules(self) if x.code == "dead-rule" and not x.paths]
            facts = [f"the plan's {x.fact} {x.fix}" for x in dead]
            messages += [listed(f"{len(facts)} rules match no leaf:", facts)] if facts else []
        return messages

    @property
    def _decided_by_rules(self) -> "Plan":
        """The plan that rules decided: this plan, or the plan that it follows or is a part of."""
        source = self._recipe.source
        return self if source is None else source._decided_by_rules

    @property
    def whole(self) -> "Plan":
        """The plan of the full tree, if this plan was made by `plan[path]`; otherwise this plan."""
        return self._recipe.source.whole if isinstance(self._recipe, _PartOf) else self

    def _adjusted_rows(self) -> list[Row]:
        return [(x.path, x.shape, x.decision) for x in self.leaves if x.decision.adjustments]

    # -------------------------------------------------------------- other plans

    def on(self, mesh: MeshLike) -> "Plan":
        """Plans the same tree for another mesh, with the same rules.

        Functions among the rules are called again, with `ShapeDtypeStruct`s. `diff` shows what
        changes.

        Args:
            mesh: The other mesh, or its axes as text, as in `plan`.

        Raises:
            MeshError: If `mesh` is not a mesh.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", fsdp("fsdp"))], make_mesh("fsdp=8")).on("fsdp=1024")
            <Plan: 1 leaf on fsdp=1024, 4.0 KiB per device>
        """
        # The new plan is made from shapes, which do not show facts about arrays.
        return replace(self._recipe.remake(self, mesh), _array_facts=self._array_facts)

    def follow(
        self, tree: PyTree, *, extra_axis: str | Sequence[str] = (), memory: str | None = None
    ) -> "Plan":
        """Plans optimizer state, an average or gradients, sharded as the parameters.

        Each leaf of `tree` follows the leaf of this plan whose path is the end of its own path:

        - A leaf with the same shape gets the same spec.
        - A factored moment, of shape `(d0,)` or `(d1,)` for a parameter `(d0, d1)`, gets the
          axes of the dims that it keeps. If the dims have equal lengths, the name of the field
          decides (`v_row`, `v_col`).
        - A history `(n, d0, d1)` is not sharded on its first dim.
        - A leaf without a counterpart is replicated.
        - If a parameter is an nnx variable with `optimizer_sharding`, and `logical_partitioning` or
          a tree of specs decided it, its copies are sharded by `optimizer_sharding`.

        Args:
            tree: The state of any optax optimizer, masked, partitioned or wrapped, or any other
                tree that contains trees like this plan's: arrays, or their
                `jax.ShapeDtypeStruct`s.
            extra_axis: A mesh axis, or several whose sizes multiply, that also shards the copies,
                as in ZeRO-1. It shards the largest free dim that it divides. Leaves with fewer
                elements than the plan's `min_size` keep their spec, and a spec never gets an axis
                twice.
            memory: The kind of memory for the tree, as in `fsdp`, such as `"pinned_host"` for an
                average that no step reads. Scalars stay on the devices. By default, each leaf is
                in the memory of its counterpart.

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
        flat = check_tree(tree, "Plan.follow", "plan.follow(optimizer.init(params))")
        decided = plan_copies(tree, flat, self, extra_axis, memory)
        leaves, facts = _planned_leaves(decided)
        return replace(
            self,
            leaves=tuple(leaves),
            _split=decided.split,
            _array_facts=facts,
            _recipe=_Copies(self, extra_axis, memory),
        )

    def with_same_arrays(self, pairs: Sequence[tuple[str, str]]) -> "Plan":
        """The plan of a tree that has one array at both paths of each pair."""
        return replace(self, _array_facts=self._array_facts._replace(same=tuple(pairs)))

    def diff(self, other: "Plan") -> "PlanDiff":
        """Lists the leaves that another plan shards differently, and the bytes a device receives.

        Leaves are matched by path. The bytes of a leaf are the part of the new shard that a device
        does not hold yet. With an abstract mesh they are an upper bound. If both meshes have the
        same axes and sizes, each device is assumed to keep its position in the mesh; otherwise
        each shard counts in full.

        Args:
            other: The plan to change to.

        Returns:
            A `PlanDiff`, which is false if the plans agree. `print` shows one line per change.

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
        """Returns the plan as JSON for other programs, one line per leaf.

        The JSON has the axes of the mesh, the rules as text, and the leaves. treeshard cannot read
        it back as a plan.

        Raises:
            ShardingRuleError: If leaves share a path.

        Examples:
            >>> import json
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> sorted(json.loads(plan(tree, [("w", P("fsdp"))], "fsdp=8").to_json()))
            ['leaves', 'mesh', 'min_size', 'rules', 'strict', 'treeshard_plan']
        """
        if error := self._shared_path_error():
            raise error
        from treeshard._planning.plan_text import to_json

        return to_json(self)

    def describe(self) -> str:
        """Returns the plan as text, as `print(plan)` shows it.

        Each line has a leaf's path, dtype, shape, spec, size per device, and the reason. Repeated
        layers share a line, with the sum of their sizes. The last lines have totals.
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
    """The child of a node that a path starts with, and its key."""
    children = dict(children_with_keys(node))
    # Keys may contain slashes: the longest matching key counts.
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
    """The mesh of text: of the attached devices if their number fits, otherwise abstract."""
    # A size of -1 stands for the attached devices.
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
    """Makes a plan: a spec for every leaf of a tree, from rules or from specs, with the reason.

    Examples:
        >>> params = {"norm": jax.numpy.ones(64), "weight": jax.numpy.ones((512, 64))}
        >>> decided = plan(params, [("norm", None), (".*", fsdp("fsdp"))], make_mesh("fsdp=8"))
        >>> decided.specs
        {'norm': P(), 'weight': P('fsdp',)}
        >>> plan(params, {"norm": None, "weight": P("fsdp")}, make_mesh("fsdp=8")) == decided
        True

    Planning reads shapes only. If a spec does not fit its leaf, the plan records what it changed
    in the leaf's `adjustments`. `Plan.check` then raises, and so does every function that applies
    the plan, such as `shard`.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree. The plan keeps non-array
            leaves unchanged.
        rules: A list of rules, as in `match_partition_rules`, or a tree of specs that has the
            structure of `tree` or a prefix of it. An entry of such a tree is a `PartitionSpec`; a
            `NamedSharding`, whose mesh is ignored; a tuple of logical names; `None` to replicate;
            or a function that takes the subtree and returns an entry or a tree of entries.
            `min_size` does not apply to leaves that have a spec. A list or tuple counts as rules if
            it is empty or contains a string or compiled pattern, also in a list or tuple inside.
            If the root of a tree of specs is a list or tuple, write `PartitionSpec`s for logical
            names.
        mesh: The mesh to plan for, an `AbstractMesh` of any size, or axes as text, such as
            `"data=16,fsdp=256"`. Text stands for a mesh of the attached devices if their number
            fits or a size is -1, else for an `AbstractMesh`. Text starts JAX's backend.
        min_size: As in `match_partition_rules`.
        strict: Whether functions that apply the plan raise if it has errors. Otherwise they apply
            what fits, and warn once: see `Plan.check_before_use`.

    Returns:
        A `Plan`. It replicates leaves that no rule matches. It drops axes that do not fit: unknown
        and repeated axes, and axes that do not divide their dim. It trims specs to the rank of
        their leaf. An array at two paths counts as two arrays, with the finding `same-array`.

    Raises:
        ShardingRuleError: If a rule is malformed, a function does not return a spec, or two
            arguments are swapped.
        SpecError: If a tree of specs does not match `tree`, or an entry is not a spec.
        ArgumentError: If the tree is a class, a function or another opaque object.
        MeshError: If `mesh` is not a mesh.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).
    """
    call = "plan(tree, rules, mesh)"
    check_order(rules, tree, "plan", call)
    check_order(rules, mesh, "plan", call)
    flat = check_tree(tree, "plan", call)
    mesh = as_mesh(mesh, _mesh_of_text)
    by_specs = is_spec_tree(rules)
    if by_specs:
        decided = decide_by_specs(rules, tree, flat, mesh)
    else:
        decided = decide(read_rules(rules), tree, flat, mesh, min_size)
    warn_of_moves(decided.adjusted_rows(), ())
    leaves, facts = _planned_leaves(decided)
    pairs = () if by_specs else tuple((pattern, action) for pattern, action in rules)
    for i, decision in histories(leaves).items():
        leaves[i] = leaves[i]._replace(decision=decision)
    return Plan(
        mesh,
        pairs,
        min_size_in_force(min_size),
        tuple(leaves),
        decided.split,
        strict,
        facts,
        _recipe=_ByRules(current_logical_rules(), rules if by_specs else None),
    )


def _planned_leaves(decided: Decided) -> tuple[list[PlannedLeaf], ArrayFacts]:
    """A record for each array, and the facts that only the arrays show."""
    paths, dtypes = decided.paths, [x.dtype for x in decided.arrays]
    on_devices = {dtype: device_dtype(dtype) for dtype in set(dtypes)}  # few
    of_leaves = [on_devices[dtype] for dtype in dtypes]
    rows = zip(paths, decided.shapes, of_leaves, decided.decisions, strict=True)
    wide = {dtype for dtype, narrow in on_devices.items() if dtype.itemsize > narrow.itemsize}
    pairs = zip(paths, dtypes, strict=True) if wide else ()
    narrowed = tuple((path, dtype.name) for path, dtype in pairs if dtype in wide)
    facts = ArrayFacts(same_arrays(paths, decided.arrays), narrowed)
    return list(starmap(PlannedLeaf, rows)), facts
