"""Where an update by hand takes a device's shard for the whole leaf, found by running it twice.

Muon, Shampoo, Adafactor and their like need a whole matrix. What they make of a shard follows from
no right result by a formula of ours: each has variants. So the traced update runs on one device and
on all of them, and its values are compared one by one. Where the operands of an operation are the
right shards, its result is wrong, and it does not communicate, the shard alone is to blame.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treeshard._trace.uses import bodies
from treeshard.testing._computations import Computation
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import norm
from treeshard.training._pitfalls import equations, user_line

Index = tuple[slice, ...]

# Of the norm of a value: rounding moves it less than the first, and a fault more than the second.
_SAME, _OTHER = 1e-4, 1e-3
# Operations that know of other devices.
_COMMUNICATE = (
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "axis_index"),
    *("pmax", "pmin", "ppermute", "psum", "psum_invariant", "ragged_all_to_all", "reduce_scatter"),
    "unreduced_psum",
)


class Culprit(NamedTuple):
    """The operation of an update that has a shard where it needs the whole leaf.

    Attributes:
        name: Of the operation, as JAX writes it: `reduce_sum`, `dot_general`.
        line: The line of code that it comes from, or an empty text.
    """

    name: str
    line: str


class OwnShards:
    """The values of a step by hand on one device, and on those of a layout."""

    def __init__(self, computation: Computation, layout: Layout) -> None:
        self.computation, self.layout = computation.narrow, layout
        self.body, self.values = self._run(layout)
        self.whole_body, self.whole = self._run(layout.alone())
        specs = [leaf.given for leaf in layout.plan.leaves]
        shapes = [leaf.shape for leaf in layout.plan.leaves]
        self.indices = [_indices(layout.mesh, *pair) for pair in zip(specs, shapes, strict=True)]

    def _run(self, layout: Layout) -> tuple[Any, dict[Var, np.ndarray]]:
        """The program that each device runs, and its values, with a row for each device."""
        computation = self.computation
        closed = computation.trace(layout)
        step, path = _shard_map(closed.jaxpr, [])
        given = [*computation.start, *computation.batch]
        if step is None or len(step.invars) != len(given) or not _passes_all(path, step):
            raise LookupError("the step has another form")
        body = step.params["jaxpr"]
        variables = [x for x in _variables(body) if _is_numeric(x)]
        debug_info = body.debug_info._replace(result_paths=None)
        shown = ClosedJaxpr(body.replace(outvars=variables, debug_info=debug_info), [])

        def run(*arguments: Any) -> list[Any]:
            return [x[None] for x in jaxpr_as_fun(shown)(*arguments)]

        rows = PartitionSpec(layout.mesh.axis_names)
        mapped = jax.shard_map(
            run, mesh=layout.mesh, in_specs=step.params["in_specs"], out_specs=rows
        )
        with jax.set_mesh(layout.mesh):
            results = jax.jit(mapped)(*given)
        return body, dict(zip(variables, map(np.asarray, results), strict=True))

    def culprit(self, i: int) -> Culprit | None:
        """What has a shard where it needs the whole, on the way to the new value of a leaf."""
        eqns, whole = self.body.eqns, self.whole_body.eqns
        if [x.primitive for x in eqns] != [x.primitive for x in whole]:
            return None
        made = {x: n for n, eqn in enumerate(eqns) for x in eqn.outvars}
        variable, other = self.body.outvars[i], self.whole_body.outvars[i]
        while self._is_right(variable, other) is False and variable in made:
            eqn, of_whole = eqns[made[variable]], whole[made[variable]]
            operands = list(zip(eqn.invars, of_whole.invars, strict=True))
            are_right = [self._is_right(x, y) for x, y in operands]
            if None in are_right:
                return None
            if all(are_right):
                return _culprit(eqn, operands)
            variable, other = operands[are_right.index(False)]
        return None

    def _is_right(self, variable: Any, other: Any) -> bool | None:
        """Whether each device has its shard of a value, or all of it; `None` if it is not known."""
        if isinstance(variable, Literal) or isinstance(other, Literal):
            both = isinstance(variable, Literal) and isinstance(other, Literal)
            return bool(np.all(variable.val == other.val)) if both else None
        if variable not in self.values or other not in self.whole:
            # Of the arguments of the step, the state is right, and each device has its own rows.
            return True if variable in self.body.invars[: len(self.indices)] else None
        # The dots keep a scalar an array.
        whole, rows = self.whole[other][0, ...], self.values[variable]
        distances = [
            self._distance(rows[n, ...], whole, device)
            for n, device in enumerate(self.layout.mesh.devices.flat)
        ]
        if max(distances) <= _SAME:
            return True
        return False if max(distances) > _OTHER else None

    def _distance(self, x: np.ndarray, whole: np.ndarray, device: Any) -> float:
        """How far a value is from the nearest of all that may be its right one on a device."""
        found = [whole] if whole.shape == x.shape else list(self._shards(x, whole, device))
        return min((_relative(x, right) for right in found), default=np.inf)

    def _shards(self, x: np.ndarray, whole: np.ndarray, device: Any) -> Iterator[np.ndarray]:
        """The parts of a value that a device may have: as of a leaf, of one that is transposed, or
        of one that has lost a dim."""
        for index in {str(of[device]): of[device] for of in self.indices}.values():
            for dims in permutations(index, whole.ndim):
                part = whole[dims]
                if part.shape == x.shape:
                    yield part


def _culprit(eqn: Any, operands: Sequence[tuple[Any, Any]]) -> Culprit | None:
    # `jvp()` and `transpose(jvp())`: in a loss, devices differ by their rows too.
    if "jvp(" in str(eqn.source_info.name_stack):
        return None
    inside = (x.primitive.name for body in bodies(eqn) for x in equations(body))
    names = {eqn.primitive.name, *inside}
    has_shard = any(x.aval.shape != y.aval.shape for x, y in operands)
    if not has_shard or not names.isdisjoint(_COMMUNICATE):
        return None
    return Culprit(eqn.primitive.name, user_line(eqn))


def _relative(x: np.ndarray, right: np.ndarray) -> float:
    difference = x.astype("float64") - right.astype("float64")
    far, size = norm(difference), norm(right.astype("float64"))
    return far / size if size else (np.inf if far else 0.0)


def _indices(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int]) -> Mapping[Any, Index]:
    return NamedSharding(mesh, spec).devices_indices_map(tuple(shape))


def _is_numeric(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended)


def _variables(body: Any) -> list[Var]:
    """What the equations of a program define and something may read."""
    return [x for eqn in body.eqns for x in eqn.outvars if type(x).__name__ != "DropVar"]


def _shard_map(jaxpr: Any, path: list[Any]) -> tuple[Any, list[Any]]:
    """The first `shard_map` of a program, and the calls that it stands in."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn, path
        for inner in (getattr(x, "jaxpr", x) for x in eqn.params.values()):
            if hasattr(inner, "eqns"):
                found, calls = _shard_map(inner, [*path, eqn])
                if found is not None:
                    return found, calls
    return None, path


def _passes_all(path: Sequence[Any], step: Any) -> bool:
    """Whether calls pass all of their arguments on, in order, to the `shard_map` inside."""
    shapes = [x.aval.shape for x in step.invars]
    return all([x.aval.shape for x in call.invars] == shapes for call in path)
