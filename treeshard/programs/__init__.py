"""Compiled steps before they run: what memory they need, and what is in it at the peak.

`step.compile(state, batch)` returns a `CompiledStep`, for attached devices and for those of
`make_mesh(topology=...)`; its `memory()` is a `Memory`.
"""

from treeshard.programs._compiled_step import CompiledStep
from treeshard.programs._memory import LiveBuffer, Memory

__all__ = ["CompiledStep", "LiveBuffer", "Memory"]


def __dir__() -> list[str]:
    return __all__
