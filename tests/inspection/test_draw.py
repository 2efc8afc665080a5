"""`draw`: its text, its files, and arrays of every rank."""

import html
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts

LAYER = {"w": np.ones((16, 64), np.float32), "norm": np.ones(16, np.float32)}
RULES = [("norm", None), ("embed", P(("data", "fsdp"))), (".*", P("data", "fsdp"))]
TREE = {
    "embed": np.ones((32, 16), np.float32),
    "layers": [{name: x.copy() for name, x in LAYER.items()} for _ in range(3)],
    "name": "mlp",
    "step": np.int32(0),
}
PICTURE = """\
mesh data=2, fsdp=4; 8 arrays, 1.9 KiB on the fullest of 8 devices
├── embed  float32[32,16]  P(('data', 'fsdp'),)  256 B
├── layers  1.7 KiB
│   └── {0..2}  1.7 KiB
│       ├── norm  float32[16]  P()  192 B (3 of them)
│       └── w  float32[16,64]  P('data', 'fsdp')  1.5 KiB (3 of them)
└── step  int32[]  P()  4 B
"""


@pytest.fixture
def plan(mesh: Mesh) -> ts.Plan:
    return ts.plan(TREE, RULES, mesh, min_size=0)


@pytest.fixture
def drawn(capsys: pytest.CaptureFixture[str]) -> Callable[[Any], str]:
    """What `draw` prints."""

    def draw(x: Any) -> str:
        ts.draw(x)
        return capsys.readouterr().out

    return draw


def test_a_plan_and_the_tree_that_follows_it(plan: ts.Plan, drawn: Any) -> None:
    for x in (plan, ts.shard(TREE, plan), plan.structs):
        assert drawn(x) == PICTURE


ALL = ["all of it on 0, 1, 2, 3, 4, 5, 6, 7"]
NINE = ["0:1, 0:1, 0:1] on 0, 1, 2, 3", "0:1, 1:2] on 4, 5"]


@pytest.mark.parametrize(
    ("shape", "spec", "parts"),
    [
        ((), P(), ALL),
        ((1,) * 8 + (2,), P(*(None,) * 8, "data"), NINE),
        ((0, 4), P(None, "fsdp"), ["[0:0, 0:1] on 0, 4"]),
    ],
    ids=["rank 0", "rank 9", "no elements"],
)
def test_one_array_of_any_rank(mesh: Mesh, shape: Any, spec: P, parts: Any, drawn: Any) -> None:
    out = drawn(jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec)))
    assert f"└── (the array)  float32[{','.join(map(str, shape))}]  {spec}" in out
    assert all(part in out for part in parts)


def test_arrays_on_no_mesh(mesh: Mesh, drawn: Any) -> None:
    x = jax.device_put(np.ones(4, np.float32), jax.devices()[3])
    split = ts.shard(np.ones(8, np.int8), P("fsdp"), mesh)
    out = drawn({"alone": x, "host": np.ones(2), "split": split})
    assert "3 arrays, 18 B on the fullest of 8 devices" in out
    assert "alone  float32[4]  only on device 3  16 B" in out
    assert "host  float64[2]  on no device  0 B" in out
    assert "└── all of it on 3" in drawn(x)
    off = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    out = drawn({"w": jax.device_put(np.ones(8, np.float32), off)})
    assert "w  float32[8]  P('fsdp',) in host memory  0 B" in out


def test_a_mesh_without_devices(drawn: Any, tmp_path: Path) -> None:
    mesh = AbstractMesh((64, 1024), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((4096, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    out = drawn(x)
    assert "1 array, 128 B on the fullest of 65,536 devices" in out
    assert "part" not in out
    ts.draw(x, to=tmp_path / "x.svg")


def test_many_parts_are_counted(drawn: Any, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ts.shard(np.ones((8, 8), np.float32), P("data", "fsdp"), mesh)
    for most, last in {8: "[4:8, 6:8] on 7", 5: "... and 3 more parts"}.items():
        monkeypatch.setattr("treeshard._inspection.draw._MOST_PARTS", most)
        *_, fifth, end = drawn(x).splitlines()
        assert end == f"    └── {last}"
        assert fifth == f"    ├── {'[4:8, 0:2] on 4' if most == 5 else '[4:8, 4:6] on 6'}"


def test_paths_are_not_read_as_markup(drawn: Any, tmp_path: Path) -> None:
    tree = {"[red]": {"$x_1$ <b> :smile: \\": np.ones(2)}, "plain": np.ones(2)}
    ts.draw(tree, to=tmp_path / "x.svg")
    for shown in (drawn(tree), words(tmp_path / "x.svg")):
        assert "[red]" in shown
        assert "$x_1$ <b> :smile: \\" in shown


def words(svg: Path) -> str:
    texts = ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")
    return "".join("".join(text.itertext()) for text in texts).replace("\xa0", " ")


def test_a_picture_shows_the_same_tree(plan: ts.Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    ts.draw(plan, to=path)
    page = path.read_text()
    for line in PICTURE.splitlines():  # blanks before a branch are positions in it
        assert line.rpartition("── ")[2] in words(path)
    # Each axis has a colour, in the specs and where its size is.
    styles = dict(re.findall(r"\.(\S+) \{ fill: (#\w+)", page))
    texts = re.findall(r'<text class="([^"]+)"[^>]*>([^<]*)<', html.unescape(page))
    for axis, colour in {"data": "#d95f02", "fsdp": "#1b9e77"}.items():
        coloured = {text.strip() for name, text in texts if styles.get(name) == colour}
        assert coloured == {repr(axis), f"{axis}="}
    assert {*re.findall(r"https?://[^\s\"'<>]+", page)} == {"http://www.w3.org/2000/svg"}
    ts.draw(plan, to=str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == page
    assert len(list(tmp_path.iterdir())) == 2


def test_another_kind_of_file(plan: ts.Plan, tmp_path: Path) -> None:
    with pytest.raises(ts.TreeShardError) as caught:
        ts.draw(plan, to=tmp_path / "plan.pdf")
    assert str(caught.value).startswith("draw: 'plan.pdf' does not end in .svg.")
    assert list(tmp_path.iterdir()) == []


def test_there_are_no_arrays_to_draw() -> None:
    for x in ("plan", {"call": jax.nn.relu}):
        message = f"draw: there are no arrays in this {type(x).__name__}. Pass"
        with pytest.raises(ts.LeafError, match=message):
            ts.draw(x)
    with pytest.raises(ts.SpecError, match="w: it is traced, and has no sharding yet."):
        jax.eval_shape(lambda x: ts.draw({"w": x}), np.ones(2))


def test_rich_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "rich", None)
    ts.draw(np.ones(2))
    message = r"draw\(to=...\) needs rich. Install it with `pip install 'treeshard\[show\]'`."
    with pytest.raises(ImportError, match=message):
        ts.draw(np.ones(2), to=tmp_path / "x.svg")
    assert list(tmp_path.iterdir()) == []
