"""Names the arguments of a compiled program by their paths in the trees that it was called with.

Arguments are matched by position. JAX drops unused arguments, so the text numbers them differently,
and the compiler may change or omit names.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from treeshard._core.jax_private import argument_names
from treeshard._core.paths import leaf_paths, path_under
from treeshard.communication._hlo import HloProgram

# `['w']`, `["w"]`, `[0]`, `.w` or `[<flat index 0>]`
_KEY = re.compile(r"""\['([^']*)'\]|\["([^"]*)"\]|\[(\d+)\]|\.(\w+)|\[<flat index (\d+)>\]""")
# `state['layers'][0].w`
_NAME = re.compile(rf"(\w+)((?:{_KEY.pattern})*)")


class Argument(NamedTuple):
    """An array that a program takes."""

    path: str  # `state/layers/0/w`; empty if a text does not name it
    number: int | None  # its position in the text; `None` if JAX dropped it
    struct: jax.ShapeDtypeStruct | None  # `None` if there is only a text


def arguments_of(program: Any, graph: HloProgram) -> list[Argument]:
    """The arguments of a program in order. A text does not have the unused ones."""
    in_text = _read_arguments(graph)
    if not isinstance(program, jax.stages.Compiled):
        return in_text
    infos = tree_flatten_with_path(program.args_info)[0]
    shardings = program.in_tree.flatten_up_to(program.input_shardings)  # `None` for dropped ones
    # JAX adds its own arguments, such as the tokens of callbacks, before the user's.
    kept = iter(in_text[len(in_text) - sum(x is not None for x in shardings) :])
    # `0/0/w` in the first argument, and `1/x/w` in the keyword argument `x`
    places = [path.partition("/")[2] for path in leaf_paths(program.args_info)]
    # Only JAX knows the names of the arguments that it drops.
    names = argument_names(program) or [""] * len(infos)
    arguments: list[Argument] = []
    for (keys, info), sharding, name, place in zip(infos, shardings, names, places, strict=True):
        argument = _DROPPED if sharding is None else next(kept)
        path = argument.path or place
        if name:  # `state['w'].value`, of a box of Flax, has the path that the box has in a plan
            full_name = name.removesuffix(keystr(keys[2:]))
            path = path_under(path_of_name(full_name), place.partition("/")[2])
        struct = jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
        arguments.append(argument._replace(path=path, struct=struct))
    return arguments


_DROPPED = Argument("", None, None)


def _read_arguments(graph: HloProgram) -> list[Argument]:
    """The arguments that a program takes."""
    parameters = sorted(graph.parameters, key=lambda op: op.index or 0)
    if graph.takes_tuple:
        return [Argument("", number, None) for number in range(len(parameters[0].types))]
    return [Argument(path_of_name(op.op_name or ""), op.index, None) for op in parameters]


def paths_by_number(arguments: Sequence[Argument]) -> dict[int, str]:
    """The path of each argument that a program takes, by its position in the text."""
    return {x.number: x.path for x in arguments if x.number is not None}


def path_of_name(name: str) -> str:
    """`state/layers/0/w` for JAX's name `state['layers'][0].w`; another name stays unchanged."""
    keys = _NAME.fullmatch(name)
    if keys is None:
        return name
    return path_under(keys[1], "/".join("".join(key) for key in _KEY.findall(keys[2])))
