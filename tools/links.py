"""Tells the site where other libraries describe their names: a hook of `mkdocs build`.

Types in signatures then link by themselves, and `[text][jax.jit]` in a page is a link. Each line of
links.txt has a name and its address. The file is kept by hand, so a build needs no network.
"""

from pathlib import Path
from typing import Any

ADDRESSES = dict(
    line.split() for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
)


def on_files(files: Any, config: Any) -> Any:
    """Registers the addresses; the earliest event at which the plugin for references is there."""
    for name, address in ADDRESSES.items():
        config.plugins["autorefs"].register_url(name, address)
    return files
