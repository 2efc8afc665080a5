"""Processes write one file together, each its own bytes, and load it into other shardings."""

import json
from contextlib import chdir, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import treeshard as ts
from tests.full_disk import files_of_at_most
from tests.multiprocess.worker import Context, error_of
from treeshard import CheckpointError, DeletedLeafError, ProcessError
from treeshard._core.processes import exchange
from treeshard.interchange import load_safetensors, save_safetensors

# path -> dtype, shape, and the spec with which it is saved
LEAVES = {
    "rows": ("float32", (64, 48), P("fsdp")),
    "columns": ("float32", (64, 48), P(None, ("fsdp", "data"))),
    "both": ("bfloat16", (16, 8, 24), P("data", None, "fsdp")),
    "halves": ("int32", (8192, 16), P(None, "data")),
    "fp8": ("float8_e4m3fn", (40, 8), P("fsdp", "data")),
    "flags": ("bool", (8,), P(("fsdp", "data"))),
    "norm": ("float32", (7,), P()),
    "scalar": ("int32", (), P()),
    "nothing": ("float32", (0, 8), P(None, "data")),
}
ELSEWHERE = [
    ("rows", P(None, "tensor")), ("columns", P("data")), ("both", P(None, "data", "tensor")),
    ("halves", P("tensor")), ("fp8", P(None, "tensor")), (".*", None),
]  # fmt: skip


@cache
def on_host() -> dict[str, np.ndarray]:
    tree = {}
    for i, (path, (dtype, shape, _)) in enumerate(LEAVES.items()):
        kind = jax.numpy.dtype(dtype)
        tree[path] = np.random.default_rng(i).integers(0, 8, shape).astype(kind)
    return tree


@cache
def spread() -> dict[str, jax.Array]:
    mesh = ts.make_mesh("data=2,fsdp=4")
    return {
        path: jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, LEAVES[path][2]), lambda i, x=x: np.array(x[i])
        )
        for path, x in on_host().items()
    }


def own_bytes(tree: dict[str, jax.Array]) -> int:
    shards = [shard for x in tree.values() for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.replica_id == 0)


def transferred(which: str) -> int:
    """Bytes that this process has read or written so far, by the system's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[which])


def file_of(context: Context) -> Path:
    return context.directory / "model.safetensors"


def meet(context: Context, what: str) -> None:
    exchange(f"test {what}", b"", timeout=30, channel="of the test")


def package_bytes(context: Context, tree: dict[str, np.ndarray]) -> bytes:
    file = context.directory / f"by-the-package-{context.index}"
    save_file(tree, file)
    return file.read_bytes()


# ------------------------------------------------------------------ save


def check_each_process_writes_its_own_bytes_of_the_file_that_the_package_writes(
    context: Context,
) -> None:
    before = transferred("wchar")
    save_safetensors(file_of(context), spread())
    written = transferred("wchar") - before
    slack = 20_000  # the header, and messages between processes
    assert own_bytes(spread()) <= written <= own_bytes(spread()) + slack
    assert file_of(context).read_bytes() == package_bytes(context, on_host())


def check_leaves_that_every_process_holds_are_written_once(context: Context) -> None:
    last = ts.make_mesh("x=2", devices=jax.devices()[-2:])
    mine = {
        "spread": spread()["rows"],
        "numpy": np.full(5, context.index, np.int32),
        "last": ts.shard(np.arange(6, dtype=np.int32), P("x"), last),
    }
    save_safetensors(file_of(context), mine)
    found = load_safetensors(file_of(context))
    assert (found["numpy"] == 0).all()
    assert (found["last"] == np.arange(6)).all()


def check_several_files_have_the_bytes_of_the_package(context: Context) -> None:
    save_safetensors(file_of(context), spread(), max_file_size=20_000)
    meet(context, "saved")
    index = json.loads((context.directory / "model.safetensors.index.json").read_text())
    holders = index["weight_map"]
    assert len(set(holders.values())) >= 3
    for name in set(holders.values()):
        part = {path: x for path, x in on_host().items() if holders[path] == name}
        assert (context.directory / name).read_bytes() == package_bytes(context, part)
    assert not file_of(context).exists()


# ------------------------------------------------------------------ load


def check_each_process_reads_its_own_bytes_of_another_sharding(context: Context) -> None:
    save_safetensors(file_of(context), spread())
    mesh = ts.make_mesh("data=4,tensor=2")
    like = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in on_host().items()}
    decided = ts.plan(like, ELSEWHERE, mesh, min_size=0)
    jax.device_put(0)  # for which JAX reads a module
    before = transferred("rchar")
    found = load_safetensors(file_of(context), decided)
    bytes_read = transferred("rchar") - before
    assert found["rows"].sharding.spec == P(None, "tensor")
    for path, x in found.items():
        assert x.shape == on_host()[path].shape
        for piece in x.addressable_shards:
            assert np.asarray(piece.data).tobytes() == on_host()[path][piece.index].tobytes()
    parts = {
        (path, str(s.index)): s.data.nbytes
        for path, x in found.items()
        for s in x.addressable_shards
    }
    assert sum(parts.values()) <= bytes_read <= sum(parts.values()) + 20_000
    assert sum(parts.values()) < sum(x.nbytes for x in on_host().values())
    if context.index == 1:  # alone
        assert load_safetensors(file_of(context)).keys() == LEAVES.keys()


# ------------------------------------------------------------------ errors on every process


def check_saves_that_fail_on_one_process_or_differ_raise_on_all(context: Context) -> None:
    before = file_of(context).read_bytes()
    fails = context.index == 1

    def refused(tree: Any, error: type[Exception] = ProcessError) -> str:
        told = error_of(lambda: save_safetensors(file_of(context), tree, timeout=30), error)
        meet(context, "over")
        assert file_of(context).read_bytes() == before
        assert [x.name for x in context.directory.iterdir() if x.name.startswith(".")] == []
        meet(context, "looked")
        return told

    deleted = {"norm": spread()["norm"] + 1}
    if fails:
        deleted["norm"].delete()
    told = refused(deleted, DeletedLeafError if fails else ProcessError)
    assert "norm: float32[7]: the array was deleted" in told
    with files_of_at_most(10_000) if fails else nullcontext():
        told = refused(spread(), CheckpointError if fails else ProcessError)
    assert "File too large" in told
    told = refused({"a": np.ones(3 if fails else 2, np.int8)})
    assert "a: I8[2] on processes 0, 2, 3; I8[3] on process 1" in told


def check_a_directory_that_is_not_shared_raises(context: Context) -> None:
    own = context.directory / f"own-{context.index}"
    own.mkdir()
    if context.index == 1:  # as a save on another machine may have left it
        (own / ".model.safetensors.part").write_bytes(b"x" * 100)
    error = ProcessError if context.index == 0 else CheckpointError
    with chdir(own), pytest.raises(error) as told:
        save_safetensors("model.safetensors", spread(), timeout=4)
    assert "does not see the file that process 0 created in" in str(told.value)
    meet(context, "over")
    assert not (own / "model.safetensors").exists()


def check_loads_that_fail_on_one_process_or_differ_raise_on_all(context: Context) -> None:
    kind = CheckpointError if context.index == 1 else ProcessError
    with chdir(context.directory / "own-1" if context.index == 1 else context.directory):
        told = error_of(lambda: load_safetensors("model.safetensors", spread(), timeout=30), kind)
    assert "No such file or directory" in told
    rules = [("halves", P("data") if context.index == 1 else P("fsdp")), (".*", None)]
    options = {"rules": rules, "mesh": ts.make_mesh("data=2,fsdp=4"), "timeout": 30}
    told = error_of(lambda: load_safetensors(file_of(context), **options))
    assert "halves: int32[8192,16] as P('fsdp',) on processes 0, 2, 3" in told
    assert "; int32[8192,16] as P('data',) on process 1" in told
