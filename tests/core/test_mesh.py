"""Making meshes from text, finding the one in force, reading names, sizes and indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import legacy, mesh_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts


def test_make_mesh_takes_text_or_sizes_and_names_as_jax_does() -> None:
    mesh = ts.make_mesh("data=2,fsdp=-1")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4}
    assert mesh.axis_types == (AxisType.Auto,) * 2
    assert set(mesh.devices.flat) == set(jax.devices())
    assert ts.make_mesh((2, 4), ("data", "fsdp")) == mesh
    assert ts.make_mesh((-1,), ("fsdp",)) == ts.make_mesh("fsdp=8")
    for wrong in [((2, 4),), ((2, 4), ("data",)), ("data=8", ("data",))]:
        with pytest.raises(ts.MeshError, match=r"give a name for each size, `make_mesh\(\(2, 4\)"):
            ts.make_mesh(*wrong)  # pyright: ignore[reportArgumentType]


def test_make_mesh_takes_numbers_of_numpy_and_the_devices_of_a_mesh() -> None:
    mesh = ts.make_mesh("data=2,fsdp=4")
    sizes = np.int64(2), np.prod((2, 2))
    assert ts.make_mesh({"data": sizes[0], "fsdp": sizes[1]}, devices=mesh.devices) == mesh
    assert ts.make_mesh((*sizes,), ("data", "fsdp"), devices=mesh.devices.tolist()) == mesh
    assert ts.make_mesh("fsdp=8", devices=mesh.devices) == ts.make_mesh("fsdp=8")
    assert all(type(size) is int for size in ts.make_mesh({"a": np.int64(8)}).shape.values())


def test_make_mesh_sets_axis_types() -> None:
    explicit = ts.make_mesh("a=2,b=4", axis_types="explicit")
    assert explicit.axis_types == (AxisType.Explicit,) * 2
    kinds = (AxisType.Auto, AxisType.Explicit)
    assert ts.make_mesh("a=2,b=4", axis_types=["auto", "explicit"]).axis_types == kinds
    assert ts.make_mesh((2, 4), ("a", "b"), kinds) == jax.make_mesh((2, 4), ("a", "b"), kinds)
    assert ts.make_mesh("a=2,b=4", axis_types=AxisType.Explicit) == explicit


@pytest.mark.parametrize(
    ("axes", "more", "message"),
    [
        ("data", {}, "cannot read 'data'"),
        ("a=2,a=4", {}, "the axis 'a' is repeated"),
        (
            "data=2,fsdp=3",
            {},
            "data=2, fsdp=3: the sizes must multiply to the number of devices, 8",
        ),
        ("data=3,fsdp=-1", {}, "data=3, fsdp=-1: the sizes must multiply to the number of devices"),
        ("a=-1,b=-1", {}, "only one may be -1"),
        ({"a": 0}, {}, "the size of 'a' must be a positive number, or -1"),
        ({"a": 8.0}, {}, "a=8.0: the size of 'a' must be a positive number, or -1"),
        ({"a": "8"}, {}, "a=8: the size of 'a' must be a positive number, or -1"),
        ("data=1,fsdp=4", {"dcn_axes": "data=2"}, "dcn_axes data=2 does not match how"),
        ("data=1,fsdp=4", {"dcn_axes": "data=3"}, "data=1, fsdp=4, dcn_axes data=3: the sizes"),
        ("fsdp=8", {"axis_types": "manual"}, "axis_types is 'manual'. Pass 'auto' or 'explicit'"),
        ("fsdp=8", {"axis_types": [AxisType.Manual]}, "axis_types is .*one for each of fsdp"),
        ("a=2,b=4", {"axis_types": ["auto"]}, "axis_types is .*one for each of a, b"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_make_mesh_rejects(axes, more, message) -> None:
    with pytest.raises(ts.MeshError, match=message):
        ts.make_mesh(axes, **more)


def test_make_mesh_rejects_unknown_axes_in_its_options() -> None:
    with pytest.raises(ts.UnknownAxisError, match="no axis 'fdsp'.*Did you mean 'fsdp'"):
        ts.make_mesh("fsdp=8", dcn_axes={"fdsp": 2})


def test_simulate_devices_rejects_a_late_call() -> None:
    with pytest.raises(ts.MeshError, match="called too late: JAX has already started with 8 CPU"):
        ts.simulate_devices(4)
    ts.simulate_devices(8)  # already the number
    with pytest.raises(ts.MeshError, match="at least 1"):
        ts.simulate_devices(0)


def shape_in_force() -> dict[str, int] | None:
    found = ts.get_incontext_mesh(raise_error=False)
    return None if found is None else dict(found.shape)


def seen_in_trace() -> dict[str, int] | None:
    seen = []
    jax.jit(lambda x: seen.append(shape_in_force()) or x).trace(jnp.zeros(()))
    return seen[0]


def test_without_a_mesh_the_error_names_the_ways_to_give_one() -> None:
    assert shape_in_force() is None
    assert seen_in_trace() is None
    ways = r"^get_incontext_mesh: no mesh is.*Pass one.*jax\.set_mesh.*NamedSharding"
    with pytest.raises(ts.NoMeshError, match=ways) as error:
        ts.get_incontext_mesh()
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("enter", [jax.set_mesh, legacy], ids=["set_mesh", "with mesh"])
def test_the_concrete_mesh_of_a_context_is_found(enter, mesh) -> None:
    with enter(mesh):
        assert ts.get_incontext_mesh() is mesh
        assert seen_in_trace() == {"data": 2, "fsdp": 4}
    assert shape_in_force() is None


def test_the_inner_context_wins(mesh, fsdp_mesh) -> None:
    with jax.set_mesh(mesh), jax.sharding.use_abstract_mesh(fsdp_mesh.abstract_mesh):
        assert ts.get_incontext_mesh() == fsdp_mesh.abstract_mesh
        assert seen_in_trace() == {"fsdp": 8}
    with legacy(mesh), jax.set_mesh(fsdp_mesh):
        assert shape_in_force() == {"fsdp": 8}
    with jax.set_mesh(fsdp_mesh), legacy(mesh):  # set_mesh wins, as in JAX
        assert shape_in_force() == {"fsdp": 8}


@pytest.mark.usefixtures("unchecked")
def test_axis_names_of_a_wrong_type_are_rejected(mesh) -> None:
    for wrong in (3, None, [1], {"data": 1}):
        with pytest.raises(TypeError, match="axis names are a string or a sequence"):
            ts.get_axes_size_in_mesh(wrong, mesh)
    with pytest.raises(ts.UnknownAxisError, match="no axis 'dat'. It has data=2, fsdp=4. Did you"):
        ts.get_axes_size_in_mesh("dat", mesh)
    with pytest.raises(ts.NoMeshError):
        ts.get_axes_size_in_mesh("data")


def test_names_and_sizes_of_the_mesh_in_force(mesh) -> None:
    assert not ts.names_in_current_mesh("data")
    with jax.set_mesh(mesh):
        assert ts.get_axes_size_in_mesh("fsdp") == 4
        assert ts.get_axes_size_in_mesh(("data", "fsdp")) == 8
        assert ts.get_axes_size_in_mesh([]) == 1
        assert ts.names_in_current_mesh("data", "fsdp")
        assert not ts.names_in_current_mesh("data", "tensor")
        assert ts.names_in_current_mesh()
        assert ts.get_mesh_axis_names() == ["data", "fsdp"]
    assert ts.get_axes_size_in_mesh(["a", "b"], mesh_of(a=64, b=1024)) == 65536
    with pytest.raises(ts.NoMeshError):
        ts.get_mesh_axis_names()


@pytest.mark.parametrize("axes", ["data", "fsdp", ("data", "fsdp"), ("fsdp", "data"), []], ids=str)
def test_index_and_size_follow_the_layout_of_a_spec(mesh, axes) -> None:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    size = ts.get_axes_size_in_mesh(axes, mesh)

    def f(x):
        assert ts.get_incontext_mesh().manual_axes == ("data", "fsdp")
        assert ts.get_mesh_axis_size(axes) == size
        return x * 0 + ts.get_submesh_device_index(axes)

    spec = P(names) if names else P()
    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    np.testing.assert_array_equal(f(jnp.zeros(size, jnp.int32)), np.arange(size))


@pytest.mark.parametrize("ask", [ts.get_mesh_axis_size, ts.get_submesh_device_index])
def test_axes_that_are_not_bound_are_rejected(ask, mesh) -> None:
    with pytest.raises(ts.UnknownAxisError, match="'data' is not bound here. No axis.*shard_map"):
        ask("data")
    partial = jax.shard_map(
        lambda x: x + ask("dat"), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}
    )
    with pytest.raises(ts.UnknownAxisError, match=r"axes are \['data'\]. Did you mean 'data'"):
        jax.jit(partial).trace(jnp.zeros((), jnp.int32))


X = np.arange(64, dtype=np.float32).reshape(8, 8)
TAKE_TEXT = {
    "names": ts.get_mesh_axis_names,
    "rules": lambda mesh: ts.match_partition_rules([("", ts.fsdp("fsdp", min_size=1))], X, mesh),
    "shard": lambda mesh: ts.shard(X, P("fsdp"), mesh).sharding,
    "a batch": lambda mesh: ts.from_process_local(X, P("data"), mesh).sharding,
    "constraint": lambda mesh: ts.with_sharding_constraint(X, P("fsdp"), mesh).sharding,
    "initialised": lambda mesh: (
        ts.init_sharded(lambda: jnp.ones(8), rules=[("", P())], mesh=mesh)[0].sharding
    ),
}


@pytest.mark.parametrize("use", TAKE_TEXT.values(), ids=TAKE_TEXT.keys())
def test_text_means_the_mesh_that_it_describes(use, mesh) -> None:
    assert use("data=2,fsdp=4") == use(mesh)
