"""Compiles a training step into one program, also for states with leaves that are not arrays."""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import (
    DictKey,
    register_pytree_with_keys,
    tree_flatten,
    tree_leaves,
    tree_map,
)

from treeshard._core.arrays import StaticSplit, array_text, has_shape, is_array
from treeshard._core.jax_private import is_tracing, varying_axes
from treeshard._core.make_mesh import is_attached, with_devices
from treeshard._core.meetings import count_step, in_turn, set_origin
from treeshard._core.paths import PyTree, leaf_paths, pair, path_under
from treeshard._core.processes import (
    TIMEOUT,
    agreeing,
    facts_of,
    is_spread,
    participating_processes,
)
from treeshard._core.spec_trees import SpecTree, get_names_from_partition_spec, specs_of_leaves
from treeshard._core.text import fold_paths
from treeshard._placement.constraint import with_sharding_constraint
from treeshard._placement.moves import through_host
from treeshard._placement.shard import move_leaves, shardings_to_compare
from treeshard._placement.targets import raise_unmovable, targets, unmovable
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, row_axes
from treeshard.errors import (
    DeletedLeafError,
    SpecError,
    StateError,
    TreeShardError,
    listed,
    warn,
)
from treeshard.training._pitfalls import (
    mark_as_separate,
    separated,
    warn_of_activations,
    warn_of_device_puts,
)

if TYPE_CHECKING:
    from treeshard.communication._comparison import Comparison
    from treeshard.programs._compiled_step import CompiledStep

StepFn = Callable[[Any, Any], tuple[Any, Any]]


class Step:
    """A step `(state, batch) -> (state, aux)`, compiled once per structure of its arguments.

    Attributes:
        plan: The plan of the state.
        batch_specs: The specs of the batch.
        is_by_hand: Whether it runs once per device, as `shard_map_step` makes it.
    """

    def __init__(
        self, fn: StepFn, plan: Plan, batch: SpecTree, *, donate: bool, per_device: bool = False
    ) -> None:
        update_wrapper(self, fn)
        self.plan, self.batch_specs = plan, batch
        self._name = "shard_map_step" if per_device else "jit_step"
        self._mesh = with_devices(plan.mesh, self._name, compile_only=True)
        self._among = participating_processes((), [self._mesh])
        self._is_attached = is_attached(self._mesh.devices.flat[0])
        gather = None
        if per_device:
            from treeshard.manual import gather_params as gather
        in_force = PlanInForce(plan, row_axes(batch), gather)
        self._fn, self._donate, self.is_by_hand = in_force.inside(fn), donate, per_device
        self._plain = fn
        self._programs: list[_Program] = []
        # By the form of a batch: the target sharding of each leaf that has one, by index.
        self._placements: dict[Any, dict[int, NamedSharding]] = {}
        # What `_form_in_place` returned for a batch of which no leaf had to move.
        self._last_in_place: Any = None

    def __call__(self, state: PyTree, batch: PyTree) -> tuple[PyTree, Any]:
        if not self._is_attached:
            with_devices(self._mesh, self._name)  # raises
        program, arrays, data = self._prepare(state, batch)
        if np.ndarray in set(map(type, arrays)):
            self._warn_of_host_leaves(program, arrays)
        # JAX 0.10 ends the process if several devices get deleted arrays, or one array twice to
        # donate. One device raises and leaves the arrays as they are, so it need not be asked.
        if self._mesh.size > 1 or not program.is_traced:
            arrays = self._usable(program, arrays, data)
        with in_turn(self._among), _fixed_context(self._mesh):
            new, aux = self._run(program, arrays, data)
            if self._among and not is_tracing():
                set_origin((*new.arrays, *tree_leaves(aux)), self._among, count_step(self._among))
        if self._donate and self._mesh.size > 1:
            mark_as_separate(new.arrays)
        return program.state.combine(new.arrays), aux

    def on(self, plan: Plan, batch: SpecTree) -> "Step":
        """Returns the same step for another plan of its state, and other specs of its batch."""
        return Step(self._plain, plan, batch, donate=self._donate, per_device=self.is_by_hand)

    def _run(self, program: "_Program", arrays: list[Any], data: list[Any]) -> tuple["_Named", Any]:
        named, run = _Named(arrays, program.names), program.compiled
        try:
            if run is None:
                run = program.run
                if not program.is_traced:
                    traced = self._trace(program, named, data)
                    if not (is_tracing() or self.is_by_hand):
                        # JAX keeps this program for the call, so that it compiles once.
                        self._warn_of_activations(traced.lower().compile())
            return run(named, data)
        except TreeShardError:
            raise
        except Exception as error:
            if re.search("deleted|donate", str(error)):
                usable = self._usable(program, arrays, data)
                if usable is not arrays:
                    return self._run(program, usable, data)
            if (problem := _misplaced(arrays, program)) is None:
                raise
            raise problem from error

    def _usable(self, program: "_Program", arrays: list[Any], data: list[Any]) -> list[Any]:
        """The arrays of a state, with copies of those that a call could not donate."""
        if any([_is_live(x) and x.is_deleted() for x in arrays]):
            raise _deleted(arrays, program.leaves)
        if not self._donate or is_tracing():
            return arrays
        return separated(arrays, data, program.leaves, self._name)

    def lower(self, state: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Traces and lowers the step for these arguments, without donating them.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.
        """
        return self._lowered(state, batch)[2]

    def compile(
        self,
        state: PyTree,
        batch: PyTree,
        *,
        compiler_options: dict[str, str | bool] | None = None,
    ) -> "CompiledStep":
        """Compiles the step for these arguments without running it; calls then use this program.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.
            compiler_options: Options of XLA, as `jax.stages.Lowered.compile` takes them.

        Returns:
            A `CompiledStep`, which tells what the program moves, needs and costs.

        Raises:
            DoesNotFitError: If the program needs more memory than the devices have, where the
                compiler or the data sheet of absent devices tells.
            SpecError, StateError: As when the step is called.
        """
        from treeshard.programs._compiled_step import compile_step

        program, traced, lowered, data = self._lowered(state, batch)
        step = compile_step(
            lowered, traced.jaxpr, self.plan, self.batch_specs, data, compiler_options
        )
        program.compiled = step.compiled
        if not self.is_by_hand:
            self._warn_of_activations(step.compiled)
        return step

    def _trace(self, program: "_Program", state: "_Named", data: list[Any]) -> Any:
        traced = program.run.trace(state, data)
        if not program.is_traced:
            program.is_traced = True
            warn_of_device_puts(traced.jaxpr, self._name)
        return traced

    def _warn_of_activations(self, compiled: jax.stages.Compiled) -> None:
        if set(get_names_from_partition_spec(self.plan)) & set(row_axes(self.batch_specs)):
            warn_of_activations(compiled, self.plan, self.batch_specs, self._name)

    def _warn_of_host_leaves(self, program: "_Program", arrays: list[Any]) -> None:
        """Warns if leaves of the state were in host memory in an earlier step, and are again."""
        on_host = {i for i, x in enumerate(arrays) if isinstance(x, np.ndarray)}
        if again := sorted(on_host & program.on_host):
            paths = ", ".join(fold_paths([program.leaves[i].path for i in again]))
            warn(
                f"{self._name}: {paths}: in host memory in every step, so that each step copies"
                " it to the devices. Pass the state that the step returned, and only read from it."
            )
        program.on_host |= on_host

    def communication(
        self,
        state: PyTree,
        batch: PyTree,
        *,
        remat: bool | str = False,
        scan: bool | str = False,
        params: str | None = None,
        dtype: Any = None,
    ) -> "Comparison":
        """Compares the communication of the compiled step with the plan, without running it.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.
            remat: Which weights are gathered a second time for the backward pass: all, or
                those whose path matches this pattern.
            scan: Which leaves are layers stacked on dim 0 that a scan runs over: all, or
                those whose path matches this pattern.
            params: A pattern for the paths of the parameters, if they cannot be told from the
                plan.
            dtype: The dtype in which weights are gathered; by default their own.

        Returns:
            A `Comparison`, as `treeshard.compare_communication` returns it.
        """
        # Readers of compiled programs are 10 modules, which a training loop does not need.
        from treeshard.communication._comparison import compare_communication

        return compare_communication(
            self.plan,
            self.lower(state, batch).compile(),
            batch=self.batch_specs,
            remat=remat,
            scan=scan,
            params=params,
            dtype=dtype,
        )

    def _lowered(
        self, state: PyTree, batch: PyTree
    ) -> tuple["_Program", jax.stages.Traced, jax.stages.Lowered, list[Any]]:
        program, arrays, data = self._prepare(*tree_map(_struct, (state, batch)))
        with _fixed_context(self._mesh):
            traced = self._trace(program, program.named(arrays), data)
            return program, traced, traced.lower(), data

    def _prepare(self, state: PyTree, batch: PyTree) -> tuple["_Program", list[Any], list[Any]]:
        leaves, treedef = tree_flatten(state)
        data, data_def = tree_flatten(batch)
        data = self._placed(batch, data, data_def)
        for program in self._programs:
            if program.state.matches(leaves, treedef) and program.batch.matches(data, data_def):
                break
        else:
            state_split = StaticSplit(leaves, treedef, has_shape)
            batch_split = StaticSplit(data, data_def, _is_data)
            program = _Program(self._fn, state_split, batch_split, self.plan, leaf_paths(state))
            specs = batch_split.dynamic(self._specs_of(batch, data)) if self.is_by_hand else None
            program.compile_lazily(self._mesh, self._donate, specs)
            self._programs.append(program)
        return program, program.state.dynamic(leaves), program.batch.dynamic(data)

    def _placed(self, batch: PyTree, data: list[Any], treedef: Any) -> list[Any]:
        """The leaves of a batch on the mesh. Processes compare the form of a batch only once."""
        if self._last_in_place is not None and _form_in_place(data, treedef) == self._last_in_place:
            return data
        if is_tracing() or any(isinstance(x, jax.ShapeDtypeStruct) for x in data):
            shapes = treedef.unflatten([_struct(x) for x in data])
            specs = treedef.unflatten(self._specs_of(batch, data))
            targets(shapes, specs, self._mesh, self._name, "batch", accept_structs=True)
            constrained = with_sharding_constraint(batch, specs, self._mesh, uneven="error")
            return tree_leaves(constrained)
        form = (treedef, *map(_form, data))
        placement = self._placements.get(form)
        if placement is None:
            placement = self._placements[form] = self._agree_on(batch, data, treedef)
        to_place = {i: goal for i, goal in placement.items() if not _is_placed(data[i], goal)}
        if to_place:
            misfits = {i: misfit for i in to_place if (misfit := unmovable(data[i]))}
            raise_unmovable(batch, misfits, self._name, "batch")
            move_leaves(data, to_place, self._name, through_host)
        else:
            self._last_in_place = _form_in_place(data, treedef)
        return data

    def _agree_on(self, batch: PyTree, data: list[Any], treedef: Any) -> dict[int, NamedSharding]:
        """The target shardings of a batch, after all processes came to the same."""
        if all(map(is_spread, data)) and (placement := self._in_place(batch, data, treedef)):
            return placement
        among = self._among if any(map(has_shape, data)) else []
        with agreeing(self._name, among=among, timeout=TIMEOUT) as facts:
            placement = self._targets(batch, data, treedef)
            if among:
                paths = leaf_paths(batch)
                facts |= facts_of(
                    (path_under("batch", paths[i]), data[i], shardings_to_compare(data[i], target))
                    for i, target in placement.items()
                )
        return placement

    def _in_place(
        self, batch: PyTree, data: list[Any], treedef: Any
    ) -> dict[int, NamedSharding] | None:
        """The target shardings of a batch of global arrays, if they have them already.

        All processes made such arrays together, so there is nothing to agree on.
        """
        try:
            placement = self._targets(batch, data, treedef)
        except TreeShardError:  # which the other processes must hear of
            return None
        placed = all(_is_placed(data[i], target) for i, target in placement.items())
        return placement if placed else None

    def _targets(self, batch: PyTree, data: list[Any], treedef: Any) -> dict[int, NamedSharding]:
        specs = treedef.unflatten(self._specs_of(batch, data))
        return targets(batch, specs, self._mesh, self._name, "batch")

    def _specs_of(self, batch: PyTree, data: list[Any]) -> list[Any]:
        specs = specs_of_leaves(self.batch_specs, batch, "batch specs")
        # A scalar has no dim to split.
        return [
            spec if spec is None or getattr(x, "shape", None) != () else PartitionSpec()
            for x, spec in zip(data, specs, strict=True)
        ]


def _struct(x: Any) -> Any:
    """The form of an array, which is all that compiling needs; other leaves as they are."""
    if not has_shape(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def _is_data(x: Any) -> bool:
    return has_shape(x) or isinstance(x, bool | int | float | complex)


def _form(x: Any) -> Any:
    """What must be the same of a leaf of the batch on all processes."""
    if not has_shape(x):
        return type(x)
    return x.shape, x.dtype, x.sharding if is_spread(x) else None


def _form_in_place(data: list[Any], treedef: Any) -> Any:
    """The form of a batch on devices, as it is quickest to get; `None` for any other batch."""
    try:
        leaves = [(x.sharding, x.shape, x.dtype, x.is_deleted()) for x in data]
    except (AttributeError, jax.errors.ConcretizationTypeError):  # not arrays, or traced
        return None
    return treedef, leaves


def _is_placed(x: Any, target: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.sharding == target and not x.is_deleted()


class _Program:
    """The compiled step for one structure of state and batch.

    Their arrays are arguments; all other leaves are constants of the program.
    """

    run: Any
    is_traced = False
    compiled: Any = None  # what `Step.compile` made, if it was called

    def __init__(
        self,
        fn: StepFn,
        state: StaticSplit,
        batch: StaticSplit,
        plan: Plan,
        paths: list[str],
    ) -> None:
        self.fn, self.state, self.batch, self.paths = fn, state, batch, paths
        self.on_host: set[int] = set()  # leaves of the state that a call had as numpy arrays
        array_paths = state.dynamic(paths)
        _check_fits_plan(array_paths, plan)
        self.leaves, self.shardings = plan.leaves, plan.sharding_of_each()
        # `collectives` reads these names of the arguments from the compiled program.
        unique = len(set(array_paths)) == len(array_paths)
        self.names = _Names(array_paths if unique else [f"{i}" for i in range(len(array_paths))])

    def named(self, arrays: Sequence[Any]) -> "_Named":
        return _Named(arrays, self.names)

    def compile_lazily(self, mesh: Mesh, donate: bool, per_device: list[Any] | None) -> None:
        """Sets `run`. If it shall run in `shard_map`, `per_device` has the batch's specs."""
        specs = [leaf.given for leaf in self.leaves]
        body = self._body
        if per_device is not None:
            body = jax.shard_map(
                self._checked_body,
                mesh=mesh,
                in_specs=(specs, [_spec_of(spec) for spec in per_device]),
                out_specs=(specs, PartitionSpec()),
            )

        def run(state: _Named, batch: list[Any]) -> tuple[_Named, Any]:
            arrays = [
                x if leaf.memory is None else jax.device_put(x, NamedSharding(mesh, leaf.given))
                for x, leaf in zip(state.arrays, self.leaves, strict=True)
            ]
            self._check_arrays(arrays, self.leaves, "enters the step as")
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                new, aux = body(arrays, batch)
            return self.named(new), aux

        run.__name__ = getattr(self.fn, "__name__", "step")  # what profiles show
        shardings = self.named(self.shardings)
        self.run = jax.jit(
            run,
            in_shardings=(shardings, None),
            out_shardings=(shardings, None),
            donate_argnums=0 if donate else (),
        )

    def _body(self, arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
        out = self.fn(self.state.combine(arrays), self.batch.combine(data))
        if not isinstance(out, tuple) or len(out) != 2:
            raise StateError(f"the step must return (state, aux), not {type(out).__name__}.")
        new, treedef = tree_flatten(out[0])
        self._check_static(new, treedef)
        new = self.state.dynamic(new)
        self._check_arrays(new, arrays, "leaves the step as")
        return new, out[1]

    def _checked_body(self, arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
        """The step on one device's shards; raises if results differ that must be equal."""
        new, aux = self._body(arrays, data)
        facts = [
            f"{leaf.path}: the result differs along {_quoted(more)}, but the plan shards it as"
            f" {leaf.given}. Average its gradients: `manual.sync_gradients`, or"
            " `manual.value_and_grad`."
            for x, leaf in zip(new, self.leaves, strict=True)
            if (more := varying_axes(x) - set(get_names_from_partition_spec(leaf.given)))
        ]
        facts += [
            f"aux{'/' + path if path else ''}: it differs along {_quoted(varying_axes(x))}. Reduce"
            " it: `Metrics.reduce`, or `jax.lax.pmean`."
            for path, x in zip(leaf_paths(aux), tree_flatten(aux)[0], strict=True)
            if is_array(x) and varying_axes(x)
        ]
        if facts:
            raise StateError(listed(f"{len(facts)} results differ between devices:", facts))
        return new, aux

    def _check_static(self, new: list[Any], treedef: Any) -> None:
        """Raises `StateError` if the step changed the structure, or a static leaf."""
        if treedef != self.state.treedef:
            paths = leaf_paths(treedef.unflatten(new))
            facts = _unpaired(
                self.paths, paths, "the returned state lacks it.", "the step adds it to the state."
            ) or ["the step changes a container of the state, or a static field in it."]
            headline = "The step changes the structure of its state:"
            raise StateError(listed(headline, facts, headed=True))
        facts = []
        for i in self.state.changed(new):
            old = self.state.static[i]
            facts.append(
                f"{self.paths[i]}: the step turns {_described(old)} into {_described(new[i])}. A"
                f" leaf that is not an array is a constant of the compiled program. {_advice(old)}"
            )
        if facts:
            raise StateError(listed(f"{len(facts)} leaves change that are not arrays:", facts))

    def _check_arrays(self, arrays: list[Any], like: Sequence[Any], how: str) -> None:
        facts = [
            f"{leaf.path}: {how} {_described(x)}, but the plan has {array_text(leaf)}. A state must"
            " keep its shapes and dtypes: convert this leaf, or plan again."
            for x, old, leaf in zip(arrays, like, self.leaves, strict=True)
            if not is_array(x) or x.shape != old.shape or x.dtype != old.dtype
        ]
        if facts:
            raise StateError(listed(f"{len(facts)} leaves differ from the plan:", facts))


def _described(x: Any) -> str:
    return array_text(x) if has_shape(x) else f"the {type(x).__name__} {x!r}"


def _advice(static: Any) -> str:
    makers = {bool: "jnp.bool_", int: "jnp.int32", float: "jnp.float32"}
    if maker := makers.get(type(static)):
        return f"Start it as an array: `{maker}({static!r})`."
    return "Keep it out of the state, or leave it unchanged."


def _spec_of(spec: Any) -> PartitionSpec:
    return PartitionSpec() if spec is None else getattr(spec, "spec", spec)


def _quoted(axes: Iterable[str]) -> str:
    return ", ".join(repr(axis) for axis in sorted(axes))


def _fixed_context(mesh: Mesh) -> AbstractContextManager[Any]:
    # `jit` compiles once per mesh context, so every call runs in the same one. Inside another
    # jit the context cannot be set, and does not change either.
    return nullcontext() if is_tracing() else jax.set_mesh(mesh)


def _check_fits_plan(paths: list[str], plan: Plan) -> None:
    planned = [leaf.path for leaf in plan.leaves]
    if paths == planned:
        return
    facts = _unpaired(
        paths, planned, "the plan has no such array.", "the state has no such array."
    ) or ["it has the same arrays in a different order."]
    raise SpecError(listed("The state does not match the plan:", facts, headed=True))


def _unpaired(a: list[str], b: list[str], only_a: str, only_b: str) -> list[str]:
    """A fact about each path that only one of two trees has."""
    pairs = pair(((path, True) for path in a), ((path, True) for path in b))
    return [f"{path}: {only_a if x else only_b}" for path, x, y in pairs if not (x and y)]


# ------------------------------------------------------------------ names of arguments


class _Names:
    """The names of the arrays in a `_Named`. It compares by identity, which is fast."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys


class _Named:
    """A list of arrays with names, which appear in the compiled program.

    A dict has them too, but JAX sorts its keys at every call.
    """

    def __init__(self, arrays: Sequence[Any], names: _Names) -> None:
        self.arrays, self.names = arrays, names


def _with_keys(x: _Named) -> tuple[list[Any], _Names]:
    return [(DictKey(k), a) for k, a in zip(x.names.keys, x.arrays, strict=True)], x.names


register_pytree_with_keys(
    _Named,
    _with_keys,
    lambda names, arrays: _Named(list(arrays), names),
    lambda x: (x.arrays, x.names),
)

# ------------------------------------------------------------------ errors of a call


def _is_live(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _deleted(arrays: list[Any], leaves: Sequence[PlannedLeaf]) -> DeletedLeafError:
    facts = [
        f"{leaf.path}: deleted, or donated to an earlier step. Continue with the state that the"
        " step returned, or make the step with `donate=False`."
        for x, leaf in zip(arrays, leaves, strict=True)
        if _is_live(x) and x.is_deleted()
    ]
    return DeletedLeafError(listed(f"{len(facts)} leaves of the state are deleted:", facts))


def _misplaced(arrays: list[Any], program: _Program) -> SpecError | None:
    """An error about leaves that are not sharded as planned, which may be why a call failed."""
    facts = [
        f"{leaf.path}: sharded as {x.sharding}, planned as {planned}. Place the state with"
        " `treeshard.shard(state, plan)`."
        for x, leaf, sharding in zip(arrays, program.leaves, program.shardings, strict=True)
        if _is_live(x) and not x.sharding.is_equivalent_to(sharding, x.ndim)
        for planned in [leaf.given if leaf.memory is None else f"{leaf.given} in {leaf.memory}"]
    ]
    if not facts:
        return None
    return SpecError(listed(f"{len(facts)} leaves are not sharded as planned:", facts))
