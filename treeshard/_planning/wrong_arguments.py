"""Errors for wrong arguments instead of plans and specs, with the line to write."""

from typing import Any

from jax.sharding import AbstractMesh, Mesh

from treeshard._core.arguments import PLAIN_VALUES, describe_argument
from treeshard._core.spec_trees import SpecCarrier
from treeshard._core.specs import is_logical, is_spec
from treeshard._planning.plan import Plan
from treeshard._planning.rules import is_list_of_rules
from treeshard.errors import ArgumentError, SpecError


def check_plan(plan: Any, call: str) -> None:
    """Raises `ArgumentError` if an argument is not a plan.

    Args:
        plan: The argument.
        call: The call of the function that makes the plan: `"jit_step(fn, plan(state, ...))"`.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"{call.partition('(')[0]}: the plan is {describe_argument(plan)}. Make a plan first:"
            f" `{call}`."
        )


def check_specs(specs: Any, call: str, tree: Any = None, axis: str = "") -> None:
    """Raises `ArgumentError` if the specs are a mesh, a list of rules or text, and `SpecError` if
    the tree and a plan are swapped.

    Args:
        specs: The argument.
        call: The call of the function, with a place for the specs: `"shard(tree, {})"`.
        tree: The tree of the specs.
        axis: The text after the specs in the call, unless they are a plan: `', "fsdp"'`.
    """
    if isinstance(specs, SpecCarrier):
        return
    where = call.partition("(")[0]
    if isinstance(tree, SpecCarrier):
        raise SpecError(
            "the tree and its specs are swapped: the first argument has specs, and the second has"
            f" arrays. The tree comes first: `{call.format('plan')}`."
        )
    if is_spec(specs):
        return
    if is_list_of_rules(specs) and not all(is_logical(rule) for rule in specs):
        planned = call.format("treeshard.plan(tree, rules, mesh)")
        raise ArgumentError(f"{where}: the specs are a list of rules. Make a plan: `{planned}`.")
    if not isinstance(specs, (Mesh, AbstractMesh, *PLAIN_VALUES)):
        return
    # Text is most likely the name of an axis.
    spec = f"P({specs!r})" if isinstance(specs, str) and not axis else "specs"
    raise ArgumentError(
        f"{where}: the specs are {describe_argument(specs)}. Pass the plan,"
        f" `{call.format('plan')}`, or specs: `{call.format(spec + axis)}`."
    )
