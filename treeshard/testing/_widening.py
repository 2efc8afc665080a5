"""Rewrites a traced program with wider floats, which show errors that its own dtypes round away.

bfloat16 keeps 8 bits of a number, so an error of 1% in a gradient is within the rounding. Wider
inputs alone would not help: code that casts its inputs to bfloat16 would still round.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import convert_element_type_p
from jax.lax import Precision

from treeshard._core.jaxprs import interpret

# Calls that read the bits of a number, or have code for certain dtypes, run in their own dtypes.
_CALLS = {
    "custom_partitioning",
    "debug_callback",
    "ffi_call",
    "io_callback",
    "pallas_call",
    "pure_callback",
    "tpu_custom_call",
    "triton_kernel_call",
}
_KEPT = {"bitcast_convert_type", *_CALLS}
# Their gradients are traced already, so only the function is left.
_INLINED = {"custom_jvp_call", "custom_vjp_call"}
_BITS = {"float32": (8, 23), "float64": (11, 52)}  # of the exponent, and of the mantissa


class Widening:
    """Rewrites programs so that floats narrower than a dtype have that dtype.

    Attributes:
        dtype: float32, or float64.
        above: Floats of up to this many bytes stay as they are.
        kept: The names of calls that keep their dtypes: custom kernels and callbacks.
    """

    def __init__(self, dtype: Any, above: int = 0) -> None:
        self.dtype, self.above = np.dtype(dtype), above
        self.kept: set[str] = set()
        # By address, with the original, which must live as long as its address is a key.
        self._jaxprs: dict[int, tuple[Any, Jaxpr]] = {}

    def widens(self, dtype: Any) -> bool:
        """Whether an array of this dtype becomes a wider one."""
        return self.dtype_of(dtype) != dtype

    def dtype_of(self, dtype: Any) -> Any:
        """The dtype that replaces another."""
        sizes = range(self.above + 1, self.dtype.itemsize)
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in sizes:
            return self.dtype
        if self.dtype == "float64" and dtype == "complex64":
            return np.dtype("complex128")
        return dtype

    def array(self, x: Any) -> Any:
        """An array or a number on the host, in its wider dtype."""
        dtype = getattr(x, "dtype", None)
        return np.asarray(x).astype(self.dtype_of(dtype)) if dtype and self.widens(dtype) else x

    def program(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """A program and all programs in it."""
        return ClosedJaxpr(self._jaxpr(closed.jaxpr), [self.array(x) for x in closed.consts])

    # -------------------------------------------------------------- programs

    def _jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._jaxprs:
            constants = [self._variable(x) for x in jaxpr.constvars]
            arguments = [self._variable(x) for x in jaxpr.invars]
            eqns: list[JaxprEqn] = []
            results = self._rewrite(jaxpr, [*constants, *arguments], eqns)
            wide = jaxpr.replace(constvars=constants, invars=arguments, eqns=eqns, outvars=results)
            self._jaxprs[id(jaxpr)] = jaxpr, wide
        return self._jaxprs[id(jaxpr)][1]

    def _rewrite(self, jaxpr: Any, given: list[Any], eqns: list[JaxprEqn]) -> list[Any]:
        """Appends the wider equations of a program to `eqns`, and returns its wider results."""

        def apply(eqn: Any, invars: list[Any]) -> list[Any]:
            name = eqn.primitive.name
            if name in _INLINED:
                closed = eqn.params["call_jaxpr"]
                pairs = zip(closed.jaxpr.constvars, closed.consts, strict=True)
                constants = [Literal(self.array(x), self._aval(y.aval)) for y, x in pairs]
                return self._rewrite(closed.jaxpr, [*constants, *invars], eqns)
            outvars = [self._variable(x) for x in eqn.outvars]
            if name in _KEPT:
                eqns.extend(self._kept(eqn, invars, outvars))
            else:
                params = {key: self._param(x) for key, x in eqn.params.items()}
                params.update(self._exact(name, eqn.params))
                eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
            return outvars

        return interpret(jaxpr, given, self._literal, apply)

    def _kept(self, eqn: Any, invars: list[Any], outvars: list[Any]) -> Iterator[JaxprEqn]:
        """An equation in its own dtypes, between conversions."""
        if eqn.primitive.name in _CALLS and any(map(self._changes, (*eqn.invars, *eqn.outvars))):
            self.kept.add(eqn.primitive.name)
        narrow = list(invars)
        for i, original in enumerate(eqn.invars):
            if self._changes(original):
                narrow[i] = Var(original.aval)
                yield _conversion(eqn, invars[i], narrow[i])
        pairs = zip(eqn.outvars, outvars, strict=True)
        results = [Var(x.aval) if self._changes(x) else wide for x, wide in pairs]
        yield eqn.replace(invars=narrow, outvars=results)
        for original, result, wide in zip(eqn.outvars, results, outvars, strict=True):
            if self._changes(original):
                yield _conversion(eqn, result, wide)

    def _exact(self, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The changes to the parameters of an equation that keep it from rounding."""
        if name == "reduce_precision" and not self.above:
            exponent, mantissa = _BITS[self.dtype.name]
            return {"exponent_bits": exponent, "mantissa_bits": mantissa}
        # By default accelerators multiply float32 with fewer bits.
        if name in ("dot_general", "conv_general_dilated"):
            return {"precision": (Precision.HIGHEST, Precision.HIGHEST)}
        return {}

    # -------------------------------------------------------------- values

    def _changes(self, x: Any) -> bool:
        return self._aval(x.aval) is not x.aval

    def _variable(self, x: Any) -> Var:
        return Var(self._aval(x.aval))

    def _literal(self, x: Literal) -> Literal:
        return Literal(self.array(x.val), self._aval(x.aval)) if self._changes(x) else x

    def _aval(self, aval: Any) -> Any:
        if hasattr(aval, "inner_aval"):  # of a reference
            inner = self._aval(aval.inner_aval)
            return aval if inner is aval.inner_aval else aval.update(inner_aval=inner)
        dtype = getattr(aval, "dtype", None)
        if dtype is None or not self.widens(dtype):
            return aval
        return aval.update(dtype=self.dtype_of(dtype))

    def _param(self, x: Any) -> Any:
        """A parameter of an equation: dtypes, types and programs may be anywhere in it."""
        if isinstance(x, ClosedJaxpr):
            return self.program(x)
        if isinstance(x, Jaxpr):
            return self._jaxpr(x)
        if isinstance(x, np.dtype):
            return self.dtype_of(x)
        if type(x) in (tuple, list):
            return type(x)(map(self._param, x))
        if type(x) is dict:
            return {key: self._param(value) for key, value in x.items()}
        if hasattr(x, "dtype") and hasattr(x, "shape") and hasattr(x, "update"):
            return self._aval(x)
        return x


def _conversion(eqn: Any, x: Any, result: Any) -> JaxprEqn:
    params = {"new_dtype": result.aval.dtype, "weak_type": False, "sharding": None}
    return eqn.replace(
        primitive=convert_element_type_p,
        invars=[x],
        outvars=[result],
        params=params,
        effects=frozenset(),
    )
