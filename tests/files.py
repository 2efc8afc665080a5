"""The files of the repository, each read and parsed once."""

import ast
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def _texts(*paths: Path) -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


# The texts of files, by path: of the library, of the pages, and of what else tests read often.
SOURCES = _texts(*sorted((ROOT / "treeshard").rglob("*.py")))
DOCS = _texts(*sorted((ROOT / "docs").rglob("*.md")))
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README, **DOCS}

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


@cache
def parsed(source: str) -> ast.Module:
    """The syntax tree of a source, which nothing may change."""
    return ast.parse(source)
