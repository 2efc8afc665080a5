"""big_vision's `infer_sharding`."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten, tree_structure

from treeshard._core.make_mesh import make_mesh
from treeshard._core.mesh import MeshLike, as_mesh
from treeshard._core.paths import PyTree, is_box
from treeshard._core.spec_trees import SpecTree
from treeshard._planning.matching import Decided, decide
from treeshard._planning.rules import read_rules, rules_error
from treeshard._planning.tactics import Tactic
from treeshard.errors import ShardingRuleError, listed, warn

Strategy = Sequence[Any]  # of (pattern, strategy string or tactic) pairs


def infer_sharding(tree: PyTree, strategy: Strategy, mesh: MeshLike) -> SpecTree:
    """Chooses the sharding of every leaf of a tree by a strategy in big_vision's form.

    The first pattern that matches a leaf's full path (`re.fullmatch`) decides. Scalars and
    leaves without a shape are always replicated. No leaf is replicated for its size, except
    by a threshold of a tactic. Nothing is moved and no values are read.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree; Flax boxes too.
        strategy: Pairs `(pattern, tactics)`. `tactics` is a string such as
            `"shard_dim('model', -1) | fsdp('data')"`, which is parsed and never evaluated,
            or a `Tactic`. In strings, `fsdp` is `fsdp(axis, min_size_to_shard_mb=4)`, and
            leaves of that many MiB or fewer are replicated; `min_size=`, in elements, may be
            given instead. Tactics of your own (`tactic`) are called by their names.
        mesh: The mesh to shard over; it may be an `AbstractMesh`, or text.

    Returns:
        The tree with each leaf, and each box around a leaf, replaced by a `NamedSharding`,
        as `jax.jit` takes it for `out_shardings`. Leaves that no pattern matches are
        replicated, and one `ShardingWarning` lists them.

    Raises:
        ShardingRuleError: If the strategy is malformed, a tactic does not return a spec, or
            a spec does not fit its leaf. All such leaves are listed. It is an
            `UnknownAxisError` too if the mesh lacks an axis.

    Examples:
        >>> params = {"head": {"kernel": jax.ShapeDtypeStruct((4096, 1024), "float32")}}
        >>> shardings = infer_sharding(params, [(".*", "fsdp('data')")], make_mesh("data=8"))
        >>> shardings["head"]["kernel"].spec
        P('data',)

    Source:
        The function of this name in big_vision.
    """
    mesh = as_mesh(mesh, make_mesh)
    decided = decide(_read(strategy), tree, mesh, 0, whole_paths=True)
    if decided.adjusted:
        matched = [row for row in decided.rows() if row[2].rule is not None]
        if error := rules_error(matched, mesh):
            raise error
        _warn_of_unmatched(decided)
    specs = [decision.given for decision in decided.decisions]
    sharding_of = {spec: NamedSharding(mesh, spec) for spec in set(specs)}
    shardings = [sharding_of[spec] for spec in specs]
    return _unboxed(tree, shardings) if decided.boxed else decided.treedef.unflatten(shardings)


def _read(strategy: Strategy) -> Any:
    read = read_rules(strategy)
    bad = [
        f"rule {index}, {pattern.pattern!r}: {action!r} is not a tactic. Write a string, such"
        " as \"fsdp('data') | shard_dim('model', -1)\"."
        for index, (pattern, action) in enumerate(read)
        if not isinstance(action, Tactic)
    ]
    if bad:
        raise ShardingRuleError(listed(f"{len(bad)} entries of the strategy are malformed:", bad))
    return read


def _warn_of_unmatched(decided: Decided) -> None:
    unmatched = [
        f"{path}: shape {shape}"
        for path, shape, decision in decided.rows()
        if any(note.kind == "unmatched" for note in decision.adjustments)
    ]
    if unmatched:
        if len(unmatched) == 1:
            text = f"No pattern of the strategy matches {unmatched[0]}"
        else:
            text = listed(f"{len(unmatched)} leaves match no pattern of the strategy:", unmatched)
        warn(f'{text}\nReplicated. To say that this is intended, end with (".*", "replicate").')


def _unboxed(tree: Any, shardings: list[Any]) -> Any:
    """The tree of the shardings, where each box around a single leaf is replaced as a whole."""
    boxes, treedef = tree_flatten(tree, is_leaf=is_box)
    replaced: list[Any] = []
    rest = iter(shardings)
    for box in boxes:
        structure = tree_structure(box)
        inside = [next(rest) for _ in range(structure.num_leaves)]
        replaced.append(inside[0] if len(inside) == 1 else structure.unflatten(inside))
    return treedef.unflatten(replaced)
