"""Matches a tree of specs with a tree of arrays, and resolves the specs on a mesh.

`jax.tree.map` cannot: a spec may stand for a full subtree, `None` and tuples of names are leaves of
specs but containers to JAX, and its errors name neither the path nor both sides of a difference.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, cast

from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from treeshard._core.arguments import describe_argument, takes
from treeshard._core.arrays import array_text, has_shape
from treeshard._core.mesh import AnyMesh, MeshLike, as_mesh, current_or_given, describe_mesh
from treeshard._core.paths import PyTree, children_with_keys, leaf_paths, path_under
from treeshard._core.specs import (
    MISFITS,
    UNCONSTRAINED,
    Adjustment,
    all_axes,
    axes_of,
    cut_to_rank,
    entries,
    is_logical,
    is_spec,
    project,
    with_entries,
)
from treeshard._core.text import fold
from treeshard.errors import SpecError, TreeShardError, UnknownAxisError, listed, misfit_error

# A tree of `PartitionSpec`s or `NamedSharding`s, a prefix of one, or a `SpecCarrier`.
SpecTree = Any


# `Plan` is one level up, and functions of the core take it.
class SpecCarrier:
    """Base of classes that are accepted instead of a tree of specs. `Plan` is one."""

    __slots__ = ()
    specs: SpecTree
    mesh: AnyMesh

    @property
    def placements(self) -> SpecTree:
        """The specs, with shardings for leaves that are not in device memory."""
        return self.specs

    def specs_by_leaf(self, tree: PyTree, *, placements: bool = False) -> list[Any] | None:
        """The specs, or `placements`, for the leaves of a tree, if its structure is the planned
        one. By default, the structure is unknown."""
        return None

    def check_before_use(self) -> None:
        """Raises if its specs must not be applied. Every function that applies them calls it."""


def get_names_from_partition_spec(partition_specs: SpecTree) -> list[str]:
    """Returns the mesh axes in a tree of specs, each once, in order of first appearance.

    Args:
        partition_specs: A spec, a `NamedSharding`, a `Plan`, or a tree of specs, which may contain
            `None`, tuples and `UNCONSTRAINED`.

    Examples:
        >>> get_names_from_partition_spec({"w": P("data", ("fsdp", "tensor")), "b": P("data")})
        ['data', 'fsdp', 'tensor']

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    names: dict[str, None] = {}
    is_carrier = isinstance(partition_specs, SpecCarrier)
    tree = partition_specs.specs if is_carrier else partition_specs
    for leaf in tree_leaves(tree, is_leaf=is_spec):
        # A tree of names may have the entries of a spec without the spec.
        axes = all_axes(entries(leaf) if is_spec(leaf) else [leaf])
        names.update(dict.fromkeys(axes))
    return list(names)


def layer_specs(specs: SpecTree, dim: int = 0) -> SpecTree:
    """Returns the specs of one layer, from the specs of layers that are stacked for `lax.scan`.

    A leaf of shape `(layers, d0, d1)` with spec `P(None, "fsdp")` has slices of shape
    `(d0, d1)` with spec `P("fsdp")`. JAX silently accepts the spec of the stacked leaf for a slice,
    and then shards the wrong dim.

    Args:
        specs: A tree of specs (or a `Plan`) of stacked leaves. `None`s stay `None`.
        dim: The dim that the scan runs over, counted from the front.

    Returns:
        The same tree, with the entry of `dim` removed from each spec. `NamedSharding`s keep their
        mesh and memory.

    Raises:
        SpecError: If a leaf is sharded on `dim`, because a scan would gather the full leaf in
            every iteration. The message lists all such leaves. Also if `dim` is negative.

    Examples:
        >>> layer_specs({"w": P(None, "fsdp", None), "b": P()})
        {'b': P(), 'w': P('fsdp',)}
    """
    if dim < 0:
        raise SpecError(
            f"layer_specs: dim={dim}: specs do not have the number of dims, so the dim of layers is"
            " counted from the front. Write `dim=0` for the first dim."
        )
    tree = specs.specs if isinstance(specs, SpecCarrier) else specs
    paths = leaf_paths(tree, is_leaf=is_spec)
    leaves, treedef = tree_flatten(tree, is_leaf=is_spec)
    bad: list[str] = []
    sliced: list[Any] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_spec(leaf):
            sliced.append(leaf)
            continue
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        parts = entries(spec)
        if dim < len(parts) and axes_of(parts[dim]):
            bad.append(
                f"{path}: {spec} shards dim {dim}, on which the layers are stacked, so every device"
                " would need every layer. Shard another dim (`fsdp(..., skip=(0,))` keeps this one"
                " free)."
            )
        rest = with_entries(spec, [*parts[:dim], *parts[dim + 1 :]])
        sliced.append(leaf.update(spec=rest) if isinstance(leaf, NamedSharding) else rest)
    if bad:
        raise SpecError(listed(f"{len(bad)} leaves are sharded on the stacked dim {dim}:", bad))
    return treedef.unflatten(sliced)


def specs_of_leaves(
    specs: SpecTree,
    tree: PyTree,
    name: str = "specs",
    resolve: Callable[[Any], Any] | None = None,
    *,
    cut: bool = True,
) -> list[Any]:
    """Matches a tree of specs with a tree: one spec for every leaf of `tree`, in its order.

    `None` means "leave this subtree unchanged". Messages use `name` for `specs`. `resolve` turns a
    tuple of logical names into a spec; without it such a tuple is an error. If `cut`, a spec for a
    subtree is cut to the rank of each leaf. Raises `SpecError` that shows both sides at the first
    path that differs, or all entries that are not specs.
    """
    matched = _match_leaves(specs, tree, name, resolve)
    return [
        _cut_to_leaf(spec, x) if cut and for_any_rank else spec for x, spec, for_any_rank in matched
    ]


def _cut_to_leaf(spec: Any, leaf: Any) -> Any:
    if spec is None or not has_shape(leaf):
        return spec
    if isinstance(spec, NamedSharding):
        return spec.update(spec=cut_to_rank(spec.spec, len(leaf.shape)))
    return cut_to_rank(spec, len(leaf.shape))


def _match_leaves(
    specs: SpecTree, tree: PyTree, name: str, resolve: Callable[[Any], Any] | None
) -> Iterable[tuple[Any, Any, bool]]:
    """Every leaf, its given spec, and whether that serves arrays of any rank, as the spec of a
    container does. Raises as `specs_of_leaves`."""
    leaves, structure = tree_flatten(tree)
    if isinstance(specs, SpecCarrier):
        # A class may not accept specs instead of its leaves, so it is not rebuilt from specs.
        each = specs.specs_by_leaf(tree)
        if each is not None:
            return zip(leaves, each, repeat(False))
        specs = specs.specs
    if type(specs) in _SPEC_TYPES:
        return zip(leaves, repeat(specs), repeat(structure != _LEAF))
    # JAX matches the structures, which is fast. Both are walked only for an error message. Most
    # trees of specs have the structure of their tree, and no entry that needs `is_leaf`.
    flat, treedef = tree_flatten(specs)
    if {*map(type, flat)} <= _SPEC_TYPES and treedef == structure:
        return zip(leaves, flat, repeat(False))
    try:
        prefixes, treedef = flatten_specs(specs, name, resolve)
    except SpecError:
        _check_order(specs, tree)
        raise
    subtrees = _subtrees(specs, treedef, tree, name)
    per_leaf: list[tuple[Any, bool]] = []
    for spec, subtree in zip(prefixes, subtrees, strict=True):
        below = tree_structure(subtree)
        per_leaf += [(spec, below != _LEAF)] * below.num_leaves
    return [(leaf, *given) for leaf, given in zip(leaves, per_leaf, strict=True)]


_LEAF = tree_structure(0)
_SPEC_TYPES = {PartitionSpec, NamedSharding}


def _subtrees(specs: SpecTree, treedef: Any, tree: PyTree, name: str) -> list[PyTree]:
    """The subtree at each entry of specs of this structure. Raises `SpecError` if they differ."""
    try:
        return treedef.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(_first_difference(specs, tree, "", name) or str(error)) from None


def call_functions(specs: SpecTree, tree: PyTree, name: str = "specs") -> SpecTree:
    """Replaces each function in a tree of specs by its result for its subtree.

    A function of a subtree returns a spec for it, or a tree of specs, as strategies of kauldron do.
    """
    if type(specs) in _SPEC_TYPES or isinstance(specs, SpecCarrier):
        return specs
    flat = tree_leaves(specs)
    if {*map(type, flat)} <= _SPEC_TYPES or not any(map(is_spec_function, flat)):
        return specs
    flat, treedef = tree_flatten(specs, is_leaf=is_spec_entry)
    called = [
        _call_function(entry, subtree) if is_spec_function(entry) else entry
        for entry, subtree in zip(flat, _subtrees(specs, treedef, tree, name), strict=True)
    ]
    return treedef.unflatten(called)


def is_spec_function(x: Any) -> bool:
    """Whether an entry of a tree of specs is a function of its subtree."""
    # A mesh is callable, because its context manager is a decorator.
    return callable(x) and not isinstance(x, type | Mesh)


def _call_function(function: Callable[[PyTree], SpecTree], subtree: PyTree) -> SpecTree:
    # Specs from `jax.tree.map` over a module contain its functions, such as `jax.nn.relu`.
    if not any(map(has_shape, tree_leaves(subtree))):
        return None
    if not takes(function, 1):
        raise SpecError(
            f"{describe_argument(function)} is neither a spec nor a function of a subtree. A tactic"
            ' is the action of a rule: `plan(tree, [(".*", fsdp("fsdp"))], mesh)`.'
        )
    return function(subtree)


def _check_order(specs: SpecTree, tree: PyTree) -> None:
    """Raises `SpecError` if the specs have arrays, and the tree has specs."""
    tree = tree.specs if isinstance(tree, SpecCarrier) else tree
    in_tree = tree_leaves(tree, is_leaf=is_spec)
    if any(map(has_shape, tree_leaves(specs))) and in_tree and all(map(is_spec, in_tree)):
        raise SpecError(
            "the tree and its specs are swapped: the first argument has specs, and the second has"
            " arrays. The tree comes first: `shard(tree, specs)`, `unshard(tree, specs, axis)`."
        )


def flatten_specs(
    specs: SpecTree, name: str = "specs", resolve: Callable[[Any], Any] | None = None
) -> tuple[list[Any], Any]:
    """Flattens a tree of specs, with `None`s as leaves and tuples of logical names resolved."""
    # `None` and tuples are nodes of a pytree, and `is_leaf` makes them leaves here.
    flat, treedef = tree_flatten(specs, is_leaf=is_spec_entry)
    # The common case, without paths, which take the most time.
    if all(spec is None or is_spec(spec) for spec in flat):
        return flat, treedef
    resolved: list[Any] = []
    bad: list[str] = []
    for path, spec in zip(leaf_paths(specs, is_leaf=is_spec_entry), flat, strict=True):
        try:
            resolved.append(_one_spec(spec, resolve))
        except SpecError as error:
            bad.append(f"{path or name}: {error}")
    if bad:
        raise SpecError(listed(f"{len(bad)} entries of the {name} are not specs:", bad))
    return resolved, treedef


def is_spec_entry(x: Any) -> bool:
    """Whether `x` is a leaf of a tree of specs: a spec, logical names, or `None`."""
    return x is None or is_spec(x) or is_logical(x)


def _one_spec(spec: Any, resolve: Callable[[Any], Any] | None) -> Any:
    if spec is None or is_spec(spec):
        return spec
    if not is_logical(spec):
        raise SpecError(
            f"{_text(spec)} ({type(spec).__name__}) is not a spec. Give a PartitionSpec, a"
            " NamedSharding, or None to leave the subtree unchanged."
        )
    if resolve is None:
        raise SpecError(
            f"{spec} is a tuple of logical names, and no rules are in force to resolve them."
            f" Write P{spec} if these are mesh axes."
        )
    return resolve(spec)


def _text(x: Any) -> str:
    return array_text(x) if has_shape(x) else repr(x)


def _first_difference(specs: SpecTree, tree: PyTree, path: str, name: str) -> str | None:
    """Describes the first node at which `specs` is not a prefix of `tree`; else `None`.

    1. A spec serves any subtree.
    2. One side has a leaf, or the two have containers of different types.
    3. The containers have different keys.
    4. Their children differ.
    5. Only the static fields differ, which are neither keys nor children.
    """
    if is_spec_entry(specs) or (_one_level(specs) is None and is_spec_function(specs)):  # 1
        return None
    spec_children, tree_children = _one_level(specs), _one_level(tree)
    here = path or "the root"
    # 2
    if spec_children is None or tree_children is None or type(specs) is not type(tree):
        return f"at {here}: the {name} have {_describe(specs)}, the tree has {_describe(tree)}."
    # 3
    if list(spec_children) != list(tree_children):
        missing = [key for key in tree_children if key not in spec_children]
        extra = [key for key in spec_children if key not in tree_children]
        parts = []
        if missing:
            parts.append(f"the {name} lack {_quote_keys(missing)}")
        if extra:
            parts.append(f"the tree has no {_quote_keys(extra)}")
        return (
            f"at {here}: {' and '.join(parts)}. The {name} must have the tree's structure, or be"
            " a prefix of it, in which one spec serves a full subtree."
        )
    # 4
    for key in spec_children:
        child_path = f"{path}/{key}".lstrip("/")
        deeper = _first_difference(spec_children[key], tree_children[key], child_path, name)
        if deeper is not None:
            return deeper
    # 5
    if tree_structure(specs, is_leaf=is_spec_entry) != tree_structure(tree):
        return (
            f"at {here}: both are {type(tree).__name__}, but their static fields differ. Make"
            f" the {name} from this tree itself, with `jax.tree.map` or by rules."
        )
    return None


def _one_level(x: Any) -> dict[str, Any] | None:
    """The children of a node by key; `None` for a leaf."""
    if x is None:
        return {}
    if tree_structure(x).num_nodes == 1 and tree_structure(x).num_leaves == 1:
        return None
    return dict(children_with_keys(x))


def _quote_keys(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:5])
    return shown + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _describe(x: Any) -> str:
    if x is None:
        return "None"
    if has_shape(x):
        return f"an array of shape {tuple(x.shape)}"
    children = _one_level(x)
    kind = type(x).__name__
    if children is None:
        return f"a leaf ({kind})"
    return f"a {kind} of {_quote_keys(list(children))}" if children else f"an empty {kind}"


# ------------------------------------------------------------------ specs on a mesh


@dataclass(frozen=True)
class ResolvedSpec:
    """The spec of one leaf as requested, and the part of it that fits a mesh and the leaf."""

    # As the caller or a rule requests it; `P()` if no rule matched.
    requested: PartitionSpec
    # The spec that the leaf gets.
    spec: PartitionSpec
    # The mesh that it was resolved on; `None` in a plan, which has one mesh for all leaves.
    mesh: AnyMesh | None = None
    # The kind of memory; `None` for the default of the devices.
    memory_kind: str | None = None
    # How `spec` differs from `requested`, and why.
    adjustments: tuple[Adjustment, ...] = ()
    # The index of the rule that requested it, and its pattern; `None` without a rule.
    rule: int | None = None
    pattern: str | None = None
    # Whether a tree of specs instead of rules requested it.
    by_spec: bool = False

    @property
    def errors(self) -> list[Adjustment]:
        """The adjustments that are errors if rules are strict."""
        return [x for x in self.adjustments if x.kind in MISFITS or x.kind == "unmatched"]

    @cached_property
    def is_exact(self) -> bool:
        """Whether the leaf gets what was requested, for each dim."""
        return not self.adjustments and UNCONSTRAINED not in entries(self.requested)

    @cached_property
    def sharding(self) -> NamedSharding:
        """`spec` on `mesh`, which must not be `None`."""
        return NamedSharding(cast(AnyMesh, self.mesh), self.spec, memory_kind=self.memory_kind)

    def misfit(self, kinds: Container[str] = MISFITS) -> SpecError | None:
        """Returns the error if the leaf cannot have the requested spec, or `None`.

        The arguments of the error are the spec on its mesh, and the reasons: see `raise_misfits`.

        Adjustments of these kinds count; `"unconstrained"` is a dim that is `UNCONSTRAINED`.
        """
        if self.is_exact:  # most leaves, and fast
            return None
        notes = [note for note in self.adjustments if note.kind in kinds]
        reasons = [note.why for note in notes]
        requested = entries(self.requested)
        if "unconstrained" in kinds and UNCONSTRAINED in requested:
            dim = requested.index(UNCONSTRAINED)
            reasons.append(
                f"dim {dim} is UNCONSTRAINED, which has a meaning only inside jit. Write an axis,"
                " or None to replicate the dim."
            )
        if not reasons:
            return None
        error = misfit_error({note.kind for note in notes}, SpecError)
        return error(self.requested_text(), " ".join(reasons))

    def requested_text(self) -> str:
        """`P('fsdp',) on the mesh (fsdp=8)`, as messages show it."""
        on_mesh = "" if self.mesh is None else f" on the mesh ({describe_mesh(self.mesh)})"
        return f"{self.requested}{on_mesh}"


def resolve_specs(
    tree: PyTree,
    specs: SpecTree,
    mesh: MeshLike | None = None,
    *,
    choose_mesh: Callable[[AnyMesh | None, Any], AnyMesh | None] | None = None,
    where: str = "",
    manual: frozenset[str] = frozenset(),
    name: str = "specs",
    resolve: Callable[[Any], Any] | None = None,
    keep_uneven: bool = False,
    typed: bool = False,
) -> list[ResolvedSpec | None]:
    """Resolves the spec of each leaf of a tree: projects it on its mesh and shape.

    The result is `None` for leaves without a shape, and for specs that are `None`. Equal leaves
    share one `ResolvedSpec`, and so its sharding. A spec that does not fit does not raise: see
    `ResolvedSpec.misfit`.

    Args:
        tree: Any pytree.
        specs: As in `specs_of_leaves`, with `name` and `resolve`.
        mesh: The mesh. By default, the mesh of the `Plan` or of each `NamedSharding`.
        choose_mesh: Takes that mesh, or `None`, and the leaf; returns the mesh to project on. If it
            returns `None`, only ranks are checked. By default that mesh, or the mesh in force.
        where: The function, for the error if no mesh is in force.
        manual: As in `project`.
        name: See `specs`.
        resolve: See `specs`.
        keep_uneven: As in `project`.
        typed: As in `project`.
    """
    if mesh is None and isinstance(specs, SpecCarrier):
        mesh = specs.mesh
    mesh = as_mesh(mesh)
    laid: list[ResolvedSpec | None] = []
    for leaf, spec, for_any_rank in _match_leaves(specs, tree, name, resolve):
        if spec is None or not has_shape(leaf):
            laid.append(None)
            continue
        own_mesh, memory_kind = mesh, None
        if isinstance(spec, NamedSharding):
            own_mesh = spec.mesh if mesh is None else mesh
            spec, memory_kind = spec.spec, spec.memory_kind
        if choose_mesh is None:
            own_mesh = current_or_given(own_mesh, where)
        else:
            own_mesh = choose_mesh(own_mesh, leaf)
        shape = tuple(leaf.shape)
        laid.append(
            _resolve(spec, own_mesh, memory_kind, shape, manual, keep_uneven, typed, for_any_rank)
        )
    return laid


# Layers have equal shapes and specs, and calls repeat. With one record for all of them, their
# shardings are one object, which JAX compares by identity first.
@lru_cache(4096)
def _resolve(
    spec: PartitionSpec,
    mesh: AnyMesh | None,
    memory_kind: str | None,
    shape: tuple[int, ...],
    manual: frozenset[str],
    keep_uneven: bool,
    typed: bool,
    for_any_rank: bool,
) -> ResolvedSpec:
    given, adjustments = project(
        spec,
        mesh,
        shape,
        manual=manual,
        keep_uneven=keep_uneven,
        typed=typed,
        for_any_rank=for_any_rank,
    )
    requested = cut_to_rank(spec, len(shape)) if for_any_rank else spec
    return ResolvedSpec(requested, given, mesh, memory_kind, adjustments)


def raise_misfits(
    tree: PyTree,
    misfits: Mapping[int, TreeShardError | None],
    where: str,
    what: str = "leaves do not fit their specs:",
    *,
    prefix: str = "",
    advice: str = "",
) -> None:
    """Raises one error for all leaves that do not fit, each with its path, if there are any.

    Args:
        tree: The tree of the leaves.
        misfits: The errors of leaves, by index; `None` for a leaf that fits. The last argument of
            an error is the reason, and an argument before it is the requested spec.
        where: The function, for the message.
        what: The headline after the count.
        prefix: The path of the tree in a larger one.
        advice: A last line.
    """
    found = {i: misfit for i, misfit in misfits.items() if misfit is not None}
    if not found:
        return
    paths, leaves = leaf_paths(tree), tree_leaves(tree)
    rows: list[tuple[str, str, str]] = []
    for i, misfit in found.items():
        *requested, why = misfit.args
        path = path_under(prefix, paths[i]) or "the array"
        rows.append((path, " as ".join([array_text(leaves[i]), *requested]), why))
    kinds = [*map(type, found.values())]
    # One class represents all errors: callers most likely catch an unknown axis.
    error = next((kind for kind in kinds if issubclass(kind, UnknownAxisError)), kinds[0])
    message = f"{where}: {_list_misfits(rows, what)}"
    raise error(f"{message}\n{advice}" if advice else message)


def _list_misfits(rows: Sequence[tuple[str, str, str]], what: str) -> str:
    """The misfits by path, array and reason. A common reason is shown once."""
    headline, reasons = f"{len(rows)} {what}", {why for _, _, why in rows}
    if len(rows) == 1 or len(reasons) > 1:
        return listed(headline, [": ".join(row) for row in rows])
    folded = fold((path, text, text) for path, text, _ in rows)
    return listed(
        f"{headline} {reasons.pop()}", [f"{path}: {x[0]}" for path, x in folded], headed=True
    )
