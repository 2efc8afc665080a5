"""Names of slices and nodes, without the compilers for them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

import treeshard as ts
from treeshard._core.topologies import parse_topology


@pytest.mark.parametrize(
    ("text", "name", "devices"),
    [
        ("v5e:16x16", "v5e:16x16", 256),
        ("v5e-256", "v5e:16x16", 256),
        ("v6e:16x16*2", "v6e:16x16*2", 512),
        ("v5p-1024", "v5p:8x8x8", 512),
        ("v4-8", "v4:2x2x1", 4),
        ("tpu7x-16", "tpu7x:2x2x2", 16),
        ("h100:2x8", "h100:2x8", 16),
        ("h200:8", "h200:1x8", 8),
    ],
)
def test_a_topology_is_read_as_people_write_it(text, name, devices) -> None:
    topology = parse_topology(text)
    assert str(topology) == name
    assert topology.devices == devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "cannot read it.*v5e:16x16"),
        ("v5f-8", "the chip 'v5f' is not known.*Did you mean 'v5p'"),
        ("v5e:64x64", r"nearest are v5e:8x16 and v5e:16x16; several.* \"v5e:16x16\*2\""),
        ("v5e-12", "nearest are v5e:2x4 and v5e:4x4"),
        ("v5p:9x9x9", "nearest are v5p:4x4x44 and v5p:8x8x12"),
        ("v5p-7", "no slice of v5p"),
        ("v5e-16x16", "write v5e:16x16, with a colon"),
        ("h100:3x7", "h100:2x8"),
        ("h100:2x8*2", "write the number of nodes"),
        ("v5e:16x16*0", "at least 1"),
    ],
)
def test_a_slice_that_does_not_exist_names_the_nearest(text, message) -> None:
    with pytest.raises(ts.MeshError, match=message):
        parse_topology(text)


def test_only_whole_rings_are_closed() -> None:
    assert parse_topology("v5e:8x16").wrap == (False, True, False)
    assert parse_topology("v5e:8x8").wrap == (False, False, False)
    assert parse_topology("v5p:4x4x4").wrap == (True, True, True)


def test_a_host_of_a_small_slice_has_all_its_chips() -> None:
    assert parse_topology("v5e-8").chips_per_host == (2, 4, 1)
    assert parse_topology("v5e-16").chips_per_host == (2, 2, 1)
    assert parse_topology("v5p-16").chips_per_host == (2, 2, 1)


def test_a_missing_compiler_names_the_extra(monkeypatch) -> None:
    with pytest.raises(ts.MeshError, match="either `devices` or `topology`"):
        ts.make_mesh("fsdp=8", devices=jax.devices(), topology="v5e-8")
    monkeypatch.setattr("treeshard._core.topologies.find_spec", lambda name: None)
    for text, extra in (("v5e-16", "tpu"), ("h200:2", "cuda")):
        with pytest.raises(ImportError, match=rf"pip install 'treeshard\[{extra}\]'"):
            ts.make_mesh("fsdp=-1", topology=text)


def _in_slices(slices: int, devices: int = 8) -> list[SimpleNamespace]:
    return [SimpleNamespace(slice_index=i * slices // devices) for i in range(devices)]


def test_axes_between_slices_are_passed_to_jax(monkeypatch) -> None:
    asked = []

    def create(shape, dcn_shape, devices, *, process_is_granule, allow_split_physical_axes):
        asked.append((list(shape), list(dcn_shape), process_is_granule))
        raise ValueError("such devices are not on this machine")

    monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", create)
    with pytest.raises(ts.MeshError, match="such devices are not on this machine. Their product"):
        ts.make_mesh("data=1,fsdp=4", dcn_axes="data=2", devices=_in_slices(2))
    assert asked == [([1, 4], [2, 1], False)]


def test_axes_share_a_dim_of_a_torus_where_jax_has_no_other_mesh(monkeypatch) -> None:
    asked = []

    def refuse(*args, **options):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 1 of size 4")

    def create(lengths, devices, *, allow_split_physical_axes):
        asked.append((lengths, allow_split_physical_axes))
        return np.array(devices).reshape(lengths)

    expected = ts.make_mesh("data=2,fsdp=4")
    monkeypatch.setattr(jax, "make_mesh", refuse)
    monkeypatch.setattr(mesh_utils, "create_device_mesh", create)
    assert ts.make_mesh("data=2,fsdp=4") == expected
    assert asked == [((2, 4), True)]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("data=2,fsdp=4", r'in 2 slices.*`make_mesh\("data=1,fsdp=4", dcn_axes="data=2"\)`'),
        ("a=3,b=5", "in 2 slices.*No size can be divided by 2: change one."),
    ],
)
def test_slices_without_axes_between_them_are_an_error(axes, message) -> None:
    devices = _in_slices(2, 8 if "data" in axes else 15)
    with pytest.raises(ts.MeshError, match=message):
        ts.make_mesh(axes, devices=devices)
