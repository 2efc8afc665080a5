"""Writes drawn trees to files, with bar charts of their bytes."""

import io
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treeshard._describe import human_bytes
from treeshard._placed import Placed, bytes_by_device, largest_part

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
