"""Names the arguments of a compiled program, and tells which leaf of a plan each of them is.

By position: the ends of paths do not tell the state `(w, b)` from the batch `(x, y)`. JAX drops
arguments that a program does not use, so that their positions in the text are other ones.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from treeshard._core.arrays import array_text, device_dtype
from treeshard._core.jax_private import argument_names
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.paths import leaf_paths, nested, path_under
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard.communication._hlo import Buffer, HloProgram
from treeshard.errors import SpecError, listed

# `['w']`, `["w"]`, `[0]`, `.w` or `[<flat index 0>]`
_KEY = re.compile(r"""\['([^']*)'\]|\["([^"]*)"\]|\[(\d+)\]|\.(\w+)|\[<flat index (\d+)>\]""")
# `state['layers'][0].w`
_NAME = re.compile(rf"(\w+)((?:{_KEY.pattern})*)")


class Argument(NamedTuple):
    """An array that a program takes."""

    path: str  # `state/layers/0/w`; empty if a text does not name it
    number: int | None  # its position in the text; `None` if JAX dropped it
    local: Buffer | None  # the part of it on one device, by the text
    annotation: str  # how it is sharded, by the text
    struct: jax.ShapeDtypeStruct | None  # the array, by JAX; `None` if there is only a text


def arguments_of(program: Any, graph: HloProgram) -> list[Argument]:
    """The arguments of a program in their order; those that it does not use too, unless there is
    only its text."""
    in_text = _in_text(graph)
    if not isinstance(program, jax.stages.Compiled):
        return in_text
    infos = tree_flatten_with_path(program.args_info)[0]
    shardings = program.in_tree.flatten_up_to(program.input_shardings)  # `None` for dropped ones
    # What JAX adds, such as the tokens of callbacks, comes before the user's arguments.
    kept = iter(in_text[len(in_text) - sum(x is not None for x in shardings) :])
    # `0/0/w` in the first argument, and `1/x/w` in the keyword argument `x`
    places = [path.partition("/")[2] for path in leaf_paths(program.args_info)]
    names = argument_names(program) or [""] * len(infos)
    arguments: list[Argument] = []
    for (keys, info), sharding, name, place in zip(infos, shardings, names, places, strict=True):
        argument = _DROPPED if sharding is None else next(kept)
        path = argument.path or place
        if name:  # `state['w'].value`, of a box of Flax, has the path that the box has in a plan
            whole = name.removesuffix(keystr(keys[2:]))
            path = path_under(path_of_name(whole), place.partition("/")[2])
        struct = jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
        arguments.append(argument._replace(path=path, struct=struct))
    return arguments


_DROPPED = Argument("", None, None, "", None)


def _in_text(graph: HloProgram) -> list[Argument]:
    """The arguments that a program takes."""
    parameters = sorted(graph.parameters, key=lambda op: op.index or 0)
    if graph.takes_tuple:
        return [Argument("", i, x, "", None) for i, x in enumerate(parameters[0].types)]
    return [
        Argument(path_of_name(op.op_name or ""), op.index, x, op.attribute("sharding"), None)
        for op in parameters
        for x in (op.types or [None])[:1]
    ]


def paths_by_number(arguments: Sequence[Argument]) -> dict[int, str]:
    """The path of each argument that a program takes, by its position in the text."""
    return {x.number: x.path for x in arguments if x.number is not None}


def path_of_name(name: str) -> str:
    """`state/layers/0/w` for JAX's name `state['layers'][0].w`; another name as it is."""
    keys = _NAME.fullmatch(name)
    if keys is None:
        return name
    return path_under(keys[1], "/".join("".join(key) for key in _KEY.findall(keys[2])))


# ------------------------------------------------------------------ whose leaves they are

# `dynamic_nodonate['first'][3]`: `eqx.filter_jit` passes the leaves of its first argument as a flat
# tuple, and the leaves of all other arguments as another.
_FLAT = re.compile(r"dynamic_(?:no)?donate/(first|rest)/\d+")


class _Fit(NamedTuple):
    """Arguments that may be the leaves of a plan."""

    where: str
    leaves: Mapping[str, Argument]
    # How many are like their leaf, less those that are not, and how many are sharded like it
    rank: tuple[int, int, int]


def leaves_of_arguments(plan: Plan, arguments: Sequence[Argument]) -> dict[str, str | None]:
    """The paths of the arguments that are leaves of a plan, each with the path of its leaf.

    They are one part of all arguments, such as the argument `state`, or `model` in it: the one that
    has most paths of the plan, with arrays of their shapes and dtypes; then one that is sharded as
    the plan says; then the outermost, since the moments of an optimizer are like their weights.
    Other arguments have `None`.

    Raises `SpecError` if several parts fit, or if arguments differ from their leaves.
    """
    fits = [*_by_path(plan, arguments), *_by_order(plan, arguments)]
    best = max((fit.rank for fit in fits), default=(0, 0, 0))
    fits = sorted((fit for fit in fits if fit.rank == best), key=_depth)
    outermost = [fit for fit in fits if _depth(fit) == _depth(fits[0])]
    if len(outermost) > 1 and best[0]:
        raise SpecError(_several([fit.where for fit in outermost]))
    leaves = outermost[0].leaves if outermost else {}
    own = {leaf.path: leaf for leaf in plan.leaves}
    facts = [fact for path, x in leaves.items() if (fact := _mismatch(own[path], x, plan.mesh))]
    if facts:
        headline = f"{len(facts)} arguments of the program differ from the plan:"
        raise SpecError(listed(headline, facts) + "\nCompile the step for this plan.")
    names: dict[str, str | None] = {x.path: None for fit in fits for x in fit.leaves.values()}
    return names | {argument.path: path for path, argument in leaves.items()}


def _depth(fit: _Fit) -> int:
    return fit.where.count("/") + bool(fit.where)


def _by_path(plan: Plan, arguments: Sequence[Argument]) -> list[_Fit]:
    """The parts of the arguments that have leaves with paths of the plan."""
    paths = {leaf.path for leaf in plan.leaves}
    parts: dict[str, dict[str, Argument]] = defaultdict(dict)
    for argument in arguments:
        keys = argument.path.split("/")
        for depth in range(len(keys) + 1):
            inside = "/".join(keys[depth:])
            if inside in paths:
                parts["/".join(keys[:depth])][inside] = argument
    return [_fit(plan, where, leaves) for where, leaves in parts.items()]


def _by_order(plan: Plan, arguments: Sequence[Argument]) -> list[_Fit]:
    """The arrays in a row, among leaves that a function takes without their paths, that are like
    all leaves of the plan."""
    names = ((_FLAT.fullmatch(argument.path), argument) for argument in arguments)
    flat = [x for _, x in sorted(((name[1], x) for name, x in names if name), key=lambda x: x[0])]
    paths = [leaf.path for leaf in plan.leaves]
    fits: list[_Fit] = []
    for start in range(len(flat) - len(paths) + 1):
        row = dict(zip(paths, flat[start:], strict=False))
        # The row at the start is the first argument, and the outermost: others may be its moments.
        where = flat[start].path.rpartition("/")[0] if start == 0 else flat[start].path
        fits.append(_fit(plan, where, row))
    return [fit for fit in fits if fit.rank[0] == len(paths)]


def _fit(plan: Plan, where: str, leaves: Mapping[str, Argument]) -> _Fit:
    pairs = [(leaf, leaves[leaf.path]) for leaf in plan.leaves if leaf.path in leaves]
    alike = [(leaf, x) for leaf, x in pairs if not _mismatch(leaf, x, plan.mesh)]
    sharded = sum(_is_sharded_like(leaf, x, plan.mesh) for leaf, x in alike)
    return _Fit(where, leaves, (len(alike), len(alike) - len(pairs), sharded))


def _mismatch(leaf: PlannedLeaf, argument: Argument, mesh: AnyMesh) -> str:
    """How an argument differs from a leaf in its size, or else in its shape or dtype."""
    local, struct, planned = argument.local, argument.struct, leaf.bytes_per_device(mesh)
    # The text has a key as its uint32s.
    if local is not None and jnp.issubdtype(leaf.dtype, jnp.number):
        size = local.bytes or 0
        if size not in (planned, leaf.bytes):
            return (
                f"{leaf.path}: {size:,} bytes per device in the program, {planned:,} in the plan."
            )
    if struct is None or (struct.shape, struct.dtype) == (leaf.shape, device_dtype(leaf.dtype)):
        return ""
    return f"{leaf.path}: {array_text(struct)} in the program, {array_text(leaf)} in the plan."


def _is_sharded_like(leaf: PlannedLeaf, argument: Argument, mesh: AnyMesh) -> bool:
    sharding = None if argument.struct is None else argument.struct.sharding
    if isinstance(sharding, NamedSharding) and axis_sizes(sharding.mesh) == axis_sizes(mesh):
        planned = NamedSharding(sharding.mesh, leaf.given)
        return planned.is_equivalent_to(sharding, len(leaf.shape))
    return argument.local is not None and argument.local.bytes == leaf.bytes_per_device(mesh)


def _several(parts: Sequence[str]) -> str:
    larger = str(nested({parts[0]: ...})).replace("Ellipsis", "...")
    return (
        f"compare_communication: the plan may be of {' or of '.join(map(repr, parts))}: these"
        " arguments of the program have the same paths, shapes, dtypes and specs. Plan more of"
        f" them, so that only one fits: `ts.plan({larger}, rules, mesh)`."
    )
