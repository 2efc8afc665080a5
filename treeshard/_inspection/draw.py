"""Draws how a tree is sharded: as a tree of text, which `print` shows or rich writes as an SVG.

The picture is made from the text, so it has the lines that the terminal shows. The SVG file is the
same on every machine, and needs neither a browser nor fonts from the network.
"""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import array_text, is_array
from treeshard._core.mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._core.text import fold, human_bytes
from treeshard._inspection.memory import PlacedLeaf, bytes_by_device, largest_part, placed_leaves
from treeshard.errors import FormatError, LeafError, counted, printable

# The colours of mesh axes in a picture, readable on white and on black.
_PALETTE = ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
_MOST_PARTS = 64  # how many parts of one array are listed

Lines = dict[str, "Lines"]  # a line, and the lines below it


def draw(x: Any, to: str | Path | None = None) -> None:
    """Draws how a plan, a tree or an array is sharded.

    Prints a tree with the shape, the spec and the bytes per device of every array; repeated layers
    are folded. For a single array of any rank, it also shows which device holds which part. Values
    are not read.

    Args:
        x: A `Plan`, a live tree, `ShapeDtypeStruct`s with shardings, or one array.
        to: A file to write instead of printing: `"plan.svg"`. Mesh axes are coloured in it.

    Raises:
        LeafError: If `x` has no arrays, or has a mutable reference (`jax.Ref`).
        SpecError: If arrays in `x` are traced. The message names all of them.
        FormatError: If `to` has another file extension.
        ImportError: If `to` is given and rich is not installed.

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
    check_no_refs(x, "draw")
    leaves = placed_leaves(x)
    if not leaves:
        raise LeafError(
            f"draw: there are no arrays in this {type(x).__name__}. Pass a plan, a tree of arrays,"
            " or an array."
        )
    path = None if to is None else Path(to)
    if path is not None and path.suffix != ".svg":
        raise FormatError(
            f"draw: {path.name!r} does not end in .svg. SVG is the only kind of picture that it"
            " writes."
        )
    shardings = (leaf.sharding for leaf in leaves)
    meshes = [*dict.fromkeys(x.mesh for x in shardings if isinstance(x, NamedSharding))]
    is_one = is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    below: Lines = {part: {} for part in _parts(leaves[0])} if is_one else {}
    text = printable("\n".join([_head(leaves, meshes), *_indent(_tree(leaves, below))]))
    if path is None:
        print(text)
    else:
        axes = dict.fromkeys(axis for mesh in meshes for axis in axis_sizes(mesh))
        path.write_text(as_svg(text, axes), encoding="utf-8")


# ------------------------------------------------------------------ the tree


def _head(leaves: list[PlacedLeaf], meshes: list[AnyMesh]) -> str:
    """`mesh data=2, fsdp=4; 8 arrays, 1.9 KiB on the fullest of 8 devices`"""
    on_mesh = "".join(f"mesh {describe_mesh(mesh)}; " for mesh in meshes)
    on_devices = bytes_by_device(leaves).values()
    most = human_bytes(max(on_devices, default=0))
    devices = counted(len(on_devices), "device")
    return f"{on_mesh}{counted(len(leaves), 'array')}, {most} on the fullest of {devices}"


def _tree(leaves: list[PlacedLeaf], below: Lines) -> Lines:
    """A line for each leaf and each part of its path; the lines in `below` go under each leaf."""
    # A branch shows the sum of its leaves, so all bytes are added up before the first line.
    folded = fold((x.path, (x.shape, x.dtype, x.sharding), x) for x in leaves)
    totals: Counter[str] = Counter()
    for path, members in folded:
        for inside in _branches(path):
            totals[inside] += sum(map(largest_part, members))
    tree: Lines = {}
    for path, members in folded:
        branch = tree
        for inside in _branches(path):
            name = inside.rpartition("/")[2]
            branch = branch.setdefault(f"{name}  {human_bytes(totals[inside])}", {})
        branch[_leaf_line(path.rpartition("/")[2], members)] = below
    return tree


def _branches(path: str) -> Iterable[str]:
    """`layers`, then `layers/{0..2}`, of `layers/{0..2}/w`."""
    return accumulate(path.split("/")[:-1], "{}/{}".format)


def _indent(tree: Lines, indent: str = "") -> Iterator[str]:
    for i, (line, inside) in enumerate(tree.items(), 1):
        corner, space = ("└── ", "    ") if i == len(tree) else ("├── ", "│   ")
        yield f"{indent}{corner}{line}"
        yield from _indent(inside, indent + space)


def _leaf_line(name: str, members: list[PlacedLeaf]) -> str:
    """`w  float32[16,64]  P('data', 'fsdp')  1.5 KiB (3 of them)`"""
    leaf = members[0]
    size = human_bytes(sum(map(largest_part, members)))
    times = f" ({len(members)} of them)" if len(members) > 1 else ""
    return f"{name or '(the array)'}  {array_text(leaf)}  {_place(leaf)}  {size}{times}"


def _place(leaf: PlacedLeaf) -> str:
    """`P('data', 'fsdp')`, or the device of an array that is not on a mesh."""
    if leaf.sharding is None:
        return "on no device"
    if leaf.spec is not None:
        return f"{leaf.spec}" if leaf.takes_device_memory else f"{leaf.spec} in host memory"
    ids = sorted(device.id for device in leaf.sharding.device_set)
    if len(ids) == 1:
        return f"only on device {ids[0]}"
    return f"{type(leaf.sharding).__name__} on {len(ids)} devices"


# ------------------------------------------------------------------ one array


def _parts(leaf: PlacedLeaf) -> list[str]:
    """`[0:4, 0:8] on 0, 1` for each part of an array; empty without devices."""
    sharding = leaf.sharding
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return []
    devices_of: dict[str, list[str]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        devices_of.setdefault(_slices(index, leaf.shape), []).append(str(device.id))
    lines = [f"{part} on {', '.join(ids)}" for part, ids in devices_of.items()]
    if len(lines) > _MOST_PARTS:
        lines[_MOST_PARTS:] = [f"... and {len(lines) - _MOST_PARTS:,} more parts"]
    return lines


def _slices(index: Iterable[slice], shape: tuple[int, ...]) -> str:
    ranges = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    if ranges == [(0, length) for length in shape]:
        return "all of it"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


# ------------------------------------------------------------------ the picture

# rich's default page draws the frame of a window, and loads its font from the network.
_SVG_PAGE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, monospace }}
{styles}
svg {{ color: black }} .paper {{ fill: white }}
@media (prefers-color-scheme: dark) {{ svg {{ color: #e2e4e9 }} .paper {{ fill: #1e2129 }} }}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{width}" height="{height}"/></clipPath>
{lines}
</defs>
<rect class="paper" width="100%" height="100%"/>
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</svg>
"""
_DEJAVU_ASPECT = 0.602  # a character's width in DejaVu Sans Mono, divided by its height


def as_svg(shown: str, axes: Iterable[str] = ()) -> str:
    """A text as a picture, with the names of mesh axes in colours."""
    try:
        from rich.cells import cell_len
        from rich.console import Console
        from rich.terminal_theme import DEFAULT_TERMINAL_THEME
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "draw(to=...) needs rich. Install it with `pip install 'treeshard[show]'`."
        ) from error
    text = Text(shown)
    for axis, colour in zip(axes, cycle(_PALETTE)):  # they repeat if there are many axes
        text.highlight_words([repr(axis), f" {axis}="], colour)
    # Without a terminal, rich would break lines after 80 characters.
    width = max(map(cell_len, shown.splitlines()))
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(text)
    page = console.export_svg(
        theme=DEFAULT_TERMINAL_THEME, code_format=_SVG_PAGE, font_aspect_ratio=_DEJAVU_ASPECT
    )
    return page.replace("#000000", "currentColor")  # black or, in a dark theme, nearly white
