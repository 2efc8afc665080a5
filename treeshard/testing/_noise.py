"""Measures how far each leaf may differ by rounding alone.

A fixed tolerance, as in `numpy.testing.assert_allclose`, does not fit all leaves: a gradient may be
1e-9 or 100, and a sum over many rows in bfloat16 may have two right digits. The computation
therefore runs again on one device, in ways that change only its rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeshard._core.jaxprs import equations
from treeshard.testing._computations import Computation, attempt
from treeshard.testing._layouts import Layout
from treeshard.testing._values import Results, Shards
from treeshard.testing._widening import Widening

# A result is wrong if it differs from the result on one device by more than this many times the
# noise.
LIMIT = 12.0
# A result is not compared if only relative errors above this would be seen.
BLIND = 0.5
# The numbers of perturbed and of reordered batches. In each, a number that is zero except for
# rounding keeps its sign with a chance of one half.
_PERTURBED, _REORDERED = 6, 3
# A change of the results by more than this many times the noise is not rounding.
_NOT_ROUNDING = 30.0
# By default accelerators multiply float32 with fewer bits: GPUs as TF32, with 10 of 23 bits of the
# mantissa, TPUs as bfloat16, with 7.
MATMUL_EPS: Mapping[str, float] = {"gpu": 2.0**-11, "tpu": 2.0**-8}
# The primitives that draw random numbers. `jax.random` binds the first, and code that calls its
# block cipher directly binds the second.
_DRAWS = ("random_bits", "threefry2x32")

_BY_ORDER = "the result depends on the order of the rows, so other orders are not noise"


class Tolerance:
    """The results of one device, and the noise of each.

    The noise of a result is the largest change, element by element, of three kinds of samples:

    1. inputs perturbed by as much as one rounding can change them;
    2. the rows of the batch in other orders, unless the result depends on their order;
    3. twice the precision, if the platform and the program support it.
    """

    def __init__(self, computation: Computation, layout: Layout, exact: Results | None) -> None:
        """`exact` are the results in twice the precision, if there are any."""
        self.computation = computation
        # How the measurement differs from the usual one, in words.
        self.notes: list[str] = []
        self.reference = computation.alone(layout)
        eqns = list(equations(computation.trace(layout)))
        # The relative rounding error of the least precise dtype.
        self.eps = _find_precision(computation, eqns, layout.mesh.devices.flat[0].platform)
        # Whether the computation draws random numbers.
        self.random = any(eqn.primitive.name in _DRAWS for eqn in eqns)
        # The noise by the index of the result. Integers and keys must be equal, so they have none.
        self.noise = {i: np.zeros(x.shape) for i, x in enumerate(self.reference) if _is_float(x)}
        # The change of a leaf is rounded like the leaf, which may be much larger.
        bases = ((i, output.base) for i, output in enumerate(computation.outputs))
        starts = ((i, computation.start[base]) for i, base in bases if base is not None)
        self._rounding = {i: _rounding_of(x) for i, x in starts if _is_float(x)}
        # A cache of `of`, until the next sample: all layouts ask for the same shards.
        self._of: dict[tuple[int, str], float] = {}
        random = np.random.default_rng(0)
        self._add_perturbed(layout, random)
        # If rounding changes a result by its size, as with an optimizer that takes signs, a
        # comparison shows no error.
        self._steady = [i for i in self.noise if self.visible(i) <= BLIND] or [*self.noise]
        most = _NOT_ROUNDING * max(self.eps, self._relative(self.noise))
        for batch in _reorder_rows(computation, layout, random):
            moved = self._measure(computation.alone(layout, batch=batch))
            if self._relative(moved) > most:
                self.notes = [_BY_ORDER]
            else:
                self._add(moved)
        if exact is not None and self._relative(moved := self._measure(exact)) <= most:
            self._add(moved)

    def _add_perturbed(self, layout: Layout, random: np.random.Generator) -> None:
        computation = self.computation
        for _ in range(_PERTURBED):
            start = [_perturb(x, self.eps, random) for x in computation.start]
            # A sum that is zero except for rounding depends only on how its terms are rounded.
            batch = [
                x if _has_integers(x) else _perturb(x, self.eps, random) for x in computation.batch
            ]
            self._add(self._measure(computation.alone(layout, start, batch)))

    def _measure(self, sample: Results) -> dict[int, np.ndarray]:
        """How far each number of a sample is from the reference."""
        pairs = ((i, sample[i].astype("float64") - self.reference[i]) for i in self.noise)
        # NumPy makes a scalar of an array without dims.
        return {i: np.asarray(np.abs(finite(x))) for i, x in pairs}

    def _add(self, moved: Mapping[int, np.ndarray]) -> None:
        """Adds a sample to the noise."""
        self._of.clear()
        for i, x in moved.items():
            self.noise[i] = np.asarray(np.maximum(self.noise[i], x))

    def _relative(self, moved: Mapping[int, np.ndarray]) -> float:
        """The norm of the changes of all steady results, relative to the norm of the results."""
        total = norm([norm(finite(self.reference[i])) for i in self._steady])
        far = norm([norm(moved[i]) for i in self._steady])
        return far / total if total else 0.0

    def with_reference(self, reference: Sequence[np.ndarray]) -> "Tolerance":
        """The same noise around other results."""
        other = copy(self)
        other.reference, other._of = list(reference), {}
        return other

    def of(self, i: int, index: Any = ...) -> float:
        """The noise of a shard of a result, as a Euclidean norm."""
        key = i, str(index)  # Python 3.11 has no hash of slices
        if key not in self._of:
            self._of[key] = self._find_noise(i, index)
        return self._of[key]

    def _find_noise(self, i: int, index: Any) -> float:
        if i not in self.noise:
            return 1e-30
        noise = self.noise[i]
        part = noise[index]
        # No shard has less than its share of the leaf's noise.
        share = norm(noise) * (part.size / max(noise.size, 1)) ** 0.5
        floor = self.eps * norm(finite(self.reference[i][index]))
        if i in self._rounding:
            floor += norm(self._rounding[i][index])
        return max(norm(part), share) + floor / 2 + float(np.finfo("float32").tiny)

    def visible(self, i: int, index: Any = ...) -> float:
        """The smallest relative error of a shard of a result that is larger than its noise."""
        if i not in self.noise:  # which must be equal
            return 0.0
        size = norm(finite(self.reference[i][index]))
        return LIMIT * self.of(i, index) / size if size else float("inf")

    def errors(
        self, shards: Shards, i: int, predicted: Mapping[Any, np.ndarray] | None = None
    ) -> list[float]:
        """The difference of each device's shard from a full result, in units of its noise.

        `predicted` has a full result for each device; by default it is the reference.
        """
        predicted = predicted or dict.fromkeys(shards, self.reference[i])
        return [
            distance(x, predicted[device][index]) / self.of(i, index)
            for device, (index, x) in shards.items()
        ]

    def is_met(self, shards: Shards, i: int) -> bool:
        """Whether all shards equal the result of one device, within rounding."""
        return max(self.errors(shards, i)) <= LIMIT

    def find_factor(self, shards: Shards, i: int) -> float | None:
        """The factor, if all devices have the same multiple of the right result.

        Any number is a multiple of any other, so a result needs several numbers above the noise.
        """
        reference = self.reference[i].astype("float64")
        sizes = np.sort(np.abs(reference).ravel())
        if sizes.size < 2 or not np.isfinite(sizes).all() or sizes[-2] <= LIMIT * self.of(i):
            return None
        x = np.concatenate([np.ravel(x) for _, x in shards.values()]).astype("float64")
        y = np.concatenate([np.ravel(reference[index]) for index, _ in shards.values()])
        if x.shape != y.shape or not np.isfinite(x).all():
            return None
        with np.errstate(all="ignore"):  # an overflow is not a multiple
            factor = float(np.vdot(y, x)) / float(np.vdot(y, y))
            rest = norm(x - factor * y) / (norm(x) or 1.0)
            errors = self.errors(shards, i, dict.fromkeys(shards, factor * reference))
        # The factor scales the noise too. Noise as large as the values would allow any factor.
        if rest < 0.3 and max(errors) <= 2 * LIMIT * max(abs(factor), 1):
            return factor
        return None


def _reorder_rows(
    computation: Computation, layout: Layout, random: np.random.Generator
) -> Iterator[list[Any]]:
    """Batches with their rows in other orders."""
    dims = computation.row_dims(layout)
    for _ in range(_REORDERED if dims else 0):
        batch = list(computation.batch)
        [rows] = {batch[i].shape[dim] for i, dim in dims.items()}
        order = random.permutation(rows)
        for i, dim in dims.items():
            batch[i] = np.take(batch[i], order, dim)
        yield batch


# ------------------------------------------------------------------ numbers


def norm(x: Any) -> float:
    """The Euclidean norm, without overflow for the largest floats of 32 bits."""
    return float(np.linalg.norm(np.asarray(x, "float64").ravel()))


def distance(x: Any, reference: Any) -> float:
    """The norm of a difference; numbers that are not finite in both are equal."""
    x, reference = np.asarray(x, "float64"), np.asarray(reference, "float64")
    if x.shape != reference.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        same = (x == reference) | (np.isnan(x) & np.isnan(reference))
        far = norm(np.where(same, 0.0, x - reference))
    return far if np.isfinite(far) else float("inf")


def finite(x: Any) -> Any:
    """The array, with 0 for numbers that are not finite."""
    return np.where(np.isfinite(x), x, 0)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _has_integers(x: Any) -> bool:
    """Whether an array has only integral numbers, such as a mask or labels, without rounding."""
    return not _is_float(x) or bool((x == np.trunc(x.astype("float64"))).all())


def _rounding_of(x: Any) -> np.ndarray:
    """By how much one rounding can change each number."""
    # NumPy makes a scalar of an array without dims.
    return np.asarray(np.abs(x) * float(jnp.finfo(x.dtype).eps))


def _perturb(x: Any, eps: float, random: np.random.Generator) -> Any:
    """The array with each number changed by as much as one rounding can."""
    if not _is_float(x):
        return x
    wide = x.astype("float64") * (1 + eps * random.uniform(-1, 1, x.shape))
    return np.asarray(wide).astype(x.dtype)


# ------------------------------------------------------------------ dtypes


def _find_precision(computation: Computation, eqns: Sequence[Any], platform: str) -> float:
    """The rounding error of the least precise float in a program."""
    widening = computation.widening
    dtypes = float_dtypes(eqns)
    if widening is not None and not widening.kept:
        dtypes = {np.dtype(widening.dtype_of(x)) for x in dtypes} | {widening.dtype}
        platform = ""  # products are in full precision
    errors = [float(jnp.finfo(x).eps) / 2 for x in dtypes]
    return max([MATMUL_EPS.get(platform, 0.0), *errors])


def run_in_float64(computation: Computation, layout: Layout) -> Results | None:
    """The results of one device in twice the precision; `None` if that is not possible."""
    if widest_float() == "float64":
        return None
    results, _ = attempt(lambda: computation.widen(Widening("float64")).alone(layout))
    return results


def widest_float() -> Any:
    """float64 under x64, or float32."""
    return jax.dtypes.canonicalize_dtype("float64")


def float_dtypes(eqns: Sequence[Any]) -> set[Any]:
    """The dtypes of the floats that equations make."""
    dtypes = {x.aval.dtype for eqn in eqns for x in eqn.outvars if hasattr(x.aval, "dtype")}
    return {x for x in dtypes if jnp.issubdtype(x, jnp.floating)}
