"""Draws how a tree is sharded: as a tree of text lines, which rich prints or writes as an SVG.

There is one layout, so that a picture has the lines of the text. It is the same file on every
machine, and needs neither a browser nor fonts from the network.
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from treeshard._core.arguments import check_no_refs
from treeshard._core.arrays import is_array
from treeshard._core.mesh import AnyMesh, axis_sizes
from treeshard._core.specs import axes_of, entries
from treeshard._core.text import fold, human_bytes
from treeshard._inspection.memory import PlacedLeaf, bytes_by_device, largest_part, placed_leaves
from treeshard.errors import FormatError, LeafError, counted

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

# Readable on white and on black.
_PALETTE = ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
_MOST_PARTS = 64  # of one array, to list

Colours = Mapping[str, str]  # of mesh axes


def draw(x: Any, to: str | Path | None = None) -> None:
    """Draws how a plan, a tree or an array is sharded.

    Shows a tree with the shape, the spec and the bytes per device of every array, in one colour
    for each mesh axis; repeated layers are folded. For a single array of any rank, it also shows
    which device holds which part. No values are read.

    Args:
        x: A `Plan`, a live tree, `ShapeDtypeStruct`s with shardings, or one array.
        to: A file to write instead of printing: `"plan.svg"`.

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
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            "draw needs rich. Install it with `pip install 'treeshard[show]'`."
        ) from error
    tree = _tree(leaves)
    if is_array(x) or isinstance(x, jax.ShapeDtypeStruct):
        for line in _parts(leaves[0]):
            tree.children[0].add(line)
    if path is None:
        # Emoji would turn `:key:` in a path into a picture.
        Console(emoji=False).print(tree)
    else:
        path.write_text(as_svg(tree), encoding="utf-8")


# ------------------------------------------------------------------ the tree

# Lines are `Text`, whose parts have styles. As strings rich would read markup in them, `[bold]`,
# and paths may have any brackets.


def _tree(leaves: list[PlacedLeaf]) -> "Tree":
    from rich.text import Text
    from rich.tree import Tree

    shardings = (leaf.sharding for leaf in leaves)
    meshes = [*dict.fromkeys(x.mesh for x in shardings if isinstance(x, NamedSharding))]
    axes = dict.fromkeys(axis for mesh in meshes for axis in axis_sizes(mesh))
    colours = dict(zip(axes, cycle(_PALETTE)))  # they repeat if there are many axes
    tree = Tree(_head(leaves, meshes, colours))
    totals: Counter[str] = Counter()
    branches: dict[str, Tree] = {}
    for path, members in fold((x.path, (x.shape, x.dtype, x.sharding), x) for x in leaves):
        *keys, name = path.split("/")
        branch = tree
        for inside in accumulate(keys, "{}/{}".format):  # `layers`, then `layers/{0..2}`
            if inside not in branches:
                branches[inside] = branch.add("")
            branch = branches[inside]
            totals[inside] += sum(map(largest_part, members))
        branch.add(_leaf_line(name, members, colours))
    # A branch has the sum of its leaves, which is known only now.
    for path, branch in branches.items():
        name = path.rpartition("/")[2]
        branch.label = Text.assemble((name, "bold"), (f"  {human_bytes(totals[path])}", "dim"))
    return tree


def _head(leaves: list[PlacedLeaf], meshes: list[AnyMesh], colours: Colours) -> "Text":
    """`mesh data=2, fsdp=4; 8 arrays, 1.9 KiB on the fullest of 8 devices`"""
    from rich.text import Text

    head = Text()
    for mesh in meshes:
        head.append("mesh ")
        for i, (axis, size) in enumerate(axis_sizes(mesh).items()):
            head.append(", " if i else "").append(f"{axis}=", colours[axis]).append(str(size))
        head.append("; " if axis_sizes(mesh) else "no axes; ")
    on_devices = bytes_by_device(leaves).values()
    most = human_bytes(max(on_devices, default=0))
    devices = counted(len(on_devices), "device")
    return head.append(f"{counted(len(leaves), 'array')}, {most} on the fullest of {devices}")


def _leaf_line(name: str, members: list[PlacedLeaf], colours: Colours) -> "Text":
    """`w  float32[16,64]  P('data', 'fsdp')  1.5 KiB (3 of them)`"""
    from rich.text import Text

    leaf = members[0]
    line = Text(f"{name or '(the array)'}  {leaf.dtype}[")
    spec = entries(leaf.sharding) if isinstance(leaf.sharding, NamedSharding) else ()
    for i, (length, entry) in enumerate(zip_longest(leaf.shape, spec)):
        axes = axes_of(entry)
        line.append("," if i else "")
        line.append(str(length), colours[axes[0]] if axes else "")  # the colour of the first axis
    place = Text(_place(leaf), "italic" if leaf.spec is None else "")
    for axis, colour in colours.items():
        place.highlight_words([repr(axis)], colour)
    size = human_bytes(sum(map(largest_part, members)))
    times = f" ({len(members)} of them)" if len(members) > 1 else ""
    return line.append("]  ").append_text(place).append(f"  {size}{times}", "dim")


def _place(leaf: PlacedLeaf) -> str:
    """`P('data', 'fsdp')`, or where an array is that is on no mesh."""
    if leaf.sharding is None:
        return "on no device"
    if leaf.spec is not None:
        return f"{leaf.spec}" if leaf.takes_device_memory else f"{leaf.spec} in host memory"
    ids = sorted(device.id for device in leaf.sharding.device_set)
    if len(ids) == 1:
        return f"only on device {ids[0]}"
    return f"{type(leaf.sharding).__name__} on {len(ids)} devices"


# ------------------------------------------------------------------ one array


def _parts(leaf: PlacedLeaf) -> list["Text"]:
    """`[0:4, 0:8] on 0, 1` for each part of an array; empty without devices."""
    from rich.text import Text

    sharding = leaf.sharding
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return []
    devices_of: dict[str, list[str]] = {}
    for device, index in sharding.devices_indices_map(leaf.shape).items():
        devices_of.setdefault(_slices(index, leaf.shape), []).append(str(device.id))
    lines = [f"{part} on {', '.join(ids)}" for part, ids in devices_of.items()]
    if len(lines) > _MOST_PARTS:
        lines[_MOST_PARTS:] = [f"... and {len(lines) - _MOST_PARTS:,} more parts"]
    return [Text(line) for line in lines]


def _slices(index: Iterable[slice], shape: tuple[int, ...]) -> str:
    ranges = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    if ranges == [(0, length) for length in shape]:
        return "all of it"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"


# ------------------------------------------------------------------ the picture

# rich's own page has the frame of a window, and loads its font from the network.
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
<rect width="100%" height="100%" fill="white"/>
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
    return console.export_svg(
        theme=DEFAULT_TERMINAL_THEME, code_format=_SVG_PAGE, font_aspect_ratio=_DEJAVU_ASPECT
    )
