"""Draws how a tree is sharded: in the terminal, in a notebook, or to a file."""

import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from treeshard._core.arrays import is_array
from treeshard._core.mesh import AnyMesh, axis_sizes, describe_mesh
from treeshard._core.specs import axes_of, entries
from treeshard._core.text import fold, human_bytes
from treeshard._inspection.memory import Placed, bytes_by_device, largest_part, placed_leaves
from treeshard._planning.plan import PlannedTree
from treeshard.errors import FormatError, LeafError

# ------------------------------------------------------------------
# Writes drawn trees to files, with bar charts of their bytes.

# In inches: the width of one character, the height of one line, the height of the charts.
_POINTS = 9
_COLUMN, _LINE, _CHARTS = _POINTS * 0.602 / 72, _POINTS * 1.35 / 72, 3.5
# Longer figures take minutes to write, and viewers cannot show them.
_LINES = 400
# The most bars in each chart.
_BARS = 64
_BRANCHES = 12


def missing(package: str) -> ImportError:
    """The error for an optional package that is not installed."""
    return ImportError(f"draw needs {package}. Install it with `pip install 'treeshard[show]'`.")


def _write_html(path: Path, picture: Any, leaves: list[Placed]) -> None:
    console, _ = _console(picture, record=True)
    console.print(picture)
    page = console.export_html(inline_styles=True)
    figure = _figure(8.0, _CHARTS)
    _charts(figure, leaves, 1.0)
    chart = _saved(figure, "svg").decode()
    body = chart[chart.index("<svg") :] + "\n</body>"
    path.write_text(page.replace("</body>", body, 1), encoding="utf-8")


def _write_figure(path: Path, picture: Any, leaves: list[Placed]) -> None:
    from rich.segment import Segment

    console, columns = _console(picture)
    lines = console.render_lines(picture, pad=False)
    if len(lines) > _LINES:
        end = Segment(f"... and {len(lines) - _LINES:,} more lines, which `draw` to .html has")
        lines = [*lines[:_LINES], [end]]
    width, text = max(columns * _COLUMN, 8.0), (len(lines) + 1) * _LINE
    figure = _figure(width, text + _CHARTS)
    share = _CHARTS / (text + _CHARTS)
    page = figure.add_axes((0, share, 1, 1 - share), xlim=(-1, width / _COLUMN - 1))
    page.set(ylim=(len(lines) + 0.5, -0.5))
    page.set_axis_off()
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            _write(page, column, row, segment)
            column += segment.cell_length
    _charts(figure, leaves, share)
    path.write_bytes(_saved(figure, path.suffix[1:]))


WRITERS: dict[str, Callable[[Path, Any, list[Placed]], None]] = {
    ".html": _write_html,
    ".png": _write_figure,
    ".svg": _write_figure,
}


# ------------------------------------------------------------------ the tree


def _console(picture: Any, record: bool = False) -> tuple[Any, int]:
    """A rich console as wide as the picture, which prints nothing, and its width."""
    from rich.console import Console

    columns = Console(width=10_000, file=io.StringIO()).measure(picture).maximum
    return Console(width=columns, file=io.StringIO(), record=record), columns


def _write(page: Any, column: int, row: int, segment: Any) -> None:
    style = segment.style
    colour = "black"
    if style is not None and style.color is not None:
        colour = style.color.get_truecolor().hex
    elif style is not None and style.dim:
        colour = "dimgray"
    # SVG collapses repeated blanks, and some viewers drop leading ones.
    text = segment.text.rstrip()
    page.text(
        column + len(text) - len(text.lstrip()),
        row,
        text.lstrip().replace(" ", "\u00a0"),
        color=colour,
        fontsize=_POINTS,
        family="DejaVu Sans Mono",
        weight="bold" if style is not None and style.bold else "normal",
        va="center_baseline",
        parse_math=False,
    )


# ------------------------------------------------------------------ the charts


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing("matplotlib") from error
    return Figure(figsize=(width, height))


def _saved(figure: Any, kind: str) -> bytes:
    from matplotlib import rc_context

    file = io.BytesIO()
    # Keeps text as text, and the output reproducible.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "treeshard"}):
        dpi = min(150, 60_000 / max(figure.get_size_inches()))
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {}
        figure.savefig(file, format=kind, dpi=dpi, metadata=metadata)
    return file.getvalue()


def _charts(figure: Any, leaves: list[Placed], share: float) -> None:
    """Draws bytes per device and per top-level branch at the bottom of a figure."""
    held = bytes_by_device(leaves)
    unit = 1024 ** min(int(math.log(max([1024, *held.values()]), 1024)), 5)
    name = human_bytes(unit).split()[1]
    devices = figure.add_axes((0.1, 0.2 * share, 0.36, 0.62 * share))
    devices.set(title=f"{name} per device (dashed: the mean)", xlabel="device")
    _chart_devices(devices, [str(device) for device in held], [n / unit for n in held.values()])
    branches = figure.add_axes((0.66, 0.2 * share, 0.3, 0.62 * share))
    branches.set(title=f"{name} per device of each branch")
    _chart_branches(branches, leaves, unit)


def _chart_devices(axes: Any, names: list[str], counts: list[float]) -> None:
    if len(counts) <= _BARS:
        axes.bar(names, counts, color="slategray")
        axes.tick_params(axis="x", labelsize=10 if len(counts) <= 16 else 5)
    else:
        axes.stairs(counts, fill=True, color="slategray")
    if counts:
        axes.axhline(sum(counts) / len(counts), color="black", linestyle="--", linewidth=0.8)


def _chart_branches(axes: Any, leaves: list[Placed], unit: int) -> None:
    found: Counter[str] = Counter()
    for leaf in leaves:
        found[leaf.path.partition("/")[0] or "(the array)"] += largest_part(leaf)
    top = found.most_common(_BRANCHES)
    if len(found) > len(top):
        rest = found.total() - sum(count for _, count in top)
        top.append((f"{len(found) - len(top)} others", rest))
    names = [name[:24] for name, _ in reversed(top)]
    axes.barh(range(len(top)), [count / unit for _, count in reversed(top)], color="slategray")
    axes.set_yticks(range(len(top)), labels=names, parse_math=False)


# Readable on white and on black.
_PALETTE = ("#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")
# The most parts of one array to list.
_PARTS = 64


def draw(x: Any, to: str | Path | None = None) -> None:
    """Draws how a plan, a tree or an array is sharded.

    Shows a tree with the shape, the spec and the bytes per device of every array, in one colour
    for each mesh axis; repeated layers are folded. For a single array of any rank, it also shows
    which device holds which part. No values are read.

    Args:
        x: A `Plan`, a live tree, `ShapeDtypeStruct`s with shardings, or one array.
        to: A file to write instead: `"plan.svg"`, `"plan.html"` or `"plan.png"`. It also has bar
            charts of the bytes on each device and in each top-level branch. (For a tree of more
            than 400 lines, only .html has all of them.) Without it, the tree is printed to the
            terminal, or shown in the notebook; where treescope is installed, a notebook shows a
            live tree with treescope instead.

    Raises:
        LeafError: If there are no arrays in `x`.
        SpecError: If arrays in it are traced: all are named.
        FormatError: If `to` has another file extension.
        ImportError: If rich, or for a file matplotlib, is not installed.

    Examples:
        >>> x = shard(np.ones((8, 4), "float32"), P("fsdp"), make_mesh("fsdp=8"))
        >>> draw({"mlp": [{"w": x}, {"w": x}]})
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
    write = None if to is None else _writer(Path(to))
    if write is None and not isinstance(x, PlannedTree) and _in_notebook() and _by_treescope(x):
        return
    picture = _picture(leaves, alone=is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    if write is not None:
        write(Path(to or ""), picture, leaves)
    else:
        from rich.console import Console

        Console().print(picture)


def _writer(path: Path) -> Any:
    if path.suffix not in WRITERS:
        raise FormatError(
            f"draw: {path.name!r} does not end in {', '.join(sorted(WRITERS))}. The extension"
            " determines the kind of file."
        )
    return WRITERS[path.suffix]


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _by_treescope(x: Any) -> bool:
    """Shows a live tree in a notebook, if treescope is there."""
    try:
        import treescope
    except ImportError:
        return False
    treescope.display(treescope.render_array_sharding(x) if is_array(x) else x)
    return True


# ------------------------------------------------------------------ the tree


def _picture(leaves: list[Placed], alone: bool) -> Any:
    """Returns the tree as a renderable for rich; for a single array, also its parts."""
    try:
        from rich.console import Group
        from rich.text import Text
        from rich.tree import Tree
    except ImportError as error:
        raise missing("rich") from error
    colours = _colours(leaves)
    root = Tree(_head(leaves, colours))
    branches: dict[str, Any] = {"": root}
    alike = fold((x.path, (x.shape, x.dtype, x.sharding), x) for x in leaves)
    totals = _branch_totals(alike)
    for path, members in alike:
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


def _branch_totals(alike: Iterable[tuple[str, list[Placed]]]) -> Mapping[str, int]:
    """Bytes per device below each branch, by folded path."""
    totals: Counter[str] = Counter()
    for path, members in alike:
        keys = path.split("/")
        held = sum(map(largest_part, members))
        totals.update({"/".join(keys[:count]): held for count in range(1, len(keys))})
    return totals


def _line(name: str, members: list[Placed], colours: dict[str, str]) -> Any:
    """The line of one array, or of several equal ones: dtype, shape, spec, bytes per device."""
    from rich.text import Text

    leaf = members[0]
    line = Text(f"{name}  ")
    line.append(f"{leaf.dtype}[")
    sharding = leaf.sharding
    dims = entries(sharding) if isinstance(sharding, NamedSharding) else ()
    for dim, length in enumerate(leaf.shape):
        axes = axes_of(dims[dim]) if dim < len(dims) else ()
        line.append("," if dim else "")
        line.append(str(length), style=colours[axes[0]] if axes else "")
    line.append("]  ")
    line.append_text(_where(leaf, colours))
    times = f" ({len(members)} of them)" if len(members) > 1 else ""
    held = sum(map(largest_part, members))
    return line.append(f"  {human_bytes(held)}{times}", style="dim")


def _where(leaf: Placed, colours: dict[str, str]) -> Any:
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


def _head(leaves: list[Placed], colours: dict[str, str]) -> Any:
    from rich.text import Text

    head = Text()
    for mesh in _meshes(leaves):
        head.append(f"mesh {describe_mesh(mesh)}; ")
    for axis, colour in colours.items():
        head.highlight_words([f"{axis}="], colour)
    held = bytes_by_device(leaves).values()
    count = f"{len(leaves):,} arrays" if len(leaves) > 1 else "1 array"
    most = human_bytes(max(held, default=0))
    return head.append(f"{count}, {most} on the fullest of {len(held):,} devices")


def _meshes(leaves: Iterable[Placed]) -> list[AnyMesh]:
    found = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    return list(dict.fromkeys(found))


def _colours(leaves: Iterable[Placed]) -> dict[str, str]:
    """A colour for each axis, in the order of the meshes; they repeat if there are many axes."""
    axes = dict.fromkeys(axis for mesh in _meshes(leaves) for axis in axis_sizes(mesh))
    return dict(zip(axes, cycle(_PALETTE)))


# ------------------------------------------------------------------ one array


def _parts(leaf: Placed) -> Any | None:
    """A table of the devices that hold each part of an array; `None` without devices."""
    from rich.table import Table

    if leaf.sharding is None or not _has_devices(leaf):
        return None
    holders: dict[str, list[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(_slices(index, leaf.shape), []).append(device.id)
    table = Table("part", "devices")
    for part, ids in list(holders.items())[:_PARTS]:
        table.add_row(part, ", ".join(map(str, ids)))
    if len(holders) > _PARTS:
        table.add_row(f"... and {len(holders) - _PARTS:,} more parts", "")
    return table


def _has_devices(leaf: Placed) -> bool:
    sharding = leaf.sharding
    return not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, jax.sharding.Mesh)


def _slices(index: Iterable[slice], shape: tuple[int, ...]) -> str:
    ranges = [part.indices(length)[:2] for part, length in zip(index, shape, strict=True)]
    if all(r == (0, length) for r, length in zip(ranges, shape, strict=True)):
        return "all of it"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in ranges) + "]"
