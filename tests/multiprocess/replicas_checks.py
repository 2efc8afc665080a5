"""Two processes save replicas that differ between them."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.worker import Context
from treeshard.checkpoint import restore, save


def told(context: Context, tree: Any, name: str) -> str:
    with pytest.raises(ts.CheckpointError) as error:
        save(context.directory / name, tree)
    with pytest.warns(ts.ShardingWarning, match="The first replicas are saved"):
        save(context.directory / name, tree, on_divergence="warn")
    again = restore(context.directory / name, tree)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    return str(error.value)


def per_process(context: Context, spec: P, axes: str) -> jax.Array:
    host = np.arange(64, dtype=np.float32).reshape(8, 8) + context.index
    sharding = jax.sharding.NamedSharding(ts.make_mesh(axes), spec)
    return jax.make_array_from_callback(host.shape, sharding, lambda i: host[i])


def check_keys_that_differ_by_process(context: Context) -> None:
    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (16, 8)), "key": key}

    mesh = ts.make_mesh("data=2,fsdp=4")
    sharding = jax.sharding.NamedSharding(mesh, P())
    data = np.asarray(jax.random.key_data(jax.random.key(context.index)))
    key = jax.random.wrap_key_data(
        jax.make_array_from_callback(data.shape, sharding, data.__getitem__)
    )
    shardings = {"w": jax.sharding.NamedSharding(mesh, P("fsdp")), "key": sharding}
    state = jax.jit(init, out_shardings=shardings)(key)
    said = told(context, state, "keys")
    assert "the copies of 2 leaves differ:" in said
    assert "w: its replicas on different devices are not equal." in said


def check_arrays_that_differ_by_process(context: Context) -> None:
    for i, spec in enumerate([P(), P("fsdp"), P(None, "fsdp")]):
        tree = {"w": per_process(context, spec, "data=2,fsdp=4"), "same": np.ones(3)}
        said = told(context, tree, f"arrays-{i}")
        assert said.splitlines()[0] == "save: w: its replicas on different devices are not equal."
        again = restore(context.directory / f"arrays-{i}")
        assert (again["w"] == np.arange(64).reshape(8, 8)).all()
    save(context.directory / "fine", {"w": per_process(context, P("data"), "data=2,fsdp=4")})


def check_own_copies_that_differ_by_process(context: Context) -> None:
    said = told(context, {"own": np.full(3, context.index)}, "own")
    assert "save: own: its values differ between processes" in said
    assert (restore(context.directory / "own")["own"] == 0).all()
