"""The pictures are drawn by the library, and the pages show those that there are."""

import re
from pathlib import Path
from xml.etree import ElementTree

import equinox as eqx
import jax
import numpy as np
import pytest
from files import PAGES, ROOT
from helpers import compiling_quickly
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples import train_fsdp
from tools import draw_pictures

PICTURES = ROOT / "docs" / "pictures"
TINY = (
    "--layers=1 --width=64 --heads=2 --batch=16 --time=8 --text-bytes=300000 --steps=2 --warmup=1"
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pictures")
    # optax mixes counts and floats.
    with jax.numpy_dtype_promotion("standard"), compiling_quickly():
        draw_pictures.main([*TINY.split(), "--loss", f"--to={folder}"])
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def text_in(svg: str) -> str:
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    return " ".join(re.sub(r"terminal-\d+", "terminal", text).split())  # rich numbers its styles


def test_they_show_what_they_say(drawn: dict[str, str]) -> None:
    text = {name: text_in(svg) for name, svg in drawn.items()}
    assert "blocks/attn/q/weight" in text["plan.svg"]
    assert "rule 0 'norm'" in text["plan.svg"]
    assert "bytes per device" in text["bytes.svg"]
    assert "164.2 KiB on the fullest of 8 devices" in text["quick-start.svg"]
    assert "what a step moves" in text["communication.svg"]
    assert "all-gather fsdp" in text["communication.svg"]
    assert "planned compiled" in text["communication.svg"]
    assert "8 devices one device" in text["loss.svg"]
    assert "bits per byte" in text["loss.svg"]


def test_they_load_nothing_and_know_no_day(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        known = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
        hosts = {*re.findall(r"https?://[^\s\"'<>]+", svg)} - known
        allowed = ("http://www.w3.org/", "http://purl.org/", "http://creativecommons.org/")
        assert all(host.startswith(allowed) for host in hosts), (name, hosts)
        assert "<dc:date>" not in svg
        assert len(svg) < 2**17


def test_those_that_are_kept_are_those_that_are_drawn(drawn: dict[str, str]) -> None:
    assert {path.name for path in PICTURES.iterdir()} == set(drawn), "make docs"


@pytest.mark.usefixtures("quick_compiles")
def test_the_kept_pictures_show_the_demo(tmp_path: Path) -> None:
    """All but the loss, which takes a whole run; of that, all but the numbers."""
    args = train_fsdp.parse([])
    mesh = ts.make_mesh(args.mesh)
    optimizer = train_fsdp.make_optimizer(args)
    structs = eqx.filter_eval_shape(
        train_fsdp.make_init(args, optimizer), jax.random.key(args.seed)
    )
    plan = ts.plan(structs, train_fsdp.RULES, mesh)
    zeros = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
        structs.model,
    )
    model = ts.shard(zeros, plan.specs.model, mesh)
    state = eqx.tree_at(lambda state: state.model, plan.structs, model)
    step = ts.jit_step(train_fsdp.make_train_step(optimizer), plan, batch=P(mesh.axis_names))
    tokens = jax.ShapeDtypeStruct((args.batch, args.time + 1), "int32")
    with jax.numpy_dtype_promotion("standard"):
        draw_pictures.draw_sharding(state, step, tokens, mesh, tmp_path)
    assert stale(tmp_path, PICTURES) == [], "make docs"
    # The same check finds a picture of something else.
    plan_svg = tmp_path / "plan.svg"
    plan_svg.write_text(plan_svg.read_text().replace("fsdp", "fdsp"))
    assert stale(tmp_path, PICTURES) == ["plan.svg"]


def stale(drawn: Path, kept: Path) -> list[str]:
    """The pictures whose kept version says something else than the one that was drawn."""
    names = sorted(path.name for path in drawn.iterdir())
    return [
        name
        for name in names
        if text_in((drawn / name).read_text()) != text_in((kept / name).read_text())
    ]


def test_the_kept_loss_has_the_labels_that_are_drawn(drawn: dict[str, str]) -> None:
    def words(svg: str) -> list[str]:
        return re.findall("[a-z]{2,}", text_in(svg))

    stale = words((PICTURES / "loss.svg").read_text()) != words(drawn["loss.svg"])
    assert not stale, "python -m tools.draw_pictures --loss"


def test_pages_show_pictures_that_there_are() -> None:
    for page, text in PAGES.items():
        shown = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text)
        shown += re.findall(r"^\[[^\]]+\]: https://raw\S*/main/(\S+)$", text, re.MULTILINE)
        shown += re.findall(r'<img[^>]* src="([^"]+)"', text)
        assert [name for name in shown if not ((ROOT / page).parent / name).is_file()] == [], page


def test_every_picture_is_shown() -> None:
    text = "".join(PAGES.values())
    assert [path.name for path in PICTURES.iterdir() if f"pictures/{path.name}" not in text] == []
