"""What is known of traced arrays beyond their types, such as which leaf of a state one is.

A type does not say which dims of a shard are split, nor whether a gradient belongs to a shard. A
traced array has no place for notes, so they stand here, by identity, for as long as the array
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
    """Notes what an array is, or which other array has its values. Returns the array."""
    if x is origin:
        return x
    key = id(x)

    def forget(dead: weakref.ref[Any]) -> None:
        if key in _NOTES and _NOTES[key][0] is dead:
            del _NOTES[key]

    _NOTES[key] = weakref.ref(x, forget), origin
    return x


def origin_of(x: Any) -> Any:
    """What was noted of an array, or of the one that it is a derivative's view of; else the array
    that it has its values from, which may be itself."""
    while x is not None:
        reference, origin = _NOTES.get(id(x), (None, None))
        if reference is None or reference() is not x:
            origin = primal_of(x)
            if origin is None:
                return x
        x = origin
    return x
