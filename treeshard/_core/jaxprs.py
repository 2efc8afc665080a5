"""Walks through the programs that JAX traces: an interpreter for facts about values.

The roles of leaves, gradients whose sums wait and wider dtypes all follow values from equation to
equation. They differ only in their facts about values, and in the effect of an equation on them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Literal

T = TypeVar("T")


def interpret(
    jaxpr: Any,
    given: Sequence[T],
    literal: Callable[[Any], T],
    apply: Callable[[Any, list[T]], Sequence[T]],
) -> list[T]:
    """Runs the equations of a program on facts about its arguments.

    `apply` handles programs in an equation, such as the body of a scan: the primitive decides how
    often, and on which values, they run.

    Args:
        jaxpr: The program.
        given: The fact about each constant, then about each argument.
        literal: Returns the fact about a literal.
        apply: Returns the fact about each result of an equation, from its operands' facts.

    Returns:
        The fact about each result.
    """
    values: dict[Any, T] = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def read(variable: Any) -> T:
        # Literals are not hashable, so they cannot be looked up.
        return literal(variable) if isinstance(variable, Literal) else values[variable]

    for eqn in jaxpr.eqns:
        results = apply(eqn, [read(variable) for variable in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The programs that an equation runs: of a jit, a scan, the branches of a cond, ..."""
    # `jaxpr` of a jit or a scan, the tuple `branches` of a cond, `call_jaxpr` of a custom_vjp; with
    # or without constants
    params = jax.tree.leaves(list(eqn.params.values()))
    return [getattr(x, "jaxpr", x) for x in params if hasattr(x, "eqns")]


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and of all programs in them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)
