"""Compares the results of a computation in several layouts with its results on one device.

Each layout is compared in several precisions. Wide floats show errors that the program's own
dtypes would round away. The program's own dtypes show errors of rounding, such as a sum in
bfloat16.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from treeshard._core.arrays import data_of, is_raw_key
from treeshard._core.jaxprs import equations
from treeshard._core.text import fold_paths
from treeshard._planning.plan_in_force import AVERAGES_PARTS
from treeshard.testing._computations import Computation, attempt
from treeshard.testing._findings import (
    WHY,
    Compared,
    compare_layout,
    summarize,
    uninformative_results,
)
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import (
    BLIND,
    LIMIT,
    MATMUL_EPS,
    Tolerance,
    float_dtypes,
    norm,
    run_in_float64,
    widest_float,
)
from treeshard.testing._own_rows import OwnRows
from treeshard.testing._report import UNCHECKED, Finding, Problem, Report, percent
from treeshard.testing._values import Results
from treeshard.testing._widening import Widening

# ------------------------------------------------------------------ words

# The cell of a result of the second step, if the first step is wrong.
_WRONG_TOO = "wrong too"
_SECOND_STEP = "step 2 is not measured if step 1 is wrong"
_RAISED = "{layout}: not compared, since it raised {error}, as expected"
_OTHER_NUMBERS = (
    "{layout}: not compared, since the loss draws random numbers, and minibatches draw"
    " different ones"
)
_OTHER_WEIGHTS = (
    "{layout}: minibatches change the result on one device too, since the loss is not a mean of"
    " rows of equal weight; compared with minibatches on one device"
)
_NOT_WIDE = "compared in {dtypes} only, since the program does not run in wider dtypes: {error}"
_NOT_WIDE_HERE = "{layout}: compared in one precision only, since in the other it raised {error}"
_KEPT_DTYPES = "{kernels}: runs in its own dtypes while all other code is compared in {wide}"
_SEES_LITTLE = "warning: errors of up to {worst} would not be seen in {paths}"
_SEES_LITTLE_ROUNDING = (
    "warning: rounding in the program's own dtypes, such as a sum in bfloat16, hides errors of up"
    " to {worst} in {paths}; with wider floats, other errors are seen from {finest}"
)
_DIFFERS_IN_ONE_PASS = (
    "one pass: `accumulate_gradients` gives other gradients in one pass over the batch, on one"
    " device too: it cuts an array that does not have rows, or the loss is not a mean over rows"
)
_RAISED_IN_ONE_PASS = "{layout}: not compared, since it raised {error}"
_NO_OWN_ROWS = (
    "the rows of one device alone cannot be computed, so a missing reduction may stay unseen:"
    " {error}"
)
_MEAN_OF_PARTS = (
    "`accumulate_gradients(axis_names=)` averages the gradients of parts of the batch, which are"
    " the gradients of the batch only if the loss is a mean over rows"
)
_KEPT_KEY = (
    "{paths}: the step returns this key unchanged, so every step draws the same random numbers"
    " unless it folds the key with a number that changes"
)

# Layouts whose failure is never expected.
_MUST_RUN = {"plan", "by hand"}
# A report warns if relative errors above this would not be seen.
_COARSE = 0.01


class Comparison:
    """A computation on one device, and how layouts differ from it."""

    def __init__(self, computation: Computation, layout: Layout) -> None:
        self.computation = computation
        # How the comparison differs from the usual one, in words.
        self.notes: list[str] = []
        # The results of one device: in wide floats, if the program has narrower floats, and then
        # in its own floats.
        self.precisions = self._run_alone(layout.alone())
        for each in self.precisions:
            self._note(*each.notes)
        if kept := _find_kept_keys(self.precisions[-1]):
            self._note(_KEPT_KEY.format(paths=", ".join(kept)))
        rows = OwnRows(self.precisions[0].computation, layout)
        # The results that cannot show an error, by index, with a word of `WHY`.
        self.gaps = uninformative_results(self.precisions, rows)
        if rows.error is not None:
            self._note(_NO_OWN_ROWS.format(error=_first_line(rows.error)))
        # The table of the report: for each result and each layout that ran, a word.
        self.cells: dict[str, dict[str, str]] = {x.path: {} for x in computation.outputs}
        # For each result, the smallest error that every layout would show, including rounding.
        self.visible: dict[str, float] = {}
        # The same for errors that are not rounding, which wider floats show better.
        self.finest: dict[str, float] = {}
        # The layouts that ran, by name, and their findings, by the index of the result.
        self.layouts: dict[str, Layout] = {}
        self.findings: dict[str, dict[int, Finding]] = {}
        # The layouts that raised, by name.
        self.raised: dict[str, Exception] = {}

    def _note(self, *texts: str) -> None:
        self.notes += [text for text in texts if text not in self.notes]

    # -------------------------------------------------------------- one device

    def _run_alone(self, alone: Layout) -> list[Tolerance]:
        """The results of one device, the widest floats first and the program's own last."""
        computation = self.computation
        computation.move_off(alone)
        exact = run_in_float64(computation, alone)
        precisions = [Tolerance(computation, alone, exact)]
        wide = self._run_in_wide_floats(alone, exact)
        if wide is not None:
            precisions.insert(0, wide)
        # A leaf rounds the update that is added to it, which could hide an error of a small update.
        # Floats of 16 bits stay, because a sum in 16 bits is one of the errors to find.
        changes = [i for i, x in enumerate(computation.outputs) if x.base is not None]
        if any(_COARSE < precisions[0].visible(i) < math.inf for i in changes):
            fine = Widening("float64", above=2)
            in_float64, _ = attempt(lambda: Tolerance(computation.widen(fine), alone, exact))
            # A TPU has no float64: the report lists the errors that would not be seen.
            if in_float64 is not None:
                precisions.insert(0, in_float64)
        return precisions

    def _run_in_wide_floats(self, alone: Layout, exact: Results | None) -> Tolerance | None:
        """The results with wide floats; `None` if all floats are wide or the program fails."""
        widening = Widening(widest_float())
        dtypes = float_dtypes(list(equations(self.computation.trace(alone))))
        narrow = sorted(str(dtype) for dtype in dtypes if widening.widens(dtype))
        if not narrow and alone.mesh.devices.flat[0].platform not in MATMUL_EPS:
            return None
        computation = self.computation
        wide, error = attempt(lambda: Tolerance(computation.widen(widening), alone, exact))
        if error is not None:
            self._note(_NOT_WIDE.format(dtypes=", ".join(narrow), error=_first_line(error)))
        elif widening.kept:
            kernels = ", ".join(sorted(widening.kept))
            self._note(_KEPT_DTYPES.format(kernels=kernels, wide=widening.dtype))
        return wide

    # -------------------------------------------------------------- a layout

    def add(self, layout: Layout) -> None:
        """Runs a layout and compares its results."""
        results = self._run(layout)
        if not results:
            return
        # Random numbers that cannot be repeated in one precision may be repeatable in the other.
        count = len(self.computation.outputs)
        results = [x for x in results if len(x.unknown) < count] or results
        self.layouts[layout.name] = layout
        self.findings[layout.name] = {i: x for each in results for i, x in each.found.items()}
        # Only the program's own dtypes show errors of rounding.
        narrow = [x for x in results if x.expected.computation.keeps_16_bits] or results
        for i, output in enumerate(self.computation.outputs):
            if layout.one_pass and output.is_aux:
                continue  # sums over minibatches differ
            self.cells[output.path][layout.name] = self._find_cell(results, i, layout)
            _keep_largest(self.visible, output.path, narrow, i)
            _keep_largest(self.finest, output.path, results, i)

    def _run(self, layout: Layout) -> list[Compared]:
        """The results of a layout in each precision in which it runs and can be compared."""
        results: list[Compared] = []
        errors: list[Exception] = []
        for expected in self.precisions:
            result, error = attempt(partial(self._compare, expected, layout))
            if error is not None:
                errors.append(error)
            if result is not None:
                self._note(*result.notes)
                results.append(result)
        if len(errors) == len(self.precisions):
            self.raised[layout.name] = errors[-1]
        elif errors and results:
            error = _first_line(errors[-1])
            self._note(_NOT_WIDE_HERE.format(layout=layout.name, error=error))
        return results

    def _compare(self, expected: Tolerance, layout: Layout) -> Compared | None:
        """The results of a layout, with the right results; `None` if these are not known."""
        computation = expected.computation
        if expected.random and (layout.minibatches > 1 or layout.one_pass):
            self._note(_OTHER_NUMBERS.format(layout=layout.name))
            return None
        if layout.minibatches > 1:
            # If rows have different weights, a mean of means differs from the mean on any device.
            alone = computation.alone(layout.alone(layout.minibatches))
            pairs = zip(alone, expected.reference, strict=True)
            if any(norm(x - y) > 2 * LIMIT * expected.of(i) for i, (x, y) in enumerate(pairs)):
                self._note(_OTHER_WEIGHTS.format(layout=layout.name))
            expected = expected.with_reference(alone)
        return compare_layout(expected, layout, computation.run(layout))

    def _find_cell(self, results: Sequence[Compared], i: int, layout: Layout) -> str:
        """A word for one result in one layout. Records the finding if the result is wrong."""
        findings = self.findings[layout.name]
        if any(i in each.unknown for each in results):
            return UNCHECKED
        wrong = [each for each in results if each.is_wrong(i)]
        if not wrong and i not in findings:
            if i in self.gaps:
                return self.gaps[i]
            error = max(max(each.errors(i)) for each in results)
            return "ok" if error < 3 else f"{error:.1f} noise"
        # A second step that starts from wrong numbers is wrong too.
        if i >= self.computation.first > min(findings, default=i):
            return _WRONG_TOO
        if i not in findings:
            findings[i] = wrong[0].describe_error(i)
        return findings[i].cell

    def has_scope(self, name: str) -> bool:
        """Whether the first layout that ran has a scope of this name."""
        if not self.layouts:
            return False
        eqns = equations(self.computation.trace(next(iter(self.layouts.values()))))
        return any(name in str(eqn.source_info.name_stack) for eqn in eqns)

    # -------------------------------------------------------------- all layouts

    def report(
        self, what: str, chosen: Sequence[Layout], expected_to_raise: Collection[str]
    ) -> Report:
        """The report on all layouts. Raises the error of a kind of layouts that all raised."""
        self._raise_common(chosen)
        raised = self._find_unexpected(expected_to_raise)
        visible = {
            path: min(self.visible[path], 1.0) for path, x in self.finest.items() if x < BLIND
        }
        self._note_what_is_not_seen(visible)
        self._note_causes()
        outputs = self.computation.outputs
        return Report(
            what,
            tuple(map(str, chosen)),
            self.cells,
            tuple(self._list_problems()),
            tuple(self.notes),
            raised,
            self._explain_gaps(),
            visible,
            frozenset(output.path for output in outputs if output.is_aux),
        )

    def _raise_common(self, chosen: Sequence[Layout]) -> None:
        # If the code never ran, the caller made a mistake, which its error describes.
        for by_hand in (False, True):
            names = [x.name for x in chosen if (x.check_vma is not None) == by_hand]
            if names and {*names} <= self.raised.keys():
                raise self.raised[names[0]]

    def _find_unexpected(self, expected_to_raise: Collection[str]) -> dict[str, str]:
        """The errors of layouts that must not raise. An expected error becomes a note."""
        unexpected: dict[str, str] = {}
        for name, error in self.raised.items():
            text = _first_line(error)
            if name in expected_to_raise and name not in _MUST_RUN:
                self._note(_RAISED.format(layout=name, error=text))
            elif name == "one pass":
                self._note(_RAISED_IN_ONE_PASS.format(layout=name, error=text))
            else:
                unexpected[name] = text
        return unexpected

    def _note_what_is_not_seen(self, visible: Mapping[str, float]) -> None:
        """Notes the leaves in which errors above 1% would not be seen: in any precision, or in the
        program's own."""
        coarse = [path for path, error in visible.items() if error > _COARSE]
        by_words = {
            _SEES_LITTLE: [path for path in coarse if self.finest[path] > _COARSE],
            _SEES_LITTLE_ROUNDING: [path for path in coarse if self.finest[path] <= _COARSE],
        }
        for words, paths in by_words.items():
            if paths:
                worst = percent(max(visible[path] for path in paths))
                finest = percent(max(self.finest[path] for path in paths))
                folded = ", ".join(fold_paths(paths))
                self._note(words.format(worst=worst, paths=folded, finest=finest))

    def _note_causes(self) -> None:
        if any(_WRONG_TOO in row.values() for row in self.cells.values()):
            self._note(_SECOND_STEP)
        if self.findings.get("one pass"):
            self._note(_DIFFERS_IN_ONE_PASS)
        elif any(self.findings.values()) and self.has_scope(AVERAGES_PARTS):
            self._note(_MEAN_OF_PARTS)

    def _explain_gaps(self) -> dict[str, str]:
        """Why a leaf could not be compared in any step."""
        outputs, first = self.computation.outputs, self.computation.first
        return {
            outputs[i].path: WHY[word]
            for i, word in self.gaps.items()
            if self.gaps.keys() >= {*range(i % first, len(outputs), first)}
        }

    def _list_problems(self) -> list[Problem]:
        problems: list[Problem] = []
        for i, output in enumerate(self.computation.outputs):
            found = {name: of_all[i] for name, of_all in self.findings.items() if i in of_all}
            for names, fact in summarize(found):
                problems.append(Problem(output.path, output.spec, tuple(names), fact))
        return problems


def _keep_largest(kept: dict[str, float], path: str, results: Sequence[Compared], i: int) -> None:
    """Keeps the smallest visible error of the layout that sees least. In each layout, the precision
    that sees most counts."""
    visible = [error for each in results if (error := each.visible(i)) is not None]
    if visible:
        kept[path] = max(kept.get(path, 0.0), min(visible))


def _find_kept_keys(own: Tolerance) -> list[str]:
    """The paths of keys that a step returns unchanged although it draws random numbers."""
    computation = own.computation
    if not own.random:
        return []
    kept: list[str] = []
    for output, reference in zip(computation.outputs, own.reference, strict=True):
        if output.base is None or output.step > 1:
            continue
        key = computation.start[output.base]
        if is_raw_key(key) and np.array_equal(data_of(key), reference):
            kept.append(computation.plan.leaves[output.base].path)
    return fold_paths(kept)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}"
