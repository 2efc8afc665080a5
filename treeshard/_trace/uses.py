"""Follows the leaves of a state through the trace of a step, to the equations that use them.

A trace does not mark gradients, but JAX names the transformation that made an equation: `jvp()` in
the forward pass, `transpose(jvp())` in the backward pass. Equations of these passes need the full
leaf. The update is elementwise, and needs only each device's shard. These names, and the dependence
on gradients, distinguish the passes from the update.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from treeshard._core.jaxprs import inner_jaxprs, interpret
from treeshard._core.mesh import axes_of_type
from treeshard._trace.values import (
    ELEMENTWISE,
    LAY_OUT,
    OF_ARRAYS,
    OF_KEYS,
    OF_SCALARS,
    PASS_ON,
    Dims,
    Value,
    dims_of,
    elementwise_result,
    join_branches,
    key_result,
    layout_result,
    unstack_results,
)

GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
# The collectives by which code by hand sends activations to the devices that have the weights.
_SENDS = ("all_to_all", "ppermute", "ragged_all_to_all", "reduce_scatter", *GATHERS)
_FORWARD, _BACKWARD = "forward", "backward"
Finals = Mapping[Any, tuple[int, ...]]  # the leaves whose new value a variable is


class Gather(NamedTuple):
    """A gather of a leaf, or of each of its layers.

    Attributes:
        axes: The mesh axes over which it is gathered.
        dtype: The dtype in which it is gathered; `uint32` for a key.
        itemsize: The bytes of one element, or of one key.
        parts: The number of layers of the leaf, which are gathered one by one.
        times: The number of gathers in a step, over all layers.
        is_again: Whether it is for the backward pass.
        is_changed: Whether its elements differ from the leaf's.
        is_counted: Whether it counts for this leaf. If leaves are added up before the gather, the
            gather of their sum counts for the first leaf.
    """

    axes: frozenset[str]
    dtype: str
    itemsize: int
    parts: int
    times: int
    is_again: bool
    is_changed: bool = False
    is_counted: bool = True


class Place(NamedTuple):
    """Where in a trace an equation stands."""

    region: str = ""  # `"forward"` or `"backward"` if it is differentiated, else empty
    trips: int = 1  # how often it runs
    path: tuple[int, ...] = ()  # the identities of the equations around it
    loop: tuple[int, ...] = ()  # the path to the innermost loop or repeated forward pass
    repeat: tuple[int, ...] = ()  # the path to the innermost repeated forward pass
    manual: frozenset[str] = frozenset()  # the mesh axes over which it runs once per device


class Walk:
    """One pass over a trace. It records what the step does with each leaf, by the leaf's number.

    Args:
        along: The mesh axes that split the batch: weights are gathered over them.
        scalars: The leaves with one element.

    Attributes:
        used: The leaves that the forward pass uses.
        prepared: The leaves that are used outside of the forward pass before they are combined with
            a gradient, such as a scale of frozen weights, or an optimizer's old statistics.
        ops: By leaf, the equations of the forward pass that use it.
        multiplied: The leaves that the update multiplies by others.
        broadcast: The leaves that the update broadcasts, as Adafactor does with its means of rows
            and columns.
        combined: The leaves that the forward pass combines before it uses the batch, such as the
            factors of a product that it adds to a weight.
        gathers: The gathers of full leaves that the step needs.
        split: By leaf, the axes of the batch over which it stays split where it is used.
        sources: By leaf, the leaves from which its new value is computed, element by element.
        updates: For leaves that a loop trains, the number of updates in a step.
        gradients: By leaf, the gradients that its new value depends on.
        changed: The leaves whose new values differ from the old ones.
        constrained: The shapes of gradients that the step constrains, with the axes of each dim.
        scattered: The elements of arrays that the step reduce-scatters by hand.
        has_waiting: Whether gradients wait for their sum over devices, on Explicit axes.
        sent: The axes over which code by hand sends other values than weights before the backward
            pass.
    """

    def __init__(self, along: Collection[str], scalars: Collection[int]) -> None:
        self.along, self.scalars = frozenset(along), frozenset({OF_SCALARS, *scalars})
        self.used: set[int] = set()
        self.prepared: set[int] = set()
        self.ops: dict[int, set[int]] = defaultdict(set)
        self.multiplied: set[int] = set()
        self.broadcast: set[int] = set()
        self.combined: set[int] = set()
        self.gathers: dict[tuple[int, Any], Gather] = {}
        self.split: dict[int, set[str]] = defaultdict(set)
        self.sources: dict[int, set[int]] = defaultdict(set)
        self.updates: dict[int, int] = {}
        self.gradients: dict[int, set[int]] = defaultdict(set)
        self.changed: set[int] = set()
        self.constrained: set[tuple[tuple[int, ...], Dims]] = set()
        self.scattered: set[int] = set()
        self.has_waiting = False
        self.sent: set[str] = set()
        self.is_counting = True  # false while the values that a loop carries are still unknown
        self.asked: dict[Any, Gather] = {}  # the gathers that the step writes

    def run(self, jaxpr: Any, given: Sequence[Value], finals: Finals, at: Place) -> list[Value]:
        """The values that a jaxpr returns for these arguments."""

        def apply(eqn: Any, operands: list[Value]) -> list[Value]:
            here = at._replace(region=_find_region(eqn) or at.region)
            results = self._results(eqn, operands, finals, here)
            if eqn.primitive.name in _SENDS and here.region != _BACKWARD:
                self._note_sent(eqn, results)
            return [
                self._final(finals[variable], result) if variable in finals else result
                for variable, result in zip(eqn.outvars, results, strict=True)
            ]

        constants = [Value()] * len(jaxpr.constvars)
        return interpret(jaxpr, [*constants, *given], _literal, apply)

    def _note_sent(self, eqn: Any, results: Sequence[Value]) -> None:
        if not any(value.leaves for value in results):
            axes = eqn.params["axis_name"]
            self.sent.update((axes,) if isinstance(axes, str) else axes)

    def _add_dependencies(
        self, variable: Any, operands: Sequence[Value], result: Value, at: Place
    ) -> Value:
        """The result of an op, with what it depends on.

        A scalar does not pass on what it is to an array that it scales: the array does not become
        a gradient by a norm of gradients, nor a value of the batch by a loss.
        """
        is_scalar = math.prod(variable.aval.shape) == 1
        if at.region == _BACKWARD:
            gradients = frozenset({OF_SCALARS if is_scalar else OF_ARRAYS})
            return result._replace(gradients=gradients, is_of_batch=False)
        known = result.gradients.union(*(operand.gradients for operand in operands))
        gradients = known & self.scalars if is_scalar else known - self.scalars
        is_of_batch = not is_scalar and any(operand.is_of_batch for operand in operands)
        return result._replace(gradients=gradients, is_of_batch=is_of_batch)

    def _final(self, leaves: tuple[int, ...], new: Value) -> Value:
        """The new value of a leaf: later equations that read it use that leaf."""
        owner = next((leaf for leaf in leaves if leaf in new.leaves), leaves[0])
        gradients = frozenset({owner}) if new.gradients else frozenset[int]()
        for leaf in leaves:
            self.sources[leaf] |= new.leaves if leaf == owner else {owner}
            self.gradients[leaf] |= new.gradients if leaf == owner else gradients
            if new.is_changed or leaf not in new.leaves:
                self.changed.add(leaf)
        return new._replace(leaves=frozenset({owner}) & new.leaves, gradients=gradients)

    # ---------------------------------------------------------------- one equation

    def _results(self, eqn: Any, operands: list[Value], finals: Finals, at: Place) -> list[Value]:
        if run := _PROGRAMS.get(eqn.primitive.name):
            return run(self, eqn, operands, finals, at)
        inner = inner_jaxprs(eqn)
        if len(inner) == 1 and len(inner[0].invars) == len(operands):
            return self._call(inner[0], eqn, operands, finals, at)
        is_of_batch = any(operand.is_of_batch for operand in operands)
        if is_of_batch:
            # An op that is not differentiated has an empty region, as in the update. An evaluation
            # of the new weights uses the batch, and so does not belong to the update.
            at = at._replace(region=at.region or _FORWARD)
        results = self._apply_op(eqn, operands, at)
        if self.is_counting and at.region == _FORWARD and not is_of_batch:
            self._note_combined(eqn, operands, results)
        pairs = zip(eqn.outvars, results, strict=True)
        return [
            self._add_dependencies(variable, operands, result, at) for variable, result in pairs
        ]

    def _note_combined(self, eqn: Any, operands: list[Value], results: list[Value]) -> None:
        # A norm of a weight in the loss is a scalar, and leaves the gradient unchanged.
        if all(math.prod(variable.aval.shape) == 1 for variable in eqn.outvars):
            return
        before = frozenset[int]().union(*(operand.leaves for operand in operands))
        self.combined |= before.difference(*(result.leaves for result in results))

    def _apply_op(self, eqn: Any, operands: list[Value], at: Place) -> list[Value]:
        name = eqn.primitive.name
        self.has_waiting |= any(map(_waits, eqn.invars))
        if name in PASS_ON:
            return list(operands)
        if name in ("sharding_constraint", "reshard"):
            return [self._apply_constraint(eqn, operands[0], at)]
        if name in GATHERS:
            return [self._apply_gather(eqn, operands[0], at)]
        if name == "reduce_scatter":
            self.scattered.add(math.prod(eqn.invars[0].aval.shape))
        if name in ELEMENTWISE:
            return [self._apply_elementwise(eqn, operands, at)]
        if name == "unstack":
            return unstack_results(eqn, operands[0])
        if name in OF_KEYS:
            return [key_result(eqn, operands[0])]
        if name == "random_bits":
            self._use(eqn, eqn.invars[0], operands[0], at, operands[0].axes)
            return [key_result(eqn, operands[0])._replace(leaves=frozenset())]
        if name == "dot_general":
            return [self._apply_product(eqn, operands, at)]
        if name in LAY_OUT:
            return [layout_result(eqn, operands[0])]
        # Other ops, such as convolutions, sorts and custom kernels, may need their full operands.
        for variable, operand in zip(eqn.invars, operands, strict=True):
            self._use(eqn, variable, operand, at)
        return [Value() for _ in eqn.outvars]

    def _apply_elementwise(self, eqn: Any, operands: list[Value], at: Place) -> Value:
        """The result of an op on each element."""
        size = math.prod(eqn.outvars[0].aval.shape)
        # A bias that is broadcast to the rows is used here: its elements are no longer the leaf's.
        # An operand of the result's size is still the leaf, changed element by element.
        full_size: list[Value] = []
        for variable, operand in zip(eqn.invars, operands, strict=True):
            is_broadcast = operand.leaves and operand.size < size
            if is_broadcast and not at.region:
                self.broadcast.update(operand.leaves)
            if is_broadcast and (at.region or not operand.gradients):
                others = [x for x in operands if x is not operand]
                self._use(eqn, variable, operand, at, _common_axes(operand, others))
            if not is_broadcast and math.prod(variable.aval.shape) == size:
                full_size.append(operand)
        return elementwise_result(eqn.primitive.name, operands, full_size)

    def _apply_product(self, eqn: Any, operands: list[Value], at: Place) -> Value:
        """The result of a product. A dim over which it runs independently may stay split."""
        # dot_general[dimension_numbers=(([1], [0]), ([], []))]: the dims of each side over which
        # it sums, and the dims over which it runs independently, as over experts. The independent
        # dims come first in the result, then all others.
        independent: list[list[tuple[str, ...]]] = []
        others: list[tuple[str, ...]] = []
        sides = zip(eqn.invars, operands, *eqn.params["dimension_numbers"], strict=True)
        for variable, operand, summed, batched in sides:
            dims = operand.dims_of_rank(variable.aval.ndim)
            along = {axis for dim in batched for axis in dims[dim]}
            kept = self._use(eqn, variable, operand, at, along).dims_of_rank(len(dims))
            independent.append([kept[dim] for dim in batched])
            others += [kept[i] for i in range(len(kept)) if i not in (*summed, *batched)]
        first = [left or right for left, right in zip(*independent, strict=True)]
        return Value(dims=_drop_repeated_axes(first + others))

    def _apply_constraint(self, eqn: Any, value: Value, at: Place) -> Value:
        """The result of a constraint, which may gather its operand."""
        sharding = eqn.params.get("sharding") or eqn.params["dst_sharding"]
        rank = eqn.outvars[0].aval.ndim
        dims = list(dims_of(sharding.spec, rank)) if hasattr(sharding, "spec") else [()] * rank
        before = value.dims_of_rank(rank)
        for dim in eqn.params.get("unconstrained_dims", ()):
            dims[dim] = before[dim]
        named = {axis for dim in dims for axis in dim}
        # Inside `shard_map`, and on axes without types, a spec leaves out other axes.
        silent = at.manual
        if eqn.primitive.name == "reshard":
            silent = at.manual | {*axes_of_type(sharding.mesh, AxisType.Auto)}
        after = value._replace(
            dims=tuple(
                (*(axis for axis in old if axis in silent and axis not in named), *new)
                for old, new in zip(before, dims, strict=True)
            )
        )
        # In the backward pass, a constraint is the transpose of one of the forward pass.
        if not at.region and OF_ARRAYS in value.gradients:
            self.constrained.add((eqn.outvars[0].aval.shape, tuple(map(tuple, dims))))
        return self._request_gather(eqn, eqn.invars[0], value, after, at)

    def _apply_gather(self, eqn: Any, value: Value, at: Place) -> Value:
        """The result of an all-gather by hand."""
        axes = eqn.params["axis_name"]
        axes = {axes} if isinstance(axes, str) else set(axes)
        larger = value._replace(size=value.size * eqn.params["axis_size"])
        if not is_last_step(eqn.params.get("axis_index_groups")):
            return larger
        return self._request_gather(eqn, eqn.invars[0], value, larger.without(axes), at)

    # ---------------------------------------------------------------- what is used

    def _use(
        self, eqn: Any, variable: Any, value: Value, at: Place, split: Collection[str] = ()
    ) -> Value:
        """Records that an op needs a value in full, except over the axes `split`.

        Returns the value after the gathers.
        """
        if not value.leaves:
            return value
        kept = value.axes & {*split, *at.manual}
        needless = self.along & (value.axes - kept)
        is_sum = all(math.prod(x.aval.shape) == 1 for x in eqn.outvars)
        is_product = not is_sum and not eqn.primitive.name.startswith("reduce_")
        is_scalar = math.prod(variable.aval.shape) == 1 and not _is_key(variable)
        # 1. A product in the update belongs to a matrix optimizer. Norms and means do not count.
        # 2. An op in a loss or an evaluation is a use, and may need gathers.
        # 3. A sum over all elements outside of both, such as a norm for a log, is not a use.
        if value.gradients and not at.region:
            self.multiplied.update(value.leaves if is_product and not is_scalar else ())
        elif at.region or not (is_sum or is_scalar):
            (self.used if at.region else self.prepared).update(value.leaves)
            self._count({key: self.asked[key] for key in value.gathers})
            if not is_sum:
                for leaf in value.leaves:
                    self.split[leaf].update(kept & self.along)
                    if at.region == _FORWARD:
                        self.ops[leaf].add(id(eqn))
                self._count(self._gathers_for_use(variable, value, needless, at))
        return value.without(needless)

    def _gathers_for_use(
        self, variable: Any, value: Value, axes: Collection[str], at: Place
    ) -> dict[Any, Gather]:
        """The gathers of a value that an op needs in full."""
        # If a loop uses a value that it does not change, one gather before the loop is enough.
        # Layers that the loop cuts out are gathered one by one.
        is_layer = value.parts > 1
        where, times = (at.loop, at.trips) if is_layer else ((value.loop, at.repeat), value.trips)
        which = (value.part, value.is_changed, frozenset(axes), str(variable.aval.dtype), where)
        return _make_gathers(variable, value, axes, times, which, at) if axes else {}

    def _count(self, gathers: dict[Any, Gather]) -> None:
        for key, gather in gathers.items() if self.is_counting else ():
            self.gathers.setdefault(key, gather)

    def _request_gather(
        self, eqn: Any, variable: Any, value: Value, after: Value, at: Place
    ) -> Value:
        """The result of an op that gathers. The gather counts where its result is used, so the
        gather of an update does not count."""
        axes = self.along & (value.axes - after.axes)
        if not value.leaves or not axes:
            return after
        # Each call is one gather, although some compilers merge equal gathers.
        where = (*at.path, id(eqn), id(variable))
        asked = _make_gathers(variable, value, axes, at.trips, where, at)
        self.asked |= asked
        return after._replace(gathers=value.gathers | asked.keys())

    # ---------------------------------------------------------------- programs in an equation

    def _call(
        self, inner: Any, eqn: Any, operands: list[Value], finals: Finals, at: Place
    ) -> list[Value]:
        """The results of a jitted function and the like. If `jax.checkpoint` repeats it for the
        gradients, it starts from its arguments again."""
        at = _enter(at, eqn)
        if eqn.params.get("differentiated"):
            at = at._replace(loop=at.path, repeat=at.path)
        return self.run(inner, operands, _inner_finals(eqn, inner, finals), at)

    def _shard_map(self, eqn: Any, operands: list[Value], finals: Finals, at: Place) -> list[Value]:
        manual = frozenset(eqn.params["newly_manual_axes"])
        inner = inner_jaxprs(eqn)[0]
        given: list[Value] = []
        for variable, inside, value, spec in zip(
            eqn.invars, inner.invars, operands, eqn.params["in_specs"], strict=True
        ):
            dims = dims_of(spec, variable.aval.ndim)
            named = {axis for dim in dims for axis in dim}
            # An argument is replicated along the axes that its spec does not name.
            value = self._request_gather(eqn, variable, value, value.without(manual - named), at)
            if not value.dims:
                value = value._replace(dims=dims)
            given.append(value._replace(size=math.prod(inside.aval.shape)))
        place = at._replace(manual=at.manual | manual)
        results = self._call(inner, eqn, given, finals, place)
        return [
            result._replace(size=math.prod(variable.aval.shape))
            for variable, result in zip(eqn.outvars, results, strict=True)
        ]

    def _scan(self, eqn: Any, operands: list[Value], finals: Finals, at: Place) -> list[Value]:
        """The results of a scan. All trips get its first arguments, and a slice of the last."""
        inner, length = inner_jaxprs(eqn)[0], eqn.params["length"]
        is_cut = [
            x.aval.shape != y.aval.shape for x, y in zip(eqn.invars, inner.invars, strict=True)
        ]
        is_stacked = [
            x.aval.shape != y.aval.shape for x, y in zip(eqn.outvars, inner.outvars, strict=True)
        ]
        carried = is_stacked.count(False)
        first = is_cut.count(False) - carried
        # A leaf that is cut into slices is a stack of layers.
        given = [
            _slice_layer(value, variable.aval.shape) if cut else value
            for value, variable, cut in zip(operands, inner.invars, is_cut, strict=True)
        ]
        place = _enter_loop(at, eqn, length)
        results = self._loop(inner, given, slice(first, first + carried), eqn, finals, place)
        stacked = [
            _stack_results(value, variable.aval.shape, length)
            for value, variable in zip(results[carried:], eqn.outvars[carried:], strict=True)
        ]
        return [*results[:carried], *stacked]

    def _while(self, eqn: Any, operands: list[Value], finals: Finals, at: Place) -> list[Value]:
        first = eqn.params["cond_nconsts"]
        given = operands[first:]
        inner = getattr(eqn.params["body_jaxpr"], "jaxpr", eqn.params["body_jaxpr"])
        carried = slice(eqn.params["body_nconsts"], len(given))
        # A trace does not show how often a `while` runs: its gathers are planned once.
        place = _enter_loop(at, eqn, 1)
        return self._loop(inner, given, carried, eqn, finals, place)

    def _loop(
        self, inner: Any, given: list[Value], carried: slice, eqn: Any, finals: Finals, at: Place
    ) -> list[Value]:
        """The results of a loop, once the values that it carries stay the same in each trip."""
        # A trip may change a leaf, or split it differently, so the body runs until the carried
        # values stay the same. Only the last run counts gathers.
        count = carried.stop - carried.start
        inside = _inner_finals(eqn, inner, finals)
        was_counting, self.is_counting = self.is_counting, False
        for _ in range(_MOST_ROUNDS):
            results = self.run(inner, given, inside, at)
            before = given[carried]
            after = [_join_trips(x, y) for x, y in zip(before, results[:count], strict=True)]
            if after == before:
                break
            given = [*given[: carried.start], *after, *given[carried.stop :]]
        self.is_counting = was_counting
        given[carried] = [_mark_changed_in_loop(x, at) for x in given[carried]]
        results = self.run(inner, given, inside, at)
        for value in results[:count]:
            if self.is_counting and value.is_changed and value.gradients:
                self.updates |= dict.fromkeys(value.leaves, at.trips)
        return results

    def _cond(self, eqn: Any, operands: list[Value], finals: Finals, at: Place) -> list[Value]:
        results: list[Value] = []
        for branch in inner_jaxprs(eqn):
            of_branch = self._call(branch, eqn, operands[1:], finals, at)
            pairs = zip(results, of_branch, strict=True)
            results = [join_branches(x, y) for x, y in pairs] if results else of_branch
        return results


def _join_trips(before: Value, after: Value) -> Value:
    """A value that a loop carries, as each trip receives it. Weights that a trip gathers for the
    next one count where the next trip uses them, like weights that are gathered before the loop."""
    return join_branches(before, after)._replace(gathers=before.gathers | after.gathers)


# Each round removes knowledge about a value, or adds the gathers of a trip: few rounds are enough.
_MOST_ROUNDS = 8
_PROGRAMS: Mapping[str, Callable[..., list[Value]]] = {
    "cond": Walk._cond,
    "scan": Walk._scan,
    "shard_map": Walk._shard_map,
    "while": Walk._while,
}


def _make_gathers(
    variable: Any, value: Value, axes: Collection[str], times: int, which: Any, at: Place
) -> dict[tuple[int, Any], Gather]:
    """A gather of a value for each leaf that it comes from; `which` distinguishes gathers."""
    dtype = variable.aval.dtype
    one = Gather(
        frozenset(axes),
        "uint32" if _is_key(variable) else str(dtype),
        dtype.itemsize,
        value.parts,
        times,
        at.region == _BACKWARD,
        value.is_changed,
    )
    first = min(value.leaves)
    return {(leaf, which): one._replace(is_counted=leaf == first) for leaf in value.leaves}


def is_last_step(groups: Sequence[Sequence[int]] | None) -> bool:
    """Whether a gather over groups of devices is the last step of a gather over a full axis.

    The groups of the last step have the devices that are farthest apart:
    `((0, 4, 8, 12), (1, 5, 9, 13), ...)`.
    """
    if not groups or len(groups[0]) < 2:
        return True
    first, second, *_ = groups[0]
    return groups[0][-1] + second - first == sum(map(len, groups))


def _waits(variable: Any) -> bool:
    """Whether a variable has an unreduced type, so that its sum waits: `f32[64,128]{U:data}`."""
    return bool(getattr(getattr(variable.aval, "sharding", None), "spec", P()).unreduced)


def _is_key(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jax.dtypes.prng_key)


def _literal(literal: Any) -> Value:
    is_scalar = getattr(literal.aval, "shape", None) == ()
    return Value(is_zero=is_scalar and literal.val == 0)


def _find_region(eqn: Any) -> str:
    """The pass in which JAX traced an equation.

    The name of the equation has the transformations, as in `transpose(jvp(block))/attn`. Only the
    part that differs from the names around the equation counts.
    """
    name = str(eqn.source_info.name_stack)
    if "transpose(" in name:
        return _BACKWARD
    return _FORWARD if "jvp(" in name else ""


def _enter(at: Place, eqn: Any) -> Place:
    return at._replace(path=(*at.path, id(eqn)))


def _enter_loop(at: Place, eqn: Any, trips: int) -> Place:
    at = _enter(at, eqn)
    return at._replace(loop=at.path, trips=at.trips * trips)


def _mark_changed_in_loop(value: Value, at: Place) -> Value:
    """A value that a loop carries, with the loop that changes it, if one does."""
    if not value.is_changed or not value.leaves:
        return value
    return value._replace(loop=at.loop, trips=at.trips)


def _inner_finals(eqn: Any, inner: Any, finals: Finals) -> Finals:
    """The variables of an inner program that are the new values of leaves."""
    pairs = zip(eqn.outvars, inner.outvars, strict=False)
    return {y: finals[x] for x, y in pairs if x in finals and not isinstance(y, Literal)}


def _slice_layer(value: Value, shape: Sequence[int]) -> Value:
    """One slice of dim 0 of a value."""
    all_elements = max(value.size, 1)
    size = math.prod(shape)
    return value._replace(
        dims=value.dims[1:], size=size, parts=value.parts * max(all_elements // max(size, 1), 1)
    )


def _stack_results(value: Value, shape: Sequence[int], length: int) -> Value:
    """The slices that a scan stacks as results, such as weights for the backward pass."""
    trips = max(length, 1)  # a scan over an empty stack has no trips
    parts = value.parts // trips if value.parts % trips == 0 else 1
    return value._replace(
        dims=((), *value.dims) if value.dims else (), size=math.prod(shape), parts=parts
    )


def _common_axes(value: Value, others: Sequence[Value]) -> set[str]:
    """The axes that split the same dims of a value and of another operand of its op."""
    return {
        axis
        for other in others
        for mine, its in zip(value.dims, other.dims, strict=False)
        for axis in mine
        if axis in its
    }


def _drop_repeated_axes(dims: Sequence[tuple[str, ...]]) -> Dims:
    """The dims, with each axis only at its first dim."""
    seen: set[str] = set()
    result: list[tuple[str, ...]] = []
    for axes in dims:
        result.append(tuple(axis for axis in axes if axis not in seen))
        seen |= {*axes}
    return tuple(result)
