"""Counts floating-point operations of products: of a step as it was traced, and as compiled.

Only matrix products and convolutions count: everything else is bound by memory. The compiler's own
count of a program takes the body of a loop once, and says nothing of kernels. Those of Pallas say
it themselves (`cost_estimate`), or the caller does. What nothing tells is named beside the sum of
the rest, which is then a lower bound.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from treeshard._core.jax_private import shard_map_axes
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
# In the `backend_config` of a `tpu_custom_call`: "cost_estimate":{"flops":"17314086912",...
_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"?(\d+)')
_TRACED_LOOP = "products in a loop whose trips depend on data"
_COMPILED_LOOP = "products in a loop or a branch that depends on data"


class Flops(NamedTuple):
    """A number of operations; a lower bound if something could not be counted, with the reasons."""

    number: int
    unknown: frozenset[str] = frozenset()

    def times(self, times: int) -> "Flops":
        return Flops(self.number * times, self.unknown)


# By a part of its name, the operations of a kernel each time that a device runs it.
Kernels = Mapping[str, int]
_NO_KERNELS: Kernels = MappingProxyType({})


def _uncounted(reason: str) -> Flops:
    return Flops(0, frozenset({reason}))


def _added(counts: Iterable[Flops]) -> Flops:
    counts = list(counts)
    unknown = frozenset[str]().union(*(flops.unknown for flops in counts))
    return Flops(sum(flops.number for flops in counts), unknown)


def _stated(kernels: Kernels, name: str) -> int | None:
    """What the caller says of a kernel."""
    return next((number for part, number in kernels.items() if part in name), None)


# ------------------------------------------------------------------ as traced


def traced_flops(jaxpr: Jaxpr | ClosedJaxpr, kernels: Kernels = _NO_KERNELS) -> Flops:
    """The operations of a jaxpr, over all devices.

    A scan counts once per step, `shard_map` once per device, and a `cond` as its largest branch.
    """
    return _added(_equation_flops(eqn, kernels) for eqn in jaxpr.eqns)


def product_flops(eqn: Any) -> int | None:
    """The operations of an equation that is a matrix product or a convolution; else `None`."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return _dot(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, contracted)
    return _traced_convolution(eqn) if name == "conv_general_dilated" else None


def _equation_flops(eqn: Any, kernels: Kernels) -> Flops:
    name, params = eqn.primitive.name, eqn.params
    product = product_flops(eqn)
    if product is not None:
        return Flops(product)
    if _KERNEL.search(name):
        return _kernel_flops(eqn, kernels)
    parts = [traced_flops(inner, kernels) for inner in _inner(params)]
    flops = _added(parts)
    if name == "while" and flops != Flops(0):
        return Flops(0, flops.unknown | {_TRACED_LOOP})
    if name == "cond":
        return Flops(max(part.number for part in parts), flops.unknown)
    return flops.times(_repetitions(name, params))


def _kernel_flops(eqn: Any, kernels: Kernels) -> Flops:
    """What a kernel computes: as the caller says, or the kernel itself."""
    # The name of `pallas_call(name=...)` is also in the name stack, behind that of the function.
    own = eqn.params.get("name") or eqn.primitive.name
    stated = _stated(kernels, f"{eqn.source_info.name_stack}/{own}")
    if stated is not None:
        return Flops(stated)
    estimate = eqn.params.get("cost_estimate")
    return (
        _uncounted(_KERNEL_REASON.format(name=own)) if estimate is None else Flops(estimate.flops)
    )


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


# ------------------------------------------------------------------ attention


def written_out_attention(jaxpr: Jaxpr | ClosedJaxpr) -> str | None:
    """The scores of attention that is not a kernel, as a type: `float32[8,32,4096,4096]`."""
    products: set[tuple[int, ...]] = set()
    exponentials: dict[tuple[int, ...], str] = {}
    for eqn in _all_equations(jaxpr):
        if eqn.primitive.name == "exp":
            result = eqn.outvars[0].aval
            exponentials[_sizes(result)] = result.dtype.name
        elif eqn.primitive.name == "dot_general" and _makes_scores(eqn):
            products.add(_sizes(eqn.outvars[0].aval))
    # Products have the dims of their batch first, and softmax may see them in another order.
    made = {tuple(sorted(sizes)) for sizes in products}
    found = [sizes for sizes in exponentials if tuple(sorted(sizes)) in made]
    if not found:
        return None
    largest = max(found, key=math.prod)
    return f"{exponentials[largest]}[{','.join(map(str, largest))}]"


def _sizes(aval: Any) -> tuple[int, ...]:
    """The dims that are not 1, such as those of groups of one head."""
    return tuple(size for size in aval.shape if size > 1)


def _makes_scores(eqn: Any) -> bool:
    """Whether a product contracts less than it makes: the width of a head, for each query and
    key."""
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = (x.aval.shape for x in eqn.invars)
    width = math.prod(left[dim] for dim in contracted)
    made = [math.prod(shape) // width for shape in (left, right)]
    same = math.prod(left[dim] for dim in batch)
    return bool(batch) and all(size // same > width for size in made)


def _all_equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Any]:
    """Those of a jaxpr and of all that it runs, without the insides of kernels."""
    for eqn in jaxpr.eqns:
        yield eqn
        if not _KERNEL.search(eqn.primitive.name):
            for inner in _inner(eqn.params):
                yield from _all_equations(inner)


# ------------------------------------------------------------------ as compiled


def compiled_flops(flow: Dataflow, kernels: Kernels = _NO_KERNELS) -> Flops:
    """The operations of a program on one device."""
    counts: list[Flops] = []
    for context, op, times in Executions(flow, _may_multiply).all():
        number = _op_flops(context, op, kernels)
        if number == 0:
            continue
        if number is None:
            counts.append(_uncounted(_KERNEL_REASON.format(name=_kernel_name(op))))
        elif times is None:
            counts.append(_uncounted(_COMPILED_LOOP))
        else:
            counts.append(Flops(times * number))
    return _added(counts)


def least_flops(flow: Dataflow) -> int:
    """The operations that a device does in 16 bits or more: what kernels state may be more than
    they do, and products of 8 bits have a higher peak."""
    least = 0
    for context, op, times in Executions(flow, _is_product).all():
        types = [value(context, name).op.type_text for name in op.operands[:2]]
        if times and not any(map(_NARROW.match, types)):
            least += times * (_op_flops(context, op, _NO_KERNELS) or 0)
    return least


_NARROW = re.compile(r"[suf][48](?!\d)")  # `s8[64,16]`, `f8e4m3fn[64,16]`, `u4[64,16]`


def _is_product(op: Op) -> bool:
    return op.opcode in ("dot", "convolution")


def _kernel_name(op: Op) -> str:
    """`splash_mha_dkv` of `%splash_mha_dkv.1`, a kernel of Pallas; else the target."""
    is_pallas = (op.op_name or "").endswith("/pallas_call")
    return re.sub(r"\.\d+$", "", op.name) if is_pallas else op.target or op.name


def _may_multiply(op: Op) -> bool:
    return _is_product(op) or _KERNEL_TARGET.search(op.target) is not None


def _op_flops(context: Context, op: Op, kernels: Kernels) -> int | None:
    """The operations of one product; `None` if nothing tells."""
    shapes = [_shape(context, name) for name in op.operands[:2]]
    result = _dims(op.type_text)
    if op.opcode == "convolution":
        return _convolution(op, [*shapes, result])
    if op.opcode == "dot":
        # dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}; none of an outer product
        return _dot(result, shapes[0], numbers(op.attribute("lhs_contracting_dims")))
    # custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config=
    #   {"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],...
    stated = _stated(kernels, f"{op.op_name}/{op.name}/{op.target}")
    if stated is not None:
        return stated
    config = op.attribute("backend_config")
    estimate = _ESTIMATE.search(config)
    if estimate is not None:
        return int(estimate[1])
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
