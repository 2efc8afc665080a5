"""An array at two paths becomes two arrays, with a warning that names both paths."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.interchange import save_safetensors


def tied(x: Any) -> dict[str, Any]:
    """What repeats besides a large array is not worth a warning."""
    one, function = np.float32(1), len
    rest = {"scale": one, "scale2": one, "f": function, "f2": function, "none": [None, None]}
    return {"embed": {"w": x}, "head": {"w": x}} | rest


HOST = np.ones((8, 4), np.float32)
WAYS = {
    "shard": lambda mesh, path: ts.shard(tied(HOST), P(), mesh),
    "reshard": lambda mesh, path: ts.reshard(
        tied(ts.shard(HOST, P(), mesh)),
        {**dict.fromkeys(tied(HOST)), "embed": P("fsdp"), "head": P("fsdp")},
        mesh,
    ),
    "gather": lambda mesh, path: ts.gather(tied(ts.shard(HOST, P("fsdp"), mesh))),
    "iter_gather": lambda mesh, path: list(ts.iter_gather(tied(HOST))),
    "save": lambda mesh, path: save(path, tied(ts.shard(HOST, P("fsdp"), mesh))),
    "save_safetensors": lambda mesh, path: save_safetensors(path, {**tied(HOST), "none": {}}),
}


@pytest.mark.parametrize("where", WAYS)
def test_both_paths_are_named(mesh: Mesh, where: str, tmp_path: Any) -> None:
    with pytest.warns(ts.ShardingWarning) as told:
        WAYS[where](mesh, tmp_path / "x")
    (one,) = told
    assert str(one.message) == (
        f"{where}: head/w: it is the same array as embed/w, and becomes an array of its own. To"
        " keep them one, leave head/w out of the tree, or use `equinox.nn.Shared`."
    )


def test_restore_names_both_paths(mesh: Mesh, tmp_path: Any) -> None:
    save(tmp_path / "x", {"a": HOST, "b": HOST.copy(), "c": HOST.copy()})
    x = ts.shard(HOST, P("fsdp"), mesh)
    with pytest.warns(ts.ShardingWarning) as told:
        restore(tmp_path / "x", {"a": x, "b": x, "c": x})
    assert str(told[0].message).splitlines() == [
        "restore: 2 arrays are no longer shared:",
        *(
            f"  {path}: it is the same array as a, and becomes an array of its own. To keep them"
            f" one, leave {path} out of the tree, or use `equinox.nn.Shared`."
            for path in "bc"
        ),
    ]
    struct = jax.ShapeDtypeStruct(HOST.shape, HOST.dtype)
    restore(tmp_path / "x", {"a": struct, "b": struct, "c": struct})  # equal, but not one array


def test_what_stays_one_array_is_no_warning(mesh: Mesh) -> None:
    x = ts.shard(HOST, P("fsdp"), mesh)
    placed = ts.shard({"a": x, "b": x}, P("fsdp"), mesh)
    assert placed["a"] is placed["b"]
    passed = ts.shard({"a": x, "b": x, "c": HOST}, {"a": None, "b": None, "c": P()}, mesh)
    assert passed["a"] is passed["b"]


def test_the_path_of_a_subtree_is_named(mesh: Mesh) -> None:
    shard_fns, _ = ts.make_shard_and_gather_fns({"model": P("fsdp")}, mesh)
    with pytest.warns(ts.ShardingWarning, match="model/b: it is the same array as model/a"):
        shard_fns["model"]({"a": HOST, "b": HOST})
