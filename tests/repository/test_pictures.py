"""The pictures are drawn by the library, and the pages show those that there are."""

import re
from pathlib import Path
from xml.etree import ElementTree

import equinox as eqx
import jax
import numpy as np
import pytest
from files import PAGES, ROOT
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples import train_fsdp
from tools import draw_diagrams, draw_pictures

PICTURES = ROOT / "docs" / "pictures"


def text_in(svg: str) -> str:
    text = "".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ")
    return " ".join(re.sub(r"terminal-\d+", "terminal", text).split())  # rich numbers its styles


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


def test_the_kept_diagrams_are_those_that_are_drawn(tmp_path: Path) -> None:
    draw_diagrams.main([f"--to={tmp_path}"])
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (PICTURES / drawn.name).read_text(), "make docs"


def stale(drawn: Path, kept: Path) -> list[str]:
    """The pictures whose kept version says something else than the one that was drawn."""
    names = sorted(path.name for path in drawn.iterdir())
    return [
        name
        for name in names
        if text_in((drawn / name).read_text()) != text_in((kept / name).read_text())
    ]


def test_pages_show_pictures_that_there_are() -> None:
    for page, text in PAGES.items():
        shown = re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text)
        shown += re.findall(r"^\[[^\]]+\]: https://raw\S*/main/(\S+)$", text, re.MULTILINE)
        shown += re.findall(r'<img[^>]* src="([^"]+)"', text)
        assert [name for name in shown if not ((ROOT / page).parent / name).is_file()] == [], page


def test_every_picture_is_shown() -> None:
    text = "".join(PAGES.values()) + (ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in PICTURES.iterdir() if f"pictures/{path.name}" not in text] == []
