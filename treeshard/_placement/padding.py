"""Pads the arrays of a tree as a plan has them, and removes the padding.

Arrays on devices change in one compiled program for the whole tree. Op by op, JAX would compile one
for each shape, and place the results as it likes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import tree_flatten, tree_leaves, tree_map, tree_structure

from treeshard._core.arrays import has_shape
from treeshard._core.paths import PyTree
from treeshard._placement.moves import replicate_then_split
from treeshard._placement.shard import Call, place
from treeshard._planning.matching import Shape
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import subtrees
from treeshard.errors import SpecError, listed


def pad_leaves(tree: PyTree, plan: Plan) -> PyTree:
    """Pads the arrays of a tree with zeros to the shapes of a padded plan.

    Args:
        tree: The plan's tree, or a subtree of it, with true shapes: arrays, or their
            `jax.ShapeDtypeStruct`s. Inside `jit` too.
        plan: A plan that `Plan.padded` or `init_sharded(..., pad=True)` returned.

    Returns:
        The tree. Arrays that the plan pads have its shapes: those on devices are sharded by it,
        numpy arrays stay on the host. All other leaves are as they were.

    Raises:
        SpecError: If the plan has no such subtree, or several that are padded differently.
        MeshError, DeletedLeafError: As `treeshard.reshard`, for arrays on devices.

    Examples:
        >>> tree = {"embed": np.ones((50257, 64), "float32")}
        >>> padded = plan(tree, [("embed", P("tensor"))], make_mesh("tensor=8")).padded()
        >>> pad_leaves(tree, padded)["embed"].shape
        (50264, 64)
    """
    return _resized(tree, plan.unpadded(), plan, "pad_leaves")


def unpad_leaves(tree: PyTree, plan: Plan) -> PyTree:
    """Removes the padding of a padded plan from the arrays of a tree.

    Inside `jit`, no data moves, and the gradient of the padding is zero. Of weights that
    `unshard` has gathered, cut rather the result, such as logits: compilers all-reduce the gradient
    of an uneven array instead of scattering it. Outside `jit`, for a checkpoint or another
    framework, arrays are resharded as `Plan.unpadded` says.

    Args:
        tree: The plan's tree, or a subtree of it, with the plan's shapes, as in `pad_leaves`.
        plan: As in `pad_leaves`.

    Returns:
        The tree. Arrays that the plan pads have their true shapes, and all other leaves are as
        they were.

    Raises:
        SpecError, MeshError, DeletedLeafError: As `pad_leaves`.

    Examples:
        >>> tree = {"embed": np.ones((50257, 64), "float32")}
        >>> padded = plan(tree, [("embed", P("tensor"))], make_mesh("tensor=8")).padded()
        >>> unpad_leaves(pad_leaves(tree, padded), padded)["embed"].shape
        (50257, 64)
    """
    return _resized(tree, plan, plan.unpadded(), "unpad_leaves")


def resize(x: Any, shape: Shape) -> Any:
    """Pads an array with zeros at the end of dims, or cuts them, on the host or inside `jit`."""
    widths = [new - old for old, new in zip(x.shape, shape, strict=True)]
    if isinstance(x, np.ndarray):
        padded = np.pad(x, [(0, max(0, width)) for width in widths])
        return padded[tuple(map(slice, shape))]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, width, 0) for width in widths])


def _resized(tree: PyTree, before: Plan, after: Plan, where: str) -> PyTree:
    """The tree, which has the shapes of `before`, with those of `after`."""
    if [leaf.shape for leaf in before.leaves] == [leaf.shape for leaf in after.leaves]:
        return tree
    leaves, treedef = tree_flatten(tree)
    arrays = [i for i, x in enumerate(leaves) if has_shape(x)]
    start = _start(tree, [tuple(leaves[i].shape) for i in arrays], before, after, where)
    old, new = before.sharding_of_each(), after.sharding_of_each()
    # What is on devices: where each array is to be, and what becomes of it.
    sources: list[Any] = [None] * len(leaves)
    targets: list[NamedSharding | None] = [None] * len(leaves)
    changes: dict[int, tuple[Shape, NamedSharding]] = {}
    for k, i in enumerate(arrays, start):
        x, shape = leaves[i], after.leaves[k].shape
        if shape == before.leaves[k].shape:
            continue
        if isinstance(x, jax.ShapeDtypeStruct):
            leaves[i] = jax.ShapeDtypeStruct(shape, x.dtype, sharding=new[k])
        elif isinstance(x, jax.Array) and not isinstance(x, Tracer):
            sources[i], targets[i] = x, old[k]
            changes[i] = shape, new[k]
        else:
            leaves[i] = resize(x, shape)
    if changes:
        # It may be on a single device, or sharded in another way; then it moves first.
        call = Call(where, replicate_then_split)
        placed = place(treedef.unflatten(sources), treedef.unflatten(targets), None, call)
        resized = _program(*zip(*changes.values(), strict=True))(tree_leaves(placed))
        for i, x in zip(changes, resized, strict=True):
            leaves[i] = x
    return treedef.unflatten(leaves)


@lru_cache(64)
def _program(shapes: tuple[Shape, ...], shardings: tuple[NamedSharding, ...]) -> Any:
    """Resizes arrays in one compiled call."""

    def run(arrays: Sequence[Any]) -> list[Any]:
        return [resize(x, shape) for x, shape in zip(arrays, shapes, strict=True)]

    return jax.jit(run, out_shardings=list(shardings))


def _start(tree: PyTree, shapes: list[Shape], before: Plan, after: Plan, where: str) -> int:
    """The index of the first leaf of the plan's subtree that has this structure and shapes.

    Several subtrees will do, such as parameters and their moments, if all change in the same way.
    """
    structure = tree_structure(tree_map(lambda x: 0 if has_shape(x) else None, tree))
    starts: dict[Any, int] = {}  # by what the leaves become
    for start in subtrees(before.structure_of_arrays, structure):
        part = slice(start, start + len(shapes))
        if [leaf.shape for leaf in before.leaves[part]] == shapes:
            result = tuple((leaf.shape, leaf.given) for leaf in after.leaves[part])
            starts.setdefault(result, start)
    if len(starts) == 1:
        return next(iter(starts.values()))
    shown = [str(shape) for shape in shapes[:5]]
    if len(shapes) > len(shown):
        shown.append("...")
    of_tree = f"subtree of this structure with leaves of shape {', '.join(shown)}"
    if starts:
        raise SpecError(
            f"{where}: the plan has more than one {of_tree}, and they are padded or sharded"
            " differently. Pass a larger part of the tree."
        )
    rows = zip(before.leaves, after.leaves, strict=True)
    facts = [f"{x.path}: {x.shape} to {y.shape}." for x, y in rows if x.shape != y.shape]
    raise SpecError(listed(f"{where}: the plan has no {of_tree}. It converts:", facts))
