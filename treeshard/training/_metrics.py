"""Metrics as sums and counts, which can be added over minibatches, steps and devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import all_leaves, tree_leaves, tree_map

from treeshard._core.arguments import describe_argument
from treeshard._core.paths import PyTree, leaf_paths, path_under
from treeshard.errors import LeafError, listed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Named pairs (sum, count), which can be added up and then averaged. A pytree.

    `metrics + step_metrics` adds pair by pair. `None` counts as empty, so a loop may start from
    `metrics = None`. Sums have at least 32 bits: bfloat16 is added up in float32, and `bool` and
    `uint8` in int32.

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
        return jax.tree.map(lambda x, y: jnp.add(widen(x), widen(y)), self, other)

    __radd__ = __add__

    def reduce(self, axis_names: str | Sequence[str]) -> "Metrics":
        """Sums over the devices along some axes, inside `shard_map`; all then have the totals.

        Args:
            axis_names: The axis that shards the batch, or several.
        """
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        return jax.tree.map(lambda x: jax.lax.psum(jnp.asarray(widen(x)), names), self)

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


# ------------------------------------------------------------------ what is added up, and averaged


def widen(x: Any) -> Any:
    """A number to be added up. It has at least 32 bits: in bfloat16, `256 + 1 == 256`."""
    dtype = jnp.result_type(x)
    if dtype.itemsize >= 4:
        return x
    return jnp.asarray(x, "float32" if jnp.issubdtype(dtype, jnp.floating) else "int32")


def map_metrics(
    add: Callable[[Any], Any], average: Callable[[Any], Any], metrics: PyTree
) -> PyTree:
    """Applies `add` to the arrays of `Metrics` and of pairs (sum, count), `average` to the others.

    Pairs are values of a dict, as `Metrics.pairs` has them: a tuple of two, the second an integer.
    """

    def of_node(x: Any) -> Any:
        if isinstance(x, Metrics):
            return tree_map(add, x)
        # Only plain dicts: a subclass may use its values in other ways.
        if type(x) is not dict:
            return average(x)
        return {
            name: tree_map(add, value) if _is_pair(value) else map_metrics(add, average, value)
            for name, value in x.items()
        }

    return tree_map(of_node, metrics, is_leaf=lambda x: type(x) is dict or isinstance(x, Metrics))


def check_metrics(metrics: PyTree, where: str) -> None:
    """Raises `LeafError` if leaves can be neither added up nor averaged."""
    rest = map_metrics(lambda x: None, lambda x: x, metrics)
    facts = [
        f"{path_under('metrics', path)}: {describe_argument(x)} has no mean."
        for path, x in zip(leaf_paths(rest), tree_leaves(rest), strict=True)
        if not _has_dtype(x, jnp.inexact)
    ]
    if facts:
        raise LeafError(
            f"{where}: {listed('metrics can be neither averaged nor added up:', facts)} Return it"
            " as a floating-point number to average it, or in"
            " `training.Metrics({name: (sum, count)})` to add it up."
        )


def _is_pair(x: Any) -> bool:
    return type(x) is tuple and len(x) == 2 and _has_dtype(x[1], jnp.integer)


def _has_dtype(x: Any, kind: Any) -> bool:
    # Texts would be read as the names of dtypes.
    return not isinstance(x, str) and all_leaves([x]) and jnp.issubdtype(jnp.result_type(x), kind)
