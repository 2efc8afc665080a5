"""Checks that a computation gives the same numbers in all layouts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treeshard._core.arguments import check_no_refs, describe_argument
from treeshard._core.mesh import MeshLike
from treeshard._core.paths import PyTree
from treeshard._core.processes import all_or_none, participating_processes, show_progress, wants_bar
from treeshard._core.spec_trees import SpecTree
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import IN_MINIBATCHES
from treeshard._planning.wrong_arguments import check_plan
from treeshard.errors import ArgumentError, MeshError, WrongResultError
from treeshard.testing._comparison import Comparison
from treeshard.testing._computations import Computation, Gradients, Steps
from treeshard.testing._layouts import Layout, make_restored_layout, select_layouts
from treeshard.testing._layouts import layouts as default_layouts
from treeshard.testing._report import Report
from treeshard.training._step import Step

_ROWS_ALIKE = (
    "{what}: No result was compared.\nAll rows of the batch are equal, so a missing reduction does"
    " not change the result. Use random numbers:"
    " `np.random.default_rng(0).normal(size=shape)`."
)
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

    Raw gradients are compared, leaf by leaf, because Adam would hide a wrong factor. A result is
    wrong if it differs from the result on one device by more than 12 times the rounding noise,
    which is measured. The parameters are changed by 1% of their scale first, because a head of
    zeros makes other gradients zero. The page "Test your sharding" has the details.

    The check needs several devices, which may be simulated. All processes must make the same call.
    If `tqdm` is installed, a call of more than 10 seconds shows a progress bar on a terminal.

    Args:
        loss: Takes `(params, batch)` and returns the loss, or a tuple that starts with it. It
            runs on one device too, so it must not name devices.
        params: The parameters, on the host or on devices. Leaves that are not floats are kept.
        batch: The batch, of random numbers, with enough rows for all layouts.
        plan: The plan of `params`, on a mesh with devices.
        layouts: Layouts to compare, or their names. By default all of `testing.layouts`.
        by_hand: A function for `jax.shard_map` that must give the same results. It takes this
            device's shards of `params` and `batch`, and returns `(loss, grads)`, as
            `manual.value_and_grad` does. It runs with `check_vma` on and off.
        batch_specs: The specs of the batch, by default as in `jit_step`.
        expected_to_raise: Names of layouts that may raise; `plan` and `by hand` must run.

    Returns:
        A `Report`, whose `str()` has a table of layouts and leaves.

    Raises:
        WrongResultError: If a result differs by more than rounding, a layout raised, random numbers
            prevented a check, or no gradient was compared, for example because all rows of the
            batch are equal. The message is the report. The error is an `AssertionError`.
        SpecError: If the plan does not match `params`; if `by_hand` is given, and neither
            `batch_specs` nor the plan says how the batch is split; if a layout's name is unknown.
        StateError: If `by_hand` does not return `(loss, grads)`.
        ArgumentError: If `plan` is not a plan.
        MeshError: If the plan's mesh has one device, or is abstract.
        LeafError: If `params` or `batch` has a mutable reference (`jax.Ref`).
    """
    check_plan(plan, "check_gradients(loss, params, batch, plan(params, rules, mesh))")
    check_no_refs(params, "check_gradients")
    check_no_refs(batch, "check_gradients", "batch")
    available = default_layouts(plan, batch, batch_specs, by_hand=by_hand is not None)
    chosen = select_layouts("check_gradients", available, layouts)
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
    """Checks that two training steps give the same results on one device and in other layouts.

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

    The check compares how each of two steps changes every leaf of the state, and the other results
    of the step. If float32 rounds an update so much that an error of 1% would not show, it also
    compares in float64. A first moment shows the scale of the raw gradient, which the parameters of
    Adam hide.

    The layouts are the plan's mesh, other axis sizes, the axes in another order, and for a step of
    `jit_step` the batch split over fewer axes. If the step uses `accumulate_gradients`, the layout
    `one pass` takes the batch in one pass on one device. `state` is not donated. In a layout,
    `jax.device_count()` is the size of its mesh, so a wrong division by it shows. The report notes
    a key that the step returns unchanged. Progress is shown as by `check_gradients`.

    Args:
        step: What `jit_step` or `shard_map_step` returned.
        state: The state, on the host or on devices. It is not donated.
        batch: The batch, of random numbers.
        layouts: The layouts to compare, or their names. By default all.
        expected_to_raise: Names of layouts that may raise; `plan` must run.
        restore_on: A mesh, such as `"data=4,fsdp=2"`, for one more layout, `restored`: the first
            step runs on the plan's mesh, and the state is saved and restored on this mesh for the
            second step. Several processes must share their temporary folder.

    Returns:
        A `Report`, as `check_gradients`.

    Raises:
        WrongResultError: As `check_gradients`, or if no leaf of the state was compared, for example
            because both steps skip their update. The error is an `AssertionError`.
        SpecError: If the state does not match the plan of the step, or a layout's name is unknown.
        ArgumentError: If `step` was not made by `jit_step` or `shard_map_step`.
        MeshError: If the plan's mesh has one device.
        LeafError: As `check_gradients`.
    """
    if not isinstance(step, Step):
        raise ArgumentError(
            f"check_step: the step is {describe_argument(step)}. Pass what `jit_step` or"
            " `shard_map_step` returned: `check_step(jit_step(fn, plan), state, batch)`."
        )
    check_no_refs(state, "check_step")
    check_no_refs(batch, "check_step", "batch")
    names = ["plan", "mesh", "axes"] if step.is_by_hand else ["plan", "mesh", "axes", "batch"]
    available = default_layouts(step.plan, batch, step.batch_specs)
    available = [layout for layout in available if layout.name in names]
    if restore_on is not None:
        available.append(make_restored_layout(available[0], restore_on))
    chosen = select_layouts("check_step", available, layouts)
    return check("check_step", Steps(step, state, batch), chosen, expected_to_raise)


def check(
    what: str,
    computation: Computation,
    chosen: Sequence[Layout],
    expected_to_raise: Collection[str],
) -> Report:
    """Compares the results of a computation in several layouts with its results on one device."""
    mesh = chosen[0].mesh
    if mesh.devices.size == 1:
        raise MeshError(
            f"{what}: the mesh has one device, so there is nothing to compare. On a laptop, call"
            " `treeshard.simulate_devices(8)` first."
        )
    bar = show_progress(chosen, what, unit="layout", show=wants_bar(), after=_QUIET_SECONDS)
    # All processes read the same numbers, so they report the same.
    with all_or_none(what, among=participating_processes((), [mesh])):
        if _has_equal_rows(computation, chosen[0]):
            raise WrongResultError(_ROWS_ALIKE.format(what=what))
        comparison = Comparison(computation, chosen[0])
        for layout in bar:
            comparison.add(layout)
        # Only the trace of a step shows whether it accumulates gradients.
        if isinstance(computation, Steps) and comparison.has_scope(IN_MINIBATCHES):
            one_pass = replace(chosen[0].alone(), name="one pass", one_pass=True)
            comparison.add(one_pass)
            chosen = [*chosen, one_pass]
        report = comparison.report(what, chosen, expected_to_raise)
        if not report.ok:
            first_error = next(iter(comparison.raised.values()), None)
            raise WrongResultError(str(report)) from first_error
    return report


def _has_equal_rows(computation: Computation, layout: Layout) -> bool:
    dims = computation.row_dims(layout)
    arrays = [np.moveaxis(np.asarray(computation.batch[i]), dim, 0) for i, dim in dims.items()]
    return bool(arrays) and all((x == x[:1]).all() for x in arrays)
