"""Leaves that carry their own spec: boxes, as Flax makes them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class, tree_flatten

from treeshard._errors import SpecError, UnknownAxisInSpecError, listed
from treeshard._mesh import context_mesh
from treeshard._paths import is_box, leaf_paths
from treeshard._spec_trees import get_names_from_partition_spec, specs_of_leaves
from treeshard._specs import axes_of, entries, has_shape, project, unknown_axis

Names = tuple[str | tuple[str, ...] | None, ...]


@register_pytree_with_keys_class
class Partitioned:
    """An array with the mesh axes that each of its dims is sharded over.

    A pytree node, with the fields and methods of Flax Linen's box of this name. Optimizers
    map over what is inside; `get_partition_spec` of a box stands for it wherever a prefix of
    specs is taken, as in the `in_specs` of `jax.shard_map`.

    Attributes:
        value: The array; inside `shard_map`, this device's part of it.
        names: One entry a dim: `None`, an axis, or a tuple of axes.

    Examples:
        >>> Partitioned(jnp.ones((8, 4)), ("fsdp", None)).get_partition_spec()
        P('fsdp', None)
    """

    def __init__(self, value: Any, names: Sequence[Any]) -> None:
        self.value = value
        self.names: Names = tuple(names)

    def replace_boxed(self, value: Any) -> "Partitioned":
        """The same box around another value."""
        return Partitioned(value, self.names)

    def unbox(self) -> Any:
        """The value."""
        return self.value

    def get_partition_spec(self) -> PartitionSpec:
        """The names as a `PartitionSpec`."""
        return PartitionSpec(*self.names)

    def __repr__(self) -> str:
        return f"Partitioned({self.value!r}, names={self.names!r})"

    def tree_flatten_with_keys(self) -> tuple[Any, Names]:
        return ((GetAttrKey("value"), self.value),), self.names

    def tree_flatten(self) -> tuple[Any, Names]:
        return (self.value,), self.names

    @classmethod
    def tree_unflatten(cls, names: Names, children: Any) -> "Partitioned":
        return cls(children[0], names)


def partition_specs(tree: Any) -> Any:
    """Returns the specs that the boxes of a tree carry; `P()` for what is in no box.

    Args:
        tree: A tree with `Partitioned` boxes, or Flax's. The values may be
            `jax.ShapeDtypeStruct`s, as `jax.eval_shape` of an init inside `shard_map`
            returns them.

    Returns:
        A prefix of `tree`, with a `PartitionSpec` in the place of every box and leaf.

    Examples:
        >>> partition_specs({"step": 0, "w": Partitioned(jnp.ones((8, 4)), ("fsdp", None))})
        {'step': P(), 'w': P('fsdp', None)}
    """
    leaves, treedef = tree_flatten(tree, is_leaf=is_box)
    return treedef.unflatten([spec_of(x) if is_box(x) else PartitionSpec() for x in leaves])


# ------------------------------------------------------------------ reading and writing boxes


def spec_of(box: Any) -> PartitionSpec:
    """What a box says of its value: Linen's `names`, or the `out_sharding` of nnx."""
    if hasattr(type(box), "replace_boxed"):
        names = getattr(box, "names", ())
    else:
        names = box.get_metadata().get("out_sharding")
    if isinstance(names, NamedSharding):
        return names.spec
    return names if isinstance(names, PartitionSpec) else PartitionSpec(*(names or ()))


def value_in(box: Any) -> Any:
    """The value in a box. (Linen's `unbox` constrains it, which fails inside `shard_map`.)"""
    return box.value if hasattr(type(box), "replace_boxed") else box.get_value()


def rebox(box: Any, value: Any, spec: PartitionSpec) -> Any:
    """The same kind of box around another value, sharded otherwise.

    Once nothing is sharded there is no box, but nnx needs its variables.
    """
    names = _names(spec, value)
    if not hasattr(type(box), "replace_boxed"):
        if any(names) or any(entries(spec_of(box))):
            return box.replace(value, out_sharding=names if any(names) else None)
        return box.replace(value)
    if not any(names):
        return value
    if isinstance(box, Partitioned):
        return Partitioned(value, names)
    return box.replace(value=value, names=names)


def box_up(kind: Any, value: Any, spec: PartitionSpec) -> Any:
    """A new box, of Linen's kind or our own, around a value that is sharded."""
    return kind(value, _names(spec, value))


def _names(spec: PartitionSpec, value: Any) -> Names:
    known = entries(spec)
    return (*known, *[None] * (len(value.shape) - len(known)))


# ------------------------------------------------------------------ leaves and their specs


def dims_over(
    spec: PartitionSpec | None, axes: Sequence[str]
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """The dims that some of `axes` shard, each with these axes, outermost first."""
    named = [axes_of(entry) for entry in entries(spec or PartitionSpec())]
    here = [(dim, tuple(a for a in known if a in axes)) for dim, known in enumerate(named)]
    return tuple((dim, found) for dim, found in here if found)


class Leaf(NamedTuple):
    """One leaf and its spec, from a tree of specs or from the leaf's own box.

    Attributes:
        path: Its name.
        value: What is inside the box, if there is one.
        spec: How it is sharded; `None` leaves it as it is.
        box: The box that the spec was read from, else `None`.
    """

    path: str
    value: Any
    spec: PartitionSpec | None
    box: Any = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it."""
        return tuple(a for entry in entries(self.spec or PartitionSpec()) for a in axes_of(entry))

    def with_value(self, value: Any) -> Any:
        """What stands in the tree once the value is another one, sharded alike."""
        if self.box is None:
            return value
        linen = hasattr(type(self.box), "replace_boxed")
        return self.box.replace_boxed(value) if linen else self.box.replace(value)

    def resharded(self, value: Any, spec: PartitionSpec) -> Any:
        """What stands in the tree once the value is another one, sharded by `spec`."""
        return value if self.box is None else rebox(self.box, value, spec)

    def unchanged(self) -> Any:
        """What stands in the tree now."""
        return self.value if self.box is None else self.box


def leaves_with_specs(tree: Any, specs: Any, where: str) -> tuple[list[Leaf], Any]:
    """The leaves of a tree with their specs, and the structure to put them back into.

    With `specs=None` boxes are read, and what is in no box is whole. With a tree of specs a
    box is a node like any other.

    Raises:
        SpecError: If `specs` does not fit the tree, or specs do not fit their leaves.
        UnknownAxisError: If specs name an axis that the mesh lacks.
    """
    stop = is_box if specs is None else None
    found, treedef = tree_flatten(tree, is_leaf=stop)
    paths = leaf_paths(tree, is_leaf=stop)
    if specs is None:
        leaves = [
            Leaf(path, value_in(x), spec_of(x), x) if is_box(x) else Leaf(path, x, PartitionSpec())
            for path, x in zip(paths, found, strict=True)
        ]
    else:
        beside = specs_of_leaves(specs, tree)
        _check_axes_of(beside, where)
        bare = [spec.spec if isinstance(spec, NamedSharding) else spec for spec in beside]
        leaves = [Leaf(*row) for row in zip(paths, found, bare, strict=True)]
    _check_ranks(leaves, where)
    return leaves, treedef


def _check_axes_of(specs: list[Any], where: str) -> None:
    mesh = context_mesh()
    if mesh is None:
        return
    for name in get_names_from_partition_spec(specs):
        if name not in mesh.shape:
            raise UnknownAxisInSpecError(f"{where}: {unknown_axis(name, mesh.shape)}")


def _check_ranks(leaves: list[Leaf], where: str) -> None:
    facts = [
        f"{leaf.path or 'the array'}: {loss.why}"
        for leaf in leaves
        if leaf.spec is not None and has_shape(leaf.value)
        for loss in project(leaf.spec, None, tuple(leaf.value.shape))[1]
    ]
    if facts:
        hint = "For one layer of a stack, `treeshard.layer_specs` gives the specs."
        raise SpecError(f"{where}: {listed('specs do not fit:', facts)} {hint}")
