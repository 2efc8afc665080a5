"""Finds the mesh and the strategy for a model on given devices, and says why the others lost.

Each program is compiled in a process of its own. XLA ends its whole process where one of its own
checks fails, and does not give the memory of a large compile back to the system.
"""

import inspect
import math
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from typing import Any

import cloudpickle
import jax
from loky import BrokenProcessPool, ProcessPoolExecutor

from treeshard._core.make_mesh import make_mesh
from treeshard._core.text import human_bytes, parse_bytes
from treeshard._core.topologies import Chip, chip_of, parse_topology, topology_devices
from treeshard.errors import DoesNotFitError, MeshError, TreeShardError, did_you_mean, listed
from treeshard.programs._candidates import (
    BATCH_AXES,
    Candidate,
    Estimator,
    Strategy,
    candidates,
    named_strategies,
    slices_of,
)
from treeshard.programs._suggestions import Suggestion, Suggestions, Verdict, ranked

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
    scan: bool | str = False,
    remat: bool | str = False,
    dtype: Any = None,
) -> Suggestions:
    """Finds the mesh and the rules with which a model trains on given devices, with reasons.

    It plans every factoring of the devices into the axes of every strategy, drops what cannot be,
    and orders the rest by what their plans send over which links. Then it compiles one after the
    other for the devices, until `top` of them fit, and ranks these by what the compiler says.

    Args:
        make: `make(mesh, rules)` returns `(step, state, batch)`: a step of `jit_step` or
            `shard_map_step`, and arrays or `jax.ShapeDtypeStruct`s of the state and of the batch.
            What else it offers as keyword arguments is varied: `remat` (a bool) and `accumulate`
            (the number of passes). It is called here with a mesh of one device, for the shapes, and
            with every other mesh in the process that compiles: cloudpickle copies it there, with
            what it refers to outside of modules.
        topology: Devices that are not attached, as in `make_mesh`: `"v5e-256"`, `"h100:2x8"`.
        devices: Without `topology`, the number of devices; by default all that are attached. TPUs
            that are attached, and devices of several processes, are named by `topology` too, since
            only this process can open them.
        memory: The bytes that programs can use on a device, as a number or `"80GB"`; by default
            what the kind of device has.
        global_batch: Passed on to `make` as `global_batch=`.
        strategies: Names, `"DP"`, `"ZeRO-1"`, `"FSDP"` or `"HSDP"`, and `Strategy`s of your own,
            such as one with rules for a `tensor` axis. By default the four names.
        top: How many that fit are compiled.
        budget: Seconds, after which nothing more is compiled. What runs then is ended.
        chip: Peaks and links of the device, instead of the published ones.
        progress: Whether to write a line to stderr for each program that is compiled.
        scan: As in `predict_communication`, for the comparison of a program with its plan.
        remat: Likewise, which weights are gathered again. Where `make` offers `remat`, those of
            candidates with it, by default all.
        dtype: Likewise.

    Returns:
        `Suggestions`, the best first. Ctrl-C stops it and returns what is known by then.

    Raises:
        MeshError: If the topology does not exist, or is given beside `devices`.
        TreeShardError: If `make` does not have this form, cannot be copied to another process or
            fails for every mesh, or a strategy is not known.

    Warns:
        ShardingWarning: As the steps that `make` builds.

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
    """
    target = _Target(topology, devices, memory, chip)
    options = _offered(make, global_batch)
    fixed = {} if global_batch is None else {"global_batch": global_batch}
    given = [one for one in strategies or () if isinstance(one, Strategy)]
    names = [*BATCH_AXES, *(axis for one in given for axis in one.axes)]
    alone = make_mesh(dict.fromkeys(names, 1), devices=jax.devices()[:1])
    first = {name: values[0] for name, values in options.items()}
    _, state, batch, *_ = _made(make, alone, [(".*", None)], {**first, **fixed})
    chosen = _strategies(strategies, state)
    order: list[Suggestion] = []
    dropped: list[Suggestion] = []
    estimator = Estimator(state, batch, target.chip, target.capacity)
    for one in candidates(chosen, target.devices, target.slices, options):
        known = estimator.estimate(one)
        if isinstance(known, str):
            dropped.append(Suggestion(one, None, None, known))
        else:
            order.append(Suggestion(one, known, None, None))
    order.sort(key=_by_estimate)
    model = {"scan": scan, "remat": remat, "dtype": dtype}
    end = math.inf if budget is None else time.monotonic() + budget
    compiling = _Compiling(make, target, fixed, model, end, progress)
    return compiling.run(order, dropped, top)


def _by_estimate(row: Suggestion) -> tuple[float, bool, int, int]:
    assert row.estimate is not None
    options = row.candidate.options
    again, passes = bool(options.get("remat")), options.get("accumulate", 1)
    # Where the links are not known, the bytes decide. Rounded: on a torus, every HSDP sends as much
    # as FSDP, and then the one with the least state comes first.
    links = row.estimate.seconds or float(row.estimate.moved_bytes)
    return float(f"{links:.3g}"), again, passes, row.estimate.state_bytes


class _Target:
    """The devices, and what is known of them."""

    def __init__(
        self, topology: str | None, devices: int | None, memory: Any, chip: Chip | None
    ) -> None:
        if topology is not None and devices is not None:
            raise MeshError("suggest: give either `devices` or `topology`.")
        self.topology = None if topology is None else parse_topology(topology)
        if self.topology is not None:
            self.devices, self.chip = self.topology.devices, chip or self.topology.chip
        else:
            attached = jax.devices()
            self.devices = devices or len(attached)
            self.chip = chip or chip_of(attached[0])
        self.slices = slices_of(self.topology)
        own = self.chip.memory if self.chip is not None else None
        self.capacity = parse_bytes(memory) if isinstance(memory, str) else memory or own
        self.missing = self._missing()

    def mesh(self, candidate: Candidate) -> Any:
        axes, slow = candidate.mesh_arguments
        if self.topology is None:
            return make_mesh(axes, devices=jax.devices()[: self.devices])
        return make_mesh(axes, topology=str(self.topology), dcn_axes=slow)

    def _missing(self) -> str | None:
        """Why nothing can be compiled for these devices."""
        if self.topology is None:
            attached = jax.devices()
            if self.devices > len(attached):
                return f"only {len(attached)} devices are attached"
            if jax.process_count() > 1:
                return "the devices belong to several processes; name them by `topology`"
            if attached[0].platform == "tpu":  # which one process holds alone
                return "this process holds the TPUs; name them by `topology`"
            return None
        try:
            topology_devices(str(self.topology))
        except ImportError as error:
            return str(error)
        return None

    def __str__(self) -> str:
        if self.topology is not None:
            return f"{self.topology} ({self.devices} devices)"
        return f"{self.devices} x {jax.devices()[0].device_kind}"


def _offered(make: Callable[..., Any], global_batch: int | None) -> dict[str, Sequence[Any]]:
    names = inspect.signature(make).parameters
    if global_batch is not None and "global_batch" not in names:
        raise TreeShardError(
            "suggest: global_batch is given, and the function does not take it. Add a parameter"
            " `global_batch`, or leave it out."
        )
    return {name: values for name, values in _OFFERED.items() if name in names}


def _made(make: Callable[..., Any], mesh: Any, rules: Any, options: Mapping[str, Any]) -> Any:
    made = make(mesh, rules, **options)
    if not isinstance(made, tuple) or len(made) != 3 or not hasattr(made[0], "compile"):
        raise TreeShardError(
            f"suggest: the function returned {type(made).__name__}, and not a tuple (step, state,"
            " batch), where step is what `jit_step` or `shard_map_step` returned."
        )
    return made


def _strategies(chosen: Sequence[str | Strategy] | None, state: Any) -> list[Strategy]:
    known = named_strategies(state)
    found: list[Strategy] = []
    for one in known if chosen is None else chosen:
        if isinstance(one, str) and one not in known:
            raise TreeShardError(
                f"suggest: there is no strategy {one!r}.{did_you_mean(one, known)} The names are"
                f" {', '.join(known)}; pass your own as Strategy(name, axes, rules)."
            )
        found.append(known[one] if isinstance(one, str) else one)
    return found


# ------------------------------------------------------------------ compiling


@dataclass
class _Compiling:
    """Compiles one candidate after the other, until enough of them fit."""

    make: Callable[..., Any]
    target: _Target
    fixed: Mapping[str, Any]
    model: Mapping[str, Any]
    end: float
    progress: bool
    # With the bytes beside their state.
    refused: list[tuple[Suggestion, int]] = field(default_factory=list)

    def run(
        self, order: Sequence[Suggestion], dropped: Sequence[Suggestion], top: int
    ) -> Suggestions:
        rows: list[Suggestion] = []
        stopped, fitting = self.target.missing, 0
        for row in order:
            if stopped is None and fitting < top:
                if (like := self._too_large(row)) is not None:
                    row = replace(row, reason=like)
                else:
                    row, stopped = self._judged(row)
            fitting += row.fits is True and not row.lost
            rows.append(row)
        failed = [row for row in rows if (row.reason or "").startswith("failed")]
        if failed and not any(row.verdict or row.reason is None for row in rows):
            reasons = [f"{row.candidate}: {row.outcome}" for row in failed]
            raise TreeShardError(listed("suggest: the function failed for every mesh:", reasons))
        return ranked([*rows, *dropped], str(self.target), stopped)

    def _too_large(self, row: Suggestion) -> str | None:
        """Why a candidate needs no compiling: what was refused differs only in its state."""
        capacity, estimate = self.target.capacity, row.estimate
        if capacity is None or estimate is None:
            return None
        for refused, beside in self.refused:
            one, other = refused.candidate, row.candidate
            alike = one.options == other.options
            alike &= one.axes.get("tensor") == other.axes.get("tensor")
            # Other parts of the step change with the state; a quarter is left for them.
            if alike and estimate.state_bytes + 0.75 * beside > capacity:
                return (
                    f"not compiled: {one} needs {human_bytes(beside)} beside its state, and the"
                    f" state alone takes {human_bytes(estimate.state_bytes)} here"
                )
        return None

    def _judged(self, row: Suggestion) -> tuple[Suggestion, str | None]:
        """Compiles a candidate. Returns why to stop, if there is a reason."""
        started = time.monotonic()
        left = self.end - started
        if left <= 0:
            return row, "the budget of time was over"
        program = _Program(self.make, self.target, row.candidate, self.fixed, self.model)
        try:
            known = _in_child(program, left)
        except TimeoutError:
            return row, "the budget of time was over"
        except KeyboardInterrupt:
            return row, "interrupted"
        if isinstance(known, str):
            judged = replace(row, reason=f"failed: {known}")
        else:
            judged = replace(row, verdict=known)
        if self.progress:
            seconds = time.monotonic() - started
            print(f"{row.candidate}: {judged.outcome} ({seconds:.0f} s)", file=sys.stderr)
        if judged.fits is False and judged.verdict and judged.estimate:
            beside = max(0, judged.verdict.need - judged.estimate.state_bytes)
            self.refused.append((judged, beside))
        return judged, None


@dataclass(frozen=True)
class _Program:
    """A candidate with all that another process needs to compile it."""

    make: Callable[..., Any]
    target: _Target
    candidate: Candidate
    fixed: Mapping[str, Any]
    model: Mapping[str, Any]

    def verdict(self) -> Verdict:
        """Compiles it, and reads what the compiler says."""
        mesh = self.target.mesh(self.candidate)
        options = {**self.candidate.options, **self.fixed}
        step, state, batch = _made(self.make, mesh, self.candidate.strategy.rules, options)
        try:
            compiled = step.compile(state, batch)
        except DoesNotFitError as error:
            if error.need is None:
                raise
            return Verdict(error.need, error.capacity)
        memory, cost = compiled.memory(), compiled.cost(self.target.chip)
        again = self.model["remat"]
        if "remat" in self.candidate.options:
            again = (again or True) if self.candidate.options["remat"] else False
        compared = compiled.communication(**{**self.model, "remat": again})
        return Verdict(
            memory.total,
            self.target.capacity or memory.capacity,
            memory.temporaries,
            sum(row.planned_bytes for row in compared.rows),
            sum(row.bytes for row in compared.rows),
            cost.exposed_bytes,
            cost.exposed_seconds,
            cost.seconds,
            cost.share,
            compared.reasons,
        )


def _in_child(program: _Program, seconds: float) -> Verdict | str:
    """The verdict on a program, or why it failed. Raises `TimeoutError` after `seconds`."""
    try:
        copied = cloudpickle.dumps(program)
    except Exception as error:  # whatever the objects that it refers to raise
        raise TreeShardError(
            f"suggest: the function cannot be copied to the process that compiles: {error}. Make"
            " what it refers to inside of it, or in a module that it imports."
        ) from error
    # A GPU that is attached is shared with this process.
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    pool = ProcessPoolExecutor(max_workers=1, env=shared)
    try:
        with _deaf_to_ctrl_c():
            task = pool.submit(_child, copied, jax.config.values)
        known, warned = task.result(None if math.isinf(seconds) else seconds)
    except BrokenProcessPool:
        return (
            "its process ended, as where the compiler fails a check of its own or the host has no"
            " memory left"
        )
    finally:
        pool.shutdown(kill_workers=True)
    for message, category, file, line in warned:
        warnings.warn_explicit(message, category, file, line)
    return known


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Has processes that start inside ignore Ctrl-C, which a terminal sends to them too: they
    inherit which signals are blocked. What comes meanwhile is heard at the end."""
    # It runs beside every first process, and where Python starts it, it unblocks Ctrl-C.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(copied: bytes, settings: Mapping[str, Any]) -> tuple[Verdict | str, list[Any]]:
    """What the process that compiles does. Returns the verdict or why it failed, and for each
    warning its message, category, file and line."""
    here = jax.config.values
    for name, value in settings.items():
        if here[name] != value:
            jax.config.update(name, value)
    with warnings.catch_warnings(record=True) as warned:
        try:
            known = pickle.loads(copied).verdict()
        except Exception as error:  # of the user's function, or of the compiler
            known = (str(error).strip() or type(error).__name__).splitlines()[0]
    return known, [(one.message, one.category, one.filename, one.lineno) for one in warned]
