"""Finds out what a step does with each leaf of its state, from its trace.

Paths and shapes do not show it: an average of the weights has the paths and shapes of the weights,
and a frozen base model has the paths and shapes of a trained one.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from treeshard._core.jax_private import drop_unused
from treeshard._planning.matching import PlannedLeaf
from treeshard._planning.plan import Plan
from treeshard._trace.uses import Gather, Place, Walk
from treeshard._trace.values import OF_ARRAYS, OF_SCALARS, Value, dims_of, leaf_value

# What a step does with a leaf: whether it uses, differentiates and changes the leaf.
TRAINED = "trained"
FROZEN = "frozen"
UPDATED = "used, updated"
ONLY_UPDATED = "updated only"
PASSED = "passed through"
# How a step scatters a gradient.
CONSTRAINT, BY_HAND, BY_TYPES = "constraint", "by hand", "by types"


class Role(NamedTuple):
    """What a step does with one leaf.

    Attributes:
        name: `"trained"` (used, and its gradient is taken), `"frozen"` (used, and returned
            unchanged), `"used, updated"` (used, and changed without a gradient, as target networks
            are), `"updated only"` (as moments and averages are) or `"passed through"`.
        gathers: The gathers of the full leaf that the step needs.
        split: The axes of the batch over which it stays split in its uses.
        sources: The paths of the leaves that its new value is computed from, element by element.
        uses: How many ops of the forward pass use it; 0 if unknown.
        updates: How often a step updates it: once per trip of a loop over steps. The trips of a
            `while` are unknown, so it counts as one update.
        is_updated_in_loop: Whether such a loop updates it.
        is_multiplied: Whether the update multiplies it by others, as matrix optimizers do.
        is_broadcast: Whether the update broadcasts it, as Adafactor does with its means of rows and
            columns.
        is_combined: Whether the forward pass computes with it before the batch, as with the factors
            of a product that it adds to a weight.
        scattered: How the step says that each device gets its shard of the gradient: by a
            `"constraint"` to the leaf's specs, as `training.value_and_grad` does, `"by hand"`, or
            `"by types"`, where gradients wait for their sum; empty if it does not.
    """

    name: str
    gathers: tuple[Gather, ...] = ()
    split: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    uses: int = 1
    updates: int = 1
    is_updated_in_loop: bool = False
    is_multiplied: bool = False
    is_broadcast: bool = False
    is_combined: bool = False
    scattered: str = ""

    @property
    def is_used(self) -> bool:
        return self.name in (TRAINED, FROZEN, UPDATED)

    def __str__(self) -> str:
        how = ["gathered"] if self.gathers else []
        if self.split:
            how.append("split")
        return f"{self.name}, {' and '.join(how)}" if how else self.name


Roles = dict[str, Role]


def roles_of(jaxpr: Any, plan: Plan, batch_axes: Collection[str]) -> Roles:
    """The role of each leaf of a plan, by its path.

    Args:
        jaxpr: The trace of a step: its first arguments, and its first results, are the leaves.
        plan: The plan of the state.
        batch_axes: The mesh axes that split the batch.
    """
    leaves = plan.leaves
    # Unused gradients, such as those that an optimizer masks, are never computed.
    program = drop_unused(jaxpr)
    uses = run_walk(program, leaves, batch_axes)
    # A leaf that is prepared for the loss is used. An old statistic, whose new value comes from
    # gradients, is not.
    uses.used |= {x for x in uses.prepared if not _has_gradient(x, uses, set())}
    finals = program.outvars[: len(leaves)]
    roles: Roles = {}
    for number, (leaf, before) in enumerate(zip(leaves, program.invars, strict=False)):
        after = finals[number]
        # If a result is an argument or a constant, no equation that a walk sees defines it.
        is_constant = isinstance(after, Literal) or after in program.invars
        is_changed = after is not before if is_constant else number in uses.changed
        name = _name(number, leaf, uses, is_changed=is_changed)
        is_used = number in uses.used
        gathers = uses.gathers.items() if is_used else ()
        of_leaf = tuple(gather for (owner, _), gather in gathers if owner == number)
        # The new value may come from moments and master copies, not from weights that are used.
        sources = uses.sources[number] - {number} - uses.used
        roles[leaf.path] = Role(
            name,
            of_leaf,
            frozenset(uses.split[number]),
            frozenset(leaves[source].path for source in sources),
            len(uses.ops[number]),
            uses.updates.get(number, 1),
            number in uses.updates,
            number in uses.multiplied,
            number in uses.broadcast and not is_used,
            number in uses.combined,
            _find_scatter(leaf, uses),
        )
    return roles


def _find_scatter(leaf: PlannedLeaf, uses: Walk) -> str:
    """How the step scatters the gradient of a leaf; empty if it does not."""
    if uses.has_waiting:
        return BY_TYPES
    if (leaf.shape, dims_of(leaf.given, len(leaf.shape))) in uses.constrained:
        return CONSTRAINT
    # By hand, only the number of scattered elements is known: the leaf's, or one layer's in a
    # scan.
    layers = leaf.shape[0] if leaf.shape else 1
    of_one_layer = leaf.size // max(layers, 1)
    return "" if uses.scattered.isdisjoint({leaf.size, of_one_layer}) else BY_HAND


def with_roles(plan: Plan, roles: Roles) -> Plan:
    """The plan, with the role of each leaf."""
    leaves = tuple(leaf._replace(role=str(roles[leaf.path])) for leaf in plan.leaves)
    return replace(plan, leaves=leaves)


def run_walk(program: Any, leaves: Sequence[PlannedLeaf], along: Collection[str]) -> Walk:
    """A walk over a program whose first arguments, and first results, are leaves of a state."""
    scalars = [i for i, leaf in enumerate(leaves) if math.prod(leaf.shape) == 1]
    state = [leaf_value(i, leaf.given, leaf.shape) for i, leaf in enumerate(leaves)]
    others = [Value(is_of_batch=True)] * (len(program.invars) - len(leaves))
    finals: dict[Any, tuple[int, ...]] = {}
    for number, variable in enumerate(program.outvars[: len(leaves)]):
        if not isinstance(variable, Literal):
            finals[variable] = (*finals.get(variable, ()), number)
    walk = Walk(along, scalars)
    walk.run(program, [*state, *others], finals, Place())
    return walk


def _name(number: int, leaf: PlannedLeaf, uses: Walk, *, is_changed: bool) -> str:
    if number not in uses.used:
        return ONLY_UPDATED if is_changed else PASSED
    is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
    if is_float and _has_gradient(number, uses, set()):
        return TRAINED
    return UPDATED if is_changed else FROZEN


def _has_gradient(number: int, uses: Walk, seen: set[int]) -> bool:
    """Whether the new value of a leaf depends on a gradient.

    A gradient does not count if it reaches the leaf only through the new value of a leaf that is
    used, as in an average of the weights.
    """
    seen.add(number)
    of_leaf = uses.gradients[number]
    if not of_leaf.isdisjoint({OF_ARRAYS, OF_SCALARS}):
        return True
    others = [other for other in of_leaf if other not in seen and other not in uses.used]
    return any(_has_gradient(other, uses, seen) for other in others)
