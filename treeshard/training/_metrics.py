"""Metrics as sums and counts, which can be added over minibatches, steps and devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Named pairs (sum, count), which can be added up and then averaged. A pytree.

    `metrics + step_metrics` adds pair by pair. Adding `None` changes nothing, so a loop may
    start from `metrics = None`.

    Attributes:
        pairs: The sum and the count of each name: scalars, or arrays of equal shape.

    Examples:
        >>> first = Metrics({"loss": (jnp.float32(6), jnp.int32(2))})
        >>> (None + first + Metrics({"loss": (jnp.float32(3), jnp.int32(1))})).means()
        {'loss': 3.0}

    Source:
        The (sum, count) pairs of the UvA deep-learning tutorials.
    """

    pairs: dict[str, tuple[Any, Any]]

    def __add__(self, other: "Metrics | None") -> "Metrics":
        if other is None:
            return self
        if not isinstance(other, Metrics):
            return NotImplemented
        if set(self.pairs) != set(other.pairs):
            unpaired = sorted(set(self.pairs) ^ set(other.pairs))
            raise ValueError(
                f"metrics {unpaired} are on one side only. Both sides need the same names."
            )
        return jax.tree.map(jnp.add, self, other)

    __radd__ = __add__

    def reduce(self, axis_names: str | Sequence[str]) -> "Metrics":
        """Sums over the devices along some axes, inside `shard_map`; all then have the totals.

        Args:
            axis_names: The axis that shards the batch, or several.
        """
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        return jax.tree.map(lambda x: jax.lax.psum(jnp.asarray(x), names), self)

    def means(self) -> dict[str, float]:
        """Returns sum / count for each name, on the host; `nan` if the count is 0."""
        means: dict[str, float] = {}
        for name, (total, count) in self.pairs.items():
            count = float(count)
            means[name] = float(total) / count if count else float("nan")
        return means


def print_metrics(
    metrics: Metrics | Mapping[str, tuple[Any, Any]], title: str | None = None
) -> None:
    """Prints the mean of each metric, one per line.

    Args:
        metrics: `Metrics`, or a plain dict of (sum, count) pairs.
        title: A line to print above them.

    Examples:
        >>> print_metrics({"loss": (3.0, 2), "accuracy": (1, 2)}, "step 1")
        step 1
          loss      1.5000
          accuracy  0.5000

    Source:
        The function of this name in the UvA deep-learning tutorials.
    """
    means = (metrics if isinstance(metrics, Metrics) else Metrics(dict(metrics))).means()
    if title is not None:
        print(title)
    width = max(map(len, means), default=0)
    for name, mean in means.items():
        print(f"  {name:<{width}}  {mean:.4f}")
