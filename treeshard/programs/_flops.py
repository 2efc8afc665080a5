"""Counts floating-point operations of products: of a step as it was traced, and as compiled.

Only matrix products and convolutions count: everything else is bound by memory. The compiler's own
count of a program takes the body of a loop once, and says nothing of kernels.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from treeshard._core.jax_private import shard_map_axes
from treeshard.communication._collectives import total
from treeshard.communication._dataflow import Context, Dataflow, Executions, value
from treeshard.communication._hlo import Op
from treeshard.programs._buffers import numbers

# Primitives, and targets of custom calls, that may have products inside a kernel.
_KERNEL = re.compile(
    r"pallas|mosaic|triton|ffi_call|dot_product_attention|ragged_dot|scaled_matmul|cudnn"
)
_KERNEL_TARGET = re.compile(
    r"mosaic|tpu_custom_call|triton|cudnn|cublas|onednn|fmha|gemm|matmul|conv", re.I
)
_KERNEL_REASON = "products inside {name}"
_TRACED_LOOP = "products in a loop whose trips depend on data"
_COMPILED_LOOP = "products in a loop or a branch that depends on data"


class Flops(NamedTuple):
    """A number of operations; `None` with the reasons if it cannot be counted."""

    number: int | None
    unknown: frozenset[str] = frozenset()


def _uncounted(reason: str) -> Flops:
    return Flops(None, frozenset({reason}))


def _added(counts: Iterable[Flops]) -> Flops:
    counts = list(counts)
    unknown = frozenset[str]().union(*(flops.unknown for flops in counts))
    return Flops(total(flops.number for flops in counts), unknown)


# ------------------------------------------------------------------ as traced


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr) -> Flops:
    """The operations of a jaxpr, over all devices.

    A scan counts once per step, `shard_map` once per device, and a `cond` as its largest branch.
    """
    return _added(_equation_flops(eqn) for eqn in jaxpr.eqns)


def product_flops(eqn: Any) -> int | None:
    """The operations of an equation that is a matrix product or a convolution; else `None`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return _dot(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, contracted)
    return _traced_convolution(eqn) if name == "conv_general_dilated" else None


def _equation_flops(eqn: Any) -> Flops:
    name, params = eqn.primitive.name, eqn.params
    product = product_flops(eqn)
    if product is not None:
        return Flops(product)
    if _KERNEL.search(name):
        return _uncounted(_KERNEL_REASON.format(name=name))
    parts = [traced_flops(inner) for inner in _inner(params)]
    flops = _added(parts)
    if name == "while" and flops.number != 0:
        return Flops(None, flops.unknown | {_TRACED_LOOP})
    if flops.number is None:
        return flops
    if name == "cond":
        return Flops(max(part.number or 0 for part in parts))
    return Flops(flops.number * _repetitions(name, params))


def _repetitions(name: str, params: Mapping[str, Any]) -> int:
    """How often a primitive runs the jaxprs in its parameters."""
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in shard_map_axes(params))
    return 1


def _inner(params: Mapping[str, Any]) -> list[Any]:
    """The jaxprs that a primitive runs: `jaxpr` of a scan, `branches` of a cond, ..."""
    values = jax.tree.leaves(list(params.values()))
    return [value for value in values if isinstance(value, ClosedJaxpr | Jaxpr)]


def _traced_convolution(eqn: Any) -> int:
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs, out = (x.aval.shape for x in (eqn.invars[0], eqn.invars[1], eqn.outvars[0]))
    windows = zip(
        params["window_strides"],
        [low for low, _ in params["padding"]],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    # Specs have the batch and the features before the spatial dims.
    sides = (dims.lhs_spec[2:], dims.out_spec[2:], dims.rhs_spec[2:])
    pairs = [
        _pairs(lhs[i], out[o], rhs[k], _Window(*window))
        for i, o, k, window in zip(*sides, windows, strict=True)
    ]
    batch, features = dims.out_spec[:2]
    return 2 * out[batch] * out[features] * rhs[dims.rhs_spec[1]] * math.prod(pairs)


# ------------------------------------------------------------------ as compiled


def compiled_flops(flow: Dataflow) -> Flops:
    """The operations of a program on one device."""
    counts: list[Flops] = []
    for context, op, times in Executions(flow, _may_multiply).all():
        number = _op_flops(context, op)
        if number == 0:
            continue
        if number is None:
            counts.append(_uncounted(_KERNEL_REASON.format(name=op.target or op.name)))
        elif times is None:
            counts.append(_uncounted(_COMPILED_LOOP))
        else:
            counts.append(Flops(times * number))
    return _added(counts)


def _may_multiply(op: Op) -> bool:
    if op.opcode in ("dot", "convolution"):
        return True
    return _KERNEL_TARGET.search(op.target) is not None


def _op_flops(context: Context, op: Op) -> int | None:
    """The operations of one product; `None` if its text does not tell."""
    shapes = [_shape(context, name) for name in op.operands[:2]]
    result = _dims(op.type_text)
    if op.opcode == "convolution":
        return _convolution(op, [*shapes, result])
    if op.opcode == "dot":
        # dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}; none of an outer product
        return _dot(result, shapes[0], numbers(op.attribute("lhs_contracting_dims")))
    # custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config=
    #   {"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],...
    config = op.attribute("backend_config")
    contracted = re.search(r'"lhs_contracting_dimensions":\[([\d,"]*)\]', config)
    if contracted is None or not op.target.startswith("__cublas$"):
        return None
    return _dot(result, shapes[0], numbers(contracted[1]))


def _convolution(op: Op, shapes: list[list[int]]) -> int | None:
    # dim_labels=b01f_01io->b01f: the batch, two spatial dims and the features of the first operand;
    # those of the kernel, with its inputs and outputs; those of the result.
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", op.attribute("dim_labels"))
    if labels is None:
        return None
    image, kernel, result = (
        dict(zip(names, dims, strict=True))
        for names, dims in zip(labels.groups(), shapes, strict=True)
    )
    spatial = [label for label in image if label.isdigit()]
    windows = _windows(op.attribute("window"), len(spatial))
    pairs = [
        _pairs(image[label], result[label], kernel[label], windows[int(label)]) for label in spatial
    ]
    return 2 * result["b"] * result["f"] * kernel["i"] * math.prod(pairs)


def _windows(text: str, dims: int) -> list["_Window"]:
    """Reads `{size=3x3 stride=2x2 pad=1_1x0_0 rhs_dilate=1x2}`, where defaults are left out."""
    stated = {key: values.split("x") for key, values in re.findall(r"(\w+)=([\w\-]+)", text)}
    strides = stated.get("stride", ["1"] * dims)
    pads = stated.get("pad", ["0_0"] * dims)
    lhs_dilations = stated.get("lhs_dilate", ["1"] * dims)
    rhs_dilations = stated.get("rhs_dilate", ["1"] * dims)
    return [
        _Window(int(stride), int(pad.partition("_")[0]), int(lhs_dilation), int(rhs_dilation))
        for stride, pad, lhs_dilation, rhs_dilation in zip(
            strides, pads, lhs_dilations, rhs_dilations, strict=True
        )
    ]


def _shape(context: Context, name: str) -> list[int]:
    return _dims(value(context, name).op.type_text)


def _dims(type_text: str) -> list[int]:
    """The dims of the first array of a type: 16 and 64 of `(f32[16,64]{1,0}, s8[4]{0})`."""
    match = re.search(r"\[([\d,]*)\]", type_text)
    return [] if match is None else numbers(match[1])


# ------------------------------------------------------------------ one product


def _dot(out: Sequence[int], lhs: Sequence[int], contracted: Sequence[int]) -> int:
    return 2 * math.prod(out) * math.prod(lhs[dim] for dim in contracted)


class _Window(NamedTuple):
    """How a kernel moves along one spatial dim; `low` is the padding before the first element."""

    stride: int
    low: int
    lhs_dilation: int
    rhs_dilation: int


@lru_cache(maxsize=1024)
def _pairs(size: int, out: int, kernel: int, window: _Window) -> int:
    """The pairs of an output and a kernel element of one spatial dim that are not padding."""
    # TPUs write a batch of 16 matrix products as one convolution, of which most is padding:
    #   convolution(%a, %b), window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf
    last = (size - 1) * window.lhs_dilation
    starts = np.arange(out) * window.stride - window.low
    count = 0
    for tap in range(kernel):
        at = starts + tap * window.rhs_dilation
        is_element = (at >= 0) & (at <= last) & (at % window.lhs_dilation == 0)
        count += int(np.sum(is_element))
    return count
