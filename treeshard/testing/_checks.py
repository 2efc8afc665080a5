"""Checks that a computation gives the same numbers in all layouts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from treeshard._core.paths import PyTree
from treeshard._core.processes import participating_processes, together
from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import fold_paths
from treeshard._planning.plan import Plan
from treeshard.errors import MeshError, WrongResultError
from treeshard.testing._computations import Computation, Gradients, Steps, line_of
from treeshard.testing._diagnosis import Diagnosis, statements
from treeshard.testing._layouts import Layout
from treeshard.testing._layouts import layouts as default_layouts
from treeshard.testing._noise import LIMIT, Tolerance, norm
from treeshard.testing._own_rows import OwnRows, with_own_keys
from treeshard.testing._report import Cause, Problem, Report
from treeshard.training._step import Step

# ------------------------------------------------------------------ words

# A cell of the second step, where the first is wrong already.
_WRONG_TOO = "wrong too"
_SECOND_STEP = "step 2 is not explained where step 1 is wrong already"
_RAISED = "{layout}: not compared, since it raised {kind}: {first}"
_OTHER_NUMBERS = (
    "{layout}: not compared, since the loss draws random numbers, and minibatches draw others"
)
_OTHER_WEIGHTS = (
    "{layout}: minibatches change the result on one device too, since the loss is not a mean of"
    " rows of equal weight; compared with minibatches on one device"
)
_HIDDEN = "rounding moves {paths} by as much as their size: a wrong factor would not be seen there"
_NOT_FINITE = "not finite on one device either: {paths}"


def check_gradients(
    loss: Callable[[Any, Any], Any],
    params: PyTree,
    batch: PyTree,
    plan: Plan,
    *,
    layouts: Sequence[Layout] | None = None,
    by_hand: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    batch_specs: SpecTree = None,
) -> Report:
    """Checks that the gradients of a loss are the same on one device and in many layouts.

    Compares the raw gradients, leaf by leaf, and not the updated parameters: an optimizer such as
    Adam hides a wrong factor. Of what differs the report says what was measured, and a cause if the
    numbers of all devices prove it: summed instead of averaged along an axis, which takes layouts
    with other axis sizes to tell, or not reduced along one.

    How far rounding moves a result is measured on one device, with the rows of the batch in other
    orders, with parameters changed in their last bit, and in twice the precision. A result is
    wrong if it is 12 times further away.

    It needs several devices: `treeshard.simulate_devices(8)` will do. A fault of the compiler for
    another platform shows on that platform only. On several processes all make the same call.

    Args:
        loss: Takes `(params, batch)` and returns the loss, or a tuple that starts with it. It
            runs on one device too, so it must not name devices; constraints see the mesh in force.
        params: The parameters, on the host or on devices. Leaves that are not floats are kept.
        batch: The batch, with enough rows for all layouts; small arrays are enough.
        plan: The plan of `params`, on a mesh with devices.
        layouts: What to compare; by default what `treeshard.testing.layouts` returns.
        by_hand: Code for `jax.shard_map` that must give the same: takes this device's shards of
            `params` and `batch`, and returns `(loss, grads)` with the shards of the gradients, as
            `manual.value_and_grad` does. It runs with `check_vma` on and off.
        batch_specs: The specs of the batch, by default as in `jit_step`.

    Returns:
        A `Report`, whose `str()` has a table of layouts and leaves.

    Raises:
        WrongResultError: If something differs by more than rounding, or nothing was compared. Its
            message is the report; it is an `AssertionError`.
        SpecError: If the plan is not of `params`; if `by_hand` is given, and neither `batch_specs`
            nor the plan says how the batch is split.
        StateError: If `by_hand` does not return `(loss, grads)`.
        MeshError: If the plan's mesh has one device, or none.

    Examples:
        >>> params = {"w": np.ones((8, 4), "float32")}
        >>> rules = [("w", fsdp("fsdp", min_size=0))]
        >>> planned = plan(params, rules, make_mesh("data=2,fsdp=4"))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
        >>> check_gradients(loss, params, np.ones((16, 8), "float32"), planned).ok
        True
    """
    chosen = layouts or default_layouts(plan, batch, batch_specs, by_hand=by_hand is not None)
    return check("check_gradients", Gradients(loss, params, batch, plan, by_hand), chosen)


def check_step(step: Step, state: PyTree, batch: PyTree) -> Report:
    """Checks that a training step does the same on one device and in other layouts, twice in a row.

    Compares how each of two steps changes every leaf of the state, and the rest that the step
    returns. A first moment shows the scale of the raw gradient, which the parameters of Adam hide.
    The layouts are the plan's mesh, other axis sizes, the axes in another order, and for a step of
    `jit_step` the batch split over fewer axes. The step is not run on `state` itself.

    Args:
        step: What `jit_step` or `shard_map_step` returned.
        state: The state, on the host or on devices. It is not donated.
        batch: The batch.

    Returns:
        A `Report`, as `check_gradients`.

    Raises:
        WrongResultError: If something differs by more than rounding, or nothing was compared; it is
            an `AssertionError`.
        SpecError: If the state does not match the plan of the step.
        MeshError: If the plan's mesh has one device.

    Examples:
        >>> planned = plan({"w": jnp.zeros(8)}, [("w", P("fsdp"))], make_mesh("fsdp=8"))
        >>> def sgd(state, x):
        ...     grad = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(state["w"])
        ...     return {"w": state["w"] - 0.1 * grad}, ()
        >>> step = jit_step(sgd, planned, batch=P("fsdp"))
        >>> check_step(step, {"w": jnp.zeros(8)}, np.ones((16, 8), "float32")).ok
        True
    """
    names = ["plan", "mesh", "axes", *["batch"] * (not step.is_by_hand)]
    chosen = default_layouts(step.plan, batch, step.batch_specs)
    chosen = [layout for layout in chosen if layout.name in names]
    return check("check_step", Steps(step, state, batch), chosen)


def check(
    what: str,
    computation: Computation,
    chosen: Sequence[Layout],
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compares a computation in layouts with one device; tells through `say` what it does."""
    mesh = chosen[0].mesh
    if mesh.devices.size == 1:
        raise MeshError(
            f"{what}: the mesh has one device, so there is nothing to compare. On a laptop, call"
            " `treeshard.simulate_devices(8)` first."
        )
    # All processes read the same numbers, and so say the same.
    with together(what, among=participating_processes((), [mesh])):
        say("one device, and its noise")
        comparison = _Comparison(computation, Tolerance(computation, chosen[0].alone()))
        for layout in chosen:
            say(str(layout))
            comparison.add(layout)
        report = comparison.report(what, chosen)
        if not report.ok:
            raise WrongResultError(str(report))
    return report


class _Comparison:
    """A computation on one device, and how layouts differ from it.

    Attributes:
        cells: For each result and layout, a word for the table.
        causes: For each layout that ran, what is wrong, by the index of the result.
        skipped: For each layout that raised, what it raised.
        notes: What was not compared, or compared in another way.
    """

    def __init__(self, computation: Computation, tolerance: Tolerance) -> None:
        self.computation, self.tolerance = computation, tolerance
        self.notes = _doubts(computation, tolerance)
        self.cells: dict[str, dict[str, str]] = {path: {} for path in computation.paths}
        self.causes: dict[str, dict[int, Cause]] = {}
        self.skipped: dict[str, Exception] = {}

    def add(self, layout: Layout) -> None:
        """Runs a layout and compares its results."""
        try:
            expected = self._expected(layout)
            if expected is None:
                return
            result = self.computation.run(layout)
        except Exception as error:  # the user's code, which may not run in all layouts
            self.skipped[layout.name] = error
            return
        rows = OwnRows(self.computation, layout)
        causes = self.causes[layout.name] = {}
        # Under `jit` a key gives the same numbers in all layouts; in `shard_map` each device draws.
        if layout.check_vma is not None and expected.random:
            expected, of_keys, note = with_own_keys(rows, expected, result)
            if of_keys is not None:
                causes[0] = of_keys
            if note:
                self.notes.append(note)
        diagnosis = Diagnosis(self.computation, rows, expected, result)
        for i, path in enumerate(self.computation.paths):
            self.cells[path][layout.name] = self._cell(diagnosis, i, causes)

    def _cell(self, diagnosis: Diagnosis, i: int, causes: dict[int, Cause]) -> str:
        """A word for one result in one layout; adds what is wrong to `causes`."""
        error = max(diagnosis.errors(i))
        if error <= LIMIT and (diagnosis.layout.name, i) not in self.computation.notes:
            return "ok" if error < 3 else f"{error:.1f} noise"
        if i >= self.computation.first > min(causes, default=i):
            return _WRONG_TOO
        cause = causes.setdefault(i, diagnosis.cause(i))
        return cause.short

    def _expected(self, layout: Layout) -> Tolerance | None:
        """What a layout should give; `None` if that cannot be said."""
        if layout.minibatches == 1:
            return self.tolerance
        if self.tolerance.random:
            self.notes.append(_OTHER_NUMBERS.format(layout=layout.name))
            return None
        # A mean of means is another number, also on one device, if rows do not weigh the same.
        alone = self.computation.alone(layout.alone(layout.minibatches))
        expected = self.tolerance.with_reference(alone)
        pairs = zip(alone, self.tolerance.reference, strict=True)
        far = (norm(x - y) > 2 * LIMIT * self.tolerance.of(i) for i, (x, y) in enumerate(pairs))
        if any(far):
            self.notes.append(_OTHER_WEIGHTS.format(layout=layout.name))
        return expected

    def report(self, what: str, chosen: Sequence[Layout]) -> Report:
        """All layouts together. Raises what all layouts of a kind raised."""
        # Code that never runs is a mistake of the caller, and its own error says which.
        for by_hand in (False, True):
            names = [x.name for x in chosen if (x.check_vma is not None) == by_hand]
            if names and {*names} <= self.skipped.keys():
                raise self.skipped[names[0]]
        if any(_WRONG_TOO in row.values() for row in self.cells.values()):
            self.notes.append(_SECOND_STEP)
        for name, error in self.skipped.items():
            kind, first = type(error).__name__, str(error).strip().partition("\n")[0][:200]
            self.notes.append(_RAISED.format(layout=name, kind=kind, first=first))
        ran = {layout.name: layout for layout in chosen if layout.name in self.causes}
        problems = tuple(self._problems(ran))
        return Report(what, tuple(map(str, chosen)), self.cells, problems, tuple(self.notes))

    def _problems(self, ran: Mapping[str, Layout]) -> Iterator[Problem]:
        computation = self.computation
        trace = cache(lambda name: computation.trace(ran[name]))
        for i, (path, spec) in enumerate(zip(computation.paths, computation.specs, strict=True)):
            causes = {name: causes[i] for name, causes in self.causes.items() if i in causes}
            for names, fact, fix in statements(computation, i, causes, ran):
                line = line_of(trace(names[0]), i)
                yield Problem(path, spec, tuple(names), fact, fix, line)


def _doubts(computation: Computation, tolerance: Tolerance) -> list[str]:
    """What comparing with one device cannot show, in words."""
    notes = list(tolerance.notes)
    paths = list(enumerate(computation.paths))
    if hidden := fold_paths(path for i, path in paths if tolerance.is_hidden(i)):
        notes.append(_HIDDEN.format(paths=", ".join(hidden)))
    if bad := fold_paths(p for i, p in paths if not np.isfinite(tolerance.reference[i]).all()):
        notes.append(_NOT_FINITE.format(paths=", ".join(bad)))
    return notes
