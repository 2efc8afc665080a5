"""Progress bars."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax

T = TypeVar("T")


def with_bar(
    items: Sequence[T], what: str, *, unit: str = "leaf", show: bool = True
) -> Iterator[T]:
    """Iterates over `items` with a progress bar on the terminal of process 0.

    Args:
        items: The items. Without items there is no bar.
        what: The public function, which the bar and the error message name.
        unit: What one item is.
        show: Whether to show a bar: the `progress` argument of the public function.

    Raises:
        ImportError: If `show` is true and `tqdm` is not installed; on every process.
    """
    if not show:
        return iter(items)
    try:
        from tqdm import tqdm
    except ImportError:
        raise ImportError(
            f"{what}(progress=True) needs tqdm. Install it with `pip install 'treeshard[show]'`."
        ) from None
    shown = items and jax.process_index() == 0
    return iter(tqdm(items, desc=what, unit=unit) if shown else items)
