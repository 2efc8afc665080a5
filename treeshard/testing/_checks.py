"""Checks that a computation gives the same numbers in all layouts."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import data_of, is_raw_key
from treeshard._core.jaxprs import equations
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree
from treeshard._core.processes import all_or_none, participating_processes, show_progress, wants_bar
from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import fold_paths
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import AVERAGES_PARTS, IN_MINIBATCHES
from treeshard.errors import MeshError, WrongResultError
from treeshard.testing._computations import Computation, Gradients, Steps
from treeshard.testing._findings import (
    WHY,
    Compared,
    compare_layout,
    summarize,
    uninformative_results,
)
from treeshard.testing._layouts import Layout, restored, selected
from treeshard.testing._layouts import layouts as default_layouts
from treeshard.testing._noise import (
    BLIND,
    LIMIT,
    MATMUL_EPS,
    Results,
    Tolerance,
    float_dtypes,
    in_float64,
    norm,
    widest_float,
)
from treeshard.testing._own_rows import OwnRows
from treeshard.testing._report import UNCHECKED, Finding, Problem, Report, percent
from treeshard.testing._widening import Widening
from treeshard.training._step import Step

# ------------------------------------------------------------------ words

_ROWS_ALIKE = (
    "{what}: Nothing was compared.\nAll rows of the batch are equal, so each device gets from its"
    " own rows what all of them give, and a missing reduction changes nothing. Use random numbers:"
    " `np.random.default_rng(0).normal(size=shape)`."
)
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
_NOT_WIDE_HERE = "{layout}: compared in one precision only, since in the other it raised {error}"
_KEPT_DTYPES = "{kernels}: runs in its own dtypes also where all else is compared in {wide}"
_SEES_LITTLE = "warning: errors of up to {worst} would not be seen in {paths}"
_SEES_LITTLE_ROUNDING = (
    "warning: what the program's own dtypes round, such as a sum in bfloat16, hides errors of up to"
    " {worst} in {paths}; where wider floats take their place, others are seen from {finest}"
)
_DIFFERS_IN_ONE_PASS = (
    "one pass: `accumulate_gradients` gives other gradients in one pass over the batch, on one"
    " device too: it cuts an array that is not one of rows, or the loss is not a mean over rows"
)
_RAISED_IN_ONE_PASS = "{layout}: not compared, since it raised {error}"
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
        LeafError: If `params` or `batch` has a mutable reference (`jax.Ref`).
    """
    check_no_refs(params, "check_gradients")
    check_no_refs(batch, "check_gradients", "batch")
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
        >>> mesh = make_mesh("fsdp=8")
        >>> planned = plan({"w": jnp.zeros(8)}, [("w", P("fsdp"))], mesh, min_size=0)
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
    order, and for a step of `jit_step` the batch split over fewer axes. If the step uses
    `accumulate_gradients`, its state is also compared with the state after one pass over the batch,
    on one device: `one pass`. The step is not run on `state` itself. In a layout,
    `jax.device_count()` is the size of its mesh, and 1 on one device, so that a division by it
    shows. A key that the step returns as it was is noted. Progress is shown as by
    `check_gradients`.

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
        LeafError: As `check_gradients`.
    """
    check_no_refs(state, "check_step")
    check_no_refs(batch, "check_step", "batch")
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
    expected_to_raise: Collection[str],
) -> Report:
    """Compares a computation in layouts with one device."""
    mesh = chosen[0].mesh
    if mesh.devices.size == 1:
        raise MeshError(
            f"{what}: the mesh has one device, so there is nothing to compare. On a laptop, call"
            " `treeshard.simulate_devices(8)` first."
        )
    bar = show_progress(chosen, what, unit="layout", show=wants_bar(), after=_QUIET_SECONDS)
    # All processes read the same numbers, and so say the same.
    with all_or_none(what, among=participating_processes((), [mesh])):
        if _are_rows_alike(computation, chosen[0]):
            raise WrongResultError(_ROWS_ALIKE.format(what=what))
        comparison = _Comparison(computation, chosen[0])
        for layout in bar:
            comparison.add(layout)
        if isinstance(computation, Steps) and comparison.has_scope(IN_MINIBATCHES):
            one_pass = replace(chosen[0].alone(), name="one pass", one_pass=True)
            comparison.add(one_pass)
            chosen = [*chosen, one_pass]
        report = comparison.report(what, chosen, expected_to_raise)
        if not report.ok:
            first_error = next(iter(comparison.raised.values()), None)
            raise WrongResultError(str(report)) from first_error
    return report


def _are_rows_alike(computation: Computation, layout: Layout) -> bool:
    dims = computation.row_dims(layout)
    arrays = [np.moveaxis(np.asarray(computation.batch[i]), dim, 0) for i, dim in dims.items()]
    return bool(arrays) and all((x == x[:1]).all() for x in arrays)


class _Comparison:
    """A computation on one device, and how layouts differ from it.

    Attributes:
        precisions: Its results with wide floats, where the program has narrower ones, and with its
            own.
        gaps: The results of which a comparison shows little, by index, and why.
        cells: For each result and layout, a word for the table.
        visible: For each result, the smallest error that would be seen in all layouts, errors of
            rounding too.
        finest: The same without those, where it is compared with wider floats.
        layouts: The layouts that ran, by name.
        findings: For each of these, what is wrong, by the index of the result.
        right: For each result, the layouts in which it is right.
        raised: For each layout that raised, what it raised.
        notes: What was compared in another way.
    """

    def __init__(self, computation: Computation, layout: Layout) -> None:
        self.computation = computation
        self.notes: list[str] = []
        self.precisions = self._of_one_device(layout.alone())
        for each in self.precisions:
            self._note(*each.notes)
        if kept := _kept_keys(self.precisions[-1]):
            self._note(_KEPT_KEY.format(paths=", ".join(kept)))
        rows = OwnRows(self.precisions[0].computation, layout)
        self.gaps = uninformative_results(self.precisions, rows)
        if rows.error is not None:
            self._note(_NO_OWN_ROWS.format(error=_first_line(rows.error)))
        self.cells: dict[str, dict[str, str]] = {path: {} for path in computation.paths}
        self.visible: dict[str, float] = {}
        self.finest: dict[str, float] = {}
        self.layouts: dict[str, Layout] = {}
        self.findings: dict[str, dict[int, Finding]] = {}
        self.right: dict[int, list[Layout]] = {i: [] for i in range(len(self.cells))}
        self.raised: dict[str, Exception] = {}

    def _note(self, *texts: str) -> None:
        self.notes += [text for text in texts if text not in self.notes]

    # -------------------------------------------------------------- one device

    def _of_one_device(self, alone: Layout) -> list[Tolerance]:
        """The results of one device, the widest floats first and the program's own last."""
        computation = self.computation
        computation.move_off(alone)
        exact = in_float64(computation, alone)
        precisions = [Tolerance(computation, alone, exact)]
        wide = self._in_wide_floats(alone, exact)
        if wide is not None:
            precisions.insert(0, wide)
        # A leaf rounds what is added to it: that alone would hide an error of an update that is
        # small beside its leaf. Floats of 16 bits stay, since a sum in them is one of the errors.
        if any(_COARSE < precisions[0].visible(i) < math.inf for i in computation.bases):
            try:
                fine = computation.widened(Widening("float64", above=2))
                precisions.insert(0, Tolerance(fine, alone, exact))
            except Exception:  # a TPU has no float64: the report says which errors it does not see
                pass
        return precisions

    def _in_wide_floats(self, alone: Layout, exact: Results | None) -> Tolerance | None:
        """The results with wide floats; `None` if its own are, or it cannot be widened."""
        widening = Widening(widest_float())
        dtypes = float_dtypes(list(equations(self.computation.trace(alone))))
        narrow = sorted(str(dtype) for dtype in dtypes if widening.widens(dtype))
        if not narrow and alone.mesh.devices.flat[0].platform not in MATMUL_EPS:
            return None
        try:
            wide = Tolerance(self.computation.widened(widening), alone, exact)
        except Exception as error:  # what the program calls may take its own dtypes only
            self._note(_NOT_WIDE.format(dtypes=", ".join(narrow), error=_first_line(error)))
            return None
        if widening.kept:
            kernels = ", ".join(sorted(widening.kept))
            self._note(_KEPT_DTYPES.format(kernels=kernels, wide=widening.dtype))
        return wide

    # -------------------------------------------------------------- a layout

    def add(self, layout: Layout) -> None:
        """Runs a layout and compares its results."""
        results: list[Compared] = []
        errors: list[Exception] = []
        for expected in self.precisions:
            try:
                result = self._compare(expected, layout)
            except Exception as error:  # the user's code, which may not run in all layouts
                errors.append(error)
                continue
            if result is not None:
                self._note(*result.notes)
                results.append(result)
        if len(errors) == len(self.precisions):
            self.raised[layout.name] = errors[-1]
        if not results:
            return
        if errors:
            error = _first_line(errors[-1])
            self._note(_NOT_WIDE_HERE.format(layout=layout.name, error=error))
        # Numbers that cannot be repeated in one precision may be in the other.
        count = len(self.computation.paths)
        results = [x for x in results if len(x.unknown) < count] or results
        findings = {i: finding for x in results for i, finding in x.found.items()}
        self.layouts[layout.name], self.findings[layout.name] = layout, findings
        # A wider float rounds nothing, so that an error of rounding is seen without it alone.
        narrow = [x for x in results if x.expected.computation.keeps_16_bits] or results
        for i, path in enumerate(self.computation.paths):
            if layout.one_pass and i in self.computation.beside:
                continue  # sums over minibatches are other numbers
            self.cells[path][layout.name] = self._cell(results, i, layout)
            for found, of in ((self.visible, narrow), (self.finest, results)):
                visible = [x for each in of if (x := each.visible(i)) is not None]
                if visible:
                    found[path] = max(found.get(path, 0.0), min(visible))

    def _compare(self, expected: Tolerance, layout: Layout) -> Compared | None:
        """The results of a layout, beside what they should be; `None` if that cannot be said."""
        computation = expected.computation
        if expected.random and (layout.minibatches > 1 or layout.one_pass):
            self._note(_OTHER_NUMBERS.format(layout=layout.name))
            return None
        if layout.minibatches > 1:
            # A mean of means is another number, also on one device, if rows do not weigh the same.
            alone = computation.alone(layout.alone(layout.minibatches))
            pairs = zip(alone, expected.reference, strict=True)
            if any(norm(x - y) > 2 * LIMIT * expected.of(i) for i, (x, y) in enumerate(pairs)):
                self._note(_OTHER_WEIGHTS.format(layout=layout.name))
            expected = expected.with_reference(alone)
        return compare_layout(expected, layout, computation.run(layout))

    def _cell(self, results: Sequence[Compared], i: int, layout: Layout) -> str:
        """A word for one result in one layout; keeps what is wrong, and where it is right."""
        findings = self.findings[layout.name]
        if any(i in each.unknown for each in results):
            return UNCHECKED
        wrong = [each for each in results if each.is_wrong(i)]
        if not wrong and i not in findings:
            if i in self.gaps:
                return self.gaps[i]
            if not layout.one_pass:
                self.right[i].append(layout)
            error = max(max(each.errors(i)) for each in results)
            return "ok" if error < 3 else f"{error:.1f} noise"
        if i >= self.computation.first > min(findings, default=i):
            return _WRONG_TOO
        if i not in findings:
            findings[i] = wrong[0].finding(i)
        return findings[i].cell

    # -------------------------------------------------------------- all layouts

    def report(
        self, what: str, chosen: Sequence[Layout], expected_to_raise: Collection[str]
    ) -> Report:
        """All layouts together. Raises what all layouts of a kind raised."""
        self._raise_common(chosen)
        if any(_WRONG_TOO in row.values() for row in self.cells.values()):
            self._note(_SECOND_STEP)
        raised = {name: _first_line(error) for name, error in self.raised.items()}
        for name in self.raised:
            if name in expected_to_raise and name not in _MUST_RUN:
                self._note(_RAISED.format(layout=name, error=raised.pop(name)))
            elif name == "one pass":
                self._note(_RAISED_IN_ONE_PASS.format(layout=name, error=raised.pop(name)))
        visible = {
            path: min(self.visible[path], 1.0) for path, x in self.finest.items() if x < BLIND
        }
        coarse = {path: error for path, error in visible.items() if error > _COARSE}
        for words, paths in (
            (_SEES_LITTLE, [path for path in coarse if self.finest[path] > _COARSE]),
            (_SEES_LITTLE_ROUNDING, [path for path in coarse if self.finest[path] <= _COARSE]),
        ):
            if paths:
                worst = percent(max(coarse[path] for path in paths))
                finest = percent(max(self.finest[path] for path in paths))
                some = ", ".join(fold_paths(paths))
                self._note(words.format(worst=worst, paths=some, finest=finest))
        if self.findings.get("one pass"):
            self._note(_DIFFERS_IN_ONE_PASS)
        elif any(self.findings.values()) and self.has_scope(AVERAGES_PARTS):
            self._note(_MEAN_OF_PARTS)
        return Report(
            what,
            tuple(map(str, chosen)),
            self.cells,
            tuple(self._problems()),
            tuple(self.notes),
            raised,
            self._not_compared(),
            visible,
            frozenset(self.computation.paths[i] for i in self.computation.beside),
        )

    def _raise_common(self, chosen: Sequence[Layout]) -> None:
        # Code that never runs is a mistake of the caller, and its own error says which.
        for by_hand in (False, True):
            names = [x.name for x in chosen if (x.check_vma is not None) == by_hand]
            if names and {*names} <= self.raised.keys():
                raise self.raised[names[0]]

    def _not_compared(self) -> dict[str, str]:
        """Why a leaf shows nothing, in no step."""
        paths, first = self.computation.paths, self.computation.first
        return {
            paths[i]: WHY[word]
            for i, word in self.gaps.items()
            if self.gaps.keys() >= {*range(i % first, len(paths), first)}
        }

    def has_scope(self, name: str) -> bool:
        """Whether the first layout that ran has a scope of this name."""
        eqns = (
            eqn
            for x in [*self.layouts.values()][:1]
            for eqn in equations(self.computation.trace(x))
        )
        return any(name in str(eqn.source_info.name_stack) for eqn in eqns)

    def _problems(self) -> list[Problem]:
        computation = self.computation
        problems: list[Problem] = []
        for i, (path, spec) in enumerate(zip(computation.paths, computation.specs, strict=True)):
            found = {name: of_all[i] for name, of_all in self.findings.items() if i in of_all}
            for names, fact in summarize(found, self.right[i], self.layouts):
                problems.append(Problem(path, spec, tuple(names), fact))
        return problems


def _kept_keys(own: Tolerance) -> list[str]:
    """Paths of the keys that a step that draws random numbers returns as they were."""
    if not own.random:
        return []
    computation = own.computation
    kept: list[str] = []
    for i, base in computation.bases.items():
        key = computation.start[base]
        is_kept = is_raw_key(key) and np.array_equal(data_of(key), own.reference[i])
        if i < computation.first and is_kept:
            kept.append(computation.plan.leaves[base].path)
    return fold_paths(kept)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}"
