"""Leaves that carry their own spec: boxes, as in Flax."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass, tree_flatten

from treeshard._core.arrays import has_shape
from treeshard._core.mesh import context_mesh
from treeshard._core.paths import PyTree, is_box, leaf_paths
from treeshard._core.spec_trees import (
    SpecTree,
    lay,
    layer_specs,
    raise_misfits,
    specs_of_leaves,
)
from treeshard._core.specs import axes_of, entries
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._planning.tactics import names_in

Names = tuple[str | tuple[str, ...] | None, ...]


@partial(register_dataclass, data_fields=["value"], meta_fields=["names", "unpadded"])
@dataclass(eq=False, repr=False)
class Partitioned:
    """An array together with the mesh axes that each of its dims is sharded over.

    A pytree node, with the fields and methods of Flax Linen's box of this name. Optimizers
    map over the value inside. Wherever a prefix of specs is taken, such as the `in_specs` of
    `jax.shard_map`, use `partition_specs` of the tree.

    Attributes:
        value: The array; inside `shard_map`, this device's shard of it.
        names: One entry per dim: `None`, an axis, or a tuple of axes.
        unpadded: The full shape without padding; `None` if no dim is padded.

    Examples:
        >>> Partitioned(jnp.ones((8, 4)), ("fsdp", None)).get_partition_spec()
        P('fsdp', None)
    """

    value: Any
    names: Sequence[Any]
    unpadded: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.names = tuple(self.names)

    def replace_boxed(self, value: Any) -> "Partitioned":
        """Returns a box with the same names and true shape around another value."""
        return Partitioned(value, self.names, self.unpadded)

    def unbox(self) -> Any:
        """Returns the value."""
        return self.value

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the names as a `PartitionSpec`."""
        return PartitionSpec(*self.names)

    def __repr__(self) -> str:
        padded = "" if self.unpadded is None else f", unpadded={self.unpadded}"
        return f"Partitioned({self.value!r}, names={self.names!r}{padded})"


def partition_specs(tree: PyTree) -> SpecTree:
    """Returns the specs that the boxes of a tree carry, and `P()` for leaves without a box.

    Args:
        tree: A tree with `Partitioned` boxes, or Flax's. The values may be
            `jax.ShapeDtypeStruct`s, as `jax.eval_shape` of an init inside `shard_map`
            returns them.

    Returns:
        A prefix of `tree`, with a `PartitionSpec` in place of each box and leaf.

    Examples:
        >>> partition_specs({"step": 0, "w": Partitioned(jnp.ones((8, 4)), ("fsdp", None))})
        {'step': P(), 'w': P('fsdp', None)}
    """
    leaves, treedef = tree_flatten(tree, is_leaf=is_box)
    return treedef.unflatten([spec_of(x) if is_box(x) else PartitionSpec() for x in leaves])


# ------------------------------------------------------------------ reading and writing boxes


def spec_of(box: Any) -> PartitionSpec:
    """The spec that a box has for its value."""
    return PartitionSpec(*names_in(box).names)


def value_in(box: Any) -> Any:
    """The value in a box. (Linen's `unbox` constrains it, which fails inside `shard_map`.)"""
    return box.value if hasattr(type(box), "replace_boxed") else box.get_value()


def unpadded_in(box: Any) -> tuple[int, ...] | None:
    """The true shape that a box records, if its value is padded."""
    if hasattr(type(box), "replace_boxed"):
        return getattr(box, "unpadded", None)
    return box.get_metadata().get("unpadded")


def rebox(
    box: Any, value: Any, spec: PartitionSpec, unpadded: tuple[int, ...] | None = None
) -> Any:
    """The same kind of box around another value, sharded by `spec`; our own if it is padded.

    A value that no axis shards gets no box, except that nnx needs its variables.
    """
    names = _names(spec, value)
    if not hasattr(type(box), "replace_boxed"):
        unpadded = unpadded if any(names) else None
        padding = {} if unpadded == unpadded_in(box) else {"unpadded": unpadded}
        if any(names) or any(entries(spec_of(box))):
            return box.replace(value, out_sharding=names if any(names) else None, **padding)
        return box.replace(value)
    if not any(names):
        return value
    if isinstance(box, Partitioned) or unpadded is not None:
        return Partitioned(value, names, unpadded)
    return box.replace(value=value, names=names)


def box_up(
    kind: Any, value: Any, spec: PartitionSpec, unpadded: tuple[int, ...] | None = None
) -> Any:
    """A new box around a sharded value: of Linen's class, or of our own, which tells padding."""
    names = _names(spec, value)
    return kind(value, names) if unpadded is None else Partitioned(value, names, unpadded)


def _names(spec: PartitionSpec, value: Any) -> Names:
    names = entries(spec)
    return (*names, *[None] * (len(value.shape) - len(names)))


# ------------------------------------------------------------------ leaves and their specs


def dims_over(
    spec: PartitionSpec | None, axes: Sequence[str]
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The dims that some of `axes` shard, each with these axes, outermost first."""
    pairs = []
    for dim, entry in enumerate(entries(spec or PartitionSpec())):
        if over := tuple(axis for axis in axes_of(entry) if axis in axes):
            pairs.append((dim, over))
    return tuple(pairs)


class Leaf(NamedTuple):
    """One leaf and its spec, from a tree of specs or from the leaf's own box.

    Attributes:
        path: Its path.
        value: The leaf, or the value in its box.
        spec: How it is sharded; `None` leaves it unchanged.
        box: The box that the spec was read from, else `None`.
        unpadded: The full shape without padding, from the box or the plan, if it is padded.
    """

    path: str
    value: Any
    spec: PartitionSpec | None
    box: Any = None
    unpadded: tuple[int, ...] | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it."""
        return tuple(a for entry in entries(self.spec or PartitionSpec()) for a in axes_of(entry))

    def with_value(self, value: Any) -> Any:
        """The leaf of the resulting tree for another value with the same spec."""
        if self.box is None:
            return value
        linen = hasattr(type(self.box), "replace_boxed")
        return self.box.replace_boxed(value) if linen else self.box.replace(value)

    def resharded(self, value: Any, spec: PartitionSpec, unpadded: tuple[int, ...] | None) -> Any:
        """The leaf of the resulting tree for another value, sharded by `spec`."""
        return value if self.box is None else rebox(self.box, value, spec, unpadded)

    def unchanged(self) -> Any:
        """The leaf of the tree as it is, with its box."""
        return self.value if self.box is None else self.box


def leaves_with_specs(tree: PyTree, specs: SpecTree, where: str) -> tuple[list[Leaf], Any]:
    """The leaves of a tree with their specs, and the structure of the tree.

    With `specs=None` the specs are read from boxes, and leaves without a box are replicated.
    With a tree of specs, a box is a node like any other. With a plan of stacked layers, the tree
    may be one layer.

    Raises:
        SpecError: If `specs` does not fit the tree, or specs do not fit their leaves.
        UnknownAxisError: If specs name an axis that the mesh lacks.
    """
    is_leaf = is_box if specs is None else None
    values, treedef = tree_flatten(tree, is_leaf=is_leaf)
    paths = leaf_paths(tree, is_leaf=is_leaf)
    mesh = None if specs is None else context_mesh()  # names in boxes may be logical
    if specs is None:
        leaves = [
            Leaf(path, value_in(x), spec_of(x), x, unpadded_in(x))
            if is_box(x)
            else Leaf(path, x, PartitionSpec())
            for path, x in zip(paths, values, strict=True)
        ]
    else:
        planned = specs.leaf_at_each_index() if isinstance(specs, Plan) else []
        true = [None if leaf is None else leaf.unpadded for leaf in planned]
        if _are_slices(values, planned):
            specs = layer_specs(specs)
            true = [None if shape is None else shape[1:] for shape in true]
        specs = specs_of_leaves(specs, tree)
        specs = [spec.spec if isinstance(spec, NamedSharding) else spec for spec in specs]
        true = true if len(true) == len(specs) else [None] * len(specs)
        rows = zip(paths, values, specs, true, strict=True)
        leaves = [Leaf(path, x, spec, None, unpadded) for path, x, spec, unpadded in rows]
    values = [leaf.value for leaf in leaves]
    specs = [leaf.spec for leaf in leaves]
    laid_specs = lay(values, specs, choose_mesh=lambda *_: mesh)
    misfits = {
        i: misfit
        for i, laid in enumerate(laid_specs)
        if laid is not None and (misfit := laid.misfit({"rank", "axis-not-in-mesh"}))
    }
    if misfits:
        # Often these are the specs of stacked layers, for one layer inside a scan.
        beyond_rank = any(laid is not None and laid.misfit({"rank"}) for laid in laid_specs)
        advice = "For one layer of a stack, use the specs that `treeshard.layer_specs` returns."
        raise_misfits(
            treedef.unflatten(values),
            misfits,
            where,
            "specs do not fit:",
            advice=advice if beyond_rank else "",
        )
    return leaves, treedef


def _are_slices(values: Sequence[Any], planned: Sequence[PlannedLeaf | None]) -> bool:
    """Whether each array has one dim less than the plan has: one layer of a stack."""
    if len(values) != len(planned):
        return False
    ranks = [
        (x.ndim, len(leaf.shape))
        for x, leaf in zip(values, planned, strict=True)
        if leaf is not None and has_shape(x)
    ]
    return bool(ranks) and all(rank + 1 == stacked for rank, stacked in ranks)
