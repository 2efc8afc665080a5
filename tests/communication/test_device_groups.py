"""The compiler's notations of device groups and of shardings are read."""

import pytest

from treeshard.communication._device_groups import Groups, groups_of

AXES = {"data": 2, "fsdp": 4}


@pytest.mark.parametrize(
    ("spelling", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", Groups(4, ("fsdp",))),
        ("{{0,4},{1,5},{2,6},{3,7}}", Groups(2, ("data",))),
        ("[8,1]<=[8]", Groups(1, ())),
        ("{}", Groups(8, ("data", "fsdp"))),
        ("{{0,1},{2,3},{4,5},{6,7}}", Groups(2, None, ("fsdp",), 1)),  # half of fsdp
        ("[2,4]<=[8]", Groups(4, ("fsdp",))),
        ("[4,2]<=[2,4]T(1,0)", Groups(2, ("data",))),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", Groups(8, ("data", "fsdp"))),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", Groups(4, ("fsdp",))),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", Groups(4, ("fsdp",))),
        ("mesh['a'=8] {'a':(2)4}", Groups(4, ("fsdp",))),
        ("{{0,4},{1,6},{2,5},{3,7}}", Groups(2, None, ("data", "fsdp"))),
        # Unknown notations, and groups that do not contain every device once.
        ("{{0,1,2},{3,4,5,6,7}}", Groups(None, None)),
        ("{{0,1},{2,3}}", Groups(None, None)),
        ("{{0,0,1,2},{4,5,6,7}}", Groups(None, None)),
        ("mesh['a'=8] {'a':(2)3}", Groups(None, None)),
        ("[2,4]<=[4,2]T(0)", Groups(None, None)),
        ("mesh['a'=8] {'b'}", Groups(None, None)),
    ],
)
def test_device_groups_are_read_in_every_notation(spelling: str, groups: Groups) -> None:
    assert groups_of(spelling, 8, AXES) == groups


def test_groups_without_a_mesh_and_of_65536_devices() -> None:
    assert groups_of("[2,4]<=[8]", 8, {}) == Groups(4, None)
    assert groups_of("[2,4]<=[8]", None, AXES) == Groups(4, ("fsdp",))
    assert groups_of("{}", None, AXES) == Groups(None, None)
    axes = {"pod": 16, "fsdp": 64, "tensor": 64}
    assert groups_of("[1024,64]<=[16,64,64]T(0,2,1)", 65536, axes) == Groups(64, ("fsdp",))
