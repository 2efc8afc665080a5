"""Reports what memory a compiled step needs, and what it communicates, before it runs.

`step.compile(state, batch)` returns a `CompiledStep`, for attached devices and for the devices of
`make_mesh(topology=...)`. `CompiledStep.memory()` returns a `Memory`.
"""

from treeshard._core.topologies import CHIPS, Chip
from treeshard.programs._compiled_step import CompiledStep
from treeshard.programs._memory import LiveBuffer, Memory

__all__ = [
    "CHIPS",
    "Chip",
    "CompiledStep",
    "LiveBuffer",
    "Memory",
]


def __dir__() -> list[str]:
    return __all__
