"""`gather` and `iter_gather`: full arrays on the host, one copy, no copies left behind."""

import re
import sys
import weakref
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import arange, assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.errors import LeafError


@pytest.fixture
def tree(mesh: Mesh) -> dict[str, Any]:
    return {
        "w": ts.shard(arange(16, 8), P("data", "fsdp"), mesh),
        "half": ts.shard(arange(8).astype(ml_dtypes.bfloat16), P("data"), mesh),
        "whole": ts.shard(arange(3), P(), mesh),
        "single": jax.device_put(arange(5), jax.devices()[2]),
        "numpy": arange(4),
        "name": "mlp",
        "step": 7,
    }


def test_arrays_become_numpy_of_its_own_memory_and_other_leaves_pass_through(
    tree: dict[str, Any],
) -> None:
    expected = {"w": arange(16, 8), "whole": arange(3), "single": arange(5), "numpy": arange(4)}
    expected |= {"half": arange(8).astype(ml_dtypes.bfloat16), "name": "mlp", "step": 7}
    back = ts.gather(tree)
    assert_same(back, expected, kinds=True)
    for key in ("w", "whole", "single", "numpy"):
        back[key][:] = -1
    assert_same(ts.gather(tree), expected, kinds=True)


def test_no_host_copy_stays_on_the_arrays(tree: dict[str, Any]) -> None:
    ts.gather(tree)
    list(ts.iter_gather(tree))
    for key in ("w", "half", "whole", "single"):
        handles = [tree[key], *(piece.data for piece in tree[key].addressable_shards)]
        assert [x._npy_value for x in handles] == [None] * len(handles)
    np.asarray(tree["w"])  # JAX itself caches a copy, so the check can fail
    assert tree["w"]._npy_value is not None


def test_an_array_can_be_donated_in_place_afterwards(mesh: Mesh) -> None:
    x = jax.jit(lambda x: x * 2)(ts.shard(arange(16, 8), P("fsdp"), mesh))
    place = x.addressable_shards[0].data.unsafe_buffer_pointer()
    ts.gather(x)
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert y.addressable_shards[0].data.unsafe_buffer_pointer() == place


def test_gathered_keys_are_on_one_device(mesh: Mesh, compiles: list[str]) -> None:
    data = np.arange(16, dtype=np.uint32).reshape(8, 2)
    keys = ts.shard(jax.random.wrap_key_data(data), P("fsdp"), mesh)
    back = ts.gather({"key": keys})["key"]
    assert (back.dtype, back.shape, back.devices()) == (keys.dtype, (8,), {jax.local_devices()[0]})
    np.testing.assert_array_equal(jax.random.key_data(back), data)
    assert compiles == []


def test_iter_gather_yields_arrays_by_path_and_keeps_none(tree: dict[str, Any]) -> None:
    seen: list[str] = []
    last = None
    for path, x in ts.iter_gather({"a": tree, "b": [arange(2)]}):
        assert last is None or last() is None, f"{seen[-1]} is still held"
        seen.append(path)
        last = weakref.ref(x)
        del x
    assert seen == ["a/half", "a/numpy", "a/single", "a/w", "a/whole", "b/0"]


LONG = {
    "gather": ts.gather,
    "shard": lambda tree, **more: ts.shard(tree, P(), **more),
    "reshard": lambda tree, **more: ts.reshard(tree["w"], P("data"), **more),
    "shard with read": lambda tree, **more: ts.shard(
        jax.ShapeDtypeStruct((4,), "float32"), P(), read=lambda path, index: arange(4), **more
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_progress_is_shown_only_on_request_and_needs_tqdm(
    tree: dict[str, Any], mesh: Mesh, name: str, capfd: Any, monkeypatch: Any
) -> None:
    with jax.set_mesh(mesh):
        LONG[name](tree)
        assert capfd.readouterr().err == ""
        LONG[name](tree, progress=True)
        shown = capfd.readouterr().err
        assert f"{name.split()[0]}: 100%" in shown
        assert "0it" not in shown
        monkeypatch.setitem(sys.modules, "tqdm", None)
        message = f"{name.split()[0]}(progress=True) needs tqdm. Install it with `pip install"
        with pytest.raises(ImportError, match=re.escape(message)):
            LONG[name](tree, progress=True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("to", [1, -1, "one", True], ids=str)
def test_to_must_be_a_process(tree: dict[str, Any], to: Any) -> None:
    message = f"gather(to={to!r}): pass 'all', or the index of the receiving process, from 0 to 0."
    with pytest.raises(ValueError, match=re.escape(message)):
        ts.gather(tree, to=to)


@pytest.mark.parametrize("read", [ts.gather, ts.iter_gather])
def test_one_error_names_all_leaves_that_cannot_be_read(mesh: Mesh, read: Any) -> None:
    tree = {"a": arange(8), "b": [arange(8), arange(4)], "c": arange(8)}
    placed = ts.shard(tree, P("fsdp"), mesh)
    placed["a"].delete()
    jax.jit(lambda x: x, donate_argnums=0)(placed["b"][1])
    with pytest.raises(ts.DeletedLeafError) as caught:
        read(placed)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith(f"{read.__name__}: 2 leaves cannot be moved: the array was deleted, or")
    assert lines == ["  a: float32[8]", "  b/1: float32[4]"]

    with pytest.raises(LeafError, match=re.escape("w: float32[8]: a tracer has no values")):
        jax.jit(lambda x: read({"w": x}))(arange(8))
    with pytest.raises(LeafError, match=re.escape("w: int32[8]: a ShapeDtypeStruct")):
        read({"w": jax.ShapeDtypeStruct((8,), "int32")})
