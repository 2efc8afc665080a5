"""Counts floating-point operations of products: of a step as it was traced, and as compiled.

Only matrix products and convolutions count: everything else is bound by memory.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from treeshard._core.jax_private import shard_map_axes
from treeshard.communication._collectives import total
from treeshard.communication._dataflow import Context, Dataflow, Executions, value
from treeshard.communication._hlo import Op

# Primitives, and targets of custom calls, that may have products inside a kernel.
_KERNEL = re.compile(
    r"pallas|mosaic|triton|ffi_call|dot_product_attention|ragged_dot|scaled_matmul|cudnn"
)
_KERNEL_TARGET = re.compile(
    r"mosaic|tpu_custom_call|triton|cudnn|cublas|onednn|fmha|gemm|matmul|conv", re.I
)
_CUBLAS = "__cublas$"
_PRODUCTS = ("dot", "convolution")


class Flops(NamedTuple):
    """A number of operations; `None` with the reasons if it cannot be counted."""

    number: int | None
    unknown: frozenset[str] = frozenset()


# ------------------------------------------------------------------ as traced


def traced_flops(jaxpr: Jaxpr) -> Flops:
    """The operations of a jaxpr, over all devices.

    A scan counts once per step, `shard_map` once per device, and a `cond` as its largest branch.
    """
    counts: list[int | None] = []
    unknown: set[str] = set()
    eqn: Any  # the shapes of its operands have no type
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        inner = [traced_flops(sub) for sub in _inner(params)]
        count = total(one.number for one in inner)
        unknown.update(reason for one in inner for reason in one.unknown)
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            count = _dot(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, contracted)
        elif name == "conv_general_dilated":
            count = _traced_convolution(eqn)
        elif _KERNEL.search(name):
            count = None
            unknown.add(f"products inside {name}")
        elif name == "while" and count != 0:
            count = None
            unknown.add("products in a loop whose trips depend on data")
        elif name == "cond" and count is not None:
            count = max((one.number or 0 for one in inner), default=0)
        elif name == "scan" and count is not None:
            count *= params["length"]
        elif name == "shard_map" and count is not None:
            count *= math.prod(params["mesh"].shape[axis] for axis in shard_map_axes(params))
        counts.append(count)
    return Flops(total(counts), frozenset(unknown))


def _inner(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs that a primitive runs."""
    for param in params.values():
        for sub in param if isinstance(param, tuple | list) else (param,):
            if isinstance(sub, ClosedJaxpr):
                yield sub.jaxpr
            elif isinstance(sub, Jaxpr):
                yield sub


def _traced_convolution(eqn: Any) -> int:
    params = eqn.params
    lhs, rhs, out = (x.aval.shape for x in (eqn.invars[0], eqn.invars[1], eqn.outvars[0]))
    numbers = params["dimension_numbers"]
    spatial = [
        _taps(lhs[i], out[o], rhs[k], stride, low, dilated, spread)
        for i, o, k, stride, (low, _), dilated, spread in zip(
            numbers.lhs_spec[2:],
            numbers.out_spec[2:],
            numbers.rhs_spec[2:],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            strict=True,
        )
    ]
    batch, features = (out[i] for i in numbers.out_spec[:2])
    return 2 * batch * features * rhs[numbers.rhs_spec[1]] * math.prod(spatial)


# ------------------------------------------------------------------ as compiled


def compiled_flops(flow: Dataflow) -> Flops:
    """The operations of a program on one device."""
    counts: list[int | None] = []
    unknown: set[str] = set()
    for context, op, times in Executions(flow, _may_multiply).all():
        flops = _flops(context, op)
        if flops is None:
            unknown.add(f"products inside {op.target or op.name}")
        elif times is None and flops:
            unknown.add("products in a loop or a branch that depends on data")
        counts.append(None if flops is None else 0 if not flops else times and times * flops)
    return Flops(None if unknown else total(counts), frozenset(unknown))


def _may_multiply(op: Op) -> bool:
    return op.opcode in _PRODUCTS or bool(op.target and _KERNEL_TARGET.search(op.target))


def _flops(context: Context, op: Op) -> int | None:
    shapes = [_shape(context, name) for name in op.operands[:2]]
    result = _dims(op.type_text)
    if op.opcode == "convolution":
        return _convolution(op, shapes, result)
    if op.opcode == "dot":
        dims = op.attribute("lhs_contracting_dims") or "{}"
    elif op.target.startswith(_CUBLAS):
        config = op.attribute("backend_config") or ""
        found = re.search(r'"lhs_contracting_dimensions":\[([\d,"]*)\]', config)
        if found is None:
            return None
        dims = found[1]
    else:
        return None
    return _dot(result, shapes[0], [int(dim) for dim in re.findall(r"\d+", dims)])


def _convolution(op: Op, shapes: list[list[int]], result: list[int]) -> int | None:
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", op.attribute("dim_labels") or "")
    if labels is None:
        return None
    sizes = [
        dict(zip(names, shape, strict=True))
        for names, shape in zip(labels.groups(), [*shapes, result], strict=True)
    ]
    lhs, rhs, out = sizes
    window = dict(re.findall(r"(\w+)=([\w\-]+)", op.attribute("window") or ""))

    def numbers(key: str, default: str, dim: int) -> list[int]:
        """What the window says of one spatial dim."""
        parts = window[key].split("x") if key in window else []
        return [int(n) for n in re.findall(r"-?\d+", parts[dim] if parts else default)]

    spatial = [
        _taps(
            lhs[str(dim)],
            out[str(dim)],
            rhs[str(dim)],
            *numbers("stride", "1", dim),
            numbers("pad", "0_0", dim)[0],
            *numbers("lhs_dilate", "1", dim),
            *numbers("rhs_dilate", "1", dim),
        )
        for dim in range(len(lhs) - 2)
    ]
    return 2 * out["b"] * out["f"] * rhs["i"] * math.prod(spatial)


def _shape(context: Context, name: str) -> list[int]:
    operand = value(context, name)
    return [] if operand is None else _dims(operand.op.type_text)


def _dims(type_text: str) -> list[int]:
    """The dims of the first array of a type."""
    match = re.search(r"\[([\d,]*)\]", type_text)
    return [] if match is None else [int(dim) for dim in re.findall(r"\d+", match[1])]


# ------------------------------------------------------------------ one product


def _dot(out: Any, lhs: Any, contracted: Any) -> int:
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracted)


@lru_cache(maxsize=1024)
def _taps(
    size: int, out: int, kernel: int, stride: int, low: int, dilated: int, spread: int
) -> int:
    """The pairs of an output and a kernel element of one spatial dim that are not padding.

    On TPUs, a batch of matrix products is a convolution of which most elements are padding.
    """
    count = 0
    outputs = np.arange(out) * stride - low
    for tap in range(kernel):
        at = outputs + tap * spread
        count += int(np.sum((at >= 0) & (at <= (size - 1) * dilated) & (at % dilated == 0)))
    return count
