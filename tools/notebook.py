"""Writes examples/quick_start.ipynb from docs/quick-start.md: `python tools/notebook.py`.

`make test` runs the page's blocks, and compares the notebook with the page.
"""

import json
import re
from typing import Any

from pages import ROOT

PAGE = ROOT / "docs" / "quick-start.md"
NOTEBOOK = ROOT / "examples" / "quick_start.ipynb"
SITE = "https://treeshard.github.io/treeshard/"
RAW = "https://raw.githubusercontent.com/treeshard/treeshard/main/docs/"
INSTALL = '# On Colab, Kaggle or a new machine, first:\n# %pip install "{}" optax'.format(
    "treeshard @ git+https://github.com/treeshard/treeshard"
)


def notebook(page: str) -> str:
    """The notebook of a page: its prose, its code, and what the code prints."""
    cells: list[dict[str, Any]] = []
    for kind, body in _parts(page):
        if kind == "text":
            cells[-1]["outputs"] = [
                {"name": "stdout", "output_type": "stream", "text": _lines(body + "\n")}
            ]
        elif kind == "python":
            cells.append(_code(body))
        else:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(_link(body))})
    cells.insert(1, _code(INSTALL))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    head = {"metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps({"cells": cells, **head}, indent=1) + "\n"


def _parts(page: str) -> list[tuple[str, str]]:
    """The blocks of a page, as (language, text), and the prose between them."""
    words = re.split(r"^```(python|text)\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)
    kinds = ["" if i % 3 == 0 else words[i] for i in range(len(words)) if i % 3 != 2]
    texts = [words[i] for i in range(len(words)) if i % 3 != 1]
    return [(k, t.strip("\n")) for k, t in zip(kinds, texts, strict=True) if t.strip()]


def _code(text: str) -> dict[str, Any]:
    empty = {"execution_count": None, "metadata": {}, "outputs": []}
    return {"cell_type": "code", **empty, "source": _lines(text)}


def _link(text: str) -> str:
    """Prose with links to the site and its pictures, since a notebook is read elsewhere."""
    text = text.replace("](pictures/", f"]({RAW}pictures/")
    return re.sub(
        r"\]\(([\w/-]+)\.md(#[\w.-]+)?\)", lambda m: f"]({SITE}{m[1]}/{m[2] or ''})", text
    )


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
