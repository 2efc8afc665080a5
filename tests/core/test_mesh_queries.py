"""The axes of the mesh in force, and of the mesh around code inside `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts


def test_names_of_the_mesh_in_force(mesh) -> None:
    assert not ts.names_in_current_mesh("data")
    with jax.set_mesh(mesh):
        assert ts.names_in_current_mesh("data", "fsdp")
        assert not ts.names_in_current_mesh("data", "tensor")
        assert ts.names_in_current_mesh()
        assert ts.get_mesh_axis_names() == ["data", "fsdp"]
    with pytest.raises(ts.NoMeshError):
        ts.get_mesh_axis_names()


@pytest.mark.parametrize("axes", ["data", "fsdp", ("data", "fsdp"), ("fsdp", "data"), []], ids=str)
def test_index_and_size_follow_the_layout_of_a_spec(mesh, axes) -> None:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    size = ts.get_axes_size_in_mesh(axes, mesh)

    def f(x):
        assert ts.get_mesh_axis_size(axes) == size
        return x * 0 + ts.get_submesh_device_index(axes)

    spec = P(names) if names else P()
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(f(jnp.zeros(size, jnp.int32)), np.arange(size))


@pytest.mark.parametrize("ask", [ts.get_mesh_axis_size, ts.get_submesh_device_index])
@pytest.mark.usefixtures("unchecked")
def test_axes_that_are_not_bound_are_rejected(ask, mesh) -> None:
    with pytest.raises(
        ts.UnknownAxisError, match="'data' is not bound here. No axis is.*shard_map"
    ):
        ask("data")
    partial = jax.shard_map(
        lambda x: x + ask("dat"), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}
    )
    with pytest.raises(
        ts.UnknownAxisError, match=r"bound axes are \['data'\]. Did you mean 'data'"
    ):
        jax.jit(partial).trace(jnp.zeros((), jnp.int32))
    with pytest.raises(TypeError, match="axis names are"):
        ask(3)
