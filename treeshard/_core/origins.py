"""Notes on traced arrays, such as the leaf of a state that an array is.

A type shows neither which dims of a shard are split, nor whether a gradient belongs to a shard. A
traced array cannot hold notes, so this module keeps them by identity for as long as the array
lives. Code that JAX traces separately, such as the body of a scan, gets other arrays, without
notes.
"""

import weakref
from typing import Any, TypeVar

from treeshard._core.jax_private import primal_of

A = TypeVar("A")

# Arrays compare by value and have no hash, so they are found by their `id`. The reference tells
# an array from a later one at the same address, and its callback removes the note.
_NOTES: dict[int, tuple[weakref.ref[Any], Any]] = {}


def note_origin(x: A, origin: Any) -> A:
    """Notes the origin of an array, or the other array that has its values. Returns the array."""
    if x is origin:
        return x
    key = id(x)

    def forget(dead: weakref.ref[Any]) -> None:
        if key in _NOTES and _NOTES[key][0] is dead:
            del _NOTES[key]

    _NOTES[key] = weakref.ref(x, forget), origin
    return x


def origin_of(x: Any) -> Any:
    """The origin of an array, or of the array that it stands for in a derivative. Without a note,
    the array that has its values, which may be itself."""
    while x is not None:
        reference, origin = _NOTES.get(id(x), (None, None))
        if reference is None or reference() is not x:
            origin = primal_of(x)
            if origin is None:
                return x
        x = origin
    return x
