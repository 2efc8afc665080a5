"""A compiled or traced program as a graph, whichever text it was read from."""

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Bits of an element, and JAX's name of the type, by HLO's name.
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
    """One array that an op takes or gives: its dtype, its elements, its bytes.

    `bytes` is `None` for a type that is not known here, and for a shape that the program
    leaves open.
    """

    dtype: str
    bytes: int | None
    rank: int


class Op(ABC):
    """One operation. Opcodes are HLO's (`all-gather`) in every program."""

    __slots__ = ("line", "name", "opcode")

    def __init__(self, name: str, opcode: str, line: int) -> None:
        self.name, self.opcode, self.line = name, opcode, line

    @property
    @abstractmethod
    def operands(self) -> Sequence[str]:
        """The names of the values it takes."""

    @property
    @abstractmethod
    def types(self) -> Sequence[Buffer]:
        """What it gives, tuples laid flat."""

    @property
    @abstractmethod
    def called(self) -> Mapping[str, Sequence[str]]:
        """The computations it calls, by role: `body`, `condition`, `branches`, `calls`."""

    @abstractmethod
    def attribute(self, name: str) -> str | None:
        """The text of one attribute, by HLO's name."""

    @property
    @abstractmethod
    def index(self) -> int | None:
        """Which element a `get-tuple-element` takes; which argument a `parameter` is."""

    @property
    @abstractmethod
    def number(self) -> int | None:
        """The value of a constant that is one whole number."""

    @property
    def trips(self) -> int | None:
        """How often a `while` runs, where its text says so."""
        return None


@dataclass(eq=False, slots=True)
class Computation:
    """Ops by name, and what comes out: one root (HLO) or several results (StableHLO).

    A region of StableHLO sees the values of the computation that it stands in.
    """

    name: str
    ops: dict[str, Op] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    inside: "Computation | None" = None


class Place(NamedTuple):
    """Where an op comes from: the name JAX gave it, and the user's line."""

    op_name: str | None
    source: str | None


class Program(ABC):
    """A whole program.

    Attributes:
        computations: By name.
        entry: The name of the one that runs.
        devices: Over how many devices it is partitioned, if the text says so.
        replicas: How many copies of it run; more than one only under `pmap`.
        partitions: Over how many devices each is split.
        axes: The mesh that the text tells of, if it does; `None` too if it has several.
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
        """What JAX calls a parameter of the entry: `state['w']`."""

    @abstractmethod
    def sharding(self, op: Op) -> str | None:
        """The text that says how a parameter of the entry is split."""


def size_of(dtype: str, shape: Sequence[int | None]) -> Buffer:
    """A buffer from HLO's name of its type and its shape, `None` for an open dim."""
    name, bits = DTYPES.get(dtype, (dtype, None))
    if bits is None or any(length is None for length in shape):
        return Buffer(name, None, len(shape))
    count = 1
    for length in shape:
        count *= length or 0
    return Buffer(name, -(-count * bits // 8), len(shape))


def one_mesh(found: Sequence[Sequence[tuple[str, str]]]) -> Mapping[str, int] | None:
    """The mesh of a program, if it tells of one; not if it has several that differ."""
    meshes = [{name: int(size) for name, size in axes} for axes in found if axes]
    return meshes[0] if meshes and all(mesh == meshes[0] for mesh in meshes) else None


def device_counts(
    sizes: Sequence[re.Match[str] | None], axes: Mapping[str, int] | None
) -> tuple[int, int, int | None]:
    """Replicas, partitions and devices, from what a program's head says of the first two."""
    replicas, partitions = (1 if size is None else int(size[1]) for size in sizes)
    if any(sizes):
        return replicas, partitions, replicas * partitions
    count = None if axes is None else math.prod(axes.values())
    return 1, count or 1, count


def first_outside(stack: Iterable[str]) -> str | None:
    """The innermost line of a call stack that is the user's own: not treeshard's, and not that
    of an installed package if there is another."""
    here = os.path.join(os.path.dirname(__file__), "")
    lines = list(stack)
    outside = [line for line in lines if not line.startswith(here)]
    own = [line for line in outside if not re.search(r"/(site|dist)-packages/|^<", line)]
    return (own or outside or lines or [None])[0]
