"""What several test files use: small arrays and meshes, comparisons to the bit, files on disk."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import treeshard as ts
from tests.deprecations import tolerated

# Before JAX 0.10.2, XLA's partitioner fails on the CPU for programs that use other memories.
OFFLOADS = pytest.mark.xfail(
    jax.__version_info__ < (0, 10, 2),
    raises=(jax.errors.JaxRuntimeError, AssertionError),
    strict=True,
    reason="needs JAX 0.10.2",
)
# Compiler options of functions that run a few times only: most of the time of a test is XLA's.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def struct(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def arange(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An array of the numbers 0, 1, ..."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def mesh_of(**sizes: int) -> AbstractMesh:
    """A mesh of Auto axes, without devices."""
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


@contextmanager
def legacy(mesh: Mesh) -> Iterator[None]:
    """`with mesh:`, which JAX has deprecated."""
    with tolerated("with mesh"):
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def on(
    mesh: Mesh, f: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable[..., Any]:
    """`f`, compiled for every device of a mesh."""
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return jax.jit(mapped, compiler_options=QUICK)


def sent(program: str) -> list[tuple[str, str]]:
    """The collectives of a compiled program, sorted: (kind, type)."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program)
    return sorted(
        (kind, shape) for types, kind in found for shape in re.findall(r"\w+\[[\d,]*\]", types)
    )


@contextmanager
def compiling_quickly(quickly: bool = True) -> Iterator[None]:
    """Compiles without LLVM's optimizations, to programs of the same HLO; or with them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quickly)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


# ------------------------------------------------------------------ comparisons


def bits(x: Any) -> bytes:
    """The bits of an array; of typed keys, those of their key data."""
    is_key = isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def assert_same(tree: Any, expected: Any, *, kinds: bool = False) -> None:
    """Asserts equal structure, and leaves of equal types and bits.

    Args:
        tree: The tree.
        expected: What it should be.
        kinds: Whether numpy arrays differ from arrays on devices.
    """
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for path, (x, y) in zip(ts.leaf_paths(expected), pairs, strict=True):
        if hasattr(y, "dtype"):
            assert not kinds or isinstance(x, jax.Array) == isinstance(y, jax.Array), path
            assert (x.shape, x.dtype) == (y.shape, y.dtype), path
            assert bits(x) == bits(y), path
        elif isinstance(y, float | complex):
            assert (type(x), repr(x)) == (type(y), repr(y)), path
        else:
            assert x is y or (type(x) is type(y) and x == y), path


def assert_close(tree: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Compares each leaf alone, so that a wrong factor in one cannot hide behind the others."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True)
    for path, (x, y) in zip(ts.leaf_paths(expected), pairs, strict=True):
        assert np.shape(x) == np.shape(y), path
        error, size = np.abs(np.asarray(x) - np.asarray(y)).max(), np.abs(np.asarray(y)).max()
        assert error <= tolerance * size, f"{path}: {error} of {size}"


# ------------------------------------------------------------------ files


def files_in(directory: Path) -> list[str]:
    """The sorted names of the entries of a directory."""
    return sorted(x.name for x in directory.iterdir())


def flip_in(checkpoint: Path, data: bytes) -> None:
    """Flips a bit in the middle of an array's bytes, in every file that has them."""
    flipped = 0
    for path in checkpoint.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(data)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(data) // 2)
                file.write(bytes([data[len(data) // 2] ^ 4]))
            flipped += 1
    assert flipped


# ------------------------------------------------------------------ processes


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Fails if a condition does not come true in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie, which nobody may come to bury."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
