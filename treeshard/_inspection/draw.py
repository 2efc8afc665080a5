"""Draws how a tree is sharded: in the terminal, in a notebook, or to a file."""

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from treeshard._core.arrays import is_array
from treeshard._core.mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._core.specs import axes_of, entries
from treeshard._core.text import fold, human_bytes
from treeshard._inspection.memory import PlacedLeaf, bytes_by_device, largest_part, placed_leaves
from treeshard._planning.plan import Plan
from treeshard.errors import FormatError, LeafError, counted

# Readable on white and on black.
_PALETTE = ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
# The most parts of one array, and the most bars of a chart, to list.
_PARTS = 64
_BARS = 64
_BRANCHES = 12


def draw(x: Any, to: str | Path | None = None) -> None:
    """Draws how a plan, a tree or an array is sharded.

    Shows a tree with the shape, the spec and the bytes per device of every array, in one colour
    for each mesh axis; repeated layers are folded. For a single array of any rank, it also shows
    which device holds which part. No values are read.

    Args:
        x: A `Plan`, a live tree, `ShapeDtypeStruct`s with shardings, or one array.
        to: A file to write instead: `"plan.svg"` or `"plan.html"`. It also has bar charts of the
            bytes on each device and in each top-level branch. Without it, the tree is printed to
            the terminal, or shown in the notebook; where treescope is installed, a notebook shows
            a live tree with treescope instead.

    Raises:
        LeafError: If there are no arrays in `x`.
        SpecError: If arrays in it are traced: all are named.
        FormatError: If `to` has another file extension.
        ImportError: If rich is not installed.

    Examples:
        >>> w = np.ones((2, 8, 4), "float32")
        >>> draw(shard({"mlp": [{"w": w[0]}, {"w": w[1]}]}, P("fsdp"), make_mesh("fsdp=8")))
        mesh fsdp=8; 2 arrays, 32 B on the fullest of 8 devices
        └── mlp  32 B
            └── {0..1}  32 B
                └── w  float32[8,4]  P('fsdp',)  32 B (2 of them)

    Source:
        `jax.debug.visualize_array_sharding`, for trees and for ranks above 2.
    """
    leaves = placed_leaves(x)
    if not leaves:
        raise LeafError(
            f"draw: there are no arrays in this {type(x).__name__}. Pass a plan, a tree of arrays,"
            " or an array."
        )
    path = None if to is None else Path(to)
    if path is not None and path.suffix not in (".html", ".svg"):
        raise FormatError(
            f"draw: {path.name!r} does not end in .html or .svg. The extension determines the kind"
            " of file."
        )
    if path is None and not isinstance(x, Plan) and _in_notebook() and _by_treescope(x):
        return
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            "draw needs rich. Install it with `pip install 'treeshard[show]'`."
        ) from error
    picture = _picture(leaves, alone=is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    if path is None:
        Console().print(picture)
    else:
        _write(path, picture, leaves)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _by_treescope(x: Any) -> bool:
    """Shows a live tree with treescope; returns false if it is not installed."""
    try:
        import treescope
    except ImportError:
        return False
    treescope.display(treescope.render_array_sharding(x) if is_array(x) else x)
    return True


# ------------------------------------------------------------------ the tree


def _picture(leaves: list[PlacedLeaf], alone: bool) -> Any:
    """Returns the tree as a renderable for rich; for a single array, also its parts."""
    from rich.console import Group
    from rich.text import Text
    from rich.tree import Tree

    colours = _colours(leaves)
    root = Tree(_head(leaves, colours))
    branches: dict[str, Any] = {"": root}
    folded = fold((x.path, (x.shape, x.dtype, x.sharding), x) for x in leaves)
    totals = _branch_totals(folded)
    for path, members in folded:
        parent, _, name = path.rpartition("/")
        branch = _branch(parent, branches, totals)
        branch.add(_line(name or "(the array)", members, colours))
    parts = _parts(leaves[0]) if alone else None
    return root if parts is None else Group(root, Text(), parts)


def _branch(path: str, branches: dict[str, Any], totals: Mapping[str, int]) -> Any:
    from rich.text import Text

    if path not in branches:
        parent, _, name = path.rpartition("/")
        label = Text(name, style="bold")
        label.append(f"  {human_bytes(totals[path])}", style="dim not bold")
        branches[path] = _branch(parent, branches, totals).add(label)
    return branches[path]


def _branch_totals(folded: Iterable[tuple[str, list[PlacedLeaf]]]) -> Mapping[str, int]:
    """Bytes per device below each branch, by folded path."""
    totals: Counter[str] = Counter()
    for path, members in folded:
        keys = path.split("/")
        held = sum(map(largest_part, members))
        totals.update({"/".join(keys[:count]): held for count in range(1, len(keys))})
    return totals


def _line(name: str, members: list[PlacedLeaf], colours: Mapping[str, str]) -> Any:
    """The line of one array, or of several equal ones: dtype, shape, spec, bytes per device."""
    from rich.text import Text

    leaf = members[0]
    line = Text(f"{name}  {leaf.dtype}[")
    dims = entries(leaf.sharding) if isinstance(leaf.sharding, NamedSharding) else ()
    for dim, length in enumerate(leaf.shape):
        axes = axes_of(dims[dim]) if dim < len(dims) else ()
        line.append("," if dim else "")
        line.append(str(length), style=colours[axes[0]] if axes else "")
    line.append("]  ")
    line.append_text(_sharding_text(leaf, colours))
    times = f" ({len(members)} of them)" if len(members) > 1 else ""
    held = sum(map(largest_part, members))
    return line.append(f"  {human_bytes(held)}{times}", style="dim")


def _sharding_text(leaf: PlacedLeaf, colours: Mapping[str, str]) -> Any:
    from rich.text import Text

    if leaf.sharding is None:
        return Text("on no device", style="italic")
    if leaf.spec is not None:
        text = Text(str(leaf.spec))
        for axis, colour in colours.items():
            text.highlight_words([repr(axis)], colour)
        return text if leaf.takes_device_memory else text.append(" in host memory", "italic")
    ids = sorted(device.id for device in leaf.sharding.device_set)
    if len(ids) == 1:
        return Text(f"only on device {ids[0]}", style="italic")
    return Text(f"{type(leaf.sharding).__name__} on {len(ids)} devices", style="italic")


def _head(leaves: list[PlacedLeaf], colours: Mapping[str, str]) -> Any:
    from rich.text import Text

    head = Text()
    for mesh in _meshes(leaves):
        head.append(f"mesh {describe_mesh(mesh)}; ")
    for axis, colour in colours.items():
        head.highlight_words([f"{axis}="], colour)
    held = bytes_by_device(leaves).values()
    most = human_bytes(max(held, default=0))
    return head.append(
        f"{counted(len(leaves), 'array')}, {most} on the fullest of {counted(len(held), 'device')}"
    )


def _meshes(leaves: Iterable[PlacedLeaf]) -> list[AnyMesh]:
    shardings = (leaf.sharding for leaf in leaves)
    return list(dict.fromkeys(x.mesh for x in shardings if isinstance(x, NamedSharding)))


def _colours(leaves: Iterable[PlacedLeaf]) -> dict[str, str]:
    """A colour for each axis, in the order of the meshes; they repeat if there are many axes."""
    axes = dict.fromkeys(axis for mesh in _meshes(leaves) for axis in axis_sizes(mesh))
    return dict(zip(axes, cycle(_PALETTE)))


# ------------------------------------------------------------------ one array


def _parts(leaf: PlacedLeaf) -> Any | None:
    """A table of the devices that hold each part of an array; `None` without devices."""
    from rich.table import Table

    sharding = leaf.sharding
    if sharding is None:
        return None
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return None
    holders: dict[str, list[int]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(_slices(index, leaf.shape), []).append(device.id)
    table = Table("part", "devices")
    for part, ids in list(holders.items())[:_PARTS]:
        table.add_row(part, ", ".join(map(str, ids)))
    if len(holders) > _PARTS:
        table.add_row(f"... and {len(holders) - _PARTS:,} more parts", "")
    return table


def _slices(index: Iterable[slice], shape: tuple[int, ...]) -> str:
    ranges = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    if all(r == (0, length) for r, length in zip(ranges, shape, strict=True)):
        return "all of it"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


# ------------------------------------------------------------------ files

# A page for rich's lines, without a window frame and without fonts from the network.
SVG_PAGE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, monospace }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{width}" height="{height}"/></clipPath>
{lines}
</defs>
<rect width="100%" height="100%" fill="white"/>
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</svg>
"""


def _write(path: Path, picture: Any, leaves: list[PlacedLeaf]) -> None:
    """Writes the tree and charts of its bytes; the same tree gives the same file."""
    from rich.console import Console, Group
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME
    from rich.text import Text

    page = Group(picture, Text(), _device_chart(leaves), Text(), _branch_chart(leaves))
    width = Console(width=10_000, file=io.StringIO()).measure(page).maximum
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(page)
    if path.suffix == ".html":
        text = console.export_html(inline_styles=True)
    else:
        text = console.export_svg(
            theme=DEFAULT_TERMINAL_THEME, code_format=SVG_PAGE, font_aspect_ratio=0.602
        )
        text = re.sub(r"\n\s+", "\n", text)
    path.write_text(text, encoding="utf-8")


def _device_chart(leaves: list[PlacedLeaf]) -> Any:
    """A bar for each run of devices that hold equally many bytes."""
    rows = []
    for held, run in groupby(bytes_by_device(leaves).items(), key=lambda item: item[1]):
        ids = [device for device, _ in run]
        rows.append((f"{ids[0]}" if len(ids) == 1 else f"{ids[0]}..{ids[-1]}", held))
    return _chart("device", rows)


def _branch_chart(leaves: list[PlacedLeaf]) -> Any:
    """A bar for each of the largest top-level branches."""
    totals: Counter[str] = Counter()
    for leaf in leaves:
        totals[leaf.path.partition("/")[0] or "(the array)"] += largest_part(leaf)
    rows = totals.most_common(_BRANCHES)
    if len(totals) > len(rows):
        rest = totals.total() - sum(held for _, held in rows)
        rows.append((f"{len(totals) - len(rows)} others", rest))
    return _chart("branch", rows)


def _chart(head: str, rows: list[tuple[str, int]]) -> Any:
    from rich.bar import Bar
    from rich.table import Table
    from rich.text import Text

    table = Table(head, "bytes per device", "", box=None)
    most = max((held for _, held in rows), default=0)
    for name, held in rows[:_BARS]:
        table.add_row(Text(name), Bar(most or 1, 0, held, width=40), human_bytes(held))
    if len(rows) > _BARS:
        table.add_row(f"... and {len(rows) - _BARS:,} more", "", "")
    return table
