"""What a regular expression depends on, read from its parse tree.

A model repeats its layers, so most paths differ only in digits. A pattern that treats all
ten digits alike decides them together; this says which patterns do.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

_ZEROS = str.maketrans("123456789", "0" * 9)
_DIGITS = range(ord("0"), ord("9") + 1)

_END: list[tuple[str, Any]] = [("END", None)]

has_digit = re.compile("[0-9]").search


def zeroed(text: str) -> str:
    """`text` with every digit replaced by 0, one for one, so that its length stays."""
    return text.translate(_ZEROS)


class Reading(NamedTuple):
    """What is known of a pattern without running it.

    Attributes:
        tells_digits_apart: Whether `search(path)` may differ from `search(zeroed(path))`.
        tells_indices_apart: Whether it may differ where other digits stand for the keys of
            the path that are numbers.
        needs: At least one of these strings occurs in every text that matches.
    """

    tells_digits_apart: bool
    tells_indices_apart: bool
    needs: tuple[str, ...]


@lru_cache(maxsize=4096)
def read_pattern(pattern: re.Pattern[str]) -> Reading:
    """Reads a compiled pattern; of one that it does not understand it claims nothing."""
    try:
        # The text alone is not enough: `(?x)#[` and `[+-0-9]` mean other than they seem.
        tree: Any = re._parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)  # pyright: ignore
        same = _digits_alike(tree)
        same_indices = same or _digits_alike(tree, only_in_indices=True)
        # Ignoring case, the letters of the pattern are not the letters of the text.
        needs = ("",) if pattern.flags & re.IGNORECASE else _needed(tree)
        return Reading(not same, not same_indices, needs)
    except Exception:  # a private module of Python's: whatever it does, be slow and right
        return Reading(True, True, ("",))


def _digits_alike(tree: Any, only_in_indices: bool = False) -> bool:
    """Whether nothing in a parse tree can tell one digit from another.

    Only what is known to be harmless passes. References to groups are not: `(.)\\1`.
    With `only_in_indices`, a digit beside a letter passes, as in `w1`: among the digits of a
    key that is a number, what stands beside one is a digit, a slash, or nothing.
    """
    items = [(str(op), arg) for op, arg in tree]
    for place, (op, arg) in enumerate(items):
        match op:
            case "LITERAL" | "NOT_LITERAL":
                alike = arg not in _DIGITS
            case "RANGE":
                low, high = arg
                alike = sum(low <= digit <= high for digit in _DIGITS) in (0, 10)
            case "ANY" | "AT" | "CATEGORY" | "NEGATE":
                alike = True
            case "IN":
                alike = _digits_alike(arg)
            case "ATOMIC_GROUP":
                alike = _digits_alike(arg, only_in_indices)
            case "BRANCH":
                alike = all(_digits_alike(branch, only_in_indices) for branch in arg[1])
            case "SUBPATTERN" | "ASSERT" | "ASSERT_NOT" | "MAX_REPEAT" | "MIN_REPEAT":
                alike = _digits_alike(arg[-1], only_in_indices)
            case "POSSESSIVE_REPEAT":
                alike = _digits_alike(arg[-1], only_in_indices)
            case _:
                alike = False
        beside = items[max(place - 1, 0) : place] + items[place + 1 : place + 2]
        guarded = op in ("LITERAL", "NOT_LITERAL", "IN") and any(map(_is_letter, beside))
        if not alike and not (only_in_indices and guarded):
            return False
    return True


def _is_letter(item: tuple[str, Any]) -> bool:
    """Whether an item of a parse tree is one character, and neither digit nor slash."""
    return item[0] == "LITERAL" and item[1] not in _DIGITS and item[1] != ord("/")


def _needed(tree: Any) -> tuple[str, ...]:
    """Strings of which every match holds at least one; `("",)` if none is known."""
    best: tuple[str, ...] = ("",)
    run = ""
    for op, arg in chain(_in_line(tree), _END):
        if op == "LITERAL":
            run += chr(arg)
        elif op not in ("AT", "ASSERT", "ASSERT_NOT"):  # they consume nothing
            found: list[tuple[str, ...]] = [(run,)]
            if op == "BRANCH":
                found.append(tuple(text for branch in arg[1] for text in _needed(branch)))
            elif op in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and arg[0] > 0:
                found.append(_needed(arg[2]))
            best = max(best, *found, key=lambda texts: min(map(len, texts)))
            run = ""
    return best


def _in_line(tree: Any) -> Iterator[tuple[str, Any]]:
    """The tree's items, with those of plain groups in place of the groups."""
    for op, arg in tree:
        if str(op) == "SUBPATTERN" and not arg[1] & re.IGNORECASE:
            yield from _in_line(arg[-1])
        elif str(op) == "ATOMIC_GROUP":
            yield from _in_line(arg)
        else:
            yield str(op), arg
