"""Read requests: the leaves that a like-tree requests, the stored leaves, and how they differ.

Checkpoints and safetensors compare all leaves before the first array is read. A mismatch during the
reads would cost minutes, and would name a single leaf.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.tree_util import tree_flatten, tree_leaves, tree_map

from treeshard._core.arrays import array_text, device_dtype, has_shape, processes_of
from treeshard._core.facts import Facts
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree, nest
from treeshard._core.spec_trees import raise_misfits, resolve_specs
from treeshard._core.specs import is_spec
from treeshard._core.text import dtype_name, parse_dtype
from treeshard._disk.leaves import (
    SavedLeaf,
    Shape,
    check_known,
    convert_to_class,
    empty_value,
    is_none,
    kind_of,
)
from treeshard._planning.plan import Plan, plan
from treeshard._planning.rules import Rules, is_list_of_rules
from treeshard.errors import ArgumentError, FormatError, MismatchError, did_you_mean, listed, warn


class RequestedLeaf(NamedTuple):
    """A requested leaf and the target of its array. `kind` and `dtype` are as in `SavedLeaf`."""

    name: str  # the name of the stored leaf
    kind: str
    shape: Shape = ()
    dtype: str = ""
    # If False, it becomes a numpy array, which may have a 64-bit dtype without JAX's x64 mode.
    on_devices: bool = False
    # On devices, `None` stands for the default device. Such an array is uncommitted.
    sharding: Sharding | None = None

    @property
    def is_here(self) -> bool:
        """Whether all its devices are in this process."""
        return self.sharding is None or self.sharding.is_fully_addressable

    @property
    def itemsize(self) -> int:
        """The bytes of an item of its array."""
        return parse_dtype(self.dtype).itemsize


def _request_leaf(
    name: str, x: Any, sharding: Sharding | None, by_rules: bool
) -> RequestedLeaf | None:
    """The request of a leaf of a like-tree, or `None` if it is static. Rules place numpy leaves."""
    kind = kind_of(x)
    if kind is None or (kind == "array" and x.dtype == jax.dtypes.float0):
        return None
    if not has_shape(x):
        return RequestedLeaf(name, kind)
    is_numpy = isinstance(x, np.ndarray | np.generic)
    dtype = x.dtype.newbyteorder("=") if is_numpy else x.dtype  # the byte order is not saved
    on_devices = by_rules or not is_numpy
    return RequestedLeaf(name, kind, tuple(x.shape), dtype_name(dtype), on_devices, sharding)


def _type_text(x: SavedLeaf | RequestedLeaf) -> str:
    if x.dtype:
        return array_text(x)
    return "None" if x.kind == "none" else f"a Python {x.kind}"


def _is_floating(dtype: str) -> bool:
    return jax.numpy.issubdtype(parse_dtype(dtype), np.floating)


# ------------------------------------------------------------------ differences

_USE_PARTIAL = "`partial=True` reads the leaves that both have, and keeps the others of `like`."
_WHOLE_PATH = (
    "{source} has the missing leaves under {path!r}. Pass the plan of the subtree,"
    " `plan[{path!r}]`, or a tree in which their paths begin with it, and `partial=True`."
)
_SUGGESTIONS = 10  # names are slow to compare, and no more leaves than these are listed


class Differences(NamedTuple):
    """How the requested leaves differ from the stored ones, by path."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misfits: dict[str, str]

    def check(
        self, source: str = "the checkpoint", *, partial: bool = False, fix: str = ""
    ) -> None:
        """Raises one `MismatchError` that lists all differences, and `fix` if paths differ.

        With `partial`, leaves may be missing or unexpected. A `ShardingWarning` lists the missing
        leaves.
        """
        misfits = [f"{path}: {why}" for path, why in self.misfits.items()]
        missing = [f"{path}: not in {source}." for path in self.missing]
        unexpected = [f"{path}: in {source}, but not requested." for path in self.unexpected]
        sections = [("leaves have another type than requested", misfits)]
        if not partial:
            for i, path in enumerate(self.missing[:_SUGGESTIONS]):
                missing[i] += did_you_mean(path, self.unexpected)
            sections.append((f"requested leaves are not in {source}", missing))
            sections.append((f"leaves of {source} are not requested", unexpected))
        facts = [listed(f"{len(rows)} {what}:", rows) for what, rows in sections if rows]
        above = _path_above(self.missing, self.unexpected)
        whole_path = above and _WHOLE_PATH.format(source=source, path=above)
        if not partial and (missing or unexpected):
            facts.append(whole_path or fix + _USE_PARTIAL)
        if facts:
            raise MismatchError("\n".join(facts))
        if missing:
            headline = f"{len(missing)} leaves keep their values from `like`:"
            warn("\n".join(filter(None, [listed(headline, missing), whole_path])))


def _path_above(missing: Sequence[str], unexpected: Iterable[str]) -> str:
    """The path under which all missing leaves are stored, or the empty text."""
    if not missing:
        return ""
    stored, end = {*unexpected}, f"/{missing[0]}"
    found = (name.removesuffix(end) for name in stored if name.endswith(end))
    return next((x for x in found if stored.issuperset(f"{x}/{name}" for name in missing)), "")


def compare(
    stored: Mapping[str, SavedLeaf], requested: Iterable[RequestedLeaf], cast: str | None = None
) -> Differences:
    """Compares the requested leaves with the stored ones, by name.

    Only floating-point arrays are converted, and only to the dtype `cast`.
    """
    missing: list[str] = []
    misfits: dict[str, str] = {}
    unexpected = dict(stored)
    for x in requested:
        saved = unexpected.pop(x.name, None)
        if saved is not None:
            if why := _misfit(saved, x, cast):
                misfits[x.name] = why
        elif x.kind != "none":  # a `None` has no values
            missing.append(x.name)
    left = [name for name, saved in unexpected.items() if saved.kind != "none"]
    return Differences(tuple(missing), tuple(left), misfits)


def _misfit(stored: SavedLeaf, requested: RequestedLeaf, cast: str | None) -> str:
    """Why a leaf cannot be read as requested. Empty if it can."""
    if stored[1:4] != requested[1:4]:  # the kind, the shape and the dtype
        fact = f"saved as {_type_text(stored)}, requested as {_type_text(requested)}."
        if "none" in (stored.kind, requested.kind) and stored.kind != requested.kind:
            return f"{fact} `partial=True` leaves it out."
        if (stored.kind, stored.shape) != (requested.kind, requested.shape):
            # Several orders of more dims may have these lengths.
            is_reversed = stored.kind == requested.kind and len(stored.shape) == 2
            is_reversed &= stored.shape == requested.shape[::-1]
            fix = f" Request {_type_text(stored)}, and transpose it by `.T`." if is_reversed else ""
            return f"{fact}{fix}"
        if not (_is_floating(stored.dtype) and _is_floating(requested.dtype)):
            return f"{fact} Only floating-point dtypes are converted; request {stored.dtype}."
        if requested.dtype != cast:
            return f"{fact} `cast={requested.dtype!r}` converts it."
    if requested.kind != "array" or not requested.on_devices:
        return ""
    # JAX would silently turn 64-bit numbers into 32-bit numbers.
    dtype = dtype_name(device_dtype(parse_dtype(requested.dtype)))
    if dtype == requested.dtype:
        return ""
    ways = "Turn on 64-bit numbers (`jax.config.update('jax_enable_x64', True)`)"
    if _is_floating(requested.dtype):
        ways += f", convert it with `cast={dtype!r}`"
    narrowed = _type_text(requested._replace(dtype=dtype))
    return (
        f"{_type_text(requested)} would be {narrowed} on devices. {ways}, or request a numpy array."
    )


def cast_dtype(cast: Any) -> str | None:
    """The name of a dtype to cast to. Raises `FormatError` unless it is a floating-point dtype."""
    if cast is None:
        return None
    try:
        name = str(jax.numpy.dtype(cast))
    except TypeError:
        name = str(cast)
    if not _is_floating(name):
        raise FormatError(
            f"cast={name!r} is not a floating-point dtype. Only floating-point arrays are"
            " converted, to a dtype such as 'float32'."
        )
    return name


def after_cast(dtype: str, cast: str | None) -> str:
    """The dtype of a stored array after a cast. Only floating-point arrays are converted."""
    return cast if cast is not None and _is_floating(dtype) else dtype


def convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts an array that was read to the requested dtype, which it mostly has."""
    if x.dtype == dtype:
        return x
    with np.errstate(all="ignore"):  # out of range becomes inf, as in `jnp.asarray`
        if not np.can_cast(x.dtype, dtype, "unsafe"):  # such as between some dtypes of `ml_dtypes`
            x = x.astype(np.float32)
        return x.astype(dtype)


# ------------------------------------------------------------------ requests


class Placing(NamedTuple):
    """How to shard arrays: by rules, as in `plan`, or else like the arrays of the like-tree."""

    rules: Rules | None = None
    mesh: MeshLike | None = None
    min_size: int | None = None

    def check(self, where: str) -> None:
        """Raises `ValueError` if an argument is given that only rules use."""
        if self.rules is not None or (self.mesh is None and self.min_size is None):
            return
        given = "min_size" if self.mesh is None else "a mesh"
        raise ValueError(
            f"{where}: {given} was given without rules. Pass `rules=` as well, such as"
            " `rules=[('.*', None)]`, which replicates."
        )


class Request(NamedTuple):
    """A read request: the leaves of a like-tree, the requested leaves by index, and the stored
    leaves.

    `leaves` includes `None`s. Static leaves are not requested.
    """

    leaves: list[Any]
    treedef: Any
    requested: dict[int, RequestedLeaf]
    stored: Mapping[str, SavedLeaf]
    differences: Differences

    def to_read(self) -> dict[int, RequestedLeaf]:
        """The requested leaves that are stored, by leaf index."""
        return {i: leaf for i, leaf in self.requested.items() if leaf.name in self.stored}

    def add_to(self, facts: Facts) -> None:
        """Adds the facts that must agree on all processes: each may have copies on its devices."""
        facts.describe(
            (leaf.name, self.leaves[i], _shared_by_processes(leaf.sharding))
            for i, leaf in self.to_read().items()
            if leaf.dtype
        )

    def tree(self, values: Iterable[tuple[int, Any]]) -> PyTree:
        """The like-tree with values that were read, which come with their leaf indices."""
        leaves = list(self.leaves)
        for i, value in values:
            leaves[i] = _like_leaf_of(value, leaves[i], self.requested[i].name)
        return self.treedef.unflatten(leaves)


def _shared_by_processes(sharding: Sharding | None) -> list[Sharding]:
    return [] if sharding is None or len(processes_of(sharding)) == 1 else [sharding]


def _like_leaf_of(value: Any, leaf: Any, name: str) -> Any:
    """Converts a value that was read to the class or byte order of its leaf in the like-tree."""
    if not has_shape(leaf):
        return convert_to_class(value, leaf, name)
    if isinstance(leaf, np.generic):
        return value[()]  # the value is an array of shape `()`
    if isinstance(leaf, np.ndarray) and isinstance(value, np.ndarray):
        return value.astype(leaf.dtype, copy=False)
    return value


def read_request(
    stored: Mapping[str, SavedLeaf],
    like: PyTree,
    placing: Placing,
    *,
    cast: Any,
    partial: bool,
    names: Callable[[PyTree], Mapping[int, str]],
    where: str,
    of_subtrees: bool = True,
) -> Request:
    """Compares a like-tree with the stored leaves. Arguments and errors are as in `restore`.

    Rules decide the shardings, or else the arrays of the like-tree do. Without `like`, all stored
    leaves are requested, by name. `names` takes the like-tree, in which `None` is a leaf, and
    returns the names of the leaves to read, by index. `where` is the public function. With
    `of_subtrees`, the plan of a subtree reads it by its path in the full tree.
    """
    placing.check(where)
    to = cast_dtype(cast)
    _check_like(like, where)
    tree = tree_map(_structs, like)
    if like is None:
        tree = {name: _like_leaf(x, to) for name, x in stored.items()}
    check_known(tree, where, MismatchError)
    leaves, treedef = tree_flatten(tree, is_leaf=is_none)
    name_of = names(tree)
    if of_subtrees and isinstance(like, Plan) and like.path:
        name_of, stored = _select_subtree(like.path, tree, stored, names)
    if partial:
        # A `None` has no values, so either side may have it instead of any leaf.
        name_of = {i: name for i, name in name_of.items() if leaves[i] is not None}
        stored = {name: x for name, x in stored.items() if x.kind != "none"}
    shardings = _shardings(tree, placing, where)
    by_rules = placing.rules is not None
    requests = {i: _request_leaf(x, leaves[i], shardings[i], by_rules) for i, x in name_of.items()}
    requested = {i: leaf for i, leaf in requests.items() if leaf is not None}
    return Request(leaves, treedef, requested, stored, compare(stored, requested.values(), to))


def _structs(x: Any) -> Any:
    if not isinstance(x, Plan):
        return x
    x.check_before_use()
    return x.structs


def _select_subtree(
    path: str,
    tree: PyTree,
    stored: Mapping[str, SavedLeaf],
    names: Callable[[PyTree], Mapping[int, str]],
) -> tuple[Mapping[int, str], Mapping[str, SavedLeaf]]:
    """The names and the stored leaves of the subtree at `path`, or at the end of that path.

    The stored tree is the full tree, the subtree, or a tree between. The longest of these paths
    under which a leaf is stored decides.
    """
    parts = path.split("/")
    prefixes = ["/".join(parts[i:]) for i in range(len(parts) + 1)]
    found = {prefix: names(nest({prefix: tree})) for prefix in prefixes}
    # The longest path, not the path with most leaves: the full tree may repeat these names.
    there = (x for x in prefixes if stored.keys() & {*found[x].values()})
    prefix = next(there, path)
    under = {x: row for x, row in stored.items() if not prefix or f"{x}/".startswith(f"{prefix}/")}
    return found[prefix], under


def _check_like(like: Any, where: str) -> None:
    """Raises `ArgumentError` if what is passed as a tree is a mesh, a list of rules, or specs."""
    what, advice = "", "Pass them by name: `{}(path, like, rules=rules, mesh=mesh)`."
    leaves = tree_leaves(like, is_leaf=is_spec)
    if isinstance(like, Mesh | AbstractMesh):
        what = "is a mesh"
    elif is_list_of_rules(like):
        what = "is a list of rules"
    elif leaves and all(map(is_spec, leaves)):
        what, advice = "has specs and no shapes", "Pass a plan: `{}(path, plan)`."
    if what:
        raise ArgumentError(f"{where}: the tree to read {what}. {advice.format(where)}")


def _like_leaf(x: SavedLeaf, cast: str | None) -> Any:
    """A leaf that requests a stored one in host memory, after a cast of floating-point arrays."""
    if x.kind == "array":
        # A view of a single number, which takes no memory.
        return np.broadcast_to(np.zeros((), parse_dtype(after_cast(x.dtype, cast))), x.shape)
    if x.kind == "key":
        return jax.ShapeDtypeStruct(x.shape, parse_dtype(x.dtype))
    return empty_value(x.kind)


def _shardings(tree: PyTree, placing: Placing, where: str) -> list[Any]:
    """The sharding of each leaf, by the rules or by its own array. `None` is a leaf too."""
    if placing.rules is None:
        return _read_shardings(tree, where)
    decided = plan(
        tree, placing.rules, with_devices(placing.mesh, where), min_size=placing.min_size
    )
    decided.check_before_use()
    # Not by `decided.shardings`: a class may change shardings when it is rebuilt from them.
    shardings = iter(decided.sharding_of_each())
    of_leaves = (x and next(shardings) for x in decided.leaf_at_each_index())
    leaves = tree_leaves(tree, is_leaf=is_none)
    return [None if leaf is None else next(of_leaves) for leaf in leaves]


def _read_shardings(tree: PyTree, where: str) -> list[Sharding | None]:
    """The shardings of the arrays in the like-tree. `None` is a leaf too.

    Raises `SpecError` for types that only traced values have, and `NoMeshError` for meshes without
    devices.
    """
    leaves = tree_leaves(tree)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    typed = [x if _has_reduced_type(x) else None for x in shardings]
    if any(typed):
        resolved = resolve_specs(leaves, typed, where=where)
        misfits = {i: spec and spec.misfit({"reduced-type"}) for i, spec in enumerate(resolved)}
        raise_misfits(tree, misfits, where)
    return [_own_sharding(leaf, where) for leaf in tree_leaves(tree, is_leaf=is_none)]


def _has_reduced_type(sharding: Any) -> bool:
    is_named = isinstance(sharding, NamedSharding)
    return is_named and bool(sharding.spec.unreduced or sharding.spec.reduced)


def _own_sharding(leaf: Any, where: str) -> Sharding | None:
    # An uncommitted array stays on the default device only until a program moves it.
    if not getattr(leaf, "committed", True):
        return None
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        with_devices(sharding.mesh, where)  # raises unless the mesh has devices
    return sharding
