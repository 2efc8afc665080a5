"""Records which leaves a value in a trace comes from, and how the value is split.

A step seldom uses a weight directly: it casts, transposes, scales, and slices the weight first.
Each device runs these operations on its shard, so the record must survive them.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from treeshard._core.specs import axes_of, dim_entries

Dims = tuple[tuple[str, ...], ...]  # the mesh axes that split each dim


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        leaves: The leaves of the state whose elements it has, perhaps each element changed.
        dims: The mesh axes that split each dim, as far as they are known.
        size: Its number of elements before it was broadcast.
        parts: The number of slices into which its leaf was cut; the value is one slice.
        part: A key that identifies the slice.
        is_changed: Whether its elements differ from the leaf's.
        is_zero: Whether all elements are 0, as updates of frozen leaves are.
        gathers: The gathers that it is the result of.
        gradients: The gradients that it depends on: of arrays (`OF_ARRAYS`), of scalars
            (`OF_SCALARS`), and, by their numbers, new values of leaves that depend on gradients.
        is_of_batch: Whether it is computed from the batch, and is not a gradient.
        loop: The path of the innermost loop that changes it; empty if no loop does.
        trips: How often that loop runs.
    """

    leaves: frozenset[int] = frozenset()
    dims: Dims = ()
    size: int = 0
    parts: int = 1
    part: tuple[Any, ...] = ()
    is_changed: bool = False
    is_zero: bool = False
    gathers: frozenset[Any] = frozenset()
    gradients: frozenset[int] = frozenset()
    is_of_batch: bool = False
    loop: tuple[int, ...] = ()
    trips: int = 1

    def without(self, axes: Collection[str]) -> "Value":
        """This value, no longer split over some axes."""
        dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in self.dims)
        return self._replace(dims=dims)

    def dims_of_rank(self, rank: int) -> Dims:
        """The axes of each dim. Unknown dims, such as the dims of constants, have no axes."""
        return self.dims or ((),) * rank

    @property
    def axes(self) -> set[str]:
        """All axes that split it."""
        return {axis for dim in self.dims for axis in dim}


OF_ARRAYS, OF_SCALARS = -1, -2


def leaf_value(number: int, spec: Any, shape: Sequence[int]) -> Value:
    """A leaf of the state, as it enters the step."""
    return Value(frozenset({number}), dims_of(spec, len(shape)), math.prod(shape))


def dims_of(spec: Any, rank: int) -> Dims:
    """The axes of each dim of a `PartitionSpec`."""
    return tuple(axes_of(entry) for entry in dim_entries(spec, rank))


def merge_values(values: Sequence[Value]) -> Value:
    """A value that is computed from several values of one shape, element by element."""
    # Zeros, as for updates that optax masks, do not change what a value is.
    values = [value for value in values if not value.is_zero] or [values[0]]
    of_leaves = [value for value in values if value.leaves]
    like = (of_leaves or [x for x in values if x.axes] or values)[0]
    leaves = frozenset[int]().union(*(value.leaves for value in values))
    gathers = frozenset[Any]().union(*(value.gathers for value in values))
    return like._replace(leaves=leaves, gathers=gathers, gradients=frozenset())


def join_branches(first: Value, second: Value) -> Value:
    """A value with the properties that two values share, such as the results of two branches."""
    common = {
        "is_zero": first.is_zero and second.is_zero,
        "gradients": first.gradients | second.gradients,
        "is_of_batch": first.is_of_batch or second.is_of_batch,
    }
    if first.is_zero or second.is_zero:
        known = second if first.is_zero else first
        return known._replace(**common)
    return first._replace(
        leaves=first.leaves & second.leaves,
        dims=first.dims if first.dims == second.dims else (),
        is_changed=first.is_changed or second.is_changed,
        **common,
    )


# ------------------------------------------------------------------ ops

# Ops that run on each element by itself.
ELEMENTWISE = frozenset(
    {
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2"),
        *("atanh", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "div"),
        *("eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag"),
        *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul"),
        *("ne", "neg", "nextafter", "not", "one_minus_square", "or", "pow", "real"),
        *("reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt"),
        *("square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    }
)
# The elementwise ops that keep each element, within the precision of its dtype.
KEEP_ELEMENTS = ("convert_element_type", "copy", "reduce_precision", "stop_gradient")
# Ops on each PRNG key by itself, whose results may have other dims at the end.
OF_KEYS = ("random_fold_in", "random_split", "random_unwrap", "random_wrap")
# Ops that return each of their operands unchanged.
PASS_ON = ("device_put", "optimization_barrier", "pvary", "copy_p")


def elementwise_result(name: str, operands: Sequence[Value], full_size: Sequence[Value]) -> Value:
    """The result of an elementwise op; `full_size` are the operands of the result's size."""
    # 1. 0 * x and 0 / x are zeros for every x. The update of a frozen leaf stays zero after it is
    #    scaled by a learning rate, or divided by the root of its moments.
    # 2. x + 0 and x - 0 are x unchanged.
    # 3. All other ops change the elements, unless they only cast or copy them.
    zeros = [operand.is_zero for operand in operands]
    if (name == "mul" and any(zeros)) or (name == "div" and zeros[0]):
        return Value(is_zero=True)
    if not full_size:
        return Value()
    adds_zero = (name in ("add", "sub") and zeros[-1]) or (name == "add" and zeros[0])
    keeps = name in KEEP_ELEMENTS or adds_zero
    new = merge_values(full_size)
    is_zero = new.is_zero and (keeps or name == "neg")
    return new._replace(is_changed=new.is_changed or not keeps, is_zero=is_zero)


def key_result(eqn: Any, value: Value) -> Value:
    """The result of an op on keys: `random_split` makes several keys of each."""
    result = eqn.outvars[0].aval.shape
    dims = (value.dims + ((),) * len(result))[: len(result)] if value.dims else ()
    return value._replace(dims=dims, size=math.prod(result), is_changed=True)


# Ops that move elements within an array, or leave some out.
LAY_OUT = frozenset(
    {"broadcast_in_dim", "dynamic_slice", "reshape", "rev", "slice", "squeeze", "transpose"}
)


def layout_result(eqn: Any, value: Value) -> Value:
    """The result of an op of `LAY_OUT`."""
    shape, result, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    dims = value.dims_of_rank(len(shape))
    if eqn.primitive.name == "reshape":
        dims = _reshape_dims(dims, shape, result)
    elif eqn.primitive.name == "transpose":
        dims = tuple(dims[dim] for dim in params["permutation"])
    elif eqn.primitive.name == "squeeze":
        dims = tuple(axes for dim, axes in enumerate(dims) if dim not in params["dimensions"])
    elif eqn.primitive.name == "broadcast_in_dim":
        placed = dict(zip(params["broadcast_dimensions"], dims, strict=True))
        dims = tuple(placed.get(dim, ()) for dim in range(len(result)))
    new = value._replace(dims=dims)
    # By the name: broadcasting a scalar to an empty array leaves out its element too.
    is_cut = eqn.primitive.name in ("slice", "dynamic_slice") and result != shape
    return _slice_result(new, eqn, shape, result) if is_cut else new


def unstack_results(eqn: Any, value: Value) -> list[Value]:
    """The slices of one dim: `u:key<fry>[4] v:key<fry>[4] = unstack[axis=1] t`, since JAX 0.12."""
    axis, count = eqn.params["axis"], len(eqn.outvars)
    one = value._replace(
        dims=(*value.dims[:axis], *value.dims[axis + 1 :]),
        size=value.size // max(count, 1),
        parts=value.parts * count,
    )
    return [one._replace(part=(*value.part, i)) for i in range(count)]


def _slice_result(value: Value, eqn: Any, shape: Sequence[int], result: Sequence[int]) -> Value:
    """One layer of a stack, if a dim is cut to length 1; otherwise a part of one layer."""
    # slice[start_indices=(2, 0) limit_indices=(3, 64)] of float32[4,64] is layer 2
    cut = [dim for dim, length in enumerate(result) if length == 1 < shape[dim]]
    starts = eqn.params.get("start_indices")
    which = id(eqn) if starts is None else tuple(starts[dim] for dim in cut)
    return value._replace(
        size=math.prod(result),
        parts=value.parts * math.prod(shape[dim] for dim in cut),
        part=(*value.part, which) if cut else value.part,
    )


def _reshape_dims(dims: Dims, shape: Sequence[int], result: Sequence[int]) -> Dims:
    """The dims after a reshape. The axes of joined dims go to the first dim of the result."""
    new: list[tuple[str, ...]] = [()] * len(result)
    if 0 in shape:  # no dims of an empty array join: their products are all 0
        return tuple(new)
    i = j = 0
    while i < len(shape) and j < len(result):
        # [8, 4, 16] to [32, 16]: the dims 0 and 1 of 32 elements become dim 0
        axes, before, after, first = dims[i], shape[i], result[j], j
        while before != after:
            if before < after:
                i += 1
                before *= shape[i]
                axes += dims[i]
            else:
                j += 1
                after *= result[j]
        while first < j and result[first] == 1:
            first += 1
        new[first] = axes
        i, j = i + 1, j + 1
    return tuple(new)
