"""What pages tell to type, and what runs on no laptop: clusters, slices, commands."""

import re
from types import SimpleNamespace

import pytest
from files import PAGES

import treeshard as ts
from treeshard._core.mesh import parse_axes

_SLICES = re.compile(
    r'make_mesh\("([\w=,]+)",\s+dcn_axes="([\w=,]+)"\)`\s+makes\s+`([^`]+)`\s+of\s+(\d+)\s+devices\s+'
    r"in\s+(\d+)\s+slices"
)
SENTENCES = [match.groups() for text in PAGES.values() for match in _SLICES.finditer(text)]


@pytest.mark.parametrize(("axes", "slow", "made", "devices", "slices"), SENTENCES)
def test_a_mesh_of_slices_is_the_one_that_the_page_says(
    axes: str, slow: str, made: str, devices: str, slices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jax.experimental import mesh_utils

    class AskedError(Exception):
        pass

    def create(shape, dcn_shape, devices, *, process_is_granule):
        raise AskedError([a * b for a, b in zip(shape, dcn_shape, strict=True)])

    monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", create)
    count, of_slices = int(devices), int(slices)
    fakes = [SimpleNamespace(slice_index=i * of_slices // count) for i in range(count)]
    with pytest.raises(AskedError) as asked:
        ts.make_mesh(axes, dcn_axes=slow, devices=fakes)
    assert asked.value.args[0] == list(parse_axes(made.replace(" ", "")).values())
