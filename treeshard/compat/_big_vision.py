"""big_vision's `infer_sharding`: its strategies, its `fsdp`, and user-defined ops.

A strategy is translated to rules with tactics, which `_planning` applies like other rules. Only the
thresholds stay in mebibytes, so that configs give the same shardings as in big_vision.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from math import prod
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_structure

from treeshard._core.arguments import check_no_refs
from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh
from treeshard._core.paths import PyTree, is_box
from treeshard._core.spec_trees import SpecTree
from treeshard._core.specs import (
    dim_entries,
    entries,
    entry_of,
    is_mesh_axes,
    project,
    trim_spec,
)
from treeshard._planning.matching import Decided, decide
from treeshard._planning.named_dims import value_of
from treeshard._planning.rules import check_order, read_rules, rules_error
from treeshard._planning.tactics import Refined, Step, Tactic, axes_to_shard, shard_largest
from treeshard.compat._strategies import TACTICS, MakeTactic, parse_strategy
from treeshard.errors import ShardingRuleError, SpecError, listed, warn

Strategy = Sequence[Any]  # of (pattern, ops) pairs
Update = Callable[[PartitionSpec, AnyMesh, str, Any], Any]  # (cur_spec, mesh, name, x) -> spec


def infer_sharding(params: PyTree, strategy: Strategy, mesh: MeshLike) -> SpecTree:
    """Chooses the sharding of every leaf of a tree by a strategy in big_vision's form.

    The first pattern that matches a leaf's full path (`re.fullmatch`) decides. Scalars and
    leaves without a shape are always replicated. Only the threshold of `fsdp` replicates
    leaves for their size. Values are neither moved nor read.

    Args:
        params: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree; Flax boxes too.
        strategy: Pairs `(pattern, ops)`, where `ops` is a string such as
            `"shard_dim('model', -1) | fsdp('data')"`, which is parsed and never evaluated,
            or a `Tactic`.
            `fsdp` is `fsdp(axis, min_size_to_shard_mb=4)`: leaves of that many MiB or fewer
            are replicated. Ops of your own (`Registry`) are called by their names.
        mesh: The mesh to shard over; it may be an `AbstractMesh`, or text.

    Returns:
        The tree with each leaf, and each box around a leaf, replaced by a `NamedSharding`,
        as `jax.jit` takes it for `out_shardings`. Unmatched leaves are replicated, and one
        `ShardingWarning` lists them.

    Raises:
        ShardingRuleError: If the strategy is malformed or is another argument, an op does not
            return a spec, or a spec does not fit its leaf. All such leaves are listed. It is an
            `UnknownAxisError` too if the mesh lacks an axis.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> params = {"head": {"kernel": jax.ShapeDtypeStruct((4096, 1024), "float32")}}
        >>> shardings = infer_sharding(params, [(".*", "fsdp('data')")], make_mesh("data=8"))
        >>> shardings["head"]["kernel"].spec
        P('data',)

    Source:
        The function of this name in big_vision.
    """
    call = "infer_sharding(params, strategy, mesh)"
    check_order(strategy, params, "infer_sharding", call)
    check_order(strategy, mesh, "infer_sharding", call)
    flat = check_no_refs(params, "infer_sharding")
    mesh = as_mesh(mesh, make_mesh)
    # `u.make_mask_trees` of big_vision matches with `re.fullmatch`, the first pattern first.
    decided = decide(read_rules(strategy, _read_ops), params, flat, mesh, 0, whole_paths=True)
    # If a pattern chose a spec that does not fit, that is an error. Unmatched leaves are
    # replicated, and a warning lists them.
    matched = [row for row in decided.adjusted_rows() if row[2].rule is not None]
    if error := rules_error(matched, mesh):
        raise error
    _warn_about_unmatched(decided)
    specs = decided.specs_of_leaves()
    # One object for each spec, because trees of thousands of leaves have a handful of specs.
    sharding_of = {spec: NamedSharding(mesh, spec) for spec in set(specs)}
    shardings = [sharding_of[spec] for spec in specs]
    return _replace_boxes(params, shardings)


def _warn_about_unmatched(decided: Decided) -> None:
    unmatched = [
        f"{path}: shape {shape}"
        for path, shape, decision in decided.adjusted_rows()
        if any(note.kind == "unmatched" for note in decision.adjustments)
    ]
    if not unmatched:
        return
    if len(unmatched) == 1:
        text = f"No pattern of the strategy matches {unmatched[0]}"
    else:
        text = listed(f"{len(unmatched)} leaves match no pattern of the strategy:", unmatched)
    warn(f'{text}\nThey are replicated. If you intend it, end with (".*", "replicate").')


def _replace_boxes(tree: Any, shardings: list[Any]) -> Any:
    """The tree of the shardings. A sharding replaces each box together with its leaf."""
    # big_vision maps over `nn.unbox(params)`, and `jax.jit` takes one sharding for a box.
    boxes, treedef = tree_flatten(tree, is_leaf=is_box)
    replaced: list[Any] = []
    rest = iter(shardings)
    for box in boxes:
        structure = tree_structure(box)
        inside = [next(rest) for _ in range(structure.num_leaves)]
        replaced.append(inside[0] if len(inside) == 1 else structure.unflatten(inside))
    return treedef.unflatten(replaced)


# ------------------------------------------------------------------ ops


def _fsdp(axis: str | Sequence[str], min_size_to_shard_mb: int | float = 4) -> Tactic:
    if not isinstance(min_size_to_shard_mb, int | float):
        raise TypeError(f"min_size_to_shard_mb is {min_size_to_shard_mb!r}, not a number of MiB")
    axes = axes_to_shard(axis, "fsdp")

    def refine(spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        # In big_vision too, a leaf of exactly this many bytes is replicated.
        if prod(leaf.shape) * leaf.dtype.itemsize <= min_size_to_shard_mb * 2**20:
            return spec, ()
        return shard_largest(spec, mesh, tuple(leaf.shape), axes)

    text = f"fsdp({entry_of(axes)!r}, min_size_to_shard_mb={min_size_to_shard_mb})"
    return Tactic((Step(text, refine, min_size=0, fsdp_axes=axes),))


def _user_op(call: str, update: Update) -> Tactic:
    """A tactic that applies what an op of the user returned; `call` is the call that made it."""

    def refine(spec: PartitionSpec, mesh: AnyMesh, path: str, leaf: Any) -> Refined:
        leaf = value_of(leaf)
        shape = tuple(leaf.shape)
        # Ops of big_vision replace an entry of a full spec, and return a plain tuple:
        # `cur_spec[:i] + (axis,) + cur_spec[i+1:]`.
        cur_spec = spec.update(partitions=tuple(dim_entries(spec, len(shape))))
        returned = update(cur_spec, mesh, path, leaf)
        is_plain = isinstance(returned, tuple) and all(map(is_mesh_axes, returned))
        new = PartitionSpec(*returned) if is_plain else returned
        if not isinstance(new, PartitionSpec) or len(entries(new)) != len(shape):
            raise SpecError(
                f"the op {call} returned {returned!r} for shape {shape}. Return a spec or a"
                " tuple with one entry per dim: a mesh axis, a tuple of them, or None."
            )
        return project(trim_spec(new), mesh, shape)

    return Tactic((Step(call, refine, by_shape=False),))


# A registry in the module, as in big_vision: a config has the names of ops, not objects. big_vision
# registers ops as "shardings.fsdp", and calls them without the prefix.
_ops: dict[str, MakeTactic] = {**TACTICS, "fsdp": _fsdp}


class Registry:
    """The registry of ops of your own, which strategies call by their names.

    Examples:
        >>> @Registry.register("shardings.shard_last")
        ... def shard_last(axis):
        ...     return lambda cur_spec, mesh, name, x: cur_spec[:-1] + (axis,)
        >>> infer_sharding(jax.numpy.ones(8), [("", "shard_last('data')")], "data=8").spec
        P('data',)

    Source:
        big_vision's class of this name, which registers preprocessing too.
    """

    @staticmethod
    def register(name: str) -> Callable[[Callable[..., Update]], MakeTactic]:
        """Returns a decorator that registers a function as an op.

        The function returns an update `(cur_spec, mesh, name, x) -> spec`. `cur_spec` has one
        entry per dim. The spec that is returned must too, and may be a plain tuple. A later
        function of the same name replaces this one. The decorated function takes the same
        arguments and returns a tactic.

        Args:
            name: `"shardings."` and the name that strategies call.

        Raises:
            ShardingRuleError: If the name does not start with `"shardings."`, cannot be called, or
                belongs to a tactic or an op of big_vision.
        """
        prefix, _, op = name.partition(".")
        if prefix != "shardings" or not op.isidentifier():
            raise ShardingRuleError(
                f"Registry.register: {name!r} is not the name of an op. Write"
                ' `Registry.register("shardings.my_op")`, which strategies call as `my_op(...)`.'
            )
        if op in TACTICS:
            raise ShardingRuleError(f"Registry.register: {op!r} is big_vision's. Use another name.")

        def add(factory: Callable[..., Update]) -> MakeTactic:
            # The tactic prints as its call, which plans and errors show.
            @wraps(factory)
            def make(*args: Any, **options: Any) -> Tactic:
                call = [*map(repr, args), *(f"{key}={value!r}" for key, value in options.items())]
                return _user_op(f"{op}({', '.join(call)})", factory(*args, **options))

            _ops[op] = make
            return make

        return add


def _read_ops(ops: Any) -> Tactic:
    if isinstance(ops, Tactic):
        return ops
    if isinstance(ops, str):
        return parse_strategy(ops, _ops)
    raise ShardingRuleError(
        f"{ops!r} is not a string of ops, such as \"shard_dim('model', -1) | fsdp('data')\"."
    )
