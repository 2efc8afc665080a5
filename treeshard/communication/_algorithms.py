"""Reads how the TPU compiler runs a collective: over how many links of each chip at once."""

import re

from treeshard.communication._hlo import Op

# In the `backend_config` of an all-reduce, or of the fusion that has it and a slice:
# {"emitter":"RotatedPincerEmitter","strategy":"StrategyND",
#  "debug":"\nStrategyND{colors:2 phases:2 cores:{16 16},{16 16} nophase0:0 ...}"}
_STRATEGY = re.compile(r"\\n(\w+)\{colors:(\d+) ")
# and of an all-gather: {"emitter":"2DAllGatherOnMajorDim","debug":"\ngroup_size = 256 ..."}
_GATHER = re.compile(r'"emitter":"(\d)DAllGather')


def links_used(op: Op | None) -> int | None:
    """The links of a chip that an op uses at once; `None` if its text does not say it.

    A color is a part of the data with a ring of its own. Each part is halved, for both directions
    of a ring, except by strategies whose name says that they run in one direction.
    """
    if op is None:
        return None
    config = op.attribute("backend_config")
    gather, strategy = _GATHER.search(config), _STRATEGY.search(config)
    if gather is not None:
        return 2 * int(gather[1])
    if strategy is None:
        return None
    name, colors = strategy.groups()
    return int(colors) * (1 if name.startswith("UniDirection") else 2)
