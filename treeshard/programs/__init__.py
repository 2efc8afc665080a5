"""Compiled steps before they run: what memory they need, what they move.

`step.compile(state, batch)` returns a `CompiledStep`, for attached devices and for those of
`make_mesh(topology=...)`; its `memory()` is a `Memory`.
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
