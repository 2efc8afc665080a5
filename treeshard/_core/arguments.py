"""Arguments of another kind than a function takes, such as two in the wrong order.

JAX calls anything a leaf, and a tree of no arrays is done at once. What is surely a mistake is an
error here; an empty container is not.
"""

import os
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jax.tree_util import all_leaves

from treeshard._core.arrays import array_text, has_shape
from treeshard.errors import ArgumentError, short

_VALUES = (bool, int, float, complex, str, bytes)


def described(x: Any) -> str:
    """What an argument is, for messages: `the class Model`, `a Mesh`, `float32[8,4]`."""
    if has_shape(x):
        return array_text(x)
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if callable(x) and hasattr(x, "__name__"):
        return f"the function {x.__name__}"
    if isinstance(x, _VALUES):
        return f"the {type(x).__name__} {short(repr(x))}"
    if isinstance(x, AbstractMesh | Mesh):
        return "a mesh"
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def check_tree(tree: Any, where: str, call: str, name: str = "the tree") -> None:
    """Raises `ArgumentError` if a whole tree is a class, a function, or another opaque object.

    Args:
        tree: What is passed as a tree.
        where: The function, for the message.
        call: How it is called.
        name: What the message calls the tree.
    """
    if not all_leaves([tree]) or isinstance(tree, _VALUES) or hasattr(tree, "shape"):
        return
    if callable(tree):
        advice = "Call it first, and pass the arrays that it makes"
    else:
        advice = "Pass its arrays, or register its class as a pytree"
    what = f"{name} is {described(tree)}, which is not a pytree of arrays"
    raise ArgumentError(f"{where}: {what}. {advice}: `{call}`.")


def check_path(path: Any, where: str, call: str) -> None:
    """Raises `ArgumentError` if a path is not one, as where it is passed after the tree."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(
            f"{where}: the path is {described(path)}. The path comes first: `{call}`."
        )
