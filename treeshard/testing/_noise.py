"""How far results may differ by rounding alone: measured, leaf by leaf."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeshard._core.arrays import is_array, is_key
from treeshard.testing._computations import Computation
from treeshard.testing._layouts import Layout
from treeshard.training._pitfalls import equations

# A result is wrong if it is further from that of one device than this many times the noise.
LIMIT = 12.0
_SAMPLES = 3  # of each kind
# What changes the results by more than this many times the noise is not rounding.
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
    """

    def __init__(self, computation: Computation, one: Layout) -> None:
        self.notes: list[str] = []
        self.reference = computation.alone(one)
        eqns = list(equations(computation.trace(one)))
        self.eps = _least_precision(eqns, one.mesh.devices.flat[0].platform)
        self.random = any(eqn.primitive.name in ("random_bits", "threefry2x32") for eqn in eqns)
        self.noise = [np.zeros(x.shape) if _is_float(x) else None for x in self.reference]
        # A rounding of what the leaf was before it changed.
        starts: list[Any] = [None if b is None else computation.start[b] for b in computation.bases]
        self._rounding = [
            np.abs(x) * float(jnp.finfo(x.dtype).eps) if _is_float(x) else np.zeros(())
            for x in starts
        ]
        random = np.random.default_rng(0)
        moved = [self.eps]
        for _ in range(_SAMPLES):
            start = [_perturbed(x, self.eps, random) for x in computation.start]
            moved.append(self._add(computation.alone(one, start)))
        most = _NOT_ROUNDING * max(moved)
        self._reorder(computation, one, random, most)
        self._more_precise(computation, one, most)

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

    def of(self, i: int, index: Any = ...) -> float:
        """The noise of a shard of a result, as a Euclidean norm."""
        noise = self.noise[i]
        if noise is None:
            return 1e-30
        part, rounding = noise[index], self._rounding[i]
        # No shard has less than its share of the leaf's noise.
        share = norm(noise) * (part.size / max(noise.size, 1)) ** 0.5
        floor = self.eps * norm(_finite(self.reference[i][index]))
        floor += norm(rounding[index]) if rounding.shape else 0.0
        return max(norm(part), share) + floor / 2 + float(np.finfo("float32").tiny)

    def is_hidden(self, i: int) -> bool:
        """Whether the noise of a result is so large that a factor of 2 would not be seen."""
        noise = self.noise[i]
        return noise is not None and 0 < norm(self.reference[i]) < 2 * LIMIT * norm(noise)

    def _add(self, sample: Sequence[np.ndarray], most: float = float("inf")) -> float:
        """Takes a sample as noise, if the results together differ by no more than `most`.

        Returns by how much they do, relative to their norm.
        """
        rows = zip(sample, self.reference, self.noise, strict=True)
        moved = [(_finite(x.astype("float64") - y), y, z) for x, y, z in rows if z is not None]
        total = norm([norm(_finite(y)) for _, y, _ in moved])
        distance = norm([norm(d) for d, _, _ in moved]) / total if total else 0.0
        if distance <= most:
            for d, _, z in moved:
                np.maximum(z, np.abs(d), out=z)
        return distance

    def _reorder(self, computation: Computation, one: Layout, random: Any, most: float) -> None:
        """Takes samples with the rows of the batch in other orders."""
        dims = computation.row_dims(one)
        for _ in range(_SAMPLES if dims else 0):
            rows = random.permutation(next(computation.batch[i].shape[d] for i, d in dims.items()))
            batch = [
                np.take(x, rows, dims[i]) if i in dims else x
                for i, x in enumerate(computation.batch)
            ]
            if self._add(computation.alone(one, batch=batch), most) > most:
                self.notes.append(
                    "the result depends on the order of the rows, so other orders are not noise"
                )
                return

    def _more_precise(self, computation: Computation, one: Layout, most: float) -> None:
        """Takes a sample in twice the precision, where that is possible."""
        start, batch = ([_wider(x) for x in xs] for xs in (computation.start, computation.batch))
        try:
            with jax.enable_x64(True):
                sample = computation.alone(one, start, batch)
        except Exception:  # the code has dtypes written in, or the platform has no float64
            return
        self._add(sample, most)


def norm(x: Any) -> float:
    """The Euclidean norm, without overflow for the largest floats of 32 bits."""
    return float(np.linalg.norm(np.asarray(x, "float64").ravel()))


def _finite(x: Any) -> Any:
    """The array with 0 where it is not finite."""
    return np.where(np.isfinite(x), x, 0)


def _is_float(x: Any) -> bool:
    return is_array(x) and not is_key(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _perturbed(x: Any, eps: float, random: Any) -> Any:
    """The array with each number changed by as much as one rounding can."""
    if not _is_float(x):
        return x
    wide = x.astype("float64") * (1 + eps * random.uniform(-1, 1, x.shape))
    return np.asarray(wide).astype(x.dtype)


def _wider(x: Any) -> Any:
    return x.astype("float64" if x.dtype.itemsize >= 4 else "float32") if _is_float(x) else x


def _least_precision(eqns: Sequence[Any], platform: str) -> float:
    """The rounding error of the least precise float in a program."""
    dtypes = {x.aval.dtype for eqn in eqns for x in eqn.outvars if hasattr(x.aval, "dtype")}
    errors = [float(jnp.finfo(x).eps) / 2 for x in dtypes if jnp.issubdtype(x, jnp.floating)]
    return max([_MATMUL_EPS.get(platform, 0.0), *errors])
