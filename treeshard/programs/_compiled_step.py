"""A step that is compiled and not yet run, with reports on its program.

Only the TPU compiler rejects a program that does not fit. The GPU compiler compiles the program,
and the first call fails. This module therefore compares the memory that the GPU compiler reports
with the memory that JAX allocates.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from treeshard._core.make_mesh import is_attached, with_devices
from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import parse_bytes
from treeshard._planning.plan import Plan
from treeshard._trace.roles import Roles, roles_of, with_roles
from treeshard.communication._comparison import Comparison, compare_step
from treeshard.communication._forecast import batch_axes
from treeshard.communication._program import ReadProgram, read_program
from treeshard.errors import DoesNotFitError
from treeshard.programs._memory import Memory, memory_of

# RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries
# (64.00G) exceeds available HBM (31.25G).
_REFUSED = re.compile(r"\(([\d.]+[KMGT])\) exceeds available HBM \(([\d.]+[KMGT])\)")


@dataclass(frozen=True)
class CompiledStep:
    """The program of a step for one form of state and batch.

    Attributes:
        plan: The plan of the state, with the role of each leaf: see `Step.plan_of`.
        batch_specs: The specs of the batch.
        batch: Structs of the batch, with their shardings.
        compiled: The `jax.stages.Compiled`.
        jaxpr: The step as JAX traced it.
        roles: What the step does with each leaf of its state, by path.

    Examples:
        >>> mesh = ts.make_mesh("fsdp=8")
        >>> plan = ts.plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], mesh, min_size=0)
        >>> @ts.jit_step(plan=plan, batch=P("fsdp"))
        ... def step(state, batch):
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        ...     return {"w": state["w"] - grad}, loss
        >>> compiled = step.compile(plan.structs, np.ones((16, 8), "float32"))
        >>> [row.kind for row in compiled.communication().rows if row.count]
        ['all-gather', 'all-reduce']
        >>> compiled.memory().arguments  # 32 bytes of weights and 64 of the batch
        96
    """

    plan: Plan
    batch_specs: SpecTree
    batch: Sequence[Any]
    compiled: jax.stages.Compiled
    jaxpr: ClosedJaxpr
    roles: Roles

    @cached_property
    def text(self) -> str:
        """The text of the program, which `collectives` reads."""
        return self.compiled.as_text() or ""

    def communication(self) -> Comparison:
        """Compares what the program communicates with the plan.

        The roles of leaves come from the trace of the step: see `Step.plan_of`.

        Returns:
            A `Comparison`.
        """
        return self._compared

    def memory(self) -> Memory:
        """Returns how much memory the program needs on one device, and what is live at the peak.

        Returns:
            A `Memory`.
        """
        return memory_of(self.compiled, self._read, self.plan)

    @cached_property
    def _compared(self) -> Comparison:
        return compare_step(self.plan, self.batch_specs, self.roles, self._read)

    @cached_property
    def _read(self) -> ReadProgram:
        return read_program(self.compiled, self.plan.mesh)


def compile_step(
    lowered: jax.stages.Lowered,
    jaxpr: ClosedJaxpr,
    plan: Plan,
    batch_specs: SpecTree,
    batch: Sequence[Any],
    options: dict[str, str | bool] | None,
) -> CompiledStep:
    """Compiles a lowered step, with options of the compiler.

    Raises `DoesNotFitError` if the compiler rejects it for its memory, or, for GPUs that are not
    attached, if it needs more memory than JAX allocates on them.
    """
    device = with_devices(plan.mesh, "compile", compile_only=True).devices.flat[0]
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        sizes = _REFUSED.search(str(error))
        if sizes is None:
            raise
        need, available = (f"{size}iB" for size in sizes.groups())
        raise DoesNotFitError(
            f"The step needs at least {need} per device, and {device.device_kind} has {available}."
            " Shard more of the state, split the batch into more minibatches, or recompute"
            " activations with `jax.checkpoint`.",
            parse_bytes(need),
            parse_bytes(available),
        ) from error
    roles = roles_of(jaxpr.jaxpr, plan, batch_axes(plan, batch_specs))
    step = CompiledStep(with_roles(plan, roles), batch_specs, batch, compiled, jaxpr, roles)
    if device.platform == "gpu" and not is_attached(device):
        step.memory().assert_fits()
    return step
