"""Compiled steps before they run: what memory they need, what they move, what bounds them.

`step.compile(state, batch)` returns a `CompiledStep`, for attached devices and for those of
`make_mesh(topology=...)`; its `memory()` is a `Memory`, its `cost()` a `Cost`.
"""

from treeshard.programs._compiled_step import CompiledStep
from treeshard.programs._cost import Cost
from treeshard.programs._memory import LiveBuffer, Memory

__all__ = ["CompiledStep", "Cost", "LiveBuffer", "Memory"]


def __dir__() -> list[str]:
    return __all__
