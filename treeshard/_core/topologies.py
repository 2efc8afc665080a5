"""Accelerators that are not attached: which slices exist, and devices to compile for."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from glob import glob
from importlib.util import find_spec
from itertools import combinations_with_replacement
from typing import Any

import jax

from treeshard._core.jax_private import has_started_backends
from treeshard.errors import FormatError, MeshError, did_you_mean

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """The published data of one device: a chip, or half a chip if JAX shows two devices per chip.

    Attributes:
        name: The name in topologies, such as `"v5e"`.
        kind: JAX's `device_kind`.
        memory: Bytes of its memory. For TPUs, the limit in the compiler's error. On GPUs, JAX
            allocates only a part.
        memory_bandwidth: Bytes per second, to and from HBM.
        dims: The dims of the torus: 2 or 3; 0 if all devices of a node are connected.
        devices: Devices per chip.
        named_by: The count per chip in the number of a name such as `v5p-1024`.
    """

    name: str
    kind: str
    memory: int
    memory_bandwidth: float
    dims: int
    devices: int = 1
    named_by: int = 1


# Sources: the pages "System architecture" of Cloud TPU (TPU v4, v5e, v5p, v6e, TPU7x), and the data
# sheets of NVIDIA's H100 SXM and H200 SXM.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "TPU v4", int(30.75 * GIB), 1228e9, 3, 1, 2),
        Chip("v5e", "TPU v5 lite", int(15.75 * GIB), 819e9, 2),
        Chip("v5p", "TPU v5", int(95.74 * GIB), 2765e9, 3, 1, 2),
        Chip("v6e", "TPU v6 lite", int(31.25 * GIB), 1638e9, 2),
        Chip("tpu7x", "TPU7x", int(94.75 * GIB), 3690e9, 3, 2, 2),
        Chip("h100", "NVIDIA H100 80GB HBM3", 84978434048, 3352e9, 0),
        Chip("h200", "NVIDIA H200", 150754820096, 4800e9, 0),
    )
}
_ALIASES = {"v5litepod": "v5e", "trillium": "v6e", "v7x": "tpu7x", "ironwood": "tpu7x"}
_MOST_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 9216}  # of one slice
_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_GPUS_PER_NODE = (1, 2, 4, 8)


@dataclass(frozen=True)
class Topology:
    """Devices of one kind: slices with these dims in chips, or `(nodes, GPUs per node)`."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        more = f"*{self.slices}" if self.slices > 1 else ""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}{more}"

    @property
    def devices(self) -> int:
        return math.prod(self.shape) * self.slices * self.chip.devices

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Which dims of the torus are closed into rings."""
        if self.chip.dims == 2:
            closed = tuple(size == 16 for size in self.shape)
        else:
            closed = (all(size % 4 == 0 for size in self.shape),) * self.chip.dims
        return (*closed, False)[:3]

    @property
    def chips_per_host(self) -> tuple[int, ...]:
        if self.chip.dims == 2 and math.prod(self.shape) <= 8:
            return (*self.shape, 1)
        return tuple(map(min, (2, 2, 1), (*self.shape, 1)[:3]))


# ------------------------------------------------------------------ names


def parse_topology(text: str) -> Topology:
    """Reads `v5e:16x16`, `v5e-256`, `v6e:16x16*2`, `h100:2x8` or `h200:8`."""
    match = re.fullmatch(r"\s*([A-Za-z]\w*?)([:-])(\d+(?:x\d+)*)(?:\*(\d+))?\s*", text)
    if match is None:
        raise MeshError(
            f"topology {text!r}: cannot read it. Write a kind of chip and the shape of a slice,"
            ' as in "v5e:16x16", "v5p-1024", "v6e:16x16*2" for two slices, or "h100:2x8" for'
            " two nodes of eight GPUs."
        )
    name = _ALIASES.get(match[1].lower(), match[1].lower())
    if name not in CHIPS:
        raise MeshError(
            f"topology {text!r}: the chip {match[1]!r} is not known.{did_you_mean(name, CHIPS)}"
            f" Known are {', '.join(CHIPS)}."
        )
    chip, slices = CHIPS[name], int(match[4] or 1)
    sizes: tuple[int, ...] = tuple(int(size) for size in match[3].split("x"))
    number = sizes[0]
    if slices < 1 or 0 in sizes:
        raise MeshError(f"topology {text!r}: sizes must be at least 1.")
    if match[2] == "-" and len(sizes) > 1:
        raise MeshError(f"topology {text!r}: write {name}:{match[3]}, with a colon.")
    if not chip.dims:
        return _nodes(text, chip, sizes, slices)
    if len(sizes) == 1:
        per_chip = chip.named_by if match[2] == "-" else 1
        shapes = [shape for shape in _shapes(chip) if math.prod(shape) * per_chip == number]
        if not shapes:
            raise _no_such_slice(text, chip, number // per_chip)
        sizes = min(shapes, key=sum)  # the one nearest to a cube
    elif sizes not in _shapes(chip):
        raise _no_such_slice(text, chip, math.prod(sizes))
    return Topology(chip, sizes, slices)


def _nodes(text: str, chip: Chip, sizes: Sequence[int], slices: int) -> Topology:
    nodes, gpus = (1, *sizes)[-2:]
    if len(sizes) > 2 or slices > 1 or gpus not in _GPUS_PER_NODE:
        raise MeshError(
            f"topology {text!r}: write the number of nodes and of GPUs in each, 1, 2, 4 or 8:"
            f' "{chip.name}:2x8", or "{chip.name}:8" for one node.'
        )
    return Topology(chip, (nodes, gpus))


@lru_cache(maxsize=8)
def _shapes(chip: Chip) -> Sequence[tuple[int, ...]]:
    """The slices that exist, fewest chips first."""
    if chip.dims == 2:
        return _FLAT
    most = _MOST_CHIPS[chip.name]
    cubes = combinations_with_replacement(range(4, most // 16 + 1, 4), 3)
    return [*_SMALL_CUBES, *sorted((x for x in cubes if math.prod(x) <= most), key=math.prod)]


def _no_such_slice(text: str, chip: Chip, chips: int) -> MeshError:
    # Among slices of equal size, the slice nearest to a cube comes last.
    longest_first = sorted(_shapes(chip), key=sum, reverse=True)
    by_chips = {math.prod(shape): shape for shape in longest_first}
    nearest = sorted(by_chips, key=lambda count: abs(count - chips))[:2]
    first, second = (by_chips[count] for count in sorted(nearest))
    return MeshError(
        f"topology {text!r}: no slice of {chip.name} has this shape. The nearest are"
        f" {Topology(chip, first)} and {Topology(chip, second)}; several slices are written as"
        f' "{Topology(chip, second, 2)}".'
    )


# ------------------------------------------------------------------ devices


def topology_devices(text: str) -> list[Any]:
    """The devices of a topology, for compiling; they cannot hold arrays."""
    return list(_devices_of(parse_topology(text)))


@lru_cache(maxsize=32)
def _devices_of(topology: Topology) -> tuple[Any, ...]:
    from jax.experimental import topologies  # slow to import, and rarely needed

    _prepare_environment()
    chip = topology.chip
    extra = "tpu" if chip.dims else "cuda"
    if not any(find_spec(package) for package in _COMPILERS[extra]):
        raise ImportError(
            f"topology {topology}: the compiler for {chip.name} is not installed. Install it with"
            f" `pip install 'treeshard[{extra}]'`; no such chip is needed."
        )
    options = _tpu_options(topology) if chip.dims else _gpu_options(topology)
    return tuple(topologies.get_topology_desc(platform=extra, **options).devices)


def _tpu_options(topology: Topology) -> dict[str, Any]:
    options = {
        "topology_name": str(replace(topology, slices=1)),
        "chips_per_host_bounds": topology.chips_per_host,
        "wrap": topology.wrap,
    }
    if topology.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device for both cores of a chip
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    return options


def _prepare_environment() -> None:
    """Sets the environment that libtpu reads, and keeps JAX from starting absent chips."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # avoids 3 s of waiting for a metadata server
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # otherwise only one process at a time
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-4")  # these two silence warnings
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    attached = [path for name in _DEVICE_FILES for path in glob(name)]
    if (
        not attached
        and not has_started_backends()
        and not getattr(jax.config, "jax_platforms", None)
    ):
        jax.config.update("jax_platforms", "cpu")


# The package that holds a platform's compiler.
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
_DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*")


def _gpu_options(topology: Topology) -> dict[str, Any]:
    """The description of a GPU that XLA compiles for. The known GPUs are of one generation."""
    chip = topology.chip
    config = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
          fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
          block_dim_limit_z: 65535 memory_bandwidth: {int(chip.memory_bandwidth)}
          l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: {chip.memory}
          shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 }}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{chip.kind}"
    """
    return {"topology": "1x{}x{}".format(*topology.shape), "target_config": config}


def chip_of(device: Any) -> Chip | None:
    """The published data of a device's kind."""
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)


# ------------------------------------------------------------------ memory

# JAX reads one of the two, and raises if both are set; both in 0.10.2 and 0.12.0.
_FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DEFAULT_FRACTION = 0.75


def usable_memory(chip: Chip) -> int:
    """The bytes that programs can use on a device: on GPUs, the bytes that JAX allocates.

    Raises `FormatError` if the fraction in the environment is not a number.
    """
    # The allocator `platform` has no limit.
    is_limited = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform"
    if chip.dims or not is_limited:
        return chip.memory
    for name in _FRACTION:
        if text := os.environ.get(name):
            try:
                fraction = float(text)
            except ValueError:
                raise FormatError(f"{name} is {text!r}, and not a number, such as 0.9.") from None
            return int(fraction * chip.memory)
    return int(_DEFAULT_FRACTION * chip.memory)
