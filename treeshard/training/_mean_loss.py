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
    weights = [x.weight for x in operands if x.weight]
    _check(all(math.isclose(w, weights[0], rel_tol=0.02) for w in weights), "a sum is added")
    return weights[0] if weights else 0.0


def _same(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    is_lost = operands[0].row_dim is not None and row_dim is None
    _check(not is_lost, "a part of the rows is taken")
    return operands[0].weight


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
    dims = {x.row_dim for x in operands} - {None}
    _check(row_dim is not None or not any(x.depends for x in operands), f"{name} of all rows")
    # Random numbers of parts are not those of the whole batch.
    _check(row_dim is None or bool(dims), f"{name} makes rows")
    along = set[Any]()
    for key in _ALONG & eqn.params.keys():
        value = eqn.params[key]
        along |= set(value) if isinstance(value, tuple) else {value}
    _check(dims.isdisjoint(along), f"{name} along rows")
    _check(not dims or not name.startswith(_PLACES), f"{name} into rows")
    if name == "gather" and operands[0].row_dim is not None:
        _check(_is_row_by_row(eqn, operands[0].row_dim), "rows are taken from all rows")
    if name == "dynamic_update_slice":
        target, update = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        are_whole = row_dim is None or target[row_dim] == update[row_dim]
        _check(are_whole and operands[1].row_dim == row_dim, "some rows are replaced")
    return 1.0


_ALONG = {"axis", "dimension", "dimensions"}  # of a sort or a cumulative sum, and the like
_PLACES = ("scatter", "custom_call", "ffi_call", "pallas_call")


def _is_row_by_row(gather: Any, row_dim: int) -> bool:
    whole = gather.invars[0].aval.shape[row_dim]
    batching = gather.params["dimension_numbers"].operand_batching_dims
    return row_dim in batching or gather.params["slice_sizes"][row_dim] == whole


def _iota(eqn: Any, operands: list[Known], row_dim: int | None) -> float:
    _check(row_dim != eqn.params["dimension"], "it numbers the rows")
    return 1.0


_LINEAR: Mapping[str, Callable[[Any, list[Known], int | None], float]] = {
    **dict.fromkeys(("add", "add_any", "concatenate", "sub"), _alike),
    **dict.fromkeys(
        (
            *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "neg", "pvary"),
            *("reduce_precision", "reshape", "sharding_constraint", "squeeze", "transpose"),
        ),
        _same,
    ),
    "div": _quotient,
    "dot_general": _matrix_product,
    "mul": _product,
    "reduce_sum": _sum,
}
_RULES = {**_LINEAR, "iota": _iota}
