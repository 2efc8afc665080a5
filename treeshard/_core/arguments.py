"""Arguments of another kind than a function takes, such as two in the wrong order.

JAX calls anything a leaf, and a tree of no arrays is done at once. What is surely a mistake is an
error here; an empty container is not.
"""

import inspect
import os
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import all_leaves, tree_leaves

from treeshard._core.arrays import array_text, has_shape
from treeshard._core.paths import leaf_paths, path_under
from treeshard.errors import ArgumentError, LeafError, listed, short

PLAIN_VALUES = (bool, int, float, complex, str, bytes)  # leaves of Python that have a value


def describe_argument(x: Any) -> str:
    """What an argument is, for messages: `the class Model`, `a Mesh`, `float32[8,4]`."""
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
    """Raises `ArgumentError` if a whole tree is a class, a function, another opaque object or an
    optimizer, and `LeafError` as `check_no_refs`.

    Args:
        tree: What is passed as a tree.
        where: The function, for the message.
        call: How it is called.
        name: What the message calls the tree.
    """
    check_no_refs(tree, where)
    if _is_optimizer(tree):
        raise ArgumentError(
            f"{where}: {name} is an optimizer, which has functions and no arrays. Pass its state:"
            f" `optimizer.init(params)`, as in `{call}`."
        )
    # JAX calls a class, a function or an opaque object a tree of one leaf. So is a number; text is
    # the path of a file, most likely.
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
    """Raises `ArgumentError` if what is passed as the function is none, as where two arguments are
    swapped. The message shows the call: `"jit_step(fn, plan)"`."""
    if not callable(function):
        where, what = call.partition("(")[0], describe_argument(function)
        raise ArgumentError(f"{where}: the function is {what}. Call `{call}`.")


def takes(function: Any, count: int) -> bool:
    """Whether a function takes so many arguments; also if it does not tell."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # of a function in C
        return True
    return True


def _is_optimizer(tree: Any) -> bool:
    """Whether a tree is a gradient transformation of optax, a named tuple of two functions."""
    return isinstance(tree, tuple) and {"init", "update"} <= {*getattr(tree, "_fields", ())}


def check_no_refs(tree: Any, where: str, prefix: str = "") -> None:
    """Raises `LeafError` if leaves are mutable references, which have the values of an array and
    are none: JAX can neither return them from a function nor place them on devices.

    Args:
        tree: Any pytree.
        where: The function, for the message.
        prefix: The path of the tree in a larger one.
    """
    leaves = tree_leaves(tree)
    # `isinstance(x, jax.Ref)` takes 3 us, since it looks into traced values. Types are few.
    if not any(issubclass(type_, (jax.Ref, Tracer)) for type_ in {*map(type, leaves)}):
        return
    refs = [i for i, x in enumerate(leaves) if isinstance(x, jax.Ref)]
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
    """Raises `ArgumentError` if a path is not one, as where it is passed after the tree."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{where}: the path is {describe_argument(path)}. The path comes first: `{call}`."
        )
