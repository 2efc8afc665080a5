"""What the site has beyond its pages: hooks of `mkdocs build`.

Types in signatures link to where other libraries describe them, and `[text][jax.jit]` in a page is
a link: each line of links.txt has a name and its address. The file is kept by hand, so a build
needs no network.
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


def on_post_page(output: str, page: Any, config: Any) -> str:
    """A page asks GitHub for no stars and no versions: it loads nothing from elsewhere."""
    return output.replace('data-md-component="source"', "")
