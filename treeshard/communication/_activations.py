"""Warns of steps that move activations in place of weights.

Without `unshard`, a compiler may keep weights split, and move what is computed with them.
"""

from typing import Any

from treeshard._core.spec_trees import SpecTree
from treeshard._core.text import fold_paths, human_bytes
from treeshard._planning.plan import Plan
from treeshard._trace.roles import Roles
from treeshard.communication._comparison import Comparison, compare_step
from treeshard.communication._differences import Unplanned
from treeshard.communication._forecast import PlannedTransfer
from treeshard.errors import TreeShardError, warn

_WORTH_A_WARNING = 2**20  # bytes


def warn_of_activations(
    compiled: Any, plan: Plan, batch: SpecTree, roles: Roles, where: str
) -> None:
    """Warns if a compiled step moves activations in place of weights, and more bytes of them.

    Weights that the plan shards over the axes of the batch are then never gathered. Less than a
    MiB is not worth a warning.
    """
    try:
        compared = compare_step(plan, compiled, batch, roles)
    except TreeShardError:  # a program that cannot be read
        return
    kept = _not_gathered(compared)
    activations = [x for each in _unplanned(compared, "activation") for x in each.collectives]
    size = sum(x.total_bytes or 0 for x in activations)
    weights = [x for x in kept if (x.kind, x.why) == ("all-gather", "weight")]
    least = max(_WORTH_A_WARNING, sum(transfer.total_bytes for transfer in kept))
    if not weights or size <= least:
        return
    shown = ", ".join(fold_paths([x.path for x in weights if x.path])[:5])
    warn(
        f"{where}: the compiled step moves {human_bytes(size)} of activations in each step,"
        f" because the compiler does not gather {shown} for use. To gather these weights"
        f" ({human_bytes(sum(x.total_bytes for x in weights))}), and to scatter their gradients"
        " as much, begin the layers that use them with"
        " `weights = treeshard.unshard(weights)`."
    )


def _not_gathered(compared: Comparison) -> list[PlannedTransfer]:
    """The planned transfers of leaves that a program neither gathers as planned nor otherwise."""
    paths = {path for each in _unplanned(compared, "not-moved") for path in each.paths}
    for difference in _unplanned(compared, "again"):
        if any(x.kind == "all-gather" for x in difference.collectives):
            paths -= set(difference.paths)
    return [transfer for transfer in compared.planned if transfer.path in paths]


def _unplanned(compared: Comparison, code: str) -> list[Unplanned]:
    return [difference for difference in compared.unplanned if difference.code == code]
