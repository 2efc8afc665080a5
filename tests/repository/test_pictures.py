"""The pictures are drawn by the library, and the pages show those that there are."""

import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
from pages import ROOT

from tools import draw_pictures

PICTURES = ROOT / "docs" / "pictures"
TINY = (
    "--layers=1 --width=64 --heads=2 --batch=16 --time=8 --text-bytes=300000 --steps=2 --warmup=1"
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pictures")
    with jax.numpy_dtype_promotion("standard"):  # optax mixes counts and floats
        draw_pictures.main([*TINY.split(), f"--to={folder}"])
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def text_in(svg: str) -> str:
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())


def test_they_show_what_they_say(drawn: dict[str, str]) -> None:
    text = {name: text_in(svg) for name, svg in drawn.items()}
    assert "blocks/attn/q/weight" in text["plan.svg"]
    assert "rule 0 'norm'" in text["plan.svg"]
    assert "bytes per device" in text["bytes.svg"]
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
    kept = {path.name for path in PICTURES.iterdir()}
    assert kept == set(drawn), "make docs"


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_shows_pictures_that_there_are(page: Path) -> None:
    text = page.read_text()
    shown = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text) + re.findall(
        r'<img[^>]* src="([^"]+)"', text
    )
    assert [name for name in shown if not (page.parent / name).is_file()] == []


def test_every_picture_is_shown() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert [path.name for path in PICTURES.iterdir() if f"pictures/{path.name}" not in text] == []
