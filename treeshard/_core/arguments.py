"""Checks for wrong arguments, such as two that are swapped.

JAX accepts any object as a leaf, and a tree without arrays would pass through unchanged. Certain
mistakes are therefore errors. An empty container is not an error.
"""

import inspect
import os
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import all_leaves, tree_leaves

from treeshard._core.arrays import array_text, has_shape, is_array
from treeshard._core.paths import leaf_paths, path_under
from treeshard.errors import ArgumentError, LeafError, listed, short

PLAIN_VALUES = (bool, int, float, complex, str, bytes)  # types of leaves with a value


def describe_argument(x: Any) -> str:
    """Describes an argument for messages: `the class Model`, `a Mesh`, `float32[8,4]`."""
    if has_shape(x):
        return array_text(x)
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if callable(x) and hasattr(x, "__name__"):
        return f"the function {x.__name__}"
    if isinstance(x, PLAIN_VALUES):
        return f"the {type(x).__name__} {short(repr(x))}"
    if isinstance(x, AbstractMesh | Mesh):
        return "a mesh"
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_tree(tree: Any, where: str, call: str, name: str = "the tree") -> None:
    """Raises `ArgumentError` if a tree is itself a class, a function, another opaque object or an
    optimizer, and `LeafError` as `check_no_refs`.

    Args:
        tree: The argument that should be a tree.
        where: The function, for the message.
        call: The right call of the function.
        name: The name of the tree in the message.
    """
    check_no_refs(tree, where)
    if _is_optimizer(tree):
        raise ArgumentError(
            f"{where}: {name} is an optimizer, which has functions and no arrays. Pass its state:"
            f" `optimizer.init(params)`, as in `{call}`."
        )
    # To JAX, a class, a function or an opaque object is a tree of one leaf. A number may be a leaf,
    # but text is most likely the path of a file.
    is_number = isinstance(tree, PLAIN_VALUES) and not isinstance(tree, str | bytes)
    if not all_leaves([tree]) or is_number or hasattr(tree, "shape"):
        return
    if callable(tree):
        advice = "Call it first, and pass the arrays that it makes"
    else:
        advice = "Pass its arrays, or register its class as a pytree"
    what = f"{name} is {describe_argument(tree)}, which is not a pytree of arrays"
    raise ArgumentError(f"{where}: {what}. {advice}: `{call}`.")


def check_function(function: Any, call: str) -> None:
    """Raises `ArgumentError` if an argument is not a function, for example because two arguments
    are swapped. The message shows the call: `"jit_step(fn, plan)"`."""
    if not callable(function):
        where, what = call.partition("(")[0], describe_argument(function)
        raise ArgumentError(f"{where}: the function is {what}. Call `{call}`.")


def takes(function: Any, count: int) -> bool:
    """Whether a function accepts `count` arguments; true if its signature is unknown."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function in C
        return True
    return True


def _is_optimizer(tree: Any) -> bool:
    """Whether a tree is a gradient transformation of optax, a named tuple of two functions."""
    return isinstance(tree, tuple) and {"init", "update"} <= {*getattr(tree, "_fields", ())}


def check_no_refs(tree: Any, where: str, prefix: str = "") -> None:
    """Raises `LeafError` if leaves are mutable references. They have the values of an array, but
    JAX can neither return them from a function nor place them on devices.

    Args:
        tree: Any pytree.
        where: The function, for the message.
        prefix: The path of the tree in a larger one.
    """
    leaves = tree_leaves(tree)
    # `isinstance(x, jax.Ref)` takes 2 us, because it inspects traced values. A tree has few types.
    if not any(issubclass(type_, (Tracer, jax.Ref)) for type_ in {*map(type, leaves)}):
        return
    refs = [i for i, x in enumerate(leaves) if not is_array(x) and isinstance(x, jax.Ref)]
    if not refs:
        return
    of_leaves = leaf_paths(tree)
    paths = [path_under(prefix, of_leaves[i]) for i in refs]
    facts = [f"{path or 'the tree'}: a mutable reference (`jax.Ref`)." for path in paths]
    message = listed(f"{where}: leaves are mutable references, not arrays:", facts, headed=True)
    raise LeafError(
        f"{message}\nPass their values, `jax.tree.map(lambda x: x[...] if isinstance(x, jax.Ref)"
        " else x, tree)`, and make references inside the jitted function that changes them."
    )


def check_path(path: Any, where: str, call: str) -> None:
    """Raises `ArgumentError` if a path is not a path, such as a tree that is passed first."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{where}: the path is {describe_argument(path)}. The path comes first: `{call}`."
        )
