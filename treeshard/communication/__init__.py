"""Reports what a compiled program communicates, and compares that with a plan.

`Step.communication` compares a step with its plan and explains each difference.
`compare_communication` compares a step of your own loop. `collectives` lists what any program
communicates. `assert_collectives` checks a budget in a test. Programs are compiled and do not run.

Examples:
    >>> mesh = ts.make_mesh("fsdp=8")
    >>> plan = ts.plan({"w": jnp.ones((8, 8))}, [("w", P("fsdp"))], mesh, min_size=0)
    >>> @ts.training.jit_step(plan=plan, batch=P("fsdp"))
    ... def step(state, batch):
    ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    ...     return {"w": state["w"] - grad}, loss
    >>> batch = np.ones((16, 8), "float32")
    >>> program = step.lower(plan.structs, batch).compile()
    >>> [(moved.kind, moved.path, moved.bytes) for moved in collectives(program)]
    [('all-gather', 'state/w', 256), ('all-reduce', None, 256), ('all-reduce', None, 4)]
    >>> compared = step.communication(plan.structs, batch)
    >>> [(x.kind, x.path, x.bytes) for x in compared.planned]
    [('all-gather', 'w', 256), ('reduce-scatter', 'w', 256), ('all-reduce', None, 4)]
    >>> print(compared)
    kind            axes     planned  compiled
    all-gather      fsdp  1 x, 256 B  1 x, 256 B
    reduce-scatter  fsdp  1 x, 256 B  0 x, 0 B
    all-reduce      fsdp    0 x, 0 B  1 x, 256 B
    plus 1 scalar, such as the loss
    The CPU compiler all-reduces full gradients (256 B) where a reduce-scatter was planned...
"""

from treeshard.communication._collectives import Collective, assert_collectives, collectives
from treeshard.communication._comparison import Comparison, compare_communication
from treeshard.communication._forecast import PlannedTransfer

__all__ = [
    "Collective",
    "Comparison",
    "PlannedTransfer",
    "assert_collectives",
    "collectives",
    "compare_communication",
]


def __dir__() -> list[str]:
    return __all__
