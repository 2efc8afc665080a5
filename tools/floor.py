"""Prints the oldest versions that pyproject.toml allows, one `name==version` a line.

    python tools/floor.py > floor.txt && pip install --constraint floor.txt --editable ".[dev]"

Tools that only build and test are left as they come.
"""

import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
TOOLS = {"bench", "dev", "docs"}  # extras that nobody installs to use the library


def floor(pyproject: Path = PYPROJECT) -> list[str]:
    """The lower bounds of the dependencies, and of the extras that users install, as pins."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    wanted += [one for name in extras if name not in TOOLS for one in extras[name]]
    return sorted({pin(requirement) for requirement in wanted})


def pin(requirement: str) -> str:
    """`"jax>=0.10.2"` as `"jax==0.10.2"`."""
    found = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?\s*>=\s*([\w.]+)\s*(?:;.*)?", requirement)
    if found is None:
        raise ValueError(f"{requirement!r} in pyproject.toml is not of the form 'name>=version'.")
    return f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    print("\n".join(floor()))
