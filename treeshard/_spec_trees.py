"""How a tree of specs lies beside a tree of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_leaves, tree_structure

from treeshard._errors import SpecError, listed
from treeshard._mesh import AnyMesh
from treeshard._paths import children_with_keys, leaf_paths
from treeshard._specs import axes_of, entries, has_shape, is_logical, is_spec, with_entries


class SpecCarrier:
    """Base of what stands for a tree of specs wherever one is taken. `Plan` is one."""

    __slots__ = ()
    specs: Any
    mesh: AnyMesh


def get_names_from_partition_spec(specs: Any) -> list[str]:
    """Returns the mesh axes that specs name, each once, in order of first appearance.

    Args:
        specs: A spec, a `NamedSharding`, a `Plan`, or any tree of them. `None`, tuples
            and `UNCONSTRAINED` are fine.

    Examples:
        >>> get_names_from_partition_spec({"w": P("data", ("fsdp", "tensor")), "b": P("data")})
        ['data', 'fsdp', 'tensor']

    Source:
        EasyLM and EasyDeL's function of this name.
    """
    names: dict[str, None] = {}
    tree = specs.specs if isinstance(specs, SpecCarrier) else specs
    for leaf in tree_leaves(tree, is_leaf=is_spec):
        # A tuple entry of a spec that was taken apart is a tree of names.
        found = [a for e in entries(leaf) for a in axes_of(e)] if is_spec(leaf) else axes_of(leaf)
        names.update(dict.fromkeys(found))
    return list(names)


def layer_specs(specs: Any, dim: int = 0) -> Any:
    """Returns the specs of one slice of a stacked tree, as `lax.scan` hands them to its body.

    A leaf of shape `(layers, d0, d1)` with spec `P(None, "fsdp")` has slices of shape
    `(d0, d1)` with spec `P("fsdp")`. JAX takes the spec of the whole leaf for a slice
    without a word, and shards the wrong dim.

    Args:
        specs: A tree of specs (or a `Plan`) of stacked leaves. `None`s stay.
        dim: The dim that the scan runs over, counted from the front.

    Returns:
        The same tree with one entry less a spec.

    Raises:
        SpecError: If a leaf is sharded on that dim: a scan would gather it whole in every
            iteration. All such leaves are named.

    Examples:
        >>> layer_specs({"w": P(None, "fsdp", None), "b": P()})
        {'b': P(), 'w': P('fsdp',)}
    """
    tree = specs.specs if isinstance(specs, SpecCarrier) else specs
    paths = leaf_paths(tree, is_leaf=is_spec)
    leaves, treedef = tree_flatten(tree, is_leaf=is_spec)
    bad: list[str] = []
    sliced: list[Any] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_spec(leaf):
            sliced.append(leaf)
            continue
        parts = entries(leaf)
        if dim < len(parts) and axes_of(parts[dim]):
            bad.append(
                f"{path}: {leaf if isinstance(leaf, PartitionSpec) else leaf.spec} shards dim"
                f" {dim}, the one that the layers are stacked on, so every device would need"
                " every layer. Shard another dim (`skip=(0,)` of `fsdp` keeps this one free)."
            )
        spec = leaf.spec if isinstance(leaf, NamedSharding) else leaf
        less = with_entries(spec, [*parts[:dim], *parts[dim + 1 :]])
        sliced.append(NamedSharding(leaf.mesh, less) if isinstance(leaf, NamedSharding) else less)
    if bad:
        raise SpecError(listed(f"{len(bad)} leaves are sharded on the stacked dim {dim}:", bad))
    return treedef.unflatten(sliced)


def specs_of_leaves(
    specs: Any, tree: Any, name: str = "specs", resolve: Callable[[Any], Any] | None = None
) -> list[Any]:
    """Lays a tree of specs beside a tree: one spec for every leaf of `tree`, in its order.

    Args:
        specs: A tree of `PartitionSpec`s or `NamedSharding`s with the structure of
            `tree`, a prefix of one (one spec for a whole subtree), or a `Plan`. `None`
            means "leave this subtree as it is".
        tree: Any pytree.
        name: What the caller calls `specs`, for messages.
        resolve: Makes a spec of a tuple of logical names, or raises `SpecError`. Without
            it such a tuple is no spec.

    Raises:
        SpecError: If `specs` is no prefix of `tree`: the first path that differs, and
            both sides. If it holds something that is no spec, or names that do not resolve.
    """
    if isinstance(specs, SpecCarrier):
        specs = specs.specs
    prefixes, treedef = tree_flatten(specs, is_leaf=_is_one)
    prefixes = _resolved(specs, prefixes, name, resolve)
    try:
        subtrees = treedef.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(_first_difference(specs, tree, "", name) or str(error)) from None
    beside: list[Any] = []
    for spec, subtree in zip(prefixes, subtrees, strict=True):
        beside += [spec] * tree_structure(subtree).num_leaves
    return beside


def _is_one(x: Any) -> bool:
    return x is None or is_spec(x) or is_logical(x)


def _resolved(
    specs: Any, prefixes: list[Any], name: str, resolve: Callable[[Any], Any] | None
) -> list[Any]:
    """The specs that were found, with specs in place of logical names."""
    if all(spec is None or is_spec(spec) for spec in prefixes):
        return prefixes
    found: list[Any] = []
    bad: list[str] = []
    for path, spec in zip(leaf_paths(specs, is_leaf=_is_one), prefixes, strict=True):
        try:
            found.append(_one_spec(spec, resolve))
        except SpecError as error:
            bad.append(f"{path or name}: {error}")
    if bad:
        raise SpecError(listed(f"{len(bad)} entries of the {name} are no specs:", bad))
    return found


def _one_spec(spec: Any, resolve: Callable[[Any], Any] | None) -> Any:
    if spec is None or is_spec(spec):
        return spec
    if not is_logical(spec):
        raise SpecError(
            f"{spec!r} ({type(spec).__name__}) is no spec. Give a PartitionSpec, a NamedSharding,"
            " or None to leave the subtree as it is."
        )
    if resolve is None:
        raise SpecError(
            f"{spec} is a tuple of logical names, and no rules are in force to resolve them."
            f" Write P{spec} if these are mesh axes."
        )
    return resolve(spec)


def _first_difference(specs: Any, tree: Any, path: str, name: str) -> str | None:
    """Where `specs` first stops being a prefix of `tree`, descending both together."""
    if _is_one(specs):
        return None
    mine, theirs = _one_level(specs), _one_level(tree)
    here = path or "the root"
    if mine is None or theirs is None or type(specs) is not type(tree):
        return f"at {here}: the {name} have {_describe(specs)}, the tree has {_describe(tree)}."
    if list(mine) != list(theirs):
        missing = [key for key in theirs if key not in mine]
        extra = [key for key in mine if key not in theirs]
        parts = []
        if missing:
            parts.append(f"the {name} lack {_quoted(missing)}")
        if extra:
            parts.append(f"the tree has no {_quoted(extra)}")
        return (
            f"at {here}: {' and '.join(parts)}. The {name} must have the tree's structure, or be"
            " a prefix of it: one spec may stand for a whole subtree."
        )
    for key in mine:
        deeper = _first_difference(mine[key], theirs[key], f"{path}/{key}".lstrip("/"), name)
        if deeper is not None:
            return deeper
    if tree_structure(specs, is_leaf=_is_one) != tree_structure(tree):
        return (
            f"at {here}: both are {type(tree).__name__}, but their static fields differ. Make"
            f" the {name} from this very tree, with `jax.tree.map` or by rules."
        )
    return None


def _one_level(x: Any) -> dict[str, Any] | None:
    if x is None:
        return {}
    if tree_structure(x).num_nodes == 1 and tree_structure(x).num_leaves == 1:
        return None
    return dict(children_with_keys(x))


def _quoted(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:5])
    return shown + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _describe(x: Any) -> str:
    if x is None:
        return "None"
    if has_shape(x):
        return f"an array of shape {tuple(x.shape)}"
    inside = _one_level(x)
    kind = type(x).__name__
    if inside is None:
        return f"a leaf ({kind})"
    return f"a {kind} of {_quoted(list(inside))}" if inside else f"an empty {kind}"
