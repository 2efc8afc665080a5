"""A bar for calls that take long."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def with_bar(
    items: Sequence[T], what: str, *, unit: str = "leaf", show: bool = True
) -> Iterator[T]:
    """The items, with a bar on the terminal that moves as they are taken.

    There is none without `show`, none on processes other than 0, and none for no items.

    Args:
        items: What is gone through.
        what: The function that was called, which the bar and the message name.
        unit: What one item is.
        show: The function's own `progress`.

    Raises:
        ImportError: If a bar is asked for and `tqdm` is not installed; on every process.
    """
    if not show:
        return iter(items)
    tqdm = _tqdm(what)
    shown = items and jax.process_index() == 0
    return iter(tqdm(items, desc=what, unit=unit) if shown else items)


def _tqdm(what: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            f"{what}(progress=True) needs tqdm. Install it with `pip install 'treeshard[show]'`."
        ) from None
    return tqdm
