"""Read requests: which leaves a like-tree requests, which are stored, and how they differ.

Checkpoints and safetensors files compare all of them before any array is read: a mismatch that
shows up while arrays are read would cost minutes, and would name one leaf, not all.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.facts import Facts
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree
from treeshard._core.spec_trees import raise_misfits, resolve_specs
from treeshard._core.text import dtype_name, parse_dtype
from treeshard._disk.leaves import Shape, check_known, empty_value, in_class_of, is_none, kind_of
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
    if kind is None or (kind == "array" and x.dtype == jax.dtypes.float0):
        return None
    if not has_shape(x):
        return LeafType(kind)
    is_numpy = isinstance(x, np.ndarray | np.generic)
    dtype = x.dtype.newbyteorder("=") if is_numpy else x.dtype  # the byte order is not saved
    return LeafType(kind, tuple(x.shape), dtype_name(dtype), on_devices=not is_numpy)


# ------------------------------------------------------------------ differences

_USE_PARTIAL = "`partial=True` reads the leaves that both have, and keeps the others of `like`."
_SUGGESTIONS = 10  # names are slow to compare, and no more leaves than these are listed


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
        misfits = [f"{path}: {why}" for path, why in self.misfits.items()]
        missing = [f"{path}: not in {source}." for path in self.missing]
        unexpected = [f"{path}: in {source}, but not requested." for path in self.unexpected]
        if misfits:
            headline = f"{len(misfits)} leaves have another type than requested:"
            facts.append(listed(headline, misfits))
        if not partial:
            for i, path in enumerate(self.missing[:_SUGGESTIONS]):
                missing[i] += did_you_mean(path, self.unexpected)
            if missing:
                headline = f"{len(missing)} requested leaves are not in {source}:"
                facts.append(listed(headline, missing))
            if unexpected:
                headline = f"{len(unexpected)} leaves of {source} are not requested:"
                facts.append(listed(headline, unexpected))
            if missing or unexpected:
                facts.append(_USE_PARTIAL)
        if facts:
            raise MismatchError("\n".join(facts))
        if missing:
            headline = f"{len(missing)} leaves keep their values from `like`:"
            warn(listed(headline, missing))


def compare(
    stored: Mapping[str, LeafType], requested: Mapping[str, LeafType], cast: str | None = None
) -> Differences:
    """Compares the requested leaves with the stored ones, by path.

    Floating-point arrays may be converted to the dtype `cast`; nothing else is converted.
    """
    none = LeafType("none")  # holds no values, so it may be missing
    missing = [path for path, x in requested.items() if path not in stored and x != none]
    unexpected = [path for path, x in stored.items() if path not in requested and x != none]
    misfits: dict[str, str] = {}
    for path, x in requested.items():
        why = _misfit(stored[path], x, cast) if path in stored else ""
        if why:
            misfits[path] = why
    return Differences(tuple(missing), tuple(unexpected), misfits)


def _misfit(stored: LeafType, requested: LeafType, cast: str | None) -> str:
    """Why a leaf cannot be read as requested; empty if it can."""
    fact = f"saved as {stored}, requested as {requested}."
    if (stored.kind, stored.shape) != (requested.kind, requested.shape):
        return fact
    if stored.dtype != requested.dtype:
        if not (stored.is_floating and requested.is_floating):
            return f"{fact} Only floating-point dtypes are converted; request {stored.dtype}."
        if requested.dtype != cast:
            return f"{fact} `cast={requested.dtype!r}` converts it."
    if requested.kind != "array" or not requested.on_devices:
        return ""
    # JAX would turn 64-bit numbers into 32-bit ones without a word.
    dtype = str(jax.dtypes.canonicalize_dtype(parse_dtype(requested.dtype)))
    if dtype == requested.dtype:
        return ""
    ways = "Turn on 64-bit numbers (`jax.config.update('jax_enable_x64', True)`)"
    if requested.is_floating:
        ways += f", convert it with `cast={dtype!r}`"
    narrowed = requested._replace(dtype=dtype)
    return f"{requested} would be {narrowed} on devices. {ways}, or request a numpy array."


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


# ------------------------------------------------------------------ requests


class Placing(NamedTuple):
    """How to shard arrays: by rules, as in `plan`; without rules, as the like-tree's own arrays."""

    rules: Rules | None = None
    mesh: MeshLike | None = None
    min_size: int | None = None

    def check(self, where: str) -> None:
        """Raises `ValueError` if something is given that only rules use."""
        if self.rules is not None or (self.mesh is None and self.min_size is None):
            return
        given = "min_size" if self.mesh is None else "a mesh"
        raise ValueError(
            f"{where}: {given} was given without rules. Pass `rules=` as well, such as"
            " `rules=[('.*', None)]`, which replicates."
        )


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

    def add_to(self, facts: Facts) -> None:
        """Adds what must be the same on all processes."""
        facts.describe(
            (leaf.name, self.leaves[i], [] if leaf.sharding is None else [leaf.sharding])
            for i, leaf in self.to_read().items()
            if leaf.type.dtype
        )

    def tree(self, values: Iterable[tuple[int, Any]]) -> PyTree:
        """The like-tree with the values that were read, given with their leaf indices."""
        leaves = list(self.leaves)
        for i, value in values:
            leaves[i] = _like_leaf_of(value, leaves[i], self.requested[i].name)
        return self.treedef.unflatten(leaves)


def _like_leaf_of(value: Any, leaf: Any, name: str) -> Any:
    """The value that was read for a leaf, in its class, as a numpy scalar or in its byte order."""
    if not has_shape(leaf):
        return in_class_of(value, leaf, name)
    if isinstance(leaf, np.generic):
        return value[()]  # it was read as an array of shape `()`
    if isinstance(leaf, np.ndarray) and isinstance(value, np.ndarray):
        return value.astype(leaf.dtype, copy=False)
    return value


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
    placing.check(where)
    to = cast_dtype(cast)
    tree = like
    if like is None:
        tree = {name: _like_leaf(x.cast(to)) for name, x in stored.items()}
    elif isinstance(like, Plan):
        like.check_before_use()
        tree = like.structs
    check_known(tree, where, MismatchError)
    leaves, treedef = tree_flatten(tree, is_leaf=is_none)
    if placing.rules is not None:
        shardings = _decided(tree, placing.rules, placing, where)
    else:
        _check_placements(tree, where)
        shardings = [_own_sharding(leaf, where) for leaf in leaves]
    requested: dict[int, RequestedLeaf] = {}
    for i, name in names(tree).items():
        type_ = leaf_type(leaves[i])
        if type_ is None:
            continue
        if type_.dtype and placing.rules is not None:
            type_ = type_._replace(on_devices=True)
        requested[i] = RequestedLeaf(name, type_, shardings[i] if type_.dtype else None)
    types = {leaf.name: leaf.type for leaf in requested.values()}
    return Request(leaves, treedef, requested, stored, compare(stored, types, to))


def _like_leaf(x: LeafType) -> Any:
    """A leaf that requests this type, in host memory."""
    if x.kind == "array":
        # A view of one number, which takes no memory.
        return np.broadcast_to(np.zeros((), parse_dtype(x.dtype)), x.shape)
    if x.kind == "key":
        return jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype))
    return empty_value(x.kind)


def _decided(tree: PyTree, rules: Rules, placing: Placing, where: str) -> list[Any]:
    """The shardings that the rules decide, and `P()` for leaves without a shape."""
    decided = plan(tree, rules, with_devices(placing.mesh, where), min_size=placing.min_size)
    decided.check_before_use()
    return tree_leaves(decided.shardings, is_leaf=is_none)


def _check_placements(tree: PyTree, where: str) -> None:
    """Raises `SpecError` for arrays that request a type which only traced values have."""
    typed = tree_map(_typed_sharding, tree)
    laid = resolve_specs(tree, typed)
    misfits = {i: spec and spec.misfit({"reduced-type"}) for i, spec in enumerate(laid)}
    raise_misfits(tree, misfits, where)


def _typed_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if sharding.spec.unreduced or sharding.spec.reduced else None


def _own_sharding(leaf: Any, where: str) -> Sharding | None:
    # An array that is not committed is on the default device only until a program moves it.
    if not getattr(leaf, "committed", True):
        return None
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        with_devices(sharding.mesh, where)  # raises unless the mesh has devices
    return sharding
