"""Decides how every leaf of a tree is sharded, and records why. Needs no devices.

A plan is a value and not a tree of shardings: it keeps the rules and the shapes, so that it can be
made again for another mesh, explain itself, and be compared, before anything is allocated.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from treeshard._core.arguments import check_no_refs, check_tree
from treeshard._core.arrays import StaticSplit, device_dtype, has_shape, same_arrays
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import (
    AnyMesh,
    MeshLike,
    abstract_mesh,
    as_mesh,
    axis_sizes,
    describe_mesh,
    parse_axes,
)
from treeshard._core.paths import PyTree, children_with_keys
from treeshard._core.spec_trees import SpecCarrier, SpecTree
from treeshard._core.specs import all_axes, entries, trimmed
from treeshard._core.text import human_bytes
from treeshard._planning.axis_names import splits_rows
from treeshard._planning.copies import copied_leaves, histories, in_memory, resized, sharded_further
from treeshard._planning.logical import ReadLogicalRules, current_logical_rules, logical_axis_rules
from treeshard._planning.matching import SMALL, PlannedLeaf, Row, decide
from treeshard._planning.mirrors import Original
from treeshard._planning.padding import padded_leaves, unpadded_leaf
from treeshard._planning.rules import (
    Rules,
    StoredAction,
    check_order,
    describe_moves,
    read_rules,
    rules_error,
    warn_of_moves,
)
from treeshard._planning.tactics import Tactic, min_size_in_force
from treeshard.errors import (
    FormatError,
    MeshError,
    ShardingRuleError,
    SpecError,
    counted,
    did_you_mean,
    listed,
    warn,
)

if TYPE_CHECKING:  # a training loop needs neither
    from treeshard._planning.findings import Finding
    from treeshard._planning.plan_report import PlanDiff


@dataclass(frozen=True, eq=False, repr=False)
class Plan(SpecCarrier):
    """How every leaf of a tree is to be sharded over a mesh, and why: see `plan`.

    Every function that takes specs takes a `Plan`. Two plans are equal if their meshes have
    the same axes and sizes, and their leaves the same paths, shapes, dtypes, specs and memories;
    their rules may differ.

    Attributes:
        mesh: The mesh that the plan is for.
        rules: The rules that decided.
        min_size: Leaves with fewer elements were not sharded.
        leaves: A `PlannedLeaf` for every array, in the order in which JAX flattens the tree.
        strict: Whether a plan with errors raises when it is applied, or warns: see
            `check_before_use`.
    """

    mesh: AnyMesh
    rules: tuple[tuple[Any, Any], ...]
    min_size: int
    leaves: tuple[PlannedLeaf, ...]
    # The tree's structure, and its non-array leaves.
    _split: StaticSplit
    strict: bool = True
    # The rules for logical names that were in force when the plan was made.
    _logical: ReadLogicalRules | None = None
    # `_mirrors`: the plan was made by `follow`. `_source`: by `follow` of this plan; a plan
    # that was read from JSON does not know it.
    _source: "Plan | None" = None
    _extra_axis: str | Sequence[str] = ()
    _memory: str | None = None
    _mirrors: bool = False
    # The paths of arrays that are one object with another leaf, and of that leaf.
    _same_arrays: tuple[tuple[str, str], ...] = ()
    # The paths of arrays that devices hold in a narrower dtype, and their own dtype.
    _narrowed: tuple[tuple[str, str], ...] = ()
    # Of a subtree: the plan of the whole tree, and the path of the subtree in it.
    _part_of: "tuple[Plan, str] | None" = None
    # What it has warned of when it was applied, and plans made from it: one set for all of them.
    _told: set[str] = field(default_factory=set)

    # -------------------------------------------------------------- the tree

    @property
    def specs(self) -> SpecTree:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tree with a `PartitionSpec` at every leaf; `P()` at non-array leaves."""
        return self._split.without_static([leaf.given for leaf in self.leaves], PartitionSpec())

    @property
    def shardings(self) -> SpecTree:
        """The tree with a `NamedSharding` at every array; `P()` at non-array leaves."""
        return self._split.without_static(self.sharding_of_each(), PartitionSpec())

    @property
    def structs(self) -> PyTree:
        """The tree of types: a `ShapeDtypeStruct` with its sharding at every array; non-array
        leaves as they are.

        It stands for the tree where only types matter, as in `jax.eval_shape`, `step.lower` and
        `step.compile`. On Explicit axes, `jax.typeof` of one prints as in the plan:
        `float32[512@fsdp,64]`.
        """
        pairs = zip(self.leaves, self.sharding_of_each(), strict=True)
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x, where in pairs]
        return self.with_arrays(structs)

    def with_arrays(self, arrays: Sequence[Any]) -> PyTree:
        """The tree with these arrays, which are in the order of `leaves`; non-array leaves as they
        are."""
        return self._split.combine(arrays)

    @property
    def placements(self) -> SpecTree:
        """The specs, with a `NamedSharding` for a leaf that is in other memory."""
        pairs = zip(self.leaves, self.sharding_of_each(), strict=True)
        placements = [x.given if x.memory is None else sharding for x, sharding in pairs]
        return self._split.without_static(placements, PartitionSpec())

    def sharding_of_each(self) -> list[NamedSharding]:
        """The sharding of every array; equal ones are one object.

        Raises:
            MeshError: If the devices lack the memory of a leaf.
        """
        kinds = [(leaf.given, leaf.memory) for leaf in self.leaves]
        wanted = sorted({memory for _, memory in kinds if memory is not None})
        headline = f"The plan places leaves in {', '.join(wanted)}: "
        try:
            of_kind = {x: NamedSharding(self.mesh, x[0], memory_kind=x[1]) for x in set(kinds)}
        except ValueError as error:
            raise MeshError(f"{headline}{error}") from None
        # JAX leaves out the memory of devices of which it knows none.
        if not {sharding.memory_kind for sharding in of_kind.values()}.issuperset(wanted):
            devices: Any = self.mesh.devices
            raise MeshError(
                f"{headline}JAX knows of no such memory for {devices.flat[0].device_kind} that is"
                " not attached, and would keep these leaves on the devices. Compile where it is"
                " attached, or plan without `memory`."
            )
        return [of_kind[kind] for kind in kinds]

    def _bare(self) -> PyTree:
        """The tree with a `ShapeDtypeStruct` without a sharding at every array."""
        structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]
        return self.with_arrays(structs)

    def __getitem__(self, path: str | int) -> "Plan":
        """The plan of a subtree, by its path in the tree.

        A path has the keys of the tree, as JAX's key paths have them: `plan["model"]`, `plan[0]` of
        a tuple, `plan["model/layers/0"]`. Paths of the subtree's leaves begin there. `on`, `padded`
        and `findings` are those of the whole plan, whose rules are about whole paths. `check`, and
        functions that apply the subtree's plan, raise for its own leaves only.

        Raises:
            SpecError: If the tree has no such path. The message has the keys that there are.

        Examples:
            >>> state = {"model": {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}, "step": 0}
            >>> decided = plan(state, [("w", P("fsdp"))], make_mesh("fsdp=8"))
            >>> decided["model"].specs, decided["model/w"].specs
            ({'w': P('fsdp',)}, P('fsdp',))
        """
        numbers = self._split.treedef.unflatten(range(self._split.treedef.num_leaves))
        prefix, left = "", str(path)
        while left:
            key, numbers = _child(numbers, left, prefix, self)
            prefix, left = f"{prefix}{key}/", left[len(key) + 1 :]
        indices, treedef = tree_flatten(numbers)
        of_tree = self.leaf_at_each_index()
        leaves = [leaf for i in indices if (leaf := of_tree[i]) is not None]
        nodes = [self._split.static[i] if of_tree[i] is None else of_tree[i] for i in indices]
        below = [
            (one.removeprefix(prefix), other.removeprefix(prefix))
            for one, other in self._same_arrays
            if one.startswith(prefix) and other.startswith(prefix)
        ]
        return replace(
            self,
            leaves=tuple(x._replace(path=x.path[len(prefix) :]) for x in leaves),
            _split=StaticSplit(nodes, treedef, lambda x: isinstance(x, PlannedLeaf)),
            _same_arrays=tuple(below),
            _part_of=(self, str(path)),
        )

    def __iter__(self) -> Any:
        raise TypeError(f"a plan is not a sequence. {_INSTEAD}")

    def __len__(self) -> int:
        raise TypeError(f"a plan has no length: `len(plan.leaves)` counts its arrays. {_INSTEAD}")

    def __bool__(self) -> bool:
        return True

    @cached_property
    def structure_of_arrays(self) -> Any:
        """The structure of the tree without its non-array leaves."""
        return tree_structure(self._split.without_static([0] * len(self.leaves)))

    def leaf_at_each_index(self) -> list[PlannedLeaf | None]:
        """A `PlannedLeaf` for every leaf of the tree, in JAX's order; `None` for non-arrays."""
        planned: list[PlannedLeaf | None] = [None] * self._split.treedef.num_leaves
        for index, leaf in zip(self._split.indices, self.leaves, strict=True):
            planned[index] = leaf
        return planned

    def bytes_per_device(self, memory: str | None = None) -> int:
        """Returns the bytes that the tree takes on the device that holds the most.

        A leaf that is sharded unevenly counts as its largest shard.

        Args:
            memory: The kind of memory, such as `"pinned_host"`; by default that of the devices.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8")).bytes_per_device()
            524288
        """
        leaves = (leaf for leaf in self.leaves if leaf.memory == memory)
        return sum(leaf.bytes_per_device(self.mesh) for leaf in leaves)

    def fsdp_axes(self) -> frozenset[str]:
        """The axes over which parameters are sharded, and gathered for use.

        They are those of the `fsdp` tactic, whatever their names; and those of specs, logical
        names and functions that split a batch by their names: `data`, `dp`, `batch`, `replica`,
        `fsdp`, also as part of a name (`dcn_data`, `fsdp_transpose`). Devices along them do the
        same work unless the batch is sharded over them too.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> decided = plan(tree, [("w", P("fsdp", "tensor"))], make_mesh("fsdp=4,tensor=2"))
            >>> decided.fsdp_axes()
            frozenset({'fsdp'})
        """
        axes: set[str] = set()
        for decision in {leaf.decision for leaf in self.leaves}:
            split = set(all_axes(entries(decision.given)))
            axes.update(filter(splits_rows, split))
            action = None if decision.rule is None else self.rules[decision.rule][1]
            if isinstance(action, Tactic | StoredAction):
                axes |= action.fsdp_axes & split
        return frozenset(axes)

    # -------------------------------------------------------------- errors and warnings

    @cached_property
    def findings(self) -> "tuple[Finding, ...]":
        """The plan's errors and warnings, each with its fix: errors first.

        `check` raises the errors:

        - leaves that no rule matches;
        - specs that do not fit: unknown and repeated axes, dims that are not divisible,
          entries beyond the rank;
        - leaves that share a path.

        The warnings:

        - rules that match no leaf, and rules whose leaves are all taken by earlier rules
          (except a last rule that matches every leaf, which is a fallback);
        - leaves of at least `min_size` elements that are not split over axes which are idle for
          them (`left-whole`), if splitting them evenly would save at least 1% of the memory that a
          device needs; largest saving first. An axis is idle for a leaf if neither the leaf nor,
          by the axis's name, the batch is split over it: see `jit_step`. Leaves that a rule names
          and replicates (`None`, `P()` or `replicate()`) are meant, unless its pattern matches
          every path;
        - a few layers that are sharded unlike the others (`unlike-siblings`);
        - optimizer state that a rule of its own shards unlike its parameter
          (`state-unlike-weight`);
        - attention heads that an axis splits into parts (`cuts-head`);
        - padded leaves in the state of an optimizer that is not elementwise (`not-elementwise`),
          by the names that optax has;
        - specs that are not used because their leaves have fewer elements than `min_size`;
        - `fsdp` that splits nothing, as this holds for all leaves (`all-too-small`);
        - arrays that are in the tree at two paths (`same-array`), which become two arrays. Shapes
          and JSON do not show them: the plan of `jax.eval_shape`'s result lacks this finding;
        - arrays of 64 bits without JAX's x64 mode (`narrowed`), which are planned, placed and
          stepped with 32 bits; JSON does not show them;
        - leaves that cannot follow their base (`follow`).

        A pattern with exponential backtracking can make this hang, as it can `plan`.
        """
        if self._part_of is not None:
            return self._part_of[0].findings
        from treeshard._planning.lint import find  # a training loop needs none of its modules

        return find(self)

    def _shared_path_error(self) -> ShardingRuleError | None:
        """The error if leaves share a path."""
        if len({leaf.path for leaf in self.leaves}) == len(self.leaves):
            return None
        from treeshard._planning.lint import collisions

        shared = list(map(str, collisions(self)))
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
                a spec, as in `match_partition_rules`.
        """
        if self._error is not None:
            raise self._error
        warn_of_moves(self._adjusted(), SMALL)

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
                action is a spec. The last two are about the whole plan, not about a subtree.
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
        both = rules_error(self._adjusted(), self.mesh), self._shared_path_error()
        errors = [error for error in both if error is not None]
        if errors:
            return type(errors[0]), "\n".join(map(str, errors))
        # The copies of a leaf with an error may fit, as a factored moment does, which has fewer
        # dims. They are still not sharded as the rule says.
        return None if self._source is None else self._source._error_text

    @cached_property
    def _unused(self) -> list[str]:
        """What its rules say and no leaf gets: warnings of a plan that is applied."""
        small = describe_moves(self._adjusted(), SMALL)
        messages = [] if small is None else [small]
        used = {leaf.rule for leaf in self.leaves if leaf.shape}
        if used and len(used - {None}) < len(self.rules) and not self._mirrors:
            from treeshard._planning.lint import unused_rules

            # Scalars need no rule, so a rule that matches only them misses nothing.
            dead = [x for x in unused_rules(self) if x.code == "dead-rule" and not x.paths]
            facts = [f"the plan's {x.fact} {x.fix}" for x in dead]
            messages += [listed(f"{len(facts)} rules match no leaf:", facts)] if facts else []
        return messages

    @property
    def _decided_by_rules(self) -> "Plan":
        """The plan of the whole tree whose leaves the rules decided."""
        origin = self._source if self._part_of is None else self._part_of[0]
        return self if origin is None else origin._decided_by_rules

    def _adjusted(self) -> list[Row]:
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
            FormatError: If the plan was read from JSON, which does not store rules.

        Examples:
            >>> tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
            >>> plan(tree, [("w", fsdp("fsdp"))], make_mesh("fsdp=8")).on("fsdp=1024")
            <Plan: 1 leaf on fsdp=1024, 4.0 KiB per device>
        """
        if (remade := self._by_its_origin(lambda origin: origin.on(mesh))) is not None:
            return remade
        if any(leaf.unpadded for leaf in self.leaves):
            return self.unpadded().on(mesh).padded()
        self._check_has_rules()
        with nullcontext() if self._logical is None else logical_axis_rules(self._logical):
            planned = plan(
                self._bare(), self.rules, mesh, min_size=self.min_size, strict=self.strict
            )
        return replace(planned, _same_arrays=self._same_arrays, _narrowed=self._narrowed)

    def _check_has_rules(self) -> None:
        """Raises `FormatError` if the plan was read from JSON, and has no rules to apply."""
        has_stored = any(isinstance(action, StoredAction) for _, action in self.rules)
        if self._mirrors or has_stored:
            raise FormatError(
                "The plan was read from JSON, which stores what the rules decided and not the rules"
                " themselves. Plan again, with `plan(tree, rules, mesh)`."
            )

    def _by_its_origin(self, change: "Callable[[Plan], Plan]") -> "Plan | None":
        """This plan after a change of the plan that it is a part of, or follows, if it does."""
        if self._part_of is not None:
            whole, path = self._part_of
            return change(whole)[path]
        if self._source is None:
            return None
        source = change(self._source)
        structs = resized(self._bare(), self._source._original(), source._original())
        tree = self._split.treedef.unflatten(structs)
        followed = source.follow(tree, extra_axis=self._extra_axis, memory=self._memory)
        return replace(followed, _same_arrays=self._same_arrays, _narrowed=self._narrowed)

    def _original(self) -> Original:
        return Original(self._split.treedef, self.leaf_at_each_index())

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
        check_no_refs(tree, "Plan.follow")
        leaves = copied_leaves(tree, self._original())
        if extra_axis:
            leaves = sharded_further(leaves, extra_axis, self.mesh, self.min_size)
        if memory is not None:
            leaves = in_memory(leaves, memory)
        split = StaticSplit(*tree_flatten(tree), has_shape)
        arrays = split.dynamic(tree_leaves(tree))
        return replace(
            self,
            leaves=tuple(leaves),
            _split=split,
            _source=self,
            _extra_axis=extra_axis,
            _memory=memory,
            _mirrors=True,
            _part_of=None,
            _same_arrays=same_arrays([leaf.path for leaf in leaves], arrays),
            _narrowed=_narrowed(leaves, arrays),
        )

    def with_same_arrays(self, pairs: Sequence[tuple[str, str]]) -> "Plan":
        """The plan of a tree that has one array at both paths of each pair."""
        return replace(self, _same_arrays=tuple(pairs))

    def padded(self) -> "Plan":
        """Plans the same tree with dims padded, so that the rules' axes divide them.

        A dim that a spec is to split and cannot (`indivisible`) is padded to the next multiple of
        its axes. So is the dim that needs the least padding in a leaf that `fsdp` cannot shard
        (`no-dim`). All other leaves stay as they are. The plan's shapes, specs and bytes are
        those with padding, and `leaf.unpadded` is the true shape, which JSON keeps.

        `treeshard.pad_leaves` and `treeshard.unpad_leaves` convert trees between both, and
        `init_sharded(..., pad=True)` initialises one with padding.

        Raises:
            FormatError: If the plan was read from JSON without padding: JSON does not store rules.

        Examples:
            >>> tree = {"embed": jax.ShapeDtypeStruct((50257, 64), "float32")}
            >>> padded = plan(tree, [("embed", P("tensor"))], make_mesh("tensor=8")).padded()
            >>> padded.leaves[0].shape, padded.leaves[0].unpadded, padded.specs
            ((50264, 64), (50257, 64), {'embed': P('tensor',)})
        """
        if (remade := self._by_its_origin(Plan.padded)) is not None:
            return remade
        if any(leaf.unpadded for leaf in self.leaves):
            return self
        self._check_has_rules()
        return replace(self, leaves=padded_leaves(self.leaves, self.rules, self.mesh))

    def unpadded(self) -> "Plan":
        """Plans the tree of a padded plan with its true shapes, as checkpoints store it.

        The axes of a padded dim shard another dim that they divide; without one, they do not
        shard the leaf.

        Examples:
            >>> tree = {"embed": jax.ShapeDtypeStruct((50257, 64), "float32")}
            >>> padded = plan(tree, [("embed", P("tensor"))], make_mesh("tensor=8")).padded()
            >>> padded.unpadded().leaves[0].shape, padded.unpadded().specs
            ((50257, 64), {'embed': P(None, 'tensor')})
        """
        if (remade := self._by_its_origin(Plan.unpadded)) is not None:
            return remade
        leaves = tuple(unpadded_leaf(leaf, self.mesh) for leaf in self.leaves)
        return replace(self, leaves=leaves)

    def diff(self, other: "Plan") -> "PlanDiff":
        """Compares this plan with another one, leaf by leaf, and says how many bytes move.

        Leaves are matched by path. The bytes of a leaf are the part of its new shard that a
        device does not hold yet, and what processes send to others, as `reshard` moves them.
        If a mesh is abstract, they are an upper bound: if both meshes have the same axes and
        sizes, each device is assumed to keep its position in the mesh; otherwise every shard
        counts in full.

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
        from treeshard._planning.plan_report import diff

        return diff(self, other)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        short = {spec: trimmed(spec) for spec in {x.given for x in self.leaves}}
        leaves = tuple(sorted(self.leaves, key=lambda leaf: leaf.path))
        return tuple(axis_sizes(self.mesh).items()), tuple(
            (x.path, x.shape, x.unpadded, x.dtype, short[x.given], x.memory) for x in leaves
        )

    # -------------------------------------------------------------- text

    def to_json(self) -> str:
        """Returns the plan as JSON, one line per leaf, for `from_json` and for other programs.

        The JSON names no devices, and has the rules as text.

        Raises:
            ShardingRuleError: If leaves share a path.
        """
        if error := self._shared_path_error():
            raise error
        from treeshard._planning.plan_json import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str, *, like: PyTree | None = None) -> "Plan":
        """Reads a plan that `to_json` wrote.

        It can be compared and printed, and trees can be sharded and restored by it. Its mesh is
        abstract, so functions that move arrays need a mesh beside it. It cannot plan for another
        mesh (`on`) or with padding (`padded`): JSON does not store rules.

        Args:
            text: The JSON.
            like: A tree with the plan's paths, shapes (with or without padding) and dtypes. The
                plan takes its structure and its non-array leaves from it. Without `like`, the
                plan's tree is a flat dict by path.

        Raises:
            FormatError: If the text is not a plan of this version; the message says where.
                If `like` has other arrays than the plan; the message lists all that differ.

        Examples:
            >>> tree = {"mlp": {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}}
            >>> text = plan(tree, [("w", P("fsdp"))], make_mesh("fsdp=8")).to_json()
            >>> Plan.from_json(text).specs, Plan.from_json(text, like=tree).specs
            ({'mlp/w': P('fsdp',)}, {'mlp': {'w': P('fsdp',)}})
        """
        from treeshard._planning.plan_json import from_json

        return from_json(Plan, text, like)

    def describe(self) -> str:
        """Returns the plan as text: one line per leaf, repeated layers folded, totals last.

        A line has the leaf's path, its dtype and shape, its spec, the bytes that it takes on
        a device (in total, for repeated layers), and the reason.
        """
        from treeshard._planning.plan_report import describe

        return describe(self)

    def __str__(self) -> str:
        return self.describe()

    def _repr_html_(self) -> str:
        """The plan as a table, for notebooks."""
        from treeshard._planning.plan_report import describe_html

        return describe_html(self)

    def __repr__(self) -> str:
        size = human_bytes(self.bytes_per_device())
        mesh = describe_mesh(self.mesh)
        return f"<Plan: {counted(len(self.leaves), 'leaf')} on {mesh}, {size} per device>"


_INSTEAD = (
    "`plan.leaves` has the decision for each array, and `plan[path]` is the plan of a subtree:"
    ' `plan["model"]`, or `plan[0]` of a tuple.'
)


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
    rules: Rules,
    mesh: MeshLike,
    *,
    min_size: int | None = None,
    strict: bool = True,
) -> Plan:
    """Decides how every leaf of a tree is sharded, by the first rule that matches its path.

    Examples:
        >>> params = {"norm": jax.numpy.ones(64), "weight": jax.numpy.ones((512, 64))}
        >>> decided = plan(params, [("norm", None), (".*", fsdp("fsdp"))], make_mesh("fsdp=8"))
        >>> decided.specs
        {'norm': P(), 'weight': P('fsdp',)}

    Nothing is moved and no values are read. A spec that does not fit its leaf raises no
    error: the plan records what was changed, as `adjustments` of the leaf. `Plan.check`
    raises for it, and so does every function that applies the plan, such as `shard`.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree. Non-array leaves are
            kept as they are.
        rules: As in `match_partition_rules`.
        mesh: The mesh to plan for. No devices are needed: give an `AbstractMesh` of any
            size, or its axes as text, such as `"data=16,fsdp=256"`. Text is a mesh of the devices,
            as in `init_sharded`, where just as many are attached. To see that, JAX starts.
        min_size: As in `match_partition_rules`.
        strict: Whether applying the plan raises if it has errors. Otherwise it keeps what fits,
            and warns once when it is applied: see `Plan.check_before_use`.

    Returns:
        A `Plan`. Leaves that no rule matches are replicated. Parts of a spec that do not
        fit are dropped: unknown and repeated axes, axes that do not divide their dim,
        entries beyond the rank. An array that is in the tree at two paths is planned as two
        arrays, with the finding `same-array`.

    Raises:
        ShardingRuleError: If a rule is malformed, a function does not return a spec, or the
            arguments are in another order.
        ArgumentError: If the tree is a class, a function or another opaque object.
        MeshError: If `mesh` is not one.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).
    """
    call = "plan(tree, rules, mesh)"
    check_order(rules, tree, "plan", call)
    check_order(rules, mesh, "plan", call)
    check_tree(tree, "plan", call)
    mesh = as_mesh(mesh, _mesh_of_text)
    decided = decide(read_rules(rules), tree, mesh, min_size)
    warn_of_moves(decided.adjusted(), frozenset())
    columns = zip(decided.paths, decided.leaves, decided.shapes, decided.decisions, strict=True)
    leaves = [
        PlannedLeaf(path, shape, device_dtype(leaf.dtype), decision)
        for path, leaf, shape, decision in columns
        if shape is not None
    ]
    pairs = tuple((pattern, action) for pattern, action in rules)
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
        current_logical_rules(),
        _same_arrays=same_arrays(decided.paths, decided.leaves),
        _narrowed=_narrowed(leaves, split.dynamic(decided.leaves)),
    )


def _narrowed(leaves: Sequence[PlannedLeaf], arrays: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """The arrays that devices hold in a narrower dtype: their paths, and their own dtypes."""
    pairs = zip(leaves, arrays, strict=True)
    return tuple(
        (leaf.path, x.dtype.name) for leaf, x in pairs if x.dtype.itemsize > leaf.dtype.itemsize
    )
