"""Whether the mean of a loss over parts of a batch is the loss of the batch, by traces of it.

Two traces, with 2 and 3 times the rows, show which dims are those of rows: their lengths differ.
What depends on rows and has no such dim is a sum over rows. A loss is a mean if all that is done
with such sums is linear, and if the lengths of rows by which it divides cancel those over which it
adds up. A mean with weights divides by a sum over rows, and batch norm brings one back to the rows:
both depend on all rows of a batch at once. What is not known here counts as no mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal
from jax.numpy import integer, issubdtype

from treeshard._core.specs import Entry, axes_of
from treeshard._trace.uses import bodies, is_last_step


class NotAMean(Exception):
    """A loss is not a mean over rows, or not known to be one."""


# ------------------------------------------------------------------ shards


Split = tuple[tuple[str, ...], ...]  # the axes that split each dim; empty for what is whole

# What may be done with a shard of a weight before it is gathered.
_KEEPS = {"convert_element_type", "copy", "copy_p", "pvary", "reduce_precision"}
_KEEPS |= {"sharding_constraint", "stop_gradient"}
_CUTS = {"dynamic_slice", "slice"}


def check_shards(jaxpr: Any, dims: Sequence[Sequence[Entry]], before: int) -> None:
    """Raises `NotAMean` if a loss uses shards of weights otherwise than to gather them.

    Args:
        jaxpr: A trace of the loss, inside `shard_map`.
        dims: The entries of each weight's spec.
        before: The number of arguments before the weights.
    """
    weights = [tuple(axes_of(entry) for entry in of_weight) for of_weight in dims]
    after = len(jaxpr.invars) - before - len(weights)
    _check_whole(_follow(jaxpr, [*[()] * before, *weights, *[()] * after]))


def _check_whole(splits: Sequence[Split]) -> None:
    if any(map(any, splits)):
        raise NotAMean("it uses a shard of a weight")


def _follow(jaxpr: Any, given: Sequence[Split]) -> list[Split]:
    """How the results of a program are split, if its arguments are split like this."""
    known: dict[Any, Split] = dict(zip(jaxpr.invars, given, strict=True))

    def read(variables: Sequence[Any]) -> list[Split]:
        return [() if isinstance(x, Literal) else known.get(x, ()) for x in variables]

    for eqn in jaxpr.eqns:
        used = read(eqn.invars)
        if any(map(any, used)):
            known |= dict(zip(eqn.outvars, _split_after(eqn, used), strict=True))
    return read(jaxpr.outvars)


def _split_after(eqn: Any, used: list[Split]) -> list[Split]:
    name, inner = eqn.primitive.name, bodies(eqn)
    if name == "scan":
        pairs = zip(eqn.invars, inner[0].invars, used, strict=True)
        given = [_of_trip(x, y, split) for x, y, split in pairs]
        _check_whole(_follow(inner[0], given))
        return [()] * len(eqn.outvars)
    if name == "optimization_barrier":
        return used
    if len(inner) == 1 and len(inner[0].invars) == len(used):
        return _follow(inner[0], used)
    _check_whole(used[1:])
    split = used[0]
    if name in _KEEPS:
        return [split]
    if name in _CUTS:
        lengths = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, split, strict=True)
        _check_whole([(axes,) for before, after, axes in lengths if before != after])
        return [split]
    if name == "squeeze":
        return [tuple(axes for i, axes in enumerate(split) if i not in eqn.params["dimensions"])]
    if name == "transpose":
        return [tuple(split[dim] for dim in eqn.params["permutation"])]
    if name == "all_gather":
        return [_gathered(eqn, split)]
    raise NotAMean(f"it uses a shard of a weight in {name}")


def _of_trip(outside: Any, inside: Any, split: Split) -> Split:
    """How an argument of a scan is split in a trip, which may get a slice of dim 0."""
    if outside.aval.shape == inside.aval.shape:
        return split
    _check_whole([split[:1]])
    return split[1:]


def _gathered(eqn: Any, split: Split) -> Split:
    if not is_last_step(eqn.params["axis_index_groups"]):
        return split
    axes, dim = eqn.params["axis_name"], eqn.params["all_gather_dimension"]
    gathered = {axes} if isinstance(axes, str) else {*axes}
    return tuple(
        tuple(axis for axis in of_dim if i != dim or axis not in gathered)
        for i, of_dim in enumerate(split)
    )


# ------------------------------------------------------------------ means


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
        depends: Whether it depends on rows.
        weight: By which factor a value without rows grows from the first trace to the second, if
            all rows are alike; of one with rows, each row. 0 for zeros.
        row_dim: Its dim of rows.
    """

    depends: bool = False
    weight: float = 1.0
    row_dim: int | None = None

    @property
    def is_sum(self) -> bool:
        return self.depends and self.row_dim is None

    @property
    def is_plain(self) -> bool:
        return _is_one(self.weight) or not self.weight


_MORE_ROWS = 3 / 2  # the second trace has 3 rows for 2 of the first


def _is_one(weight: float) -> bool:
    return math.isclose(weight, 1, rel_tol=0.02)  # lengths may be constants in bfloat16


def check_mean(first: Any, second: Any, before: int, is_sum: Sequence[bool]) -> None:
    """Raises `NotAMean` if a loss is not known to be a mean over rows.

    Args:
        first: Its trace with 2 times the rows: `(value, *aux)` of weights and data.
        second: The same with 3 times the rows.
        before: The number of arguments before the data.
        is_sum: Which arrays of `aux` are sums over rows; other scalars are means, and other arrays
            have a result for each row.
    """
    given = [
        Known(i >= before and bool(x.aval.ndim), 1.0, _row_dim(x, y))
        for i, (x, y) in enumerate(zip(first.invars, second.invars, strict=True))
    ]
    value, *aux = _run(first, second, given)
    _check(value.row_dim is None and value.is_plain, "it is not a mean")
    for known, x, adds in zip(aux, first.outvars[1:], is_sum, strict=True):
        if adds:
            right = known.row_dim is None and _is_one(known.weight / _MORE_ROWS)
        elif x.aval.ndim:
            right = known.row_dim == 0 and known.is_plain
        else:
            right = known.is_plain
        _check(right, "aux is neither a mean, nor of rows")


def _check(is_right: bool, otherwise: str) -> None:
    if not is_right:
        raise NotAMean(otherwise)


def _row_dim(first: Any, second: Any) -> int | None:
    """The dim whose length differs between two traces."""
    pairs = list(zip(first.aval.shape, second.aval.shape, strict=True))
    dims = [i for i, (before, after) in enumerate(pairs) if before != after]
    _check(len(dims) < 2, "rows are compared with rows")
    for before, after in (pairs[dim] for dim in dims):
        _check(after * 2 == before * 3, "a part of the rows is taken")
    return dims[0] if dims else None


def _run(first: Any, second: Any, given: Sequence[Known]) -> list[Known]:
    """What is known of the results of a program, in two traces."""
    _check(len(first.eqns) == len(second.eqns), "it branches on the number of rows")
    known: dict[Any, Known] = dict(zip(first.invars, given, strict=True))

    def read(x: Any, y: Any) -> Known:
        _check(isinstance(x, Literal) == isinstance(y, Literal), "it branches on the rows")
        if isinstance(x, Literal):
            return _constant(x, y)
        return known.get(x) or Known(row_dim=_row_dim(x, y))

    for x, y in zip(first.eqns, second.eqns, strict=True):
        _check(x.primitive is y.primitive, "it branches on the number of rows")
        operands = [read(*pair) for pair in zip(x.invars, y.invars, strict=True)]
        known |= dict(zip(x.outvars, _results(x, y, operands), strict=True))
    return [read(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]


def _constant(first: Any, second: Any) -> Known:
    if getattr(first.val, "ndim", 0):
        return Known(row_dim=_row_dim(first, second))
    before, after = float(first.val), float(second.val)
    if before == after or (math.isnan(before) and math.isnan(after)):
        return Known(weight=float(before != 0))
    _check(bool(before), "it branches on the number of rows")
    return Known(weight=after / before)


def _results(first: Any, second: Any, operands: list[Known]) -> list[Known]:
    row_dims = [_row_dim(*pair) for pair in zip(first.outvars, second.outvars, strict=True)]
    is_free = all(not x.depends and x.is_plain and x.row_dim is None for x in operands)
    name, inner = first.primitive.name, bodies(first)
    if is_free and set(row_dims) <= {None} and name not in _LINEAR:
        return [Known()] * len(row_dims)
    if name == "scan":
        return _scanned(first, second, operands)
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return _run(inner[0], bodies(second)[0], operands)
    _check(not inner, f"{name} is not known")
    depends = any(x.depends for x in operands)
    rule = _RULES.get(name, _other)
    results: list[Known] = []
    for row_dim in row_dims:
        mixes = row_dim is not None and any(x.is_sum for x in operands)
        _check(not mixes, "a sum over rows meets rows")
        weight = rule(first, operands, row_dim)
        results.append(Known(depends, weight, row_dim))
    return results


def _scanned(first: Any, second: Any, operands: list[Known]) -> list[Known]:
    _check(first.params["length"] == second.params["length"], "it scans over rows")
    inner = [bodies(eqn)[0] for eqn in (first, second)]
    is_cut = _have_other_shapes(first.invars, inner[0].invars)
    count = _have_other_shapes(first.outvars, inner[0].outvars).count(False)
    given = [
        x._replace(row_dim=x.row_dim - 1) if cut and x.row_dim is not None else x
        for x, cut in zip(operands, is_cut, strict=True)
    ]
    # First come what is the same in each trip, then what is carried, then what is cut into slices.
    same = is_cut.count(False) - count
    carried = slice(same, same + count)
    for _ in range(_MOST_ROUNDS):
        results = _run(inner[0], inner[1], given)
        before = given[carried]
        given[carried] = [_met(*pair) for pair in zip(before, results[:count], strict=True)]
        if given[carried] == before:
            break
    else:
        raise NotAMean("a loop does more in each trip")
    stacked = [
        x._replace(row_dim=None if x.row_dim is None else x.row_dim + 1) for x in results[count:]
    ]
    return [*given[carried], *stacked]


def _have_other_shapes(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    return [x.aval.shape != y.aval.shape for x, y in zip(outside, inside, strict=True)]


_MOST_ROUNDS = 4


def _met(before: Known, after: Known) -> Known:
    """What holds for a value that a loop carries, before and after a trip."""
    weights = {x.weight for x in (before, after)} - {0.0}
    _check(len(weights) < 2 or math.isclose(*weights, rel_tol=0.02), "a loop adds up rows")
    weight = before.weight or after.weight
    return after._replace(depends=before.depends or after.depends, weight=weight)


# ------------------------------------------------------------------ ops


def _alike(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    """Sums, differences, and what is joined: terms must grow alike."""
    is_joined = row_dim is not None and eqn.params.get("dimension") == row_dim
    _check(not is_joined, "rows are joined")
    weights = [x.weight for x in operands if x.weight]
    _check(all(math.isclose(w, weights[0], rel_tol=0.02) for w in weights), "a sum is added")
    return weights[0] if weights else 0.0


def _same(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    is_lost = operands[0].row_dim is not None and row_dim is None
    _check(not is_lost, "a part of the rows is taken")
    return operands[0].weight


def _reshaped(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    """Rows that lie side by side must stay so: the part of a device is a piece of the batch."""
    before = operands[0].row_dim
    if before is not None and row_dim is not None:
        outside = math.prod(eqn.invars[0].aval.shape[:before])
        is_order_kept = outside == math.prod(eqn.outvars[0].aval.shape[:row_dim])
        _check(is_order_kept and eqn.params["dimensions"] is None, "rows are put in another order")
    return _same(eqn, operands, row_dim)


def _converted(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    to_integer = issubdtype(eqn.params["new_dtype"], integer)
    rounds = to_integer and not issubdtype(eqn.invars[0].aval.dtype, integer)
    _check(not (rounds and operands[0].is_sum), "a sum over rows is rounded")
    return _same(eqn, operands, row_dim)


def _product(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    _check(sum(x.is_sum for x in operands) < 2, "sums over rows are multiplied")
    return math.prod(x.weight for x in operands)


def _quotient(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    above, below = operands
    _check(not below.is_sum and bool(below.weight), "it divides by a sum over rows")
    return above.weight / below.weight


def _sum(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    [known] = operands
    return known.weight * (_MORE_ROWS if known.row_dim in eqn.params["axes"] else 1)


def _matrix_product(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    contracted, _ = eqn.params["dimension_numbers"]
    is_summed = any(x.row_dim in dims for x, dims in zip(operands, contracted, strict=True))
    return _product(eqn, operands, row_dim) * (_MORE_ROWS if is_summed else 1)


def _other(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    """What is done row by row, or does not depend on rows."""
    name = eqn.primitive.name
    _check(all(x.is_plain and not x.is_sum for x in operands), f"{name} of a sum over rows")
    dims = [x.row_dim for x in operands]
    has_rows = any(dim is not None for dim in dims)
    _check(row_dim is not None or not any(x.depends for x in operands), f"{name} of all rows")
    # Random numbers of parts are not those of the whole batch.
    _check(row_dim is None or has_rows, f"{name} makes rows")
    if has_rows:
        is_by_row = _BY_ROW.get(name, _never)
        _check(is_by_row(eqn, dims, row_dim), f"{name} is not known to go row by row")
    return 1.0


# ------------------------------------------------------------------ what goes row by row

RowDims = Sequence[int | None]


def _never(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    return False


def _always(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    return True


def _along_other_dims(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    along = {eqn.invars[0].aval.ndim - 1} if eqn.primitive.name == "top_k" else set[int]()
    for key in ("axis", "axes", "dimension", "dimensions"):
        value = eqn.params.get(key, ())
        along |= set(value) if isinstance(value, tuple) else {value}
    return along.isdisjoint(dims)


def _takes_all_rows(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    """Of `slice` and `dynamic_slice`: rows that are left are as many as before."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return dims[0] == row_dim and row_dim is not None and before[row_dim] == after[row_dim]


def _pads_no_rows(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    return dims[0] is not None and eqn.params["padding_config"][dims[0]] == (0, 0, 0)


def _replaces_all_rows(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    target, update = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    return row_dim is None or (dims[1] == row_dim and target[row_dim] == update[row_dim])


def _looks_up_by_row(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    if dims[0] is None:
        return True
    whole = eqn.invars[0].aval.shape[dims[0]]
    batching = eqn.params["dimension_numbers"].operand_batching_dims
    return dims[0] in batching or eqn.params["slice_sizes"][dims[0]] == whole


def _convolves_each_row(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    batch = eqn.params["dimension_numbers"].lhs_spec[0]
    return dims[0] == batch and dims[1] is None and eqn.params["batch_group_count"] == 1


def _has_windows_of_a_row(eqn: Any, dims: RowDims, row_dim: int | None) -> bool:
    [dim] = dims[:1]
    sizes = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    if dim is None or any(eqn.params[key][dim] != 1 for key in sizes if key in eqn.params):
        return False
    return tuple(eqn.params["padding"][dim]) == (0, 0)


_ELEMENTWISE = """
    abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp conj cos cosh digamma eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic
    lt max min ne nextafter not or pow real rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor
    optimization_barrier
"""
# With keys of each row.
_RANDOM = "random_bits random_clone random_fold_in random_split random_unwrap random_wrap"
_ALONG_DIMS = """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_and reduce_max reduce_min
    reduce_or reduce_prod rev sort split top_k
"""
_WINDOWS = "reduce_window reduce_window_max reduce_window_min reduce_window_sum"
_BY_ROW: Mapping[str, Callable[[Any, RowDims, int | None], bool]] = {
    **dict.fromkeys(f"{_ELEMENTWISE} {_RANDOM}".split(), _always),
    **dict.fromkeys(_ALONG_DIMS.split(), _along_other_dims),
    **dict.fromkeys(_WINDOWS.split(), _has_windows_of_a_row),
    **dict.fromkeys(("slice", "dynamic_slice"), _takes_all_rows),
    "conv_general_dilated": _convolves_each_row,
    "dynamic_update_slice": _replaces_all_rows,
    "gather": _looks_up_by_row,
    "pad": _pads_no_rows,
}


# ------------------------------------------------------------------ rules


def _iota(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    _check(row_dim != eqn.params["dimension"], "it numbers the rows")
    return 1.0


_LINEAR: Mapping[str, Callable[[Any, list[Known], int | None], float]] = {
    **dict.fromkeys(("add", "add_any", "concatenate", "sub"), _alike),
    **dict.fromkeys(
        (
            *("broadcast_in_dim", "copy", "copy_p", "neg", "pvary", "reduce_precision"),
            *("reshard", "sharding_constraint", "squeeze", "stop_gradient", "transpose"),
        ),
        _same,
    ),
    "convert_element_type": _converted,
    "div": _quotient,
    "dot_general": _matrix_product,
    "mul": _product,
    "reduce_sum": _sum,
    "reshape": _reshaped,
}
_RULES = {**_LINEAR, "iota": _iota}
