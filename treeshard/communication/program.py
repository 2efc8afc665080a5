"""A compiled or traced program as a graph, independent of the format of its text."""

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# HLO's name of a dtype -> JAX's name, and the bits of an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "pred": ("bool", 8),
    **{f"s{bits}": (f"int{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": (f"uint{bits}", bits) for bits in (2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    "bf16": ("bfloat16", 16),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
    "f4e2m1fn": ("float4_e2m1fn", 4),
    **{
        f"f8{kind}": (f"float8_{kind}", 8)
        for kind in ("e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz")
    },
    "f8e8m0fnu": ("float8_e8m0fnu", 8),
}


class Buffer(NamedTuple):
    """One array that an op consumes or produces.

    `bytes` is `None` for a dtype that is not in `DTYPES`, and for a dynamic shape.
    """

    dtype: str
    bytes: int | None
    rank: int


class Op(ABC):
    """One operation. Opcodes are spelled as in HLO (`all-gather`)."""

    __slots__ = ("line", "name", "opcode")

    def __init__(self, name: str, opcode: str, line: int) -> None:
        self.name, self.opcode, self.line = name, opcode, line

    @property
    @abstractmethod
    def operands(self) -> Sequence[str]:
        """The names of its operands."""

    @property
    @abstractmethod
    def types(self) -> Sequence[Buffer]:
        """The arrays that it produces, with tuples flattened."""

    @property
    @abstractmethod
    def called(self) -> Mapping[str, Sequence[str]]:
        """The computations that it calls, by role: `body`, `condition`, `branches`, `calls`."""

    @abstractmethod
    def attribute(self, name: str) -> str | None:
        """The text of one attribute, by its name in HLO."""

    @property
    @abstractmethod
    def index(self) -> int | None:
        """The element that a `get-tuple-element` selects, or the number of a `parameter`."""

    @property
    @abstractmethod
    def number(self) -> int | None:
        """The value of a constant that is a single integer."""

    @property
    def trips(self) -> int | None:
        """The trip count of a `while`, if the text states it."""
        return None


@dataclass(eq=False, slots=True)
class Computation:
    """Ops by name, and the results: one root (HLO) or several values (StableHLO).

    A region of StableHLO sees the values of the computation that encloses it.
    """

    name: str
    ops: dict[str, Op] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    inside: "Computation | None" = None


class Place(NamedTuple):
    """Where an op comes from: the name that JAX gave it, and the line of the user's code."""

    op_name: str | None
    source: str | None


class Program(ABC):
    """A whole program.

    Attributes:
        computations: By name.
        entry: The name of the computation where execution starts.
        devices: The number of devices, if the text states it.
        replicas: The number of replicas; more than one only under `pmap`.
        partitions: The number of devices that each replica is partitioned over.
        axes: The mesh that the text names; `None` if it names none, or several that differ.
        tupled: Whether a loop carries one tuple (HLO) or many values (StableHLO).
    """

    computations: dict[str, Computation]
    entry: str
    devices: int | None
    replicas: int
    partitions: int
    axes: Mapping[str, int] | None
    tupled: bool

    @abstractmethod
    def place(self, op: Op) -> Place:
        """Where an op comes from."""

    @abstractmethod
    def argument(self, op: Op) -> str | None:
        """JAX's name of a parameter of the entry: `state['w']`."""

    @abstractmethod
    def sharding(self, op: Op) -> str | None:
        """The text of the sharding of a parameter of the entry."""


def size_of(dtype: str, shape: Sequence[int | None]) -> Buffer:
    """A buffer of a dtype, by its name in HLO, and a shape, with `None` for a dynamic dim."""
    name, bits = DTYPES.get(dtype, (dtype, None))
    if bits is None or any(length is None for length in shape):
        return Buffer(name, None, len(shape))
    count = 1
    for length in shape:
        count *= length or 0
    return Buffer(name, -(-count * bits // 8), len(shape))


def one_mesh(named: Sequence[Sequence[tuple[str, str]]]) -> Mapping[str, int] | None:
    """The mesh of a program; `None` if it names none, or several that differ."""
    meshes = [{name: int(size) for name, size in axes} for axes in named if axes]
    return meshes[0] if meshes and all(mesh == meshes[0] for mesh in meshes) else None


def device_counts(
    sizes: Sequence[re.Match[str] | None], axes: Mapping[str, int] | None
) -> tuple[int, int, int | None]:
    """Replicas, partitions and devices, from the counts in a program's first line."""
    replicas, partitions = (1 if size is None else int(size[1]) for size in sizes)
    if any(sizes):
        return replicas, partitions, replicas * partitions
    count = None if axes is None else math.prod(axes.values())
    return 1, count or 1, count


def first_outside(stack: Iterable[str]) -> str | None:
    """The innermost line of a call stack that is in the user's own code.

    Lines of treeshard are skipped, and so are lines of installed packages if others remain.
    """
    package = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
    lines = list(stack)
    outside = [line for line in lines if not line.startswith(package)]
    own = [line for line in outside if not re.search(r"/(site|dist)-packages/|^<", line)]
    return (own or outside or lines or [None])[0]
