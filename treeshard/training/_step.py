"""Compiles a training step into one program, also for states with leaves that are not arrays."""

from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh
from jax.tree_util import tree_flatten, tree_leaves

from treeshard._core.arguments import check_no_refs, check_tree
from treeshard._core.arrays import StaticSplit, has_shape
from treeshard._core.jax_private import is_tracing
from treeshard._core.make_mesh import is_attached, with_devices
from treeshard._core.meetings import (
    check_not_broken,
    check_ran,
    count_program,
    count_step,
    exclusive,
    record_step,
    set_origin,
)
from treeshard._core.paths import PyTree
from treeshard._core.processes import participating_processes
from treeshard._core.reports import report
from treeshard._core.spec_trees import SpecTree
from treeshard._planning.plan import Plan
from treeshard._planning.plan_in_force import PlanInForce, row_axes
from treeshard.errors import ArgumentError, TreeShardError
from treeshard.training._batch import BatchPlacement, structs_of
from treeshard.training._pitfalls import (
    are_distinct,
    check_are_arrays,
    check_arguments,
    check_not_deleted,
    check_separate,
    check_sharded,
    come_from_steps,
    copy_shared_buffers,
    mark_as_from_step,
    reshard_to_planned_types,
)
from treeshard.training._program import Program, StepFn, form_of

if TYPE_CHECKING:
    from treeshard._trace.roles import Roles
    from treeshard.communication._comparison import Comparison
    from treeshard.programs._compiled_step import CompiledStep


class Step:
    """A step `(state, batch) -> (state, aux)`, compiled once per structure of its arguments.

    Attributes:
        plan: The plan of the state.
        batch_specs: The specs of the batch.
        is_by_hand: Whether it runs once per device, as `shard_map_step` makes it.
    """

    def __init__(
        self,
        fn: StepFn,
        plan: Plan,
        batch: SpecTree,
        *,
        donate: bool,
        per_device: bool = False,
    ) -> None:
        update_wrapper(self, fn)
        self.plan, self.batch_specs, self.is_by_hand = plan, batch, per_device
        self._name = "shard_map_step" if per_device else "jit_step"
        self._mesh = with_devices(plan.mesh, self._name, compile_only=True)
        self._processes = participating_processes((), [self._mesh])
        self._in_force = PlanInForce(plan, row_axes(batch), per_device)
        self._fn, self._donate = fn, donate
        self._batches = BatchPlacement(batch, self._mesh, self._processes, self._name)
        self._programs: list[Program] = []
        self._is_attached = is_attached(self._mesh.devices.flat[0])

    def __call__(self, state: PyTree, batch: PyTree, *others: Any) -> tuple[PyTree, Any]:
        self._validate(others)
        leaves, treedef = tree_flatten(state)
        data, data_def = tree_flatten(batch)
        program = self._program(leaves, treedef, data, data_def)
        arrays = program.state.dynamic(leaves)
        # Inside the user's jit, arrays cannot be placed, and JAX does not donate.
        if is_tracing():
            data = program.batch.dynamic(data)
            program.trace(arrays, data)
            new, aux = program(arrays, data)
            return program.state.combine(new), aux
        arrays, data, entry = self._place(program, arrays, data, data_def)
        # Calls of other threads wait, so that all processes start programs in one order.
        with exclusive(self._processes), jax.set_mesh(self._mesh):
            new, aux = self._run(program, arrays, data)
            self._record(program, new, aux, entry)
        return program.state.combine(new), aux

    def on(self, plan: Plan, batch: SpecTree) -> "Step":
        """Returns the same step for another plan of its state, and other specs of its batch."""
        return Step(self._fn, plan, batch, donate=self._donate, per_device=self.is_by_hand)

    # -------------------------------------------------------------- a call

    def _validate(self, others: tuple[Any, ...]) -> None:
        """Raises if the step cannot be called: extra arguments, no devices, or broken processes."""
        if others:
            raise ArgumentError(
                f"{self._name}: the step takes (state, batch), and was called with"
                f" {2 + len(others)} arguments. Put a key, or what else it needs, in the batch:"
                " `step(state, (batch, key))`; or in the state, which returns a new key:"
                ' `{"params": params, "key": key}`.'
            )
        if not self._is_attached:
            with_devices(self._mesh, self._name)  # raises
        check_not_broken(self._name, self._processes)

    def _place(
        self, program: Program, arrays: list[Any], data: list[Any], data_def: Any
    ) -> tuple[list[Any], list[Any], str]:
        """The arrays of the state and of the batch as the program takes them, and the text that the
        processes compare at their next exchange."""
        data, entry = self._batches.place(data, data_def)
        data = program.batch.dynamic(data)
        # Checking 1000 arrays takes a tenth of a call on one device. On one device, JAX itself
        # rejects arrays that are deleted or share memory, so only repeated objects are copied.
        if program.is_traced and self._mesh.size == 1 and are_distinct([*arrays, *data]):
            return arrays, data, entry
        check_not_deleted(arrays, program.leaves)
        if not come_from_steps(arrays, data, self._mesh):
            arrays = reshard_to_planned_types(arrays, program.shardings)
            if self._donate:
                arrays = copy_shared_buffers(arrays, data, program.leaves, self._name)
        return arrays, data, entry

    def _run(self, program: Program, arrays: list[Any], data: list[Any]) -> tuple[list[Any], Any]:
        """Runs the program, and traces it at its first call."""
        try:
            if not program.is_traced:
                program.trace(arrays, data)
            return program(arrays, data)
        except TreeShardError:
            raise
        except TypeError:
            # The program was made for other arguments of the same structure.
            state, batch = program.state.combine(arrays), program.batch.combine(data)
            check_are_arrays(state, batch, self._name)
            program.check_entering(arrays)
            raise
        except (ValueError, RuntimeError) as error:
            # JAX rejects wrong shardings faster than a check of all arrays before each call would.
            # A program that failed while it ran has deleted its arguments.
            check_ran(self._name, self._processes, error)
            if not isinstance(error, jax.errors.JaxRuntimeError):
                check_not_deleted(arrays, program.leaves)
                check_sharded(arrays, program.leaves, program.shardings, error)
                if self._donate:
                    check_separate(arrays, data, program.leaves, error)
            raise

    def _record(self, program: Program, new: list[Any], aux: Any, entry: str) -> None:
        """Records the results of the step, for the other processes and for its next call."""
        if self._processes:
            call = count_step(self._processes)
            set_origin(new, self._processes, call, [leaf.path for leaf in program.leaves])
            set_origin(tree_leaves(aux), self._processes, f"{call}, aux,")
            record_step(self._processes, f"{self._name_program(program)}, {entry}")
        if self._donate and self._mesh.size > 1:
            mark_as_from_step(new, self._mesh)

    def _name_program(self, program: Program) -> str:
        """Names a program to other processes, which have called theirs in the same order."""
        if program.number is None:
            program.number = count_program(self._processes)
        return f"program {program.number} ({getattr(self, '__qualname__', self._name)})"

    def _program(self, leaves: list[Any], treedef: Any, data: list[Any], data_def: Any) -> Program:
        """The program for arguments of this structure, which is made at their first call."""
        for program in self._programs:
            if program.state.matches(leaves, treedef) and program.batch.matches(data, data_def):
                return program
        # Checked once per structure.
        check_tree(treedef.unflatten(leaves), self._name, "step(state, batch)", "the state")
        check_no_refs(data_def.unflatten(data), self._name, "batch")
        state, batch = treedef.unflatten(leaves), data_def.unflatten(data)
        check_are_arrays(state, batch, self._name, structs=True)
        check_arguments(state, batch, self.plan, self._name)
        program = Program(
            self._fn,
            self._in_force,
            StaticSplit(leaves, treedef, has_shape),
            StaticSplit(data, data_def, _is_data),
            self._batches,
            donate=self._donate,
        )
        self._programs.append(program)
        return program

    # -------------------------------------------------------------- before a call

    def trace(self, state: PyTree, batch: PyTree) -> jax.stages.Traced:
        """Traces the step for these arguments, without donating them.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.

        Returns:
            What `jax.jit(step).trace` returns: it has the `jaxpr`.
        """
        return self._trace_step(state, batch)[1]

    def lower(self, state: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """Traces and lowers the step for these arguments, without donating them.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.
        """
        return self.trace(state, batch).lower()

    def compile(
        self,
        state: PyTree,
        batch: PyTree,
        *,
        compiler_options: dict[str, str | bool] | None = None,
    ) -> "CompiledStep":
        """Compiles the step for these arguments without running it.

        Calls with batches of these shapes and dtypes then use this program. Other batches are
        compiled at their first call, as without `compile`.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.
            compiler_options: Options of XLA, as `jax.stages.Lowered.compile` takes them.

        Returns:
            A `CompiledStep`, which reports the program's communication and memory.

        Raises:
            DoesNotFitError: If the program needs more memory than the devices have, by the
                compiler or, for absent devices, by the data sheet.
            SpecError, StateError: As when the step is called.
        """
        program, traced, data = self._trace_step(state, batch)
        step = report("programs._compiled_step").compile_step(
            traced.lower(), traced.jaxpr, self.plan, self.batch_specs, data, compiler_options
        )
        program.compiled[form_of(data)] = step.compiled
        return step

    def communication(self, state: PyTree, batch: PyTree) -> "Comparison":
        """Compares the communication of the compiled step with the plan, without running it.

        Which leaves are trained, how often each is gathered and in which dtype follows from the
        trace of the step: see `plan_of`.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.

        Returns:
            A `Comparison`, as `treeshard.compare_communication` returns it.
        """
        _, traced, _ = self._trace_step(state, batch)
        roles = self._roles_in(traced.jaxpr)
        with _context_of(self._mesh):
            compiled = traced.lower().compile()
        read = report("communication._program").read_program(compiled, self.plan.mesh)
        compare_step = report("communication._comparison").compare_step
        return compare_step(self.plan, self.batch_specs, roles, read)

    def plan_of(self, state: PyTree, batch: PyTree) -> Plan:
        """The plan of the state, with what the step does with each leaf: `print` it.

        Nothing is compiled. The role of a leaf is read from the trace of the step:

        - `trained`: the step takes its gradient, and its new value depends on the gradient;
        - `frozen`: it is used, and returned unchanged;
        - `used, updated`: used, and changed without its own gradient, as target networks are;
        - `updated only`: changed and not used, as moments and averages are;
        - `passed through`: neither used nor changed.

        A `gathered` leaf is needed in full along axes of the batch. A `split` leaf stays split
        along such axes where it is used, as experts do.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.

        Returns:
            The plan; each of its `leaves` has a `role`.

        Raises:
            SpecError, StateError: As when the step is called.

        Examples:
            >>> state = {"w": jnp.ones((8, 8)), "average": jnp.ones((8, 8))}
            >>> plan = ts.plan(state, [(".*", P("fsdp"))], ts.make_mesh("fsdp=8"), min_size=0)
            >>> @ts.jit_step(plan=plan, batch=P("fsdp"))
            ... def step(state, batch):
            ...     loss_of = lambda w: jnp.mean((batch @ w) ** 2)
            ...     loss, grad = jax.value_and_grad(loss_of)(state["w"])
            ...     w = state["w"] - 0.1 * grad
            ...     return {"w": w, "average": 0.9 * state["average"] + 0.1 * w}, loss
            >>> roles = step.plan_of(plan.structs, np.ones((16, 8), "float32"))
            >>> {leaf.path: leaf.role for leaf in roles.leaves}
            {'average': 'updated only', 'w': 'trained, gathered'}
        """
        return report("_trace.roles").with_roles(self.plan, self.roles(state, batch))

    def roles(self, state: PyTree, batch: PyTree) -> "Roles":
        """Returns what the step does with each leaf, as records by path: see `plan_of`.

        Args:
            state: The state, or `plan.structs`.
            batch: A batch, or `jax.ShapeDtypeStruct`s of one.

        Returns:
            A `Role` for each leaf: its name, where it is gathered, and how often.

        Raises:
            SpecError, StateError: As when the step is called.
        """
        _, traced, _ = self._trace_step(state, batch)
        return self._roles_in(traced.jaxpr)

    def _roles_in(self, jaxpr: ClosedJaxpr) -> "Roles":
        return report("_trace.roles").roles_of(jaxpr.jaxpr, self.plan, self._batch_axes())

    def _batch_axes(self) -> tuple[str, ...]:
        return report("communication._forecast").batch_axes(self.plan, self.batch_specs)

    def _trace_step(
        self, state: PyTree, batch: PyTree
    ) -> tuple[Program, jax.stages.Traced, list[Any]]:
        """The step, traced for arguments of this form, and structs of the batch's arrays."""
        leaves, treedef = tree_flatten(structs_of(state))
        data, data_def = tree_flatten(structs_of(batch))
        for i, target in self._batches.targets(data, data_def).items():
            data[i] = data[i].update(sharding=target)
        program = self._program(leaves, treedef, data, data_def)
        data = program.batch.dynamic(data)
        # On Explicit axes the sharding of an argument is part of the type that is traced.
        arrays = [
            x.update(sharding=sharding)
            for x, sharding in zip(program.state.dynamic(leaves), program.shardings, strict=True)
        ]
        with _context_of(self._mesh):
            return program, program.trace(arrays, data), data


def _is_data(x: Any) -> bool:
    # `jit` takes numbers as arguments. As constants, each value would be a program of its own.
    return has_shape(x) or isinstance(x, bool | int | float | complex)


def _context_of(mesh: Mesh) -> AbstractContextManager[Any]:
    # `jit` compiles once per mesh context, so every call runs in the same one. Inside another
    # jit the context cannot be set, and does not change either.
    return nullcontext() if is_tracing() else jax.set_mesh(mesh)
