"""What a like-tree requests: the type and the sharding of each array."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import tree_flatten

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.make_mesh import with_devices
from treeshard._core.mesh import MeshLike
from treeshard._core.text import parse_dtype
from treeshard._disk.leaves import SavedLeaf, Shape, kind_of
from treeshard._planning.plan import Plan, plan
from treeshard._planning.rules import Rules
from treeshard.errors import FormatError, MismatchError, did_you_mean, listed, warn

# ------------------------------------------------------------------
# Compares the requested leaves with the stored ones, before anything is read.


class LeafType(NamedTuple):
    """The type of a leaf, whatever its values.

    Attributes:
        kind: As in `SavedLeaf`.
        shape: The shape of an array, or of an array of keys.
        dtype: Its dtype by name; nothing for other kinds.
        on_devices: Whether it will be a `jax.Array`, which has 64-bit dtypes only in JAX's x64
            mode.
    """

    kind: str
    shape: Shape = ()
    dtype: str = ""
    on_devices: bool = False

    def __str__(self) -> str:
        if self.dtype:
            return array_text(self)
        return "None" if self.kind == "none" else f"a Python {self.kind}"

    def cast(self, to: str) -> "LeafType":
        """The same in the dtype `to`, if it is an array of floating-point numbers."""
        return self._replace(dtype=to) if _is_floating(self) else self


class Differences(NamedTuple):
    """How the requested leaves differ from the stored ones.

    Attributes:
        missing: The paths that are requested but not stored.
        unexpected: The paths that are stored but not requested.
        misfits: Why stored leaves cannot be read as requested, by path.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misfits: dict[str, str]

    def check(self, source: str = "the checkpoint", *, partial: bool = False) -> None:
        """Raises one `MismatchError` that lists all differences, if there are any.

        Args:
            source: The name of the checkpoint or file, for the message.
            partial: Whether leaves may be missing or unexpected. A `ShardingWarning` then lists
                the missing ones.
        """
        facts: list[str] = []
        if self.misfits:
            lines = [f"{path}: {why}" for path, why in self.misfits.items()]
            facts.append(listed(f"{len(lines)} leaves have another type than requested:", lines))
        if self.missing and not partial:
            headline = f"{len(self.missing)} requested leaves are not in {source}:"
            facts.append(listed(headline, self._missing_facts(source)))
        if self.unexpected and not partial:
            headline = f"{len(self.unexpected)} leaves of {source} are not requested:"
            lines = [f"{path}: in {source}, but not requested." for path in self.unexpected]
            facts.append(listed(headline, lines))
        if facts and not partial and (self.missing or self.unexpected):
            facts.append(
                "`partial=True` reads the leaves that both have, and keeps the others of `like`."
            )
        if facts:
            raise MismatchError("\n".join(facts))
        if self.missing:
            lines = [f"{path}: not in {source}." for path in self.missing]
            warn(listed(f"{len(lines)} leaves keep their values from `like`:", lines))

    def _missing_facts(self, source: str) -> list[str]:
        known = [self.unexpected if i < 10 else () for i in range(len(self.missing))]  # shown: ten
        return [
            f"{path}: not in {source}.{did_you_mean(path, near)}"
            for path, near in zip(self.missing, known, strict=True)
        ]


def leaf_type(x: Any) -> LeafType | None:
    """What a leaf of a like-tree asks for; `None` if it is static.

    numpy's arrays ask for numpy's.
    """
    kind = kind_of(x)
    if kind is None:
        return None
    if not has_shape(x):
        return LeafType(kind)
    return LeafType(kind, tuple(x.shape), str(x.dtype), not isinstance(x, np.ndarray | np.generic))


def saved_types(rows: Iterable[SavedLeaf]) -> dict[str, LeafType]:
    """The types of the rows of a table, by path."""
    return {row.path: LeafType(row.kind, row.shape, row.dtype) for row in rows}


def compare(
    there: Mapping[str, LeafType], asked: Mapping[str, LeafType], cast: str | None = None
) -> Differences:
    """Compares the requested leaves with the stored ones, by path.

    Args:
        there: The stored leaves.
        asked: The requested leaves. The result has their dtypes.
        cast: The dtype that arrays of other floating-point dtypes may be converted to. Nothing
            else is converted; without it, nothing is.
    """
    # A `None` holds no values, so it may be missing.
    missing = tuple(p for p, x in asked.items() if p not in there and x.kind != "none")
    unexpected = tuple(p for p, x in there.items() if p not in asked and x.kind != "none")
    whys = {path: _misfit(there[path], asked[path], cast) for path in asked if path in there}
    return Differences(missing, unexpected, {path: why for path, why in whys.items() if why})


def cast_dtype(cast: Any) -> str:
    """The name of a dtype to cast to. Raises `FormatError` unless it is a floating-point dtype."""
    try:
        name = str(jax.numpy.dtype(cast))
    except TypeError:
        name = str(cast)
    if not _is_floating(LeafType("array", (), name)):
        raise FormatError(
            f"cast={name!r} is not a floating-point dtype. Only floating-point arrays are"
            " converted, to a dtype such as 'float32'."
        )
    return name


def _misfit(there: LeafType, asked: LeafType, cast: str | None) -> str:
    """Why a leaf cannot be read as requested; empty if it can."""
    fact = f"saved as {there}, requested as {asked}."
    if there[:2] != asked[:2]:
        return fact
    if there.dtype != asked.dtype:
        if not (_is_floating(there) and _is_floating(asked)):
            return f"{fact} Only floating-point dtypes are converted; request {there.dtype}."
        if asked.dtype != cast:
            return f"{fact} `cast={asked.dtype!r}` converts it."
    return _too_wide(asked)


def _too_wide(asked: LeafType) -> str:
    if asked.kind != "array" or not asked.on_devices:
        return ""
    had = asked._replace(dtype=str(jax.dtypes.canonicalize_dtype(parse_dtype(asked.dtype))))
    if had == asked:
        return ""
    ways = ["Turn on 64-bit numbers (`jax.config.update('jax_enable_x64', True)`)"]
    ways += [f"convert it with `cast={had.dtype!r}`"] if _is_floating(asked) else []
    return f"{asked} would be {had} on devices. {', '.join(ways)}, or request a numpy array."


def _is_floating(x: LeafType) -> bool:
    return x.kind == "array" and jax.numpy.issubdtype(parse_dtype(x.dtype), np.floating)


class Placing(NamedTuple):
    """How to shard arrays: by rules, as in `plan`; without rules, as the like-tree's own arrays."""

    rules: Rules | None = None
    mesh: MeshLike | None = None
    min_size: int | None = None


class Asked(NamedTuple):
    """A requested array.

    Attributes:
        type: Its type.
        sharding: Its sharding; `None` for the default device, or for numpy.
    """

    type: LeafType
    sharding: Sharding | None


def arrays_asked_for(
    like: Any, placing: Placing, where: str
) -> tuple[list[Any], Any, dict[int, Asked]]:
    """The leaves and structure of a like-tree, and the request at each of its arrays.

    With rules, these decide the shardings; otherwise the like-tree's own arrays do. numpy arrays
    and `ShapeDtypeStruct`s without a sharding have none.

    Raises:
        ShardingRuleError: If the rules leave a leaf undecided, or decide a spec that does not fit.
        NoMeshError: If there is no mesh for the rules.
        MeshError: If the mesh is abstract: it has no devices.
        ValueError: If a mesh is given without rules.
    """
    rules, mesh, min_size = placing
    if rules is None and (mesh is not None or min_size is not None):
        given = "a mesh" if mesh is not None else "min_size"
        raise ValueError(
            f"{where}: {given} was given without rules. Pass `rules=` as well, such as"
            " `rules=[('.*', None)]`, which replicates."
        )
    tree = like.structs if isinstance(like, Plan) else like
    leaves, treedef = tree_flatten(tree)
    types = {i: asked for i, leaf in enumerate(leaves) if (asked := _array_type(leaf)) is not None}
    if rules is None:
        return leaves, treedef, {i: Asked(x, _own(leaves[i], where)) for i, x in types.items()}
    decided = plan(tree, rules, with_devices(mesh, where), min_size=min_size)
    decided.check()
    places = tree_flatten(decided.shardings)[0]
    placed = {i: Asked(x._replace(on_devices=True), places[i]) for i, x in types.items()}
    return leaves, treedef, placed


def _array_type(leaf: Any) -> LeafType | None:
    return leaf_type(leaf) if has_shape(leaf) else None


def _own(leaf: Any, where: str) -> Sharding | None:
    if isinstance(leaf, np.ndarray | np.generic) or not getattr(leaf, "committed", True):
        return None
    if isinstance(leaf.sharding, NamedSharding):
        with_devices(leaf.sharding.mesh, where)  # raises unless the mesh has devices
    return leaf.sharding
