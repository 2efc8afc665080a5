"""Looks up the spec of each leaf in a tree of specs, the plan in force, or boxes around the leaves.

Inside `shard_map`, an array has no spec: it is this device's shard, and its type has only the axes
along which it varies, not the dims that they split. `Partitioned` is a box for trees without Flax.
Flax's boxes are recognised by their methods, without importing Flax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import register_dataclass, tree_flatten, tree_leaves

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import array_text, has_shape, is_array
from treeshard._core.jax_private import varying_axes
from treeshard._core.mesh import context_mesh
from treeshard._core.origins import origin_of
from treeshard._core.paths import PyTree, is_box, is_box_of_leaf, leaf_paths
from treeshard._core.spec_trees import (
    ResolvedSpec,
    SpecTree,
    layer_specs,
    raise_misfits,
    resolve_specs,
    specs_of_leaves,
)
from treeshard._core.specs import all_axes, dim_entries, drop_axes, entries, is_spec
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.named_dims import names_in
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import UNKNOWN, PlanInForce, current_plan
from treeshard.errors import SpecError, listed

Names = tuple[str | tuple[str, ...] | None, ...]


@partial(register_dataclass, data_fields=["value"], meta_fields=["names"])
@dataclass(eq=False, repr=False)
class Partitioned:
    """An array together with the mesh axes that each of its dims is sharded over.

    A pytree node, with the fields and methods of Flax Linen's box of this name. Optimizers
    map over the value inside. For a prefix of specs, such as the `in_specs` of `jax.shard_map`, use
    `partition_specs` of the tree.

    Attributes:
        value: The array; inside `shard_map`, this device's shard of it.
        names: One entry per dim: `None`, an axis, or a tuple of axes.

    Examples:
        >>> Partitioned(jnp.ones((8, 4)), ("fsdp", None)).get_partition_spec()
        P('fsdp', None)
    """

    value: Any
    names: Sequence[Any]

    def __post_init__(self) -> None:
        self.names = tuple(self.names)

    def replace_boxed(self, value: Any) -> "Partitioned":
        """Returns a box with the same names around another value."""
        return Partitioned(value, self.names)

    def unbox(self) -> Any:
        """Returns the value."""
        return self.value

    def get_partition_spec(self) -> PartitionSpec:
        """Returns the names as a `PartitionSpec`."""
        return PartitionSpec(*self.names)

    def __repr__(self) -> str:
        return f"Partitioned({self.value!r}, names={self.names!r})"


def partition_specs(tree: PyTree) -> SpecTree:
    """Returns the specs that the boxes of a tree carry, and `P()` for leaves without a box.

    Args:
        tree: A tree with `Partitioned` boxes, or Flax's. The values may be
            `jax.ShapeDtypeStruct`s, as `jax.eval_shape` of an init inside `shard_map`
            returns them.

    Returns:
        A prefix of `tree`, with a `PartitionSpec` instead of each box and leaf.

    Raises:
        LeafError: If a leaf is a mutable reference (`jax.Ref`).

    Examples:
        >>> partition_specs({"step": 0, "w": Partitioned(jnp.ones((8, 4)), ("fsdp", None))})
        {'step': P(), 'w': P('fsdp', None)}
    """
    check_no_refs(tree, "partition_specs")
    leaves, treedef = tree_flatten(tree, is_leaf=is_box)
    return treedef.unflatten([spec_of(x) if is_box(x) else PartitionSpec() for x in leaves])


# ------------------------------------------------------------------ reading and writing boxes

# Flax has two kinds of boxes. Linen's boxes have `replace_boxed`, and a method for their spec, like
# `Partitioned`. nnx variables keep names in their metadata, next to the metadata of users.


def _is_variable(box: Any) -> bool:
    """Whether a box is an nnx variable."""
    return not hasattr(type(box), "replace_boxed")


def spec_of(box: Any) -> PartitionSpec:
    """The spec that a box has for its value."""
    return PartitionSpec(*names_in(box).names)


def value_in(box: Any) -> Any:
    """The value in a box."""
    # Linen's `unbox` also constrains the sharding of the value, which fails inside `shard_map`.
    return box.get_value() if _is_variable(box) else box.value


def _variable_with(box: Any, value: Any, names: Names) -> Any:
    """An nnx variable with another value, sharded by `names`."""
    # Metadata is static in nnx: a new `out_sharding=None` would change the structure of the tree.
    is_sharded = any(names)
    if not is_sharded and not any(entries(spec_of(box))):
        return box.replace(value)
    return box.replace(value, out_sharding=names if is_sharded else None)


def make_box(value: Any, spec: PartitionSpec) -> Partitioned:
    """A new box around a value that `spec` shards."""
    return Partitioned(value, _names(spec, value))


def _names(spec: PartitionSpec, value: Any) -> Names:
    return tuple(dim_entries(spec, len(value.shape)))


# ------------------------------------------------------------------ leaves and their specs


class Leaf(NamedTuple):
    """One leaf and its spec, from a tree of specs or from the leaf's own box.

    Attributes:
        path: The path of the leaf.
        node: The node in the tree: the value, or the box that the spec was read from.
        value: The leaf, or the value in its box.
        spec: The spec of the leaf.
        passes_through: Whether every function returns the leaf unchanged: it is not an array, or
            the tree of specs has `None` for it.
    """

    path: str
    node: Any
    value: Any
    spec: PartitionSpec
    passes_through: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard it."""
        return tuple(all_axes(entries(self.spec)))

    @property
    def is_boxed(self) -> bool:
        """Whether its spec was read from a box around it."""
        return self.node is not self.value

    def with_value(self, value: Any) -> Any:
        """The leaf of the resulting tree for another value with the same spec."""
        if not self.is_boxed:
            return value
        if _is_variable(self.node):
            return self.node.replace(value)
        return self.node.replace_boxed(value)

    def rebox(self, value: Any, spec: PartitionSpec) -> Any:
        """The leaf of the resulting tree for another value, sharded by `spec`.

        It has the same kind of box. A replicated value gets no box, except for nnx, which needs its
        variables.
        """
        if not self.is_boxed:
            return value
        box, names = self.node, _names(spec, value)
        if _is_variable(box):
            return _variable_with(box, value, names)
        if not any(names):
            return value
        if isinstance(box, Partitioned):
            return make_box(value, spec)
        return box.replace(value=value, names=names)


class _Place(NamedTuple):
    """A leaf of a tree, or a box around one."""

    path: str
    node: Any  # the box, or the leaf
    value: Any  # the leaf


def _places(tree: PyTree) -> tuple[list[_Place], Any]:
    """All leaves and boxes of a tree, and the structure above them."""
    # A box whose value is a tree is an ordinary node, because one spec cannot fit the tree.
    nodes, treedef = tree_flatten(tree, is_leaf=is_box_of_leaf)
    rows = zip(leaf_paths(tree, is_leaf=is_box_of_leaf), nodes, strict=True)
    places = [_Place(path, x, value_in(x) if is_box(x) else x) for path, x in rows]
    return places, treedef


# If no specs are passed, the first of these that applies decides:
#
# 1. The plan in force, if a part of it has the structure and the shapes of the tree. If boxes name
#    other axes, that is an error: either the plan or a box is wrong, and values would be, too.
# 2. Boxes that name axes, if the plan has no such part: the tree was made inside the `shard_map`.
# 3. Without either, leaves are replicated, as in plain data parallelism. Under `check_vma=True`,
#    shards and replicated leaves have different types, and shards are an error.


@dataclass(frozen=True)
class FoundSpecs:
    """Specs that were not passed but found: a prefix of the tree, with one spec for each box."""

    specs: SpecTree


def find_specs(
    tree: PyTree, axes: Sequence[str], call: str, *, are_gradients: bool = False
) -> FoundSpecs:
    """Finds how a tree is sharded if no specs were passed.

    The plan in force decides: it has sharded the arguments of the step. Boxes that name axes
    decide about trees that the plan does not have, such as trees that `shard_params` has made.
    Without a plan, leaves without a box are replicated.

    Args:
        tree: Any pytree.
        axes: The axes over which it is gathered or averaged.
        call: How to pass specs, for messages: `"gather_params(params, axis_name, {})"`.
        are_gradients: As in `PlanInForce.specs_of`.

    Raises:
        SpecError: If the plan does not contain the tree, or has several parts that match it; if the
            plan and the boxes differ; or if leaves are shards by their types, without a plan or
            boxes.
    """
    step, own = current_plan(), specs_in_boxes(tree)
    if step is None:
        # Before the average, gradients of replicated parameters differ between devices, too.
        if not are_gradients:
            _check_no_shards(tree, axes, call)
        return own
    places, treedef = _places(tree)
    named = [_select_mesh_axes(spec, step) for spec in tree_leaves(own.specs, is_leaf=is_spec)]
    try:
        specs = step.specs_of(tree, call, are_gradients=are_gradients)
    except SpecError:
        if _shards_only_boxes(places, named, step):
            return own
        raise
    outline = treedef.unflatten(range(len(places)))
    planned = [spec or PartitionSpec() for spec in specs_of_leaves(specs, outline)]
    if facts := _differences(places, named, planned, step):
        raise _ask_for_specs(call, "boxes and the plan of the step differ:", facts, "the specs")
    return FoundSpecs(treedef.unflatten(planned))


def _shards_only_boxes(
    places: Sequence[_Place], named: Sequence[PartitionSpec | None], step: PlanInForce
) -> bool:
    """Whether boxes name axes, and all arrays without names are replicated."""
    rows = zip(places, named, strict=True)
    unnamed = [place.value for place, spec in rows if not spec and is_array(place.value)]
    return any(named) and not step.may_be_shards(unnamed)


def _differences(
    places: Sequence[_Place],
    named: Sequence[PartitionSpec | None],
    planned: Sequence[PartitionSpec],
    step: PlanInForce,
) -> list[str]:
    """The leaves whose boxes name other axes than the plan.

    Leaves that the step has received are sharded as planned, so their boxes are not compared.
    """
    return [
        f"{place.path}: {in_box} in its box, and {in_plan} in the plan."
        for place, in_box, in_plan in zip(places, named, planned, strict=True)
        if in_box
        and step.part_by_hand(in_plan) != step.part_by_hand(in_box)
        and step.known_spec(place.value) is UNKNOWN
    ]


def _check_no_shards(tree: PyTree, axes: Sequence[str], call: str) -> None:
    """Raises if no leaf has a box, and some differ between devices, as shards do.

    JAX tracks this only under `check_vma=True`. Arrays that `vary` has marked do not count.
    """
    nodes = tree_leaves(tree, is_leaf=is_box)
    # One box is enough: code that puts boxes around shards leaves other leaves without.
    if any(map(is_box, nodes)):
        return
    facts = []
    for path, x in zip(leaf_paths(tree), nodes, strict=True):
        origin = origin_of(x)
        over = varying_axes(origin).intersection(axes) if is_array(origin) else ()
        if over:
            facts.append(f"{path or 'the array'}: {array_text(x)} differs along {sorted(over)}.")
    if facts:
        headline = "no specs say how these leaves are sharded, and they differ between devices:"
        error = _ask_for_specs(call, headline, facts, "the specs of the `shard_map`")
        raise SpecError(f"{error} If each device has a full array of its own, they are P().")


def _ask_for_specs(call: str, headline: str, facts: Sequence[str], which: str) -> SpecError:
    """The error that asks for specs, with the call to write."""
    where = call.partition("(")[0]
    told = listed(headline, facts, headed=True)
    return SpecError(f"{where}: {told}\nPass {which}: `{call.format('specs')}`.")


def specs_in_boxes(tree: PyTree) -> FoundSpecs:
    """The specs of boxes. For a leaf without a box, or with a box without names, the spec with
    which the step has received it, or `P()`."""
    step = current_plan()
    places, treedef = _places(tree)
    return FoundSpecs(treedef.unflatten([_spec_at(place, step) for place in places]))


def _spec_at(place: _Place, step: PlanInForce | None) -> PartitionSpec:
    spec = spec_of(place.node) if is_box(place.node) else PartitionSpec()
    if step is None or not is_array(place.value) or any(entries(spec)):
        return spec
    # If it is not a spec, the array is full (`None`), or its sharding is unknown.
    known = step.known_spec(place.value)
    return known if isinstance(known, PartitionSpec) else spec


def _select_mesh_axes(spec: PartitionSpec, step: PlanInForce) -> PartitionSpec | None:
    """The mesh axes for the names in a box, which may be logical names of Flax."""
    names = all_axes(entries(spec))
    known = [name for name in names if name in step.plan.mesh.axis_names]
    return drop_axes(spec, set(names).difference(known)) if known else None


def leaves_with_specs(tree: PyTree, specs: SpecTree, where: str) -> tuple[list[Leaf], Any]:
    """The leaves of a tree with their specs, and the structure of the tree.

    With `FoundSpecs`, a box and its value are one leaf. With a tree of specs, a box is a node like
    any other. With a plan of stacked layers, the tree may be one layer.

    Raises:
        SpecError: If `specs` does not fit the tree, or specs do not fit their leaves.
        UnknownAxisError: If specs name an axis that the mesh lacks.
        ShardingRuleError: If `specs` is a plan with errors.
        LeafError: If a leaf is a mutable reference (`jax.Ref`).
    """
    check_no_refs(tree, where)
    if isinstance(specs, FoundSpecs):
        leaves, treedef = _leaves_in_boxes(tree, specs.specs)
        # The names in boxes may be logical names of Flax, so they are not checked against a mesh.
        mesh = None
    else:
        leaves, treedef = _leaves_beside(tree, specs)
        mesh = context_mesh()
    values = [leaf.value for leaf in leaves]
    laid_specs = resolve_specs(values, [leaf.spec for leaf in leaves], choose_mesh=lambda *_: mesh)
    _raise_misfits(treedef.unflatten(values), laid_specs, where)
    return leaves, treedef


def _leaves_in_boxes(tree: PyTree, specs: SpecTree) -> tuple[list[Leaf], Any]:
    places, treedef = _places(tree)
    of_places = specs_of_leaves(specs, treedef.unflatten(range(len(places))))
    rows = zip(places, of_places, strict=True)
    return [Leaf(*place, spec, not is_array(place.value)) for place, spec in rows], treedef


def _leaves_beside(tree: PyTree, specs: SpecTree) -> tuple[list[Leaf], Any]:
    values, treedef = tree_flatten(tree)
    if isinstance(specs, Plan):
        specs.check_before_use()
        # JAX would accept the spec of the stacked leaf for one layer, and gather the wrong dim.
        specs = layer_specs(specs) if _is_layer(values, specs.leaf_at_each_index()) else specs
    leaves = []
    # The `in_specs` of a `shard_map` have cut these shards, and JAX rejects specs that are too long
    # there. A spec that is too long is often the spec of a stack, for one layer.
    of_leaves = specs_of_leaves(specs, tree, cut=False)
    rows = zip(leaf_paths(tree), values, of_leaves, strict=True)
    for path, value, spec in rows:
        plain = spec.spec if isinstance(spec, NamedSharding) else spec
        passes_through = plain is None or not is_array(value)
        leaves.append(Leaf(path, value, value, plain or PartitionSpec(), passes_through))
    return leaves, treedef


def _is_layer(values: Sequence[Any], planned: Sequence[PlannedLeaf | None]) -> bool:
    """Whether each array has one dim less than the plan has: one layer of a stack."""
    if len(planned) != len(values):  # the plan is a prefix, or does not fit at all
        return False
    ranks = [
        (x.ndim, len(leaf.shape))
        for x, leaf in zip(values, planned, strict=True)
        if leaf is not None and has_shape(x)
    ]
    return bool(ranks) and all(rank + 1 == stacked for rank, stacked in ranks)


# Divisibility is not checked, because the values may be shards already.
_MISFITS = frozenset({"rank", "axis-not-in-mesh", "reduced-type"})


def _raise_misfits(tree: PyTree, laid_specs: Sequence[ResolvedSpec | None], where: str) -> None:
    """Raises for specs that are too long, name an unknown axis, or have reduced axes."""
    misfits = {i: laid and laid.misfit(_MISFITS) for i, laid in enumerate(laid_specs)}
    too_long = any(laid is not None and laid.misfit({"rank"}) for laid in laid_specs)
    # Such specs are often the specs of stacked layers, for one layer inside a scan.
    advice = "For one layer of a stack, use the specs that `treeshard.layer_specs` returns."
    raise_misfits(tree, misfits, where, "specs do not fit:", advice=advice if too_long else "")
