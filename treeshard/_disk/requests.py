"""Read requests: which leaves a like-tree requests, which are stored, and how they differ.

Checkpoints and safetensors files compare them before any array is read.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree, pair
from treeshard._core.processes import facts_of
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import Shape, empty_value, is_none, kind_of
from treeshard._planning.plan import Plan, plan
from treeshard._planning.rules import Rules
from treeshard.errors import FormatError, MismatchError, did_you_mean, listed, warn


class LeafType(NamedTuple):
    """The type of a leaf, whatever its values; `kind` and `dtype` are as in `SavedLeaf`.

    On devices it will be a `jax.Array`, which has 64-bit dtypes only in JAX's x64 mode.
    """

    kind: str
    shape: Shape = ()
    dtype: str = ""
    on_devices: bool = False

    def __str__(self) -> str:
        if self.dtype:
            return array_text(self)
        return "None" if self.kind == "none" else f"a Python {self.kind}"

    @property
    def is_floating(self) -> bool:
        """Whether it is an array of floating-point numbers."""
        return self.kind == "array" and jax.numpy.issubdtype(parse_dtype(self.dtype), np.floating)

    def cast(self, to: str | None) -> "LeafType":
        """The type after a cast to the dtype `to`, which changes floating-point arrays only."""
        return self._replace(dtype=to) if to is not None and self.is_floating else self


def leaf_type(x: Any) -> LeafType | None:
    """The type that a leaf has, or that it requests; `None` if it is static."""
    kind = kind_of(x)
    if kind is None or not has_shape(x):
        return None if kind is None else LeafType(kind)
    return LeafType(kind, tuple(x.shape), str(x.dtype), not isinstance(x, np.ndarray | np.generic))


# ------------------------------------------------------------------ differences


class Differences(NamedTuple):
    """How the requested leaves differ from the stored ones, by path."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misfits: dict[str, str]

    def check(self, source: str = "the checkpoint", *, partial: bool = False) -> None:
        """Raises one `MismatchError` that lists all differences.

        If `partial`, leaves may be missing or unexpected; a `ShardingWarning` lists the missing
        ones.
        """
        facts: list[str] = []
        if self.misfits:
            lines = [f"{path}: {why}" for path, why in self.misfits.items()]
            facts.append(listed(f"{len(lines)} leaves have another type than requested:", lines))
        if self.missing and not partial:
            headline = f"{len(self.missing)} requested leaves are not in {source}:"
            known = [self.unexpected if i < 10 else () for i in range(len(self.missing))]  # listed
            lines = [
                f"{path}: not in {source}.{did_you_mean(path, near)}"
                for path, near in zip(self.missing, known, strict=True)
            ]
            facts.append(listed(headline, lines))
        if self.unexpected and not partial:
            headline = f"{len(self.unexpected)} leaves of {source} are not requested:"
            lines = [f"{path}: in {source}, but not requested." for path in self.unexpected]
            facts.append(listed(headline, lines))
        if (self.missing or self.unexpected) and not partial:
            facts.append(
                "`partial=True` reads the leaves that both have, and keeps the others of `like`."
            )
        if facts:
            raise MismatchError("\n".join(facts))
        if self.missing:
            lines = [f"{path}: not in {source}." for path in self.missing]
            warn(listed(f"{len(lines)} leaves keep their values from `like`:", lines))


def compare(
    stored: Mapping[str, LeafType], requested: Mapping[str, LeafType], cast: str | None = None
) -> Differences:
    """Compares the requested leaves with the stored ones, by path.

    Floating-point arrays may be converted to the dtype `cast`; nothing else is converted.
    """
    missing, unexpected, misfits = [], [], {}
    for path, wanted, found in pair(requested.items(), stored.items()):
        if wanted is None or found is None:
            # A `None` holds no values, so it may be missing.
            if (wanted or found) != LeafType("none"):
                (missing if found is None else unexpected).append(path)
        elif why := _misfit(found, wanted, cast):
            misfits[path] = why
    return Differences(tuple(missing), tuple(unexpected), misfits)


def cast_dtype(cast: Any) -> str | None:
    """The name of a dtype to cast to. Raises `FormatError` unless it is a floating-point dtype."""
    if cast is None:
        return None
    try:
        name = str(jax.numpy.dtype(cast))
    except TypeError:
        name = str(cast)
    if not LeafType("array", (), name).is_floating:
        raise FormatError(
            f"cast={name!r} is not a floating-point dtype. Only floating-point arrays are"
            " converted, to a dtype such as 'float32'."
        )
    return name


def _misfit(stored: LeafType, requested: LeafType, cast: str | None) -> str:
    """Why a leaf cannot be read as requested; empty if it can."""
    fact = f"saved as {stored}, requested as {requested}."
    if stored[:2] != requested[:2]:
        return fact
    if stored.dtype != requested.dtype:
        if not (stored.is_floating and requested.is_floating):
            return f"{fact} Only floating-point dtypes are converted; request {stored.dtype}."
        if requested.dtype != cast:
            return f"{fact} `cast={requested.dtype!r}` converts it."
    if requested.kind != "array" or not requested.on_devices:
        return ""
    dtype = str(jax.dtypes.canonicalize_dtype(parse_dtype(requested.dtype)))
    if dtype == requested.dtype:
        return ""
    ways = ["Turn on 64-bit numbers (`jax.config.update('jax_enable_x64', True)`)"]
    ways += [f"convert it with `cast={dtype!r}`"] if requested.is_floating else []
    return (
        f"{requested} would be {requested._replace(dtype=dtype)} on devices. {', '.join(ways)}, or"
        " request a numpy array."
    )


# ------------------------------------------------------------------ requests


class Placing(NamedTuple):
    """How to shard arrays: by rules, as in `plan`; without rules, as the like-tree's own arrays."""

    rules: Rules | None = None
    mesh: MeshLike | None = None
    min_size: int | None = None


class RequestedLeaf(NamedTuple):
    """A requested leaf; `sharding` is `None` for the default device, and for numpy."""

    name: str
    type: LeafType
    sharding: Sharding | None


class Request(NamedTuple):
    """A read request: the leaves of a like-tree, those requested of them, by index, and those
    stored.

    `leaves` includes `None`s; static leaves are not requested.
    """

    leaves: list[Any]
    treedef: Any
    requested: dict[int, RequestedLeaf]
    stored: Mapping[str, LeafType]
    differences: Differences

    def to_read(self) -> dict[int, RequestedLeaf]:
        """The requested leaves that are stored, by leaf index."""
        return {i: leaf for i, leaf in self.requested.items() if leaf.name in self.stored}

    def facts(self) -> dict[str, str]:
        """What must be the same on all processes."""
        return facts_of(
            (leaf.name, self.leaves[i], [] if leaf.sharding is None else [leaf.sharding])
            for i, leaf in self.to_read().items()
            if leaf.type.dtype
        )

    def tree(self, values: Iterable[tuple[int, Any]]) -> PyTree:
        """The like-tree with the values that were read, given with their leaf indices."""
        leaves = list(self.leaves)
        for i, value in values:
            leaves[i] = value[()] if isinstance(leaves[i], np.generic) else value
        return self.treedef.unflatten(leaves)


def read_request(
    stored: Mapping[str, LeafType],
    like: PyTree,
    placing: Placing,
    *,
    cast: Any,
    names: Callable[[PyTree], Mapping[int, str]],
    where: str,
) -> Request:
    """Compares what a like-tree requests with what is stored; arguments and errors as of `restore`.

    With rules, these decide the shardings; otherwise the like-tree's own arrays do. Without `like`,
    all stored leaves are requested, by name. `names` takes the like-tree, whose `None`s are leaves,
    and returns the names of the leaves to read, by index. `where` is the public function.
    """
    rules, mesh, min_size = placing
    if rules is None and (mesh is not None or min_size is not None):
        given = "a mesh" if mesh is not None else "min_size"
        raise ValueError(
            f"{where}: {given} was given without rules. Pass `rules=` as well, such as"
            " `rules=[('.*', None)]`, which replicates."
        )
    to = cast_dtype(cast)
    tree = like.structs if isinstance(like, Plan) else like
    if like is None:
        tree = {name: _like_leaf(x.cast(to)) for name, x in stored.items()}
    leaves, treedef = tree_flatten(tree, is_leaf=is_none)
    if rules is not None:
        decided = plan(tree, rules, with_devices(mesh, where), min_size=min_size)
        decided.check()
        shardings = tree_leaves(decided.shardings, is_leaf=is_none)
    elif like is not None:
        shardings = [_own_sharding(leaf, where) for leaf in leaves]
    else:
        shardings = [None] * len(leaves)
    requested: dict[int, RequestedLeaf] = {}
    for i, name in names(tree).items():
        if (kind := leaf_type(leaves[i])) is None:
            continue
        if kind.dtype and (rules is not None or like is None):
            kind = kind._replace(on_devices=rules is not None)
        requested[i] = RequestedLeaf(name, kind, shardings[i] if kind.dtype else None)
    types = {leaf.name: leaf.type for leaf in requested.values()}
    return Request(leaves, treedef, requested, stored, compare(stored, types, to))


def _like_leaf(x: LeafType) -> Any:
    if x.dtype:
        return jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype))
    return empty_value(x.kind)


def _own_sharding(leaf: Any, where: str) -> Sharding | None:
    is_numpy = isinstance(leaf, np.ndarray | np.generic)
    if is_numpy or not has_shape(leaf) or not getattr(leaf, "committed", True):
        return None
    if isinstance(leaf.sharding, NamedSharding):
        with_devices(leaf.sharding.mesh, where)  # raises unless the mesh has devices
    return leaf.sharding
