"""What was read goes to its devices region by region."""

import time
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from treeshard._core.arrays import Region
from treeshard._disk.requests import RequestedLeaf
from treeshard._disk.to_devices import to_devices

ROWS = 2**18  # of 8 float32: a region is 8 MiB, more than goes to devices in one call


def _unaligned(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory, and an array in it that CPU devices cannot adopt: they do if 64 divides its address.

    An array that has adopted a region takes no memory beside it.
    """
    memory = np.empty(rows * 8 + 16, np.float32)
    start = 1 if memory.ctypes.data % 64 == 0 else 0
    return memory, memory[start : start + rows * 8].reshape(rows, 8)


def _are_freed(read: list[weakref.ref[np.ndarray]]) -> bool:
    """Whether nothing has the regions, once JAX's threads have let go of them."""
    end = time.monotonic() + 30
    while any(region() is not None for region in read) and time.monotonic() < end:
        # A thread may let go after the array is ready; JAX frees it in a later call.
        jax.device_put(np.zeros(())).block_until_ready()
        time.sleep(0.01)
    return all(region() is None for region in read)


@pytest.mark.parametrize("spec", [P("fsdp"), P()])
def test_a_region_is_freed_before_the_next_one_is_read(
    spec: P, fsdp_mesh: jax.sharding.Mesh
) -> None:
    shape = (8 * ROWS, 8) if spec else (ROWS, 8)
    sharding = NamedSharding(fsdp_mesh, spec)
    read: list[weakref.ref[np.ndarray]] = []

    def regions() -> Iterator[tuple[str, Region, np.ndarray]]:
        for key in ("w", "v"):
            for start in range(0, shape[0], ROWS):
                assert _are_freed(read)
                memory, values = _unaligned(ROWS)
                values[:] = start
                read.append(weakref.ref(memory))
                part = [(key, ((start, start + ROWS), (0, 8)), values)]
                del memory, values
                yield part.pop()

    target = RequestedLeaf("w", "array", shape, "float32", on_devices=True, sharding=sharding)
    arrays = to_devices({"w": target, "v": target}, regions())
    for x in arrays.values():
        assert x.sharding == sharding
        assert np.asarray(x)[::ROWS, 0].tolist() == list(range(0, shape[0], ROWS))
