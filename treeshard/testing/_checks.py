"""Checks that a computation gives the same numbers in all layouts."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree
from treeshard._core.processes import participating_processes, together, wants_bar, with_bar
from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import fold_paths
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import AVERAGES_PARTS
from treeshard.errors import MeshError, WrongResultError
from treeshard.testing._computations import Computation, Gradients, Steps
from treeshard.testing._evidence import WHY, check_rows, gaps, kept_keys, without_other_step
from treeshard.testing._findings import Compared, statements
from treeshard.testing._layouts import Layout, restored, selected
from treeshard.testing._layouts import layouts as default_layouts
from treeshard.testing._noise import (
    LIMIT,
    MATMUL_EPS,
    Tolerance,
    float_dtypes,
    norm,
    widest_float,
)
from treeshard.testing._own_rows import OF_THE_MEAN_GRADIENT, OwnRows, with_own_keys
from treeshard.testing._report import UNCHECKED, Finding, Problem, Report, percent
from treeshard.testing._widening import Widening
from treeshard.training._pitfalls import equations
from treeshard.training._step import Step

# ------------------------------------------------------------------ words

# A cell of the second step, where the first is wrong already.
_WRONG_TOO = "wrong too"
_SECOND_STEP = "step 2 is not measured where step 1 is wrong already"
_RAISED = "{layout}: not compared, since it raised {error}, as expected"
_OTHER_NUMBERS = (
    "{layout}: not compared, since the loss draws random numbers, and minibatches draw others"
)
_OTHER_WEIGHTS = (
    "{layout}: minibatches change the result on one device too, since the loss is not a mean of"
    " rows of equal weight; compared with minibatches on one device"
)
_NOT_WIDE = "compared in {dtypes} only, since the program does not run in wider dtypes: {error}"
_NOT_WIDE_HERE = "compared in one precision only, since in the other it raised {error}"
_KEPT_DTYPES = "{kernels}: runs in its own dtypes also where all else is compared in {wide}"
_SEES_LITTLE = "warning: errors of up to {worst} would not be seen in {paths}"
_NO_OWN_ROWS = (
    "the rows of one device alone cannot be computed, so it is not known whether a missing"
    " reduction would change anything: {error}"
)
_MEAN_OF_PARTS = (
    "the program averages the gradients of parts of the batch, by"
    " `accumulate_gradients(axis_names=)`: those of the batch, only if the loss is a mean over rows"
)
_KEPT_KEY = (
    "{paths}: the step returns this key as it was, so each step draws the same random numbers"
    " unless it is folded with a number that changes"
)

# Layouts whose failure is never expected.
_MUST_RUN = {"plan", "by hand"}
# The relative error above which a report warns that smaller ones are not seen.
_COARSE = 0.01
_QUIET_SECONDS = 10.0


def check_gradients(
    loss: Callable[[Any, Any], Any],
    params: PyTree,
    batch: PyTree,
    plan: Plan,
    *,
    layouts: Sequence[Layout | str] | None = None,
    by_hand: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    batch_specs: SpecTree = None,
    expected_to_raise: Collection[str] = (),
) -> Report:
    """Checks that the gradients of a loss are the same on one device and in many layouts.

    Examples:
        >>> random = np.random.default_rng(0)
        >>> params = {"w": random.normal(size=(8, 4)).astype("float32")}
        >>> batch = random.normal(size=(16, 8)).astype("float32")
        >>> rules = [("w", fsdp("fsdp", min_size=0))]
        >>> planned = plan(params, rules, make_mesh("data=2,fsdp=4"))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)
        >>> check_gradients(loss, params, batch, planned).ok
        True

    Compares raw gradients, leaf by leaf: Adam would hide a wrong factor. A result is wrong if it
    differs from that of one device by more than 12 times the rounding noise, which is measured.
    Parameters are moved by 1% of their scale first, since a head of zeros makes other gradients
    zero. The page "Test your sharding" has the details.

    It needs several devices, which may be simulated. On several processes all make the same
    call. On a terminal, a call of more than 10 seconds shows a progress bar with an estimate of
    the rest, if `tqdm` is installed.

    Args:
        loss: Takes `(params, batch)` and returns the loss, or a tuple that starts with it. It
            runs on one device too, so it must not name devices.
        params: The parameters, on the host or on devices. Leaves that are not floats are kept.
        batch: The batch, of random numbers, with enough rows for all layouts.
        plan: The plan of `params`, on a mesh with devices.
        layouts: Layouts to compare, or their names. By default all of `testing.layouts`.
        by_hand: Code for `jax.shard_map` that must give the same: takes this device's shards of
            `params` and `batch`, and returns `(loss, grads)`, as `manual.value_and_grad` does. It
            runs with `check_vma` on and off.
        batch_specs: The specs of the batch, by default as in `jit_step`.
        expected_to_raise: Names of layouts that may raise; `plan` and `by hand` must run.

    Returns:
        A `Report`, whose `str()` has a table of layouts and leaves.

    Raises:
        WrongResultError: If something differs by more than rounding, a layout raised, random
            numbers prevented a check, or no gradient was compared, as if all rows of the batch are
            alike. Its message is the report; it is an `AssertionError`.
        SpecError: If the plan is not of `params`; if `by_hand` is given, and neither `batch_specs`
            nor the plan says how the batch is split; if there is no layout of a name.
        StateError: If `by_hand` does not return `(loss, grads)`.
        MeshError: If the plan's mesh has one device, or none.
    """
    available = default_layouts(plan, batch, batch_specs, by_hand=by_hand is not None)
    chosen = selected("check_gradients", available, layouts)
    computation = Gradients(loss, params, batch, plan, by_hand)
    return check("check_gradients", computation, chosen, expected_to_raise)


def check_step(
    step: Step,
    state: PyTree,
    batch: PyTree,
    *,
    layouts: Sequence[Layout | str] | None = None,
    expected_to_raise: Collection[str] = (),
    restore_on: MeshLike | None = None,
) -> Report:
    """Checks that a training step does the same on one device and in other layouts, twice in a row.

    Examples:
        >>> planned = plan({"w": jnp.zeros(8)}, [("w", P("fsdp"))], make_mesh("fsdp=8"))
        >>> batch = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
        >>> def sgd(state, x):
        ...     grad = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(state["w"])
        ...     return {"w": state["w"] - 0.1 * grad}, ()
        >>> step = jit_step(sgd, planned, batch=P("fsdp"))
        >>> check_step(step, {"w": jnp.zeros(8)}, batch).ok
        True

    Compares how each of two steps changes every leaf of the state, and the rest that the step
    returns. Where float32 rounds an update so much that errors above 1% would not be seen, it
    compares in float64 too. A first moment shows the scale of the raw gradient, which the
    parameters of Adam hide. The layouts are the plan's mesh, other axis sizes, the axes in another
    order, and for a step of `jit_step` the batch split over fewer axes. The step is not run on
    `state` itself. In a layout, `jax.device_count()` is the size of its mesh, and 1 on one device,
    so that a division by it shows. A key that the step returns as it was is noted. Progress is
    shown as by `check_gradients`.

    Args:
        step: What `jit_step` or `shard_map_step` returned.
        state: The state, on the host or on devices. It is not donated.
        batch: The batch, of random numbers.
        layouts: What to compare: names of layouts, or layouts. By default all.
        expected_to_raise: Names of layouts that may raise; `plan` must run.
        restore_on: A mesh, such as `"data=4,fsdp=2"`, for one more layout, `restored`: the first
            step on the plan's mesh, then the state is saved and restored on this one, for the
            second step. On several processes the temporary folder must be one that all see.

    Returns:
        A `Report`, as `check_gradients`.

    Raises:
        WrongResultError: As `check_gradients`, or if no leaf of the state was compared, as if both
            steps skip their update; it is an `AssertionError`.
        SpecError: If the state does not match the plan of the step, or there is no layout of a
            name.
        MeshError: If the plan's mesh has one device.
    """
    names = ["plan", "mesh", "axes"] if step.is_by_hand else ["plan", "mesh", "axes", "batch"]
    available = default_layouts(step.plan, batch, step.batch_specs)
    available = [layout for layout in available if layout.name in names]
    if restore_on is not None:
        available.append(restored(available[0], restore_on))
    chosen = selected("check_step", available, layouts)
    return check("check_step", Steps(step, state, batch), chosen, expected_to_raise)


def check(
    what: str,
    computation: Computation,
    chosen: Sequence[Layout],
    expected_to_raise: Collection[str] = (),
) -> Report:
    """Compares a computation in layouts with one device."""
    mesh = chosen[0].mesh
    if mesh.devices.size == 1:
        raise MeshError(
            f"{what}: the mesh has one device, so there is nothing to compare. On a laptop, call"
            " `treeshard.simulate_devices(8)` first."
        )
    bar = with_bar(chosen, what, unit="layout", show=wants_bar(), after=_QUIET_SECONDS)
    # All processes read the same numbers, and so say the same.
    with together(what, among=participating_processes((), [mesh])):
        check_rows(what, computation, chosen[0])
        comparison = _Comparison(computation, chosen[0])
        for layout in bar:
            comparison.add(layout)
        report = comparison.report(what, chosen, expected_to_raise)
        if not report.ok:
            first_error = next(iter(comparison.raised.values()), None)
            raise WrongResultError(str(report)) from first_error
    return report


class _Precision(NamedTuple):
    """A computation in some dtypes, and what it gives on one device."""

    computation: Computation
    tolerance: Tolerance


class _Comparison:
    """A computation on one device, and how layouts differ from it.

    Attributes:
        precisions: With wide floats, where the program has narrower ones, and with its own.
        gaps: The results of which a comparison shows little, by index, and why.
        cells: For each result and layout, a word for the table.
        visible: For each result, the smallest error that would be seen in all layouts.
        findings: For each layout that ran, what is wrong, by the index of the result.
        raised: For each layout that raised, what it raised.
        notes: What was compared in another way.
    """

    def __init__(self, computation: Computation, layout: Layout) -> None:
        alone = layout.alone()
        computation.move_off(alone)
        own = _Precision(computation, Tolerance(computation, alone))
        self.computation, self.precisions, self.notes = computation, [own], []
        if (wide := self._widened(own, alone)) is not None:
            self.precisions.insert(0, wide)
        if (fine := self._with_float64(alone)) is not None:
            self.precisions.insert(0, fine)
        for each in self.precisions:
            self.notes += [note for note in each.tolerance.notes if note not in self.notes]
        if kept := kept_keys(computation, own.tolerance):
            self.notes.append(_KEPT_KEY.format(paths=", ".join(kept)))
        rows = OwnRows(self.precisions[0].computation, layout)
        self.gaps = gaps(self.precisions, rows)
        if rows.error is not None:
            self.notes.append(_NO_OWN_ROWS.format(error=_first_line(rows.error)))
        self.cells: dict[str, dict[str, str]] = {path: {} for path in computation.paths}
        self.visible: dict[str, float] = {}
        self.findings: dict[str, dict[int, Finding]] = {}
        self.raised: dict[str, Exception] = {}

    def _widened(self, own: _Precision, alone: Layout) -> _Precision | None:
        """The computation with wide floats; `None` if its own are, or it cannot be widened."""
        widening = Widening(widest_float())
        dtypes = float_dtypes(list(equations(own.computation.trace(alone))))
        narrow = sorted(str(dtype) for dtype in dtypes if widening.widens(dtype))
        if not narrow and alone.mesh.devices.flat[0].platform not in MATMUL_EPS:
            return None
        try:
            wide = own.computation.widened(widening)
            tolerance = Tolerance(wide, alone)
        except Exception as error:  # what the program calls may take its own dtypes only
            self.notes.append(_NOT_WIDE.format(dtypes=", ".join(narrow), error=_first_line(error)))
            return None
        if widening.kept:
            kernels = ", ".join(sorted(widening.kept))
            self.notes.append(_KEPT_DTYPES.format(kernels=kernels, wide=widening.dtype))
        return _Precision(wide, tolerance)

    def _with_float64(self, alone: Layout) -> _Precision | None:
        """The computation with float64 for float32, if an update is small beside its leaf.

        A leaf rounds what is added to it, and that alone would hide an error of the update. Floats
        of 16 bits stay as they are: a sum in them is one of the errors.
        """
        computation, tolerance = self.precisions[0]
        if not any(_COARSE < tolerance.visible(i) < math.inf for i in computation.bases):
            return None
        try:
            fine = computation.narrow.widened(Widening("float64", above=2))
            return _Precision(fine, Tolerance(fine, alone))
        except Exception:  # a TPU has no float64: the report says which errors it does not see
            return None

    # -------------------------------------------------------------- a layout

    def add(self, layout: Layout) -> None:
        """Runs a layout and compares its results."""
        results: list[Compared | None] = []
        error: Exception | None = None
        for each in self.precisions:
            try:
                results.append(self._run(*each, layout))
            except Exception as raised:  # the user's code, which may not run in all layouts
                error = raised
        if not results and error is not None:
            self.raised[layout.name] = error
        compared = [each for each in results if each is not None]
        if not compared:
            return
        if error is not None:
            self.notes.append(f"{layout.name}: {_NOT_WIDE_HERE.format(error=_first_line(error))}")
        findings = self.findings.setdefault(layout.name, {})
        for i, path in enumerate(self.computation.paths):
            self.cells[path][layout.name] = self._cell(compared, i, findings)
            visible = [x for each in compared if (x := each.visible(i)) is not None]
            if visible:
                self.visible[path] = max(self.visible.get(path, 0.0), min(visible))

    def _run(
        self, computation: Computation, tolerance: Tolerance, layout: Layout
    ) -> Compared | None:
        """The results of a layout, beside what they should be; `None` if that cannot be said."""
        expected = self._expected(computation, tolerance, layout)
        if expected is None:
            return None
        result = computation.run(layout)
        # Under `jit` a key gives the same numbers in all layouts; in `shard_map` each device draws.
        if not computation.is_by_hand(layout) or not expected.random:
            return Compared(computation, layout, expected, result)
        rows = OwnRows(computation, layout)
        right, of_keys, note = with_own_keys(rows, expected, result)
        if note and note not in self.notes:
            self.notes.append(note)
        if right is None:
            for row in self.cells.values():
                row[layout.name] = UNCHECKED
            return None
        if of_keys is not None:
            differs = (i for i in range(computation.first) if expected.error(result[i], i) > LIMIT)
            self.findings.setdefault(layout.name, {})[next(differs, 0)] = of_keys
        unknown = rows.unexplained(right, result)
        text = OF_THE_MEAN_GRADIENT.format(layout=layout.name)
        if unknown and text not in self.notes:
            self.notes.append(text)
        return Compared(computation, layout, right, result, unknown)

    def _cell(self, results: Sequence[Compared], i: int, findings: dict[int, Finding]) -> str:
        """A word for one result in one layout; adds what is wrong to `findings`."""
        if any(i in each.unknown for each in results):
            return UNCHECKED
        wrong = [each for each in results if each.is_wrong(i)]
        if not wrong and i not in findings:
            error = max(max(each.errors(i)) for each in results)
            right = "ok" if error < 3 else f"{error:.1f} noise"
            return self.gaps.get(i, right)
        if i >= self.computation.first > min(findings, default=i):
            return _WRONG_TOO
        if i not in findings:
            findings[i] = wrong[0].finding(i)
        return findings[i].cell

    def _expected(
        self, computation: Computation, tolerance: Tolerance, layout: Layout
    ) -> Tolerance | None:
        """What a layout should give; `None` if that cannot be said."""
        if layout.minibatches == 1:
            return tolerance
        if tolerance.random:
            self.notes.append(_OTHER_NUMBERS.format(layout=layout.name))
            return None
        # A mean of means is another number, also on one device, if rows do not weigh the same.
        alone = computation.alone(layout.alone(layout.minibatches))
        expected = tolerance.with_reference(alone)
        pairs = zip(alone, tolerance.reference, strict=True)
        far = (norm(x - y) > 2 * LIMIT * tolerance.of(i) for i, (x, y) in enumerate(pairs))
        note = _OTHER_WEIGHTS.format(layout=layout.name)
        if any(far) and note not in self.notes:
            self.notes.append(note)
        return expected

    # -------------------------------------------------------------- all layouts

    def report(
        self, what: str, chosen: Sequence[Layout], expected_to_raise: Collection[str]
    ) -> Report:
        """All layouts together. Raises what all layouts of a kind raised."""
        self._raise_common(chosen)
        if any(_WRONG_TOO in row.values() for row in self.cells.values()):
            self.notes.append(_SECOND_STEP)
        expected = {*expected_to_raise} - _MUST_RUN
        raised = {name: _first_line(error) for name, error in self.raised.items()}
        for name in [name for name in raised if name in expected]:
            self.notes.append(_RAISED.format(layout=name, error=raised.pop(name)))
        not_compared = without_other_step(self.computation, self.gaps)
        paths = self.computation.paths
        visible = {path: x for path, x in self.visible.items() if x < 0.5}
        coarse = {path: error for path, error in visible.items() if error > _COARSE}
        if coarse:
            worst, some = percent(max(coarse.values())), ", ".join(fold_paths(coarse))
            self.notes.append(_SEES_LITTLE.format(worst=worst, paths=some))
        if any(self.findings.values()) and self._averages_parts(chosen[0]):
            self.notes.append(_MEAN_OF_PARTS)
        ran = {layout.name: layout for layout in chosen if layout.name in self.findings}
        return Report(
            what,
            tuple(map(str, chosen)),
            self.cells,
            tuple(self._problems(ran)),
            tuple(self.notes),
            raised,
            {paths[i]: WHY[word] for i, word in not_compared.items()},
            visible,
            frozenset(paths) - {paths[i] for i in self.computation.compared()},
        )

    def _averages_parts(self, layout: Layout) -> bool:
        stacks = (
            str(eqn.source_info.name_stack) for eqn in equations(self.computation.trace(layout))
        )
        return any(AVERAGES_PARTS in stack for stack in stacks)

    def _raise_common(self, chosen: Sequence[Layout]) -> None:
        # Code that never runs is a mistake of the caller, and its own error says which.
        for by_hand in (False, True):
            names = [x.name for x in chosen if (x.check_vma is not None) == by_hand]
            if names and {*names} <= self.raised.keys():
                raise self.raised[names[0]]

    def _problems(self, ran: Mapping[str, Layout]) -> list[Problem]:
        computation = self.computation
        found: list[Problem] = []
        for i, (path, spec) in enumerate(zip(computation.paths, computation.specs, strict=True)):
            of_leaf = {name: found[i] for name, found in self.findings.items() if i in found}
            for names, fact in statements(of_leaf, ran):
                found.append(Problem(path, spec, tuple(names), fact))
        return found


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}"
