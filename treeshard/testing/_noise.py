"""How far results may differ by rounding alone: measured, leaf by leaf."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeshard._core.arrays import is_key
from treeshard.testing._layouts import Computation, Layout, Shards
from treeshard.training._pitfalls import equations

# A result is wrong if it is further from that of one device than this many times the noise.
LIMIT = 12.0
_SAMPLES = 3  # of each kind
# What changes the results by more than this many times the noise is no rounding.
_NOT_ROUNDING = 30.0
# By default, accelerators multiply float32 with fewer bits.
_MATMUL_EPS = {"gpu": 2.0**-11, "tpu": 2.0**-8}


class Tolerance:
    """The results of one device, and the noise of each.

    Attributes:
        reference: The results.
        noise: The largest difference that was measured, element by element; `None` for integers
            and keys, which must be equal.
        eps: The relative rounding error of the least precise dtype of the computation.
        notes: What was measured in another way than usual, in words.
        random: Whether the computation draws random numbers.
        relative_noise: How far rounding moves all results together, relative to their norm.
    """

    def __init__(self, computation: Computation, one: Layout) -> None:
        self.notes: list[str] = []
        self.reference = [full(x) for x in computation.run(one)]
        jaxpr = computation.trace(one)
        self.eps = _least_precision(jaxpr, one.mesh.devices.flat[0].platform)
        self.random = any(_draws(eqn) for eqn in equations(jaxpr))
        floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in self.reference]
        zeros = [np.zeros(x.shape) for x in self.reference]
        self.noise: list[np.ndarray | None] = [
            x if is_float else None for x, is_float in zip(zeros, floats, strict=True)
        ]
        # A rounding of what the leaf was before it changed.
        starts = [None if b is None else computation.start[b] for b in computation.bases]
        self._rounding = [
            np.zeros(()) if x is None or is_key(x) or not y else np.abs(x) * float(_eps(x.dtype))
            for x, y in zip(starts, floats, strict=True)
        ]
        random = np.random.default_rng(0)
        perturbed = [
            computation.run(one, start=[_perturbed(x, self.eps, random) for x in computation.start])
            for _ in range(_SAMPLES)
        ]
        self.relative_noise = max([self.eps, *map(self._add, map(_all_full, perturbed))])
        self._reorder(computation, one, random)
        self._more_precise(computation, one)

    def with_reference(self, reference: Sequence[np.ndarray]) -> "Tolerance":
        """The same noise around other results."""
        other = copy(self)
        other.reference = list(reference)
        return other

    def widened(self, others: Sequence[Sequence[np.ndarray]]) -> "Tolerance":
        """The noise, at least as large as the distances of other results."""
        other = copy(self)
        other.noise = [None if x is None else x.copy() for x in self.noise]
        for sample in others:
            other._add(sample)
        return other

    def of(self, i: int, index: Any) -> float:
        """The noise of a shard of a result, as a Euclidean norm."""
        noise = self.noise[i]
        if noise is None:
            return 0.0
        part, reference = noise[index], self.reference[i][index]
        # No shard has less than its share of the leaf's noise.
        share = norm(noise) * (part.size / max(noise.size, 1)) ** 0.5
        rounding = self._rounding[i]
        rounding = norm(rounding[index]) if rounding.shape else 0.0
        floor = self.eps * norm(reference) / 2 + rounding / 2
        return max(norm(part), share) + floor + float(np.finfo("float32").tiny)

    def is_hidden(self, i: int) -> bool:
        """Whether the noise of a result is so large that a factor of 2 would not be seen."""
        size = norm(self.reference[i])
        return 0 < size < 2 * LIMIT * norm(self.noise[i]) if self.noise[i] is not None else False

    def _add(self, sample: Sequence[np.ndarray], most: float = float("inf")) -> float:
        """Takes a sample as noise if it differs by no more than `most`; returns by how much."""
        rows = zip(sample, self.reference, self.noise, strict=True)
        moved = [(x.astype("float64") - y, y, z) for x, y, z in rows if z is not None]
        moved = [(np.where(np.isfinite(d), d, 0.0), y, z) for d, y, z in moved]
        total = norm([norm(y) for _, y, _ in moved])
        distance = norm([norm(d) for d, _, _ in moved]) / total if total else 0.0
        if distance <= most:
            for d, _, z in moved:
                np.maximum(z, np.abs(d), out=z)
        return distance

    def _reorder(self, computation: Computation, one: Layout, random: Any) -> None:
        """Takes samples with the rows of the batch in other orders."""
        dims = computation.row_dims(one)
        for _ in range(_SAMPLES if dims else 0):
            rows = random.permutation(next(computation.batch[i].shape[d] for i, d in dims.items()))
            batch = [
                np.take(x, rows, dims[i]) if i in dims else x
                for i, x in enumerate(computation.batch)
            ]
            sample = _all_full(computation.run(one, batch=batch))
            if self._add(sample, self._most()) > self._most():
                self.notes.append(
                    "the result depends on the order of the rows, so other orders are not noise"
                )
                return

    def _more_precise(self, computation: Computation, one: Layout) -> None:
        """Takes a sample in twice the precision, where that is possible."""
        start = [_wider(x) for x in computation.start]
        try:
            with jax.enable_x64(True):
                sample = _all_full(
                    computation.run(one, start, [_wider(x) for x in computation.batch])
                )
        except Exception:  # the code has dtypes written in, or the platform has no float64
            return
        self._add(sample, self._most())

    def _most(self) -> float:
        return _NOT_ROUNDING * self.relative_noise


def full(shards: Shards) -> np.ndarray:
    """The array that one device has."""
    [(_, x)] = shards.values()
    return x


def norm(x: Any) -> float:
    """The Euclidean norm, without overflow for the largest floats of 32 bits."""
    return float(np.linalg.norm(np.asarray(x, "float64").ravel()))


def _all_full(result: Sequence[Shards]) -> list[np.ndarray]:
    return [full(x) for x in result]


def _eps(dtype: Any) -> Any:
    return jnp.finfo(dtype).eps


def _perturbed(x: Any, eps: float, random: Any) -> Any:
    """The array with each number changed by as much as one rounding can."""
    if is_key(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wide = x.astype("float64") * (1 + eps * random.uniform(-1, 1, x.shape))
    return np.asarray(wide).astype(x.dtype)


def _wider(x: Any) -> Any:
    if is_key(x) or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x.astype("float64" if x.dtype.itemsize >= 4 else "float32")


def _least_precision(jaxpr: Any, platform: str) -> float:
    """The rounding error of the least precise float in a program."""
    matmul = _MATMUL_EPS.get(platform, 0.0)
    errors = [matmul]
    for eqn in equations(jaxpr):
        dtypes = [x.aval.dtype for x in eqn.outvars if hasattr(x.aval, "dtype")]
        errors += [float(_eps(x)) / 2 for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    return max(errors)


def _draws(eqn: Any) -> bool:
    return eqn.primitive.name in ("random_bits", "threefry2x32")
