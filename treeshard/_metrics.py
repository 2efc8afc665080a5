"""Metrics as sums and counts, which add up over minibatches, steps and devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Named pairs (sum, count): a pytree that adds up, whose means are what one reads.

    `metrics + step_metrics` adds pair by pair; with `None` in the place of either it is the
    other one, so a loop may start from `metrics = None`.

    Attributes:
        pairs: For every name its sum and its count: scalars, or arrays of equal shape.

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
            odd = sorted(set(self.pairs) ^ set(other.pairs))
            raise ValueError(f"metrics {odd} stand on one side only. Add metrics of equal names.")
        return jax.tree.map(jnp.add, self, other)

    __radd__ = __add__

    def reduce(self, axis_names: str | Sequence[str]) -> "Metrics":
        """Sums over the devices along some axes, inside `shard_map`: they then all hold the same.

        Args:
            axis_names: The axes that shard the batch, one or several.
        """
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        return jax.tree.map(lambda x: jax.lax.psum(jnp.asarray(x), names), self)

    def means(self) -> dict[str, float]:
        """Returns sum / count of every name, on the host; `nan` where nothing was counted."""
        means: dict[str, float] = {}
        for name, (total, count) in self.pairs.items():
            count = float(count)
            means[name] = float(total) / count if count else float("nan")
        return means


def print_metrics(
    metrics: Metrics | Mapping[str, tuple[Any, Any]], title: str | None = None
) -> None:
    """Prints the mean of every metric, a line each.

    Args:
        metrics: `Metrics`, or a plain dict of (sum, count) pairs.
        title: A line above them.

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
