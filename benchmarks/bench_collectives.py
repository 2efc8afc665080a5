"""What collectives cost, by size and axes: python -m benchmarks.bench_collectives

On 8 simulated devices (or on the accelerators that are there), 4 KiB to 64 MiB. A size is that
of the array that a device has where it has most: what an all-gather gives it, what a
reduce-scatter or an all-reduce takes from it. A call is over when the result is there, on all
devices; results up to 1 MiB are checked, and that two all-to-alls are the identity.

The algorithm bandwidth is size / time. The bus bandwidth is what each device sends in that time,
were the collective done as well as it can be: it may be compared between kinds and numbers of
devices, and with what the hardware promises. (On simulated devices all of it is memory traffic
of one machine.) Both are defined as NCCL's tests define them. What is measured is the time over
that of `np.copy` of the same bytes, once for every device.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Row, medians, options, report

SIZES = [2**12, 2**16, 2**20, 2**24, 2**26]  # bytes
CHECKED = 2**20  # larger results are not compared: it takes longer than what is timed
MESHES = {"x=8": ["x"], "x=2,y=4": ["x", "y", ("x", "y")]}
Axes = str | tuple[str, ...]


class Kind(NamedTuple):
    """A collective.

    Attributes:
        call: Takes this device's part of `x`, the axes, and the number of devices along them.
        split: Whether parts are smaller than the size, by the number of devices.
        wanted: From all parts along the axes, `(n, elements)`, what each device shall have.
        sends: What each device must send, as a part of the size.
    """

    call: Callable[[Any, Axes, int], Any]
    split: bool
    wanted: Callable[[np.ndarray], np.ndarray]
    sends: Callable[[int], float]


def copies(x: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(x.reshape(1, -1), (n, x.size))


def all_to_all(x: Any, axes: Axes, n: int) -> Any:
    return lax.all_to_all(x.reshape(n, -1), axes, 0, 0, tiled=True).reshape(-1)


def ppermute(x: Any, axes: Axes, n: int) -> Any:
    return lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


KINDS = {
    "all_gather": Kind(
        lambda x, axes, n: lax.all_gather(x, axes, tiled=True),
        split=True,
        wanted=lambda parts: copies(parts, len(parts)),
        sends=lambda n: (n - 1) / n,
    ),
    "all_reduce": Kind(
        # Not the same on all devices as far as types go, like the others.
        lambda x, axes, n: lax.pcast(lax.psum(x, axes), axes, to="varying"),
        split=False,
        wanted=lambda parts: copies(parts.sum(0), len(parts)),
        sends=lambda n: 2 * (n - 1) / n,
    ),
    "reduce_scatter": Kind(
        lambda x, axes, n: lax.psum_scatter(x, axes, tiled=True),
        split=False,
        wanted=lambda parts: parts.sum(0).reshape(len(parts), -1),
        sends=lambda n: (n - 1) / n,
    ),
    "all_to_all": Kind(
        all_to_all,
        split=False,
        wanted=lambda parts: (
            parts.reshape(len(parts), len(parts), -1).swapaxes(0, 1).reshape(parts.shape)
        ),
        sends=lambda n: (n - 1) / n,
    ),
    "ppermute": Kind(
        ppermute, split=False, wanted=lambda parts: np.roll(parts, 1, axis=0), sends=lambda n: 1.0
    ),
}


class Case(NamedTuple):
    kind: str
    mesh: Mesh
    axes: Axes
    size: int

    @property
    def devices(self) -> int:
        return ts.get_axes_size_in_mesh(self.axes, self.mesh)

    @property
    def title(self) -> str:
        size = f"{self.size // 2**10} KiB" if self.size < 2**20 else f"{self.size // 2**20} MiB"
        axes = self.axes if isinstance(self.axes, str) else " and ".join(self.axes)
        sizes = ", ".join(f"{name}={length}" for name, length in self.mesh.shape.items())
        return f"{self.kind}, {size} over {axes} of {sizes}"


def compiled(case: Case, times: int = 1) -> Callable[[Any], Any]:
    """The collective, once or several times after one another, on all devices."""
    kind = KINDS[case.kind]

    def body(x: Any) -> Any:
        for _ in range(times):
            x = kind.call(x, case.axes, case.devices)
        return x

    spec = P(case.mesh.axis_names)
    return jax.jit(jax.shard_map(body, mesh=case.mesh, in_specs=spec, out_specs=spec))


def make_input(case: Case) -> Any:
    """Small whole numbers, whose sums are exact, as they lie on all devices."""
    elements = case.size // 4 // (case.devices if KINDS[case.kind].split else 1)
    where = NamedSharding(case.mesh, P(case.mesh.axis_names))
    numbers = lambda: (jnp.arange(case.mesh.size * elements) % 251).astype(jnp.float32)  # noqa: E731
    return jax.jit(numbers, out_shardings=where)()


def check(case: Case, x: Any, out: Any) -> None:
    """Raises `AssertionError` unless every device has what it should have."""
    shape, names = tuple(case.mesh.shape.values()), case.mesh.axis_names
    over = [names.index(a) for a in ([case.axes] if isinstance(case.axes, str) else case.axes)]
    others = [i for i in range(len(names)) if i not in over]
    # The devices of a group stand together, in the order of their axes.
    order = np.arange(case.mesh.size).reshape(shape).transpose(*others, *over)
    given, found = (np.asarray(y).reshape(case.mesh.size, -1) for y in (x, out))
    for group in order.reshape(-1, case.devices):
        np.testing.assert_array_equal(found[group], KINDS[case.kind].wanted(given[group]))
    if case.kind == "all_to_all":
        np.testing.assert_array_equal(compiled(case, times=2)(x), x)


def measure(case: Case, rounds: int) -> Row:
    x, f = make_input(case), compiled(case)
    if case.size <= CHECKED:
        check(case, x, f(x))
    # What the devices of one machine would at least have to do: copy all of it once.
    everything = np.ones(case.size * case.mesh.size // 4, np.float32)
    calls = {"it": lambda: f(x).block_until_ready(), "copy": partial(np.copy, everything)}
    seconds = medians(calls, min(rounds, max(3, 2**26 // case.size)))
    algorithm = case.size / seconds["it"] / 1e9
    bus = algorithm * KINDS[case.kind].sends(case.devices)
    vs = (
        f"{seconds['it'] * 1e3:8.3f} ms, algorithm {algorithm:7.3f} GB/s, bus {bus:7.3f} GB/s,"
        f" {case.size:,} bytes on each of {case.mesh.size}"
    )
    return Row(f"{case.title}, x np.copy", seconds["it"] / seconds["copy"], vs=vs)


def cases(sizes: list[int], kinds: list[str]) -> list[Case]:
    made: list[Case] = []
    for text, every in MESHES.items():
        mesh = ts.make_mesh(text)
        made += [Case(kind, mesh, axes, size) for axes in every for kind in kinds for size in sizes]
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    args = options(parser)
    ts.simulate_devices(8)
    rows = [measure(case, args.rounds) for case in cases(args.sizes, args.kinds)]
    report("Collectives", rows)


if __name__ == "__main__":
    main()
