"""Finds the use of a mesh axis by its name.

`P("x")` may mean FSDP, where the weight is gathered for use and the axis splits the batch, or
tensor parallelism, where the axis must not split the batch. A spec does not show the use, but by
convention the axis's name does. The names here come from `PartitionAxis` (dp, fsdp, tp, sp, ep),
EasyLM, T5X, MaxText, AXLearn, Levanter and torchtitan. Other names have no known use.
"""

import re
from collections.abc import Collection
from typing import Literal

from treeshard._core.mesh import MeshLike, axis_sizes

AxisUse = Literal["data", "fsdp", "sequence", "tensor", "expert", "stage"]

_WORDS: dict[AxisUse, str] = {
    "data": "data dp ddp batch replica replicate",
    "fsdp": "fsdp hsdp zero",
    "sequence": "sp seq sequence cp context",
    "tensor": "tp tensor mp model mdl",
    "expert": "ep expert experts",
    "stage": "pp pipe pipeline stage stages",
}
_USES: dict[str, AxisUse] = {word: use for use, words in _WORDS.items() for word in words.split()}
# Usual names of the axes of the first five fields of `PartitionAxis`, beginning with its default.
USUAL_NAMES = {
    "data_parallel_axis": ("dp", "data", "replica"),
    "fully_sharded_data_parallel_axis": ("fsdp",),
    "tensor_parallel_axis": ("tp", "tensor", "model", "mp"),
    "sequence_parallel_axis": ("sp", "sequence", "seq", "context"),
    "expert_parallel_axis": ("ep", "expert"),
}
# The uses whose axes split the rows of a batch.
_ROWS = ("data", "fsdp")


def use_of(axis: str) -> AxisUse | None:
    """The use of an axis, by the first known word of its name; `None` if no word is known.

    `dcn_data` is for data, `fsdp_transpose` for FSDP, `tensor_sequence` for tensor parallelism.
    """
    words = re.findall("[a-z]+", axis.lower())
    return next((_USES[word] for word in words if word in _USES), None)


def name_on_mesh(axis: str, mesh_axes: Collection[str]) -> str | None:
    """A mesh's own name for a default axis of `PartitionAxis`, such as `"tensor"` for `"tp"`."""
    for default, *others in USUAL_NAMES.values():
        if axis == default and axis not in mesh_axes:
            return next((name for name in others if name in mesh_axes), None)
    return None


def splits_rows(axis: str) -> bool:
    """Whether an axis splits dim 0 of a batch, by its name."""
    return use_of(axis) in _ROWS


def idle_axes(mesh: MeshLike, used: Collection[str]) -> list[str]:
    """The axes of several devices that are not used, so that devices along them repeat work."""
    return [axis for axis, size in axis_sizes(mesh).items() if size > 1 and axis not in used]
