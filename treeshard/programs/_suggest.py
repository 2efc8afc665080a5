"""Finds the mesh and the strategy for a model on given devices, and says why the others lost.

Each program is compiled in a process of its own (`_child.py`).
"""

import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.tree_util import tree_leaves

from treeshard._core.arrays import has_shape
from treeshard._core.make_mesh import make_mesh
from treeshard._core.text import human_bytes, parse_bytes
from treeshard._core.topologies import (
    Chip,
    Topology,
    chip_of,
    parse_topology,
    topology_devices,
    usable_memory,
)
from treeshard._trace.roles import Roles
from treeshard.communication._collectives import total
from treeshard.errors import DoesNotFitError, MeshError, TreeShardError, did_you_mean, listed
from treeshard.programs._candidates import (
    BATCH_AXES,
    NAMED,
    Candidate,
    Estimator,
    Strategy,
    candidates,
    named_strategies,
    slices_of,
)
from treeshard.programs._child import in_child
from treeshard.programs._suggestions import (
    Measure,
    Suggestion,
    Suggestions,
    Verdict,
    fastest_first,
    ranked,
    simplest_first,
)

_OFFERED = {"remat": (False, True), "accumulate": (1, 4)}


def suggest(
    make: Callable[..., Any],
    *,
    topology: str | None = None,
    devices: int | None = None,
    memory: int | str | None = None,
    global_batch: int | None = None,
    strategies: Sequence[str | Strategy] | None = None,
    top: int = 5,
    budget: int | float | None = None,
    chip: Chip | None = None,
    progress: bool = False,
) -> Suggestions:
    """Finds the mesh and the rules with which a model trains on given devices, with reasons.

    Examples:
        >>> def make(mesh, rules):
        ...     plan = ts.plan({"w": jax.ShapeDtypeStruct((512, 512), "float32")}, rules, mesh)
        ...     def step(state, batch):
        ...         loss, grads = jax.value_and_grad(lambda p: jnp.sum(batch @ p["w"]))(state)
        ...         return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss
        ...     batch = jax.ShapeDtypeStruct((64, 512), "float32")
        ...     return ts.jit_step(step, plan), plan.structs, batch
        >>> found = ts.suggest(make, devices=8, strategies=["DP", "FSDP"], memory="1GB")
        >>> found.best.mesh, found.best.fits
        ('fsdp=8', True)

    It plans every way to split the devices into the axes of every strategy, compiles those that
    send least until `top` fit, and ranks these by time, by waiting and by memory. Within 3%, the
    simplest strategy comes first.

    Args:
        make: `make(mesh, rules)` returns `(step, state, batch)`: a step of `jit_step` or
            `shard_map_step`, and arrays or `jax.ShapeDtypeStruct`s of the state and of the batch.
            Its keyword arguments `remat` (a bool) and `accumulate` (the number of passes), if it
            has them, are varied. It is called here with a mesh of one device, and with every
            other mesh in a child process, to which cloudpickle copies it.
        topology: Devices that are not attached, as in `make_mesh`: `"v5e-256"`, `"h100:2x8"`.
            Needed too for TPUs that are attached and for devices of several processes.
        devices: Without `topology`, the number of devices; by default all that are attached.
        memory: The bytes that programs can use on a device, as a number or `"80GB"`; by default
            what the kind of device has.
        global_batch: Passed on to `make` as `global_batch=`.
        strategies: Names, `"DP"`, `"ZeRO-1"`, `"FSDP"` or `"HSDP"`, and `Strategy`s of your own.
            By default the four names.
        top: How many that fit are compiled with the fastest options; 0 for none. Where the memory
            of a device is not known, all count as if they fit.
        budget: Seconds, after which nothing more is compiled. What runs then is ended.
        chip: Peaks and links of the device, instead of the published ones.
        progress: Whether to write a line to stderr for each program that is compiled.

    Returns:
        `Suggestions`, the best first. Ctrl-C stops it and returns what is known by then.

    Raises:
        MeshError: If the topology does not exist, or is given beside `devices`.
        TreeShardError: If `make` does not have this form, cannot be copied to another process or
            fails for every mesh, or a strategy is not known.

    Warns:
        ShardingWarning: As the steps that `make` builds.
    """
    target = _target_of(topology, devices, memory, chip)
    offered = _offered(make, global_batch)
    fixed = {} if global_batch is None else {"global_batch": global_batch}
    chosen = NAMED if strategies is None else strategies
    state, batch, roles = _on_one_device(make, chosen, offered, fixed)
    with_rows = [x for x in tree_leaves(batch) if has_shape(x) and x.shape]
    estimator = Estimator(state, roles, with_rows, target.chip, target.capacity, target.topology)
    order: list[Suggestion] = []
    dropped: list[Suggestion] = []
    strategies = _strategies(chosen, roles)
    slices = slices_of(target.topology)
    for candidate in candidates(strategies, target.devices, slices, offered):
        estimate = estimator.estimate(candidate)
        if isinstance(estimate, str):
            dropped.append(Suggestion(candidate, None, None, estimate))
        else:
            order.append(Suggestion(candidate, estimate, None, None))
    order = in_order(order)
    end = math.inf if budget is None else time.monotonic() + budget
    compiling = _Compiling(make, target, fixed, end, progress, probes_of(offered))
    rows, stopped = compiling.run(order, top)
    return ranked([*rows, *dropped], str(target), stopped)


def in_order(rows: Sequence[Suggestion]) -> list[Suggestion]:
    """The order of compiling: by what plans send, and the simplest of those that send as long."""
    return [*simplest_first(sorted(rows, key=_by_estimate), _sending_time)]


def _sending_time(row: Suggestion) -> Measure:
    """The time in which its plan sends; where the links are not known, the bytes decide."""
    assert row.estimate is not None
    return Measure(0, row.estimate.seconds or row.estimate.moved_bytes)


def _by_estimate(row: Suggestion) -> tuple[float, bool, int, int]:
    assert row.estimate is not None
    # Rounded: where plans send the same, the one with the least state comes first.
    sending = float(f"{_sending_time(row).amount:.3g}")
    candidate = row.candidate
    return sending, candidate.remat, candidate.passes, row.estimate.state_bytes


def probes_of(offered: Mapping[str, Sequence[Any]]) -> Sequence[Mapping[str, Any]]:
    """Choices that have each value of each option, with the first values of the others."""
    first = {name: values[0] for name, values in offered.items()}
    others = [{**first, name: value} for name, values in offered.items() for value in values[1:]]
    return [first, *others]


# ------------------------------------------------------------------ the devices


@dataclass(frozen=True)
class _Target:
    """The devices, and what is known of them."""

    topology: Topology | None
    devices: int
    chip: Chip | None
    capacity: int | None

    def mesh(self, candidate: Candidate) -> Any:
        axes, slow = candidate.mesh_arguments
        if self.topology is None:
            return make_mesh(axes, devices=jax.devices()[: self.devices])
        return make_mesh(axes, topology=str(self.topology), dcn_axes=slow)

    def missing(self) -> str | None:
        """Why nothing can be compiled for these devices."""
        if self.topology is None:
            return self._not_attached()
        try:
            topology_devices(str(self.topology))
        except ImportError as error:
            return str(error)
        return None

    def _not_attached(self) -> str | None:
        attached = jax.devices()
        if self.devices > len(attached):
            return f"only {len(attached)} devices are attached"
        if jax.process_count() > 1:
            return "the devices belong to several processes; name them by `topology`"
        # libtpu locks the chips for one process: a child could not open them.
        if attached[0].platform == "tpu":
            return "this process holds the TPUs; name them by `topology`"
        return None

    def __str__(self) -> str:
        if self.topology is not None:
            return f"{self.topology} ({self.devices} devices)"
        return f"{self.devices} x {jax.devices()[0].device_kind}"


def _target_of(
    topology: str | None, devices: int | None, memory: int | str | None, chip: Chip | None
) -> _Target:
    if topology is not None and devices is not None:
        raise MeshError("suggest: give either `devices` or `topology`.")
    if isinstance(memory, str):
        memory = parse_bytes(memory)
    if topology is not None:
        parsed = parse_topology(topology)
        number, known_chip = parsed.devices, parsed.chip
    else:
        parsed, attached = None, jax.devices()
        number, known_chip = devices or len(attached), chip_of(attached[0])
    chip = chip or known_chip
    if memory is None and chip is not None:
        memory = usable_memory(chip)
    return _Target(parsed, number, chip, memory)


# ------------------------------------------------------------------ the user's function


def _offered(make: Callable[..., Any], global_batch: int | None) -> dict[str, Sequence[Any]]:
    """What the function lets vary, with the values."""
    names = inspect.signature(make).parameters
    if global_batch is not None and "global_batch" not in names:
        raise TreeShardError(
            "suggest: global_batch is given, and the function does not take it. Add a parameter"
            " `global_batch`, or leave it out."
        )
    return {name: values for name, values in _OFFERED.items() if name in names}


def _on_one_device(
    make: Callable[..., Any],
    chosen: Sequence[str | Strategy],
    offered: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
) -> tuple[Any, Any, Roles]:
    """The state, the batch and the roles of leaves, from a mesh of one device with the axes of all
    strategies."""
    axes = [*BATCH_AXES]
    for strategy in chosen:
        if isinstance(strategy, Strategy):
            axes += strategy.axes
    mesh = make_mesh(dict.fromkeys(axes, 1), devices=jax.devices()[:1])
    options = {name: values[0] for name, values in offered.items()}
    step, state, batch = _call(make, mesh, [(".*", None)], {**options, **fixed})
    return state, batch, step.roles(state, batch)


def _call(make: Callable[..., Any], mesh: Any, rules: Any, options: Mapping[str, Any]) -> Any:
    made = make(mesh, rules, **options)
    if not isinstance(made, tuple) or len(made) != 3 or not hasattr(made[0], "compile"):
        raise TreeShardError(
            f"suggest: the function returned {type(made).__name__}, and not a tuple (step, state,"
            " batch), where step is what `jit_step` or `shard_map_step` returned."
        )
    return made


def _strategies(chosen: Sequence[str | Strategy], roles: Roles) -> list[Strategy]:
    named = named_strategies(roles)
    for name in chosen:
        if not isinstance(name, Strategy) and name not in named:
            raise TreeShardError(
                f"suggest: there is no strategy {name!r}.{did_you_mean(name, named)} The names are"
                f" {', '.join(named)}; pass your own as Strategy(name, axes, rules)."
            )
    return [x if isinstance(x, Strategy) else named[x] for x in chosen]


# ------------------------------------------------------------------ compiling

_FAILED = "failed: {error}"
_ALIKE = (
    "not compiled: {refused} needs {beside} beside its state, and the state alone takes {state}"
    " here"
)
# Other parts of a step change with the state; a quarter is left for them.
_LIKELY_BESIDE = 0.75


@dataclass
class _Compiling:
    """Compiles one candidate after the other, until enough of them fit.

    `probes` are choices of options, of each of which one is compiled first.
    """

    make: Callable[..., Any]
    target: _Target
    fixed: Mapping[str, Any]
    end: float
    progress: bool
    probes: Sequence[Mapping[str, Any]] = ({},)
    # What does not fit, with the bytes beside its state.
    refused: list[tuple[Candidate, int]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, order: Sequence[Suggestion], top: int) -> tuple[Sequence[Suggestion], str | None]:
        """The rows, with verdicts; and why not all were compiled that could be."""
        rows = list(order)
        stopped = self.target.missing()
        if stopped is None and top > 0:
            try:
                compile_in_turn(rows, top, self.probes, self._judge)
            except TimeoutError:
                stopped = "the budget of time was over"
            except KeyboardInterrupt:
                stopped = "interrupted"
        if rows and len(self.failed) == len(rows):
            raise TreeShardError(
                listed("suggest: the function failed for every mesh:", self.failed)
            )
        return rows, stopped

    def _judge(self, row: Suggestion) -> Suggestion:
        """Compiles a candidate, unless one like it was refused. Raises `TimeoutError` at the end
        of the budget."""
        alike = self._refused_alike(row)
        if alike is not None:
            return replace(row, reason=alike)
        started = time.monotonic()
        work = partial(_verdict, self.make, self.target, row.candidate, self.fixed)
        verdict = in_child(work, self.end - started)
        if isinstance(verdict, str):
            row = replace(row, reason=_FAILED.format(error=verdict))
            self.failed.append(f"{row.candidate}: {row.outcome}")
        else:
            row = replace(row, verdict=verdict)
        if self.progress:
            seconds = time.monotonic() - started
            print(f"{row.candidate}: {row.outcome} ({seconds:.0f} s)", file=sys.stderr)
        if row.fits is False and row.verdict and row.estimate:
            beside = max(0, row.verdict.need - row.estimate.state_bytes)
            self.refused.append((row.candidate, beside))
        return row

    def _refused_alike(self, row: Suggestion) -> str | None:
        """Why a candidate needs no compiling: what was refused differs only in its state."""
        capacity, candidate = self.target.capacity, row.candidate
        if capacity is None or row.estimate is None:
            return None
        state = row.estimate.state_bytes
        for refused, beside in self.refused:
            if refused.options != candidate.options:
                continue
            if refused.axes.get("tensor") != candidate.axes.get("tensor"):
                continue
            if state + _LIKELY_BESIDE * beside > capacity:
                sizes = {"beside": human_bytes(beside), "state": human_bytes(state)}
                return _ALIKE.format(refused=refused, **sizes)
        return None


def compile_in_turn(
    rows: list[Suggestion],
    top: int,
    probes: Sequence[Mapping[str, Any]],
    judge: Callable[[Suggestion], Suggestion],
) -> None:
    """Replaces rows by what `judge` returns, which compiles them: the first that fits of each
    choice of options, then with the choice of the fastest of these, until `top` of it fit."""

    def compile_some(number: int, options: Mapping[str, Any] | None) -> None:
        chosen = [
            i for i, row in enumerate(rows) if options is None or row.candidate.options == options
        ]
        for i in chosen:
            if len(_that_fit([rows[j] for j in chosen])) >= number:
                return
            if rows[i].verdict is None and rows[i].reason is None:
                rows[i] = judge(rows[i])

    for options in probes:
        compile_some(1, options)
    found = fastest_first(_that_fit(rows))
    if found:
        compile_some(top, found[0].candidate.options)
    # There may be fewer, or none fits but those with several options that save memory.
    compile_some(top, None)


def _that_fit(rows: Sequence[Suggestion]) -> list[Suggestion]:
    return [row for row in rows if row.verdict is not None and not row.lost]


def _verdict(
    make: Callable[..., Any],
    target: _Target,
    candidate: Candidate,
    fixed: Mapping[str, Any],
) -> Verdict:
    """Compiles a candidate, and reads what the compiler says."""
    options = {**candidate.options, **fixed}
    step, state, batch = _call(make, target.mesh(candidate), candidate.strategy.rules, options)
    try:
        compiled = step.compile(state, batch)
    except DoesNotFitError as error:
        if error.need is None:
            raise
        return Verdict(error.need, error.capacity)
    memory, cost = compiled.memory(), compiled.cost(target.chip)
    compared = compiled.communication()
    return Verdict(
        need=memory.total,
        capacity=target.capacity or memory.capacity,
        temporaries=memory.temporaries,
        planned=sum(row.planned_bytes for row in compared.rows),
        moved=total(row.bytes for row in compared.rows),
        exposed=None if "collectives, exposed" in cost.incomplete else cost.exposed_bytes,
        exposed_seconds=cost.exposed_seconds,
        seconds=cost.seconds,
        is_complete=not cost.incomplete,
        share=cost.share,
        findings=compared.reasons,
    )
