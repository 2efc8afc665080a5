"""Draws how a tree is sharded: as text in a terminal or a notebook, or as one SVG picture.

rich lays out both, so that the picture has the lines of the text. A picture of it needs neither a
browser nor fonts from the network, and is the same file on every machine.
"""

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, cycle, groupby, zip_longest
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import is_array
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import axes_of, entries
from treeshard._core.text import consecutive, fold, human_bytes
from treeshard._inspection.memory import PlacedLeaf, bytes_by_device, largest_part, placed_leaves
from treeshard.errors import FormatError, LeafError, counted

# Readable on white and on black.
_PALETTE = ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
# The most parts of one array, and bars of devices, to list.
_PARTS = 64
_BARS = 64


def draw(x: Any, to: str | Path | None = None) -> None:
    """Draws how a plan, a tree or an array is sharded.

    Shows a tree with the shape, the spec and the bytes per device of every array, in one colour
    for each mesh axis; repeated layers are folded. For a single array of any rank, it also shows
    which device holds which part. No values are read.

    Args:
        x: A `Plan`, a live tree, `ShapeDtypeStruct`s with shardings, or one array.
        to: A file to write instead of printing: `"plan.svg"`. It also has a bar for the bytes on
            each device.

    Raises:
        LeafError: If there are no arrays in `x`, or it has a mutable reference (`jax.Ref`).
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
    try:
        from rich.console import Console, Group
    except ImportError as error:
        raise ImportError(
            "draw needs rich. Install it with `pip install 'treeshard[show]'`."
        ) from error
    shown = [_tree(leaves)]
    if is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        shown += ["", _parts(leaves[0])]
    if path is None:
        # In a notebook, rich displays HTML. Emoji would turn `:key:` in a path into a picture.
        Console(emoji=False).print(Group(*shown))
        return
    shown += ["", _device_chart(leaves)]
    path.write_text(as_svg(Group(*shown)), encoding="utf-8")


# ------------------------------------------------------------------ the tree

# Lines are in rich's markup, `[#d95f02]16[/]`. A bracket opens a tag only before a letter, `#`, `/`
# or `@`: that of `float32[8,4]` is text. Names may have any brackets, and are escaped.


def _tree(leaves: list[PlacedLeaf]) -> Any:
    """The tree, as rich prints it."""
    from rich.tree import Tree

    shardings = (leaf.sharding for leaf in leaves)
    meshes = [*dict.fromkeys(x.mesh for x in shardings if isinstance(x, NamedSharding))]
    axes = dict.fromkeys(axis for mesh in meshes for axis in axis_sizes(mesh))
    colours = dict(zip(axes, cycle(_PALETTE)))  # they repeat if there are many axes
    tree = Tree(_head(leaves, meshes, colours))
    totals: Counter[str] = Counter()
    branches: dict[str, Any] = {}
    for path, members in fold((x.path, (x.shape, x.dtype, x.sharding), x) for x in leaves):
        *keys, name = path.split("/")
        branch = tree
        for inside in accumulate(keys, "{}/{}".format):  # `layers`, then `layers/{0..2}`
            if inside not in branches:
                branches[inside] = branch.add("")
            branch = branches[inside]
            totals[inside] += sum(map(largest_part, members))
        branch.add(_leaf_line(name, members, colours))
    for path, branch in branches.items():
        name = _painted(path.rpartition("/")[2], "bold")
        branch.label = f"{name}  [dim]{human_bytes(totals[path])}[/]"
    return tree


def _head(leaves: list[PlacedLeaf], meshes: list[AnyMesh], colours: Mapping[str, str]) -> str:
    """`mesh data=2, fsdp=4; 8 arrays, 1.9 KiB on the fullest of 8 devices`"""
    shown = ""
    for mesh in meshes:
        sizes = axis_sizes(mesh).items()
        axes = [f"{_painted(f'{axis}=', colours[axis])}{size}" for axis, size in sizes]
        shown += f"mesh {', '.join(axes) or 'no axes'}; "
    on_devices = bytes_by_device(leaves).values()
    most = human_bytes(max(on_devices, default=0))
    devices = counted(len(on_devices), "device")
    return f"{shown}{counted(len(leaves), 'array')}, {most} on the fullest of {devices}"


def _leaf_line(name: str, members: list[PlacedLeaf], colours: Mapping[str, str]) -> str:
    """`w  float32[16,64]  P('data', 'fsdp')  1.5 KiB (3 of them)`"""
    leaf = members[0]
    spec = entries(leaf.sharding) if isinstance(leaf.sharding, NamedSharding) else ()
    dims: list[str] = []
    for length, entry in zip_longest(leaf.shape, spec):  # in the colour of the first axis
        axes = axes_of(entry)
        dims.append(_painted(str(length), colours[axes[0]]) if axes else str(length))
    array = f"{leaf.dtype}[{','.join(dims)}]"
    size = human_bytes(sum(map(largest_part, members)))
    times = f" ({len(members)} of them)" if len(members) > 1 else ""
    name = _painted(name or "(the array)")
    return "  ".join([name, array, _place(leaf, colours), f"[dim]{size}{times}[/]"])


def _place(leaf: PlacedLeaf, colours: Mapping[str, str]) -> str:
    """`P('data', 'fsdp')`, or where an array is that is on no mesh."""
    if leaf.sharding is None:
        return "[italic]on no device[/]"
    if leaf.spec is not None:
        spec = _painted(str(leaf.spec))
        for axis, colour in colours.items():
            spec = spec.replace(repr(axis), _painted(repr(axis), colour))
        return spec if leaf.takes_device_memory else f"{spec}[italic] in host memory[/]"
    ids = sorted(device.id for device in leaf.sharding.device_set)
    if len(ids) == 1:
        return f"[italic]only on device {ids[0]}[/]"
    return f"[italic]{type(leaf.sharding).__name__} on {len(ids)} devices[/]"


def _painted(text: str, style: str = "none") -> str:
    """Text in a style, whatever brackets it has."""
    from rich.markup import escape

    return f"[{style}]{escape(text)}[/]"


# ------------------------------------------------------------------ one array


def _parts(leaf: PlacedLeaf) -> Any:
    """A table of the devices that hold each part of an array; empty without devices."""
    from rich.table import Table

    sharding = leaf.sharding
    if sharding is None:
        return ""
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        return ""
    devices_of: dict[str, list[int]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        devices_of.setdefault(_slices(index, leaf.shape), []).append(device.id)
    table = Table("part", "devices")
    for part, ids in list(devices_of.items())[:_PARTS]:
        table.add_row(_painted(part), ", ".join(map(str, ids)))
    if len(devices_of) > _PARTS:
        table.add_row(f"... and {len(devices_of) - _PARTS:,} more parts", "")
    return table


def _slices(index: Iterable[slice], shape: tuple[int, ...]) -> str:
    ranges = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    if ranges == [(0, length) for length in shape]:
        return "all of it"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


# ------------------------------------------------------------------ the picture

# rich's own page has a window frame, and loads its font from the network.
_SVG_PAGE = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px "DejaVu Sans Mono", Menlo, monospace }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{width}" height="{height}"/></clipPath>
{lines}
</defs>
<rect class="paper" width="100%" height="100%" fill="white"/>
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</svg>
"""
_DEJAVU_ASPECT = 0.602  # the width of a character of DejaVu Sans Mono, of its height


def as_svg(shown: Any) -> str:
    """What rich prints, as a picture; the same lines give the same text."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME

    # Without a terminal, rich would break lines after 80 characters.
    width = Console(width=10_000, file=io.StringIO()).measure(shown).maximum
    console = Console(width=width, file=io.StringIO(), record=True, emoji=False)
    console.print(shown)
    svg = console.export_svg(
        theme=DEFAULT_TERMINAL_THEME, code_format=_SVG_PAGE, font_aspect_ratio=_DEJAVU_ASPECT
    )
    return re.sub(r"\n\s+", "\n", svg).replace("</style>", f"{_dark(svg)}</style>", 1)


def _dark(svg: str) -> str:
    """The style of the paper, and of black and grey letters, for readers in a dark mode."""
    # .terminal-1234-r1 { fill: #000000 }
    greys = dict(re.findall(r"(\.[\w-]+) \{ fill: #(..)\2\2", svg))
    shades = {letters: 0xE6 - int(grey, 16) * 2 // 3 for letters, grey in greys.items()}
    styles = [
        f"{letters} {{ fill: #{shade:02x}{shade:02x}{shade:02x} }}"
        for letters, shade in shades.items()
    ]
    return (
        f"@media (prefers-color-scheme: dark) {{ .paper {{ fill: #1e2129 }} {' '.join(styles)} }}\n"
    )


def _device_chart(leaves: list[PlacedLeaf]) -> Any:
    """A bar for each run of consecutive devices that hold equally many bytes."""
    from rich.bar import Bar
    from rich.table import Table

    table = Table("device", "bytes per device", "", box=None)
    size_of = bytes_by_device(leaves)
    most = max(size_of.values(), default=0) or 1  # rich divides by it
    alike = groupby(size_of, key=size_of.__getitem__)
    runs = [(size, ids) for size, run in alike for ids in consecutive(run)]
    for size, ids in runs[:_BARS]:
        name = f"{ids[0]}" if len(ids) == 1 else f"{ids[0]}..{ids[-1]}"
        table.add_row(name, Bar(most, 0, size, width=40), human_bytes(size))
    if len(runs) > _BARS:
        table.add_row(f"... and {len(runs) - _BARS:,} more", "", "")
    return table
