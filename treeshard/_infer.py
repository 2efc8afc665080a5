"""Shardings by a strategy, as big_vision writes them."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten, tree_structure

from treeshard._errors import ShardingRuleError, listed, warn
from treeshard._matching import Decided, decide
from treeshard._mesh import AnyMesh
from treeshard._paths import is_box
from treeshard._rules import read_rules, rows_of, rules_error
from treeshard._tactics import Tactic

Strategy = Sequence[Any]  # of (pattern, strategy string or tactic) pairs


def infer_sharding(tree: Any, strategy: Strategy, mesh: AnyMesh) -> Any:
    """Decides the sharding of every leaf of a tree, by a strategy as big_vision writes it.

    The first pattern that matches all of a leaf's path (`re.fullmatch`) decides. Scalars and
    leaves without a shape are replicated, whatever matches them. There is no floor but those
    of the tactics. Nothing is moved and no values are read.

    Args:
        tree: Arrays, or their `jax.ShapeDtypeStruct`s, in any pytree; Flax boxes too.
        strategy: Pairs `(pattern, tactics)`: a string such as
            `"shard_dim('model', -1) | fsdp('data')"`, which is parsed and never evaluated,
            or a `Tactic`. In strings `fsdp` is `fsdp(axis, min_size_to_shard_mb=4)`, and
            leaves of that many MiB or fewer stay whole; `min_size=`, in elements, may be
            given instead. Tactics of your own (`tactic`) go by their names.
        mesh: The mesh to shard over; an `AbstractMesh` will do.

    Returns:
        The tree with a `NamedSharding` in the place of every leaf, and of every box around
        one, as `jax.jit` takes it for `out_shardings`. Leaves that no pattern matches are
        replicated, and one `ShardingWarning` lists them.

    Raises:
        ShardingRuleError: If the strategy is malformed, a tactic returns no spec, or what
            tactics decide does not fit: all such leaves are listed. It is an
            `UnknownAxisError` too if the mesh lacks an axis.

    Examples:
        >>> params = {"head": {"kernel": jax.ShapeDtypeStruct((4096, 1024), "float32")}}
        >>> found = infer_sharding(params, [("head/.*", "fsdp('data')")], make_mesh("data=8"))
        >>> found["head"]["kernel"].spec
        P('data',)

    Source:
        The function of this name in big_vision.
    """
    decided = decide(_read(strategy), tree, mesh, 0, whole_paths=True)
    if decided.adjusted:
        matched = [row for row in rows_of(decided) if row[2].rule is not None]
        if error := rules_error(matched, mesh):
            raise error
        _warn_of_unmatched(decided)
    placed = {spec: NamedSharding(mesh, spec) for spec in {d.given for d in decided.decisions}}
    found = [placed[decision.given] for decision in decided.decisions]
    return _unboxed(tree, found) if decided.boxed else decided.treedef.unflatten(found)


def _read(strategy: Strategy) -> Any:
    read = read_rules(strategy)
    bad = [
        f"rule {index}, {pattern.pattern!r}: {action!r} is no tactic. Write it as a string, such"
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
        for path, shape, decision in rows_of(decided)
        if any(note.kind == "unmatched" for note in decision.adjustments)
    ]
    if unmatched:
        headline = f"{len(unmatched)} leaves match no pattern of the strategy:"
        last = 'They are replicated; a last entry (".*", "replicate") says that this is meant.'
        one = "No pattern of the strategy matches " if len(unmatched) == 1 else ""
        warn(f"{one}{listed(headline, unmatched)}\n{last}")


def _unboxed(tree: Any, shardings: list[Any]) -> Any:
    """The shardings in the tree, with one in the place of each box around one leaf."""
    leaves, treedef = tree_flatten(tree, is_leaf=is_box)
    found: list[Any] = []
    rest = iter(shardings)
    for leaf in leaves:
        inside = tree_structure(leaf)
        few = [next(rest) for _ in range(inside.num_leaves)]
        found.append(few[0] if len(few) == 1 else inside.unflatten(few))
    return treedef.unflatten(found)
