"""What is measured of a result that differs from that of one device: how far, or by which factor.

A factor is named only if it takes the right result to that of every device, within the noise; the
axes whose size it is are named only if their sizes are the factor on meshes of different sizes.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from treeshard.testing._computations import Axes, Computation, Shards, subsets
from treeshard.testing._layouts import Layout
from treeshard.testing._noise import (
    LIMIT,
    Tolerance,
    distance,
    errors_of,
    finite,
    multiple_in,
    norm,
)
from treeshard.testing._own_rows import named
from treeshard.testing._report import Finding

_SHAPE = "has the shape {shape}, where one device gives {right}."
_NOT_FINITE = "not finite on {wrong} of {all} devices."
_OFF = "differs by more than rounding: the table says how far."
_MULTIPLE = "a multiple of the right result"


class Compared:
    """The results of one layout, beside those that it should have.

    Attributes:
        unknown: The results of which the right ones are not known.
    """

    def __init__(
        self,
        computation: Computation,
        layout: Layout,
        expected: Tolerance,
        result: list[Shards],
        unknown: Collection[int] = (),
    ) -> None:
        self.computation, self.layout = computation, layout
        self.expected, self.result, self.unknown = expected, result, unknown

    def errors(self, i: int) -> list[float]:
        """The difference of each device's shard from the right one, in units of its noise."""
        return errors_of(self.result[i], self.expected, i)

    def is_wrong(self, i: int) -> bool:
        """Whether a result is further from the right one than rounding takes it."""
        return (self.layout.name, i) in self.computation.notes or max(self.errors(i)) > LIMIT

    def visible(self, i: int) -> float | None:
        """The smallest relative error that would be seen; `None` of what must be equal."""
        if i not in self.expected.noise:
            return None
        return min(self.expected.visible(i, index) for index, _ in self.result[i].values())

    def finding(self, i: int) -> Finding:
        """What is measured of a result that is wrong."""
        # A gradient of another form cannot leave `shard_map`, and was replaced by zeros.
        if (note := self.computation.notes.get((self.layout.name, i))) is not None:
            return note
        reference = self.expected.reference[i]
        shards = list(self.result[i].values())
        for index, x in shards:
            if x.shape != reference[index].shape:
                fact = _SHAPE.format(shape=x.shape, right=reference[index].shape)
                return Finding(fact, "shape")
        broken = sum(bool((np.isfinite(x) != np.isfinite(reference[at])).any()) for at, x in shards)
        if broken:
            return Finding(_NOT_FINITE.format(wrong=broken, all=len(shards)), "not finite")
        factor = multiple_in(self.result[i], self.expected, i)
        if factor is not None:
            shown = f"x {factor:.3f}" if abs(factor) > 0.1 else f"x {factor:.3g}"
            return Finding(_MULTIPLE, shown, shown, factor)
        far = norm([distance(x, reference[index]) for index, x in shards])
        size = norm([norm(finite(reference[index])) for index, _ in shards])
        percent = 100 * far / size if size else math.inf
        shown = f"{percent:.2g}" if percent < 100 else f"{percent:.0f}"
        cell = f"off {shown}%" if size else "not zero"
        wrong = sum(error > LIMIT for error in self.errors(i))
        some = "" if wrong == len(shards) else f" on {wrong} of {len(shards)}"
        return Finding(_OFF, cell + some)


# ------------------------------------------------------------------ over all layouts


def statements(
    findings: Mapping[str, Finding], layouts: Mapping[str, Layout]
) -> Iterator[tuple[list[str], str]]:
    """What is said of one result: the layouts in which it is wrong, and a fact.

    `layouts` are those that ran, and `findings` those of the layouts where the result is wrong.
    """
    axes = _axes_of_factor(findings, layouts)
    by_fact: dict[str, dict[str, str]] = {}
    for name, finding in findings.items():
        by_fact.setdefault(finding.fact, {})[name] = finding.measured
    for fact, measured in by_fact.items():
        first = next(iter(measured.values()))
        if first:
            others = [f"{x} in `{name}`" for name, x in measured.items() if x != first]
            end = f": {axes}." if axes and fact == _MULTIPLE else "."
            fact = f"{fact} ({'; '.join([first, *others])}){end}"
        yield list(measured), fact


def _axes_of_factor(findings: Mapping[str, Finding], layouts: Mapping[str, Layout]) -> str:
    """The axes whose size a factor is on all meshes, in words; empty if there are none."""
    factors = {name: x.factor for name, x in findings.items() if x.factor is not None}
    # Where the result is right, the factor is 1. With `check_vma` other code is differentiated.
    kinds = {layouts[name].check_vma for name in factors}
    right = [n for n, x in layouts.items() if n not in findings and x.check_vma in kinds]
    numbers = [*factors.values(), *(1.0 for _ in right)]
    shapes = [layouts[name].mesh.shape for name in (*factors, *right)]
    if not factors or min(numbers) <= 0:
        return ""
    if axes := axes_of(numbers, shapes):
        return f"the size of {named(axes)}"
    if axes := axes_of([1 / x for x in numbers], shapes):
        return f"1 / the size of {named(axes)}"
    return ""


def axes_of(numbers: Sequence[float], shapes: Sequence[Mapping[str, int]]) -> Axes:
    """The axes whose sizes multiply to the number of each mesh; none if that proves nothing.

    A number that is the same on all meshes may be a constant, and axes that others would explain
    as well are not proven.
    """
    if max(numbers) < 1.5 * min(numbers):
        return ()
    sizes = {axis: np.array([shape[axis] for shape in shapes]) for axis in shapes[0]}
    split = [axis for axis in sizes if sizes[axis].max() > 1]
    matches: list[Axes] = []
    for axes in subsets(split):
        products = math.prod(sizes[axis] for axis in axes)
        if np.allclose(numbers, products, rtol=0.01, atol=0):
            matches.append(axes)
    return matches[0] if len(matches) == 1 else ()
