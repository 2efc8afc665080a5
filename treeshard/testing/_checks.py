"""Checks that a computation gives the same numbers in all layouts."""

from collections.abc import Callable, Sequence
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
from treeshard.testing._diagnosis import Diagnosis, named
from treeshard.testing._layouts import Layout
from treeshard.testing._layouts import layouts as default_layouts
from treeshard.testing._noise import LIMIT, Tolerance, norm
from treeshard.testing._report import Cause, Problem, Report, merged
from treeshard.training._step import Step

# Random numbers are the same if results differ by less than this part of their size.
_ALIKE = 0.02


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
    Adam hides a wrong factor. What differs is told in words: summed instead of averaged along an
    axis, not reduced, permuted, another shard's rows, zero.

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
        WrongResultError: If something differs by more than rounding. Its message is the report;
            it is an `AssertionError`.
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
        WrongResultError: If something differs by more than rounding; it is an `AssertionError`.
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
    with together(what, among=participating_processes((), [mesh])):
        say("one device, and its noise")
        tolerance = Tolerance(computation, chosen[0].alone())
        notes = _doubts(computation, tolerance)
        cells: dict[str, dict[str, str]] = {path: {} for path in computation.paths}
        causes: dict[str, dict[int, Cause]] = {}
        skipped: dict[str, Exception] = {}
        for layout in chosen:
            say(str(layout))
            try:
                expected = _expected(computation, layout, tolerance, notes)
                if expected is None:
                    continue
                result = computation.run(layout)
            except Exception as error:
                skipped[layout.name] = error
                continue
            diagnosis = Diagnosis(computation, layout, expected, result)
            causes[layout.name] = found = _own_randomness(diagnosis, notes)
            for i, path in enumerate(computation.paths):
                error = max(diagnosis.errors(i))
                if (layout.name, i) in computation.notes or error > LIMIT:
                    if i < computation.first or min(found, default=i) >= computation.first:
                        found.setdefault(i, diagnosis.cause(i))
                    cells[path][layout.name] = found[i].short if i in found else "wrong too"
                else:
                    cells[path][layout.name] = "ok" if error < 3 else f"{error:.1f} noise"
        if any("wrong too" in row.values() for row in cells.values()):
            notes.append("step 2 is not explained where step 1 is wrong already")
        _raise_if_none_ran(chosen, skipped)
        for name, error in skipped.items():
            first = str(error).strip().partition("\n")[0][:200]
            notes.append(f"{name}: not compared, since it raised {type(error).__name__}: {first}")
        by_name = {layout.name: layout for layout in chosen}
        trace = cache(lambda name: computation.trace(by_name[name]))
        problems = [
            Problem(
                computation.paths[i],
                computation.specs[i],
                tuple(names),
                fact,
                fix,
                line_of(trace(names[0]), i),
            )
            for i, names, fact, fix in merged(causes)
        ]
        report = Report(what, tuple(map(str, chosen)), cells, tuple(problems), tuple(notes))
        if problems:
            raise WrongResultError(str(report))
    return report


def _doubts(computation: Computation, tolerance: Tolerance) -> list[str]:
    """What comparing with one device cannot show, in words."""
    notes, paths = list(tolerance.notes), list(enumerate(computation.paths))
    if hidden := fold_paths(path for i, path in paths if tolerance.is_hidden(i)):
        notes.append(
            f"rounding moves {', '.join(hidden)} by as much as their size: a wrong factor would not"
            " be seen there"
        )
    if bad := fold_paths(p for i, p in paths if not np.isfinite(tolerance.reference[i]).all()):
        notes.append(f"not finite on one device either: {', '.join(bad)}")
    return notes


def _expected(
    computation: Computation, layout: Layout, tolerance: Tolerance, notes: list[str]
) -> Tolerance | None:
    """What a layout should give; `None` if that cannot be said."""
    if layout.minibatches == 1:
        return tolerance
    if tolerance.random:
        notes.append(
            f"{layout.name}: not compared, since the loss draws random numbers, and minibatches"
            " draw others"
        )
        return None
    alone = computation.alone(layout.alone(layout.minibatches))
    pairs = enumerate(zip(alone, tolerance.reference, strict=True))
    if any(norm(x - y) > 2 * LIMIT * tolerance.of(i) for i, (x, y) in pairs):
        notes.append(
            f"{layout.name}: minibatches change the result on one device too, since the loss is not"
            " a mean of rows of equal weight; compared with minibatches on one device"
        )
    return tolerance.with_reference(alone)


def _own_randomness(diagnosis: Diagnosis, notes: list[str]) -> dict[int, Cause]:
    """Finds how the devices of a body by hand draw random numbers, and takes the result of that.

    The result of all devices together is known if one device can repeat it: with one key for all
    rows, with the same key on each device, or with keys folded by `axis_index`.
    """
    tolerance, name = diagnosis.tolerance, diagnosis.layout.name
    if diagnosis.layout.check_vma is None or not tolerance.random:
        return {}
    if diagnosis.unlikeness(tolerance.reference) < _ALIKE:
        return {}
    results = list(diagnosis.keyed())
    order, nearest = min(results, key=lambda x: diagnosis.unlikeness(x[1]), default=((), None))
    if nearest is None or diagnosis.unlikeness(nearest) > _ALIKE:
        diagnosis.tolerance = tolerance.widened([values for _, values in results])
        notes.append(
            f"{name}: each device draws random numbers in a way that one device cannot repeat, so"
            " only differences are seen that are larger than those between keys"
        )
        return {}
    diagnosis.tolerance = tolerance.with_reference(nearest)
    folded, split = set(order or ()), set(diagnosis.batch_axes)
    if missing := named(sorted(split - folded)):
        fact = f"the key is not folded along {missing}: devices draw the same random numbers."
        fix = f"Fold it: `jax.random.fold_in(key, jax.lax.axis_index({sorted(split - folded)!r}))`."
        return {0: Cause(fact, fix, "same key")}
    if extra := named(sorted(folded - split)):
        fact = (
            f"the key is folded along {extra}, where devices have the same rows: they draw"
            " different random numbers for the same activations."
        )
        return {0: Cause(fact, "Fold it over the axes of the batch only.", "other key")}
    notes.append(
        f"{name}: each device draws its own random numbers; compared with keys folded by"
        f" axis_index({order!r}) on one device"
    )
    return {}


def _raise_if_none_ran(chosen: Sequence[Layout], skipped: dict[str, Exception]) -> None:
    """Raises the first error, if no layout of a kind, by jit or by hand, could run."""
    for by_hand in (False, True):
        names = [x.name for x in chosen if (x.check_vma is not None) == by_hand]
        if names and all(name in skipped for name in names):
            raise skipped[names[0]]
