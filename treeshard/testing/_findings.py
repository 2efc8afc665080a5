"""Describes how a result differs from the right one: how far, and by which factor.

A finding names a factor only if, within the noise, every device has the right result times this
factor.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from treeshard.testing._computations import Axes
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import BLIND, LIMIT, Tolerance, distance, finite, norm
from treeshard.testing._own_rows import OwnRows
from treeshard.testing._report import Finding
from treeshard.testing._values import Shards

# ------------------------------------------------------------------ words

_SHAPE = "has the shape {shape}, where one device gives {right}."
_BROKEN = "not finite on {wrong} of {all} devices."
_OFF = "differs by more than rounding: the table says how far."
_MULTIPLE = "a multiple of the right result"
_UNFOLDED = "the key is not folded along {axes}: devices draw the same random numbers."
_FOLDED = (
    "the key is folded along {axes}, where devices have the same rows: they draw different random"
    " numbers for the same activations."
)
_REPEATED = (
    "{layout}: each device draws its own random numbers; compared with keys folded by"
    " axis_index({order!r}) on one device"
)
_UNREPEATED = (
    "{layout}: not checked, since each device draws random numbers in a way that one device cannot"
    " repeat; fold the key by `manual.fold_rng_over_axis`, or by `fold_in(key, axis_index(axes))`"
)
_OF_THE_MEAN_GRADIENT = (
    "{layout}: results that are not linear in the gradients are not checked, since each device"
    " draws its own random numbers and the step does not return the mean gradient; compare it with"
    " `check_gradients`"
)
_ZERO, _HIDDEN, _NOT_FINITE, _ALIKE = "zero", "hidden", "not finite", "alike"
# Why a result could not be compared, by the word of its cell.
WHY = {
    _ZERO: "zero on one device, so a wrong factor or order of shards would not be seen",
    _HIDDEN: (
        "rounding changes it by its own size, as when an optimizer takes the sign of a gradient"
        " near zero, so a wrong factor would not be seen"
    ),
    _NOT_FINITE: "not finite on one device either",
    _ALIKE: (
        "all devices get the same result from their own rows, so a missing reduction would not be"
        " seen"
    ),
}


def uninformative_results(precisions: Sequence[Tolerance], rows: OwnRows) -> dict[int, str]:
    """The results that cannot show an error, by index, with a word of `WHY`.

    The first of the precisions is the widest. Integers and keys must be equal, so they are always
    compared.
    """
    widest = precisions[0]
    found: dict[int, str] = {}
    for i in widest.noise:
        reference = widest.reference[i]
        if not np.isfinite(reference).all():
            found[i] = _NOT_FINITE
        elif not norm(reference):
            found[i] = _ZERO
        elif min(each.visible(i) for each in precisions) > BLIND:
            found[i] = _HIDDEN
        elif rows.has_equal_results(i, LIMIT * widest.of(i)):
            found[i] = _ALIKE
    return found


# ------------------------------------------------------------------ one layout


class Compared:
    """The results of one layout, with the right results."""

    def __init__(
        self,
        expected: Tolerance,
        layout: Layout,
        result: list[Shards],
        unknown: Collection[int] = (),
        found: Mapping[int, Finding] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.expected, self.result = expected, result
        # The indices of results whose right values are unknown.
        self.unknown = unknown
        # Findings about random numbers, by the index of the first result that shows them.
        self.found = found or {}
        # How the right results were computed, in words.
        self.notes = notes
        by_layout = expected.computation.notes.items()
        self._of_form = {i: note for (name, i), note in by_layout if name == layout.name}

    def errors(self, i: int) -> list[float]:
        """The difference of each device's shard from the right one, in units of its noise."""
        return self.expected.errors(self.result[i], i)

    def is_wrong(self, i: int) -> bool:
        """Whether a result differs from the right one by more than rounding."""
        return i in self._of_form or not self.expected.is_met(self.result[i], i)

    def visible(self, i: int) -> float | None:
        """The smallest relative error that would be seen; `None` for results that must be equal."""
        if i not in self.expected.noise or i in self.unknown:
            return None
        return min(self.expected.visible(i, index) for index, _ in self.result[i].values())

    def describe_error(self, i: int) -> Finding:
        """The finding for a wrong result: the first of these cases that applies.

        1. The trace had no gradient, or a gradient of another form.
        2. Its shape differs from the shape on one device.
        3. It is finite in only one of the layout and one device.
        4. All devices have the same multiple of the right result.
        5. It is off by a part of its size.
        """
        # `shard_map` cannot return a gradient of another form: zeros replaced it.
        if i in self._of_form:
            return self._of_form[i]
        reference = self.expected.reference[i]
        shards = list(self.result[i].values())
        for index, x in shards:
            if x.shape != reference[index].shape:
                fact = _SHAPE.format(shape=x.shape, right=reference[index].shape)
                return Finding(fact, "shape")
        broken = sum(bool((np.isfinite(x) != np.isfinite(reference[at])).any()) for at, x in shards)
        if broken:
            return Finding(_BROKEN.format(wrong=broken, all=len(shards)), "not finite")
        factor = self.expected.find_factor(self.result[i], i)
        if factor is not None:
            return Finding(_MULTIPLE, f"x {factor:.3f}" if abs(factor) > 0.1 else f"x {factor:.3g}")
        wrong = sum(error > LIMIT for error in self.errors(i))
        where = "" if wrong == len(shards) else f" on {wrong} of {len(shards)}"
        return Finding(_OFF, self._relative_error(i) + where)

    def _relative_error(self, i: int) -> str:
        reference = self.expected.reference[i]
        shards = list(self.result[i].values())
        size = norm([norm(finite(reference[index])) for index, _ in shards])
        if not size:
            return "not zero"
        far = norm([distance(x, reference[index]) for index, x in shards])
        percent = 100 * far / size
        return f"off {percent:.2g}%" if percent < 100 else f"off {percent:.0f}%"


def compare_layout(expected: Tolerance, layout: Layout, result: list[Shards]) -> Compared:
    """Compares the results of a layout with the right results.

    Under `jit`, a key gives the same numbers in all layouts. In `shard_map`, each device draws its
    own numbers. One device can repeat them if it knows the key of each device:

    1. One key for all rows, as on one device: the results are compared directly.
    2. The same key on each device, or a key folded by `axis_index` along some axes: the right
       results are the means of the results of single devices. Results that the code does not
       reduce are recognised by the results of single devices, too.
    3. Keys folded in another way: the right results are unknown.

    The case that explains most results applies, if no other case explains as many.
    """
    computation = expected.computation
    indices = range(computation.first)
    wrong = [i for i in indices if not expected.is_met(result[i], i)]
    if not wrong or not expected.random or not computation.is_by_hand(layout):
        return Compared(expected, layout, result)
    rows = OwnRows(computation, layout)
    right = {order: rows.expect_means(order, expected) for order in rows.distinct_orders()}
    counts: dict[Axes | None, int] = {
        order: sum(rows.is_explained(order, means, result, i) for i in indices)
        for order, means in right.items()
    }
    multiples = [i for i in wrong if expected.find_factor(result[i], i) is not None]
    counts[None] = len(indices) - len(wrong) + len(multiples)  # one key for all rows
    most = max(counts.values())
    best = [order for order, count in counts.items() if count == most]
    if most == 0 or len(best) > 1:
        note = _UNREPEATED.format(layout=layout.name)
        return Compared(expected, layout, result, range(len(result)), notes=[note])
    [order] = best
    if order is None:
        return Compared(expected, layout, result)
    return _compare_by_keys(rows, order, right[order], result, wrong[0])


def _compare_by_keys(
    rows: OwnRows, order: Axes, right: Tolerance, result: list[Shards], first_wrong: int
) -> Compared:
    """Compares results with the results of single devices, with keys folded along some axes."""
    name = rows.layout.name
    unknown = _find_unknown(rows, order, right, result)
    wrong_keys = _check_folding(rows.axes, order)
    notes = [] if wrong_keys else [_REPEATED.format(layout=name, order=order)]
    if unknown:
        notes.append(_OF_THE_MEAN_GRADIENT.format(layout=name))
    found = {first_wrong: wrong_keys} if wrong_keys else {}
    return Compared(right, rows.layout, result, unknown, found, notes)


def _find_unknown(
    rows: OwnRows, order: Axes, right: Tolerance, result: Sequence[Shards]
) -> set[int]:
    """The results of a step whose right values do not follow from the results of single devices.

    For results that are linear in the gradients, the mean over the devices is right. Other results,
    such as Adam's second moment, depend on the mean gradient, which a step does not return.
    """
    first = rows.computation.first
    if not order or first == len(result):
        return set()
    unknown = {i for i in range(first) if not rows.is_explained(order, right, result, i)}
    if unknown:  # the second step starts from them
        unknown |= {i for i in range(first, len(result)) if not right.is_met(result[i], i)}
    return unknown


def _check_folding(axes: Axes, order: Axes) -> Finding | None:
    """The finding for keys that are folded along other axes than the axes of the batch."""
    if missing := sorted({*axes} - {*order}):
        return Finding(_UNFOLDED.format(axes=_name_axes(missing)), "same key")
    if extra := sorted({*order} - {*axes}):
        return Finding(_FOLDED.format(axes=_name_axes(extra)), "other key")
    return None


# ------------------------------------------------------------------ over all layouts


def summarize(found: Mapping[str, Finding]) -> Iterator[tuple[list[str], str]]:
    """The problems of one result: the layouts in which it is wrong, and a fact.

    `found` has the findings by the name of the layout.
    """
    by_fact: dict[str, dict[str, Finding]] = {}
    for name, finding in found.items():
        by_fact.setdefault(finding.fact, {})[name] = finding
    for fact, members in by_fact.items():
        if fact == _MULTIPLE:
            first = next(iter(members.values())).cell
            # The factor may depend on the mesh, as the size of an axis does.
            others = [f"{x.cell} in `{n}`" for n, x in members.items() if x.cell != first]
            fact = f"{fact} ({'; '.join([first, *others])})."
        yield [*members], fact


def _name_axes(axes: Sequence[str]) -> str:
    """Axes in words: "`data` and `fsdp`"."""
    return " and ".join(f"`{axis}`" for axis in axes)
