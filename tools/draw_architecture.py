"""Draws docs/pictures/architecture.svg: the packages, and the ways of a step, a save and a report.

    python -m tools.draw_architecture           # as `make docs`

On the left, a package stands above those that it imports. On the right, each column is a call: from
top to bottom, what it does in the packages of a row.
"""

import argparse
from html import escape
from pathlib import Path

WIDTH, TOP, ROW, BOX, GAP = 960, 40, 52, 34, 8
PACKAGES = 430  # the width of the left half
ROWS = (
    ("_cli",),
    ("testing",),
    ("programs",),
    ("communication",),
    ("_trace",),
    ("compat",),
    ("checkpoint", "interchange"),
    ("training", "_disk"),
    ("_placement", "manual", "_inspection"),
    ("_planning",),
    ("_core",),
)
# A colour for the light theme and one for the dark, and what the call does in each package.
WAYS = {
    "step(state, batch)": (
        ("#1b7f5d", "#4fc99e"),
        {
            "training": "validate, run, record",
            "_placement": "place the batch",
            "_planning": "the plan in force",
            "_core": "compare processes",
        },
    ),
    "checkpoint.save": (
        ("#b5520a", "#f0965a"),
        {
            "checkpoint": "regions, table, rename",
            "_disk": "lock, write, flush",
            "_core": "agree, fail together",
        },
    ),
    "step.communication": (
        ("#5b53a6", "#a79fee"),
        {
            "communication": "read HLO, compare",
            "_trace": "what the step does",
            "training": "trace, compile",
            "_planning": "specs of each leaf",
        },
    ),
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), help="the folder")
    to = parser.parse_args(argv).to / "architecture.svg"
    to.write_text(picture(), encoding="utf-8")


def picture():
    height = TOP + len(ROWS) * ROW
    head = f'<svg viewBox="0 0 {WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">'
    boxes = [line for row, names in enumerate(ROWS) for line in packages(row, names)]
    ways = [line for number, call in enumerate(WAYS) for line in way(number, call)]
    return "\n".join([head, f"<style>{style()}</style>", *boxes, *ways, "</svg>", ""])


def packages(row, names):
    """The boxes of a row."""
    width = (PACKAGES - GAP * (len(names) - 1)) // len(names)
    for i, name in enumerate(names):
        x, y = i * (width + GAP), TOP + row * ROW
        yield f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{BOX}" rx="6"/>'
        yield f'<text class="name" x="{x + width // 2}" y="{y + BOX // 2 + 5}">{name}</text>'


def way(number, call):
    """A column: the call, a line down to the last package that it enters, and a dot for each."""
    x = PACKAGES + 30 + number * (WIDTH - PACKAGES - 20) // len(WAYS)
    _, does = WAYS[call]
    heights = {middle(name): what for name, what in does.items()}
    yield f'<text class="call fill{number}" x="{x - 8}" y="20">{escape(call)}</text>'
    yield f'<line class="way{number}" x1="{x}" y1="28" x2="{x}" y2="{max(heights)}"/>'
    for y, what in heights.items():
        yield f'<circle class="fill{number}" cx="{x}" cy="{y}" r="5"/>'
        yield f'<text class="does" x="{x + 10}" y="{y + 4}">{what}</text>'


def middle(name):
    row = next(i for i, names in enumerate(ROWS) if name in names)
    return TOP + row * ROW + BOX // 2


def style():
    fixed = "text { font: 13px sans-serif } .name { text-anchor: middle; font: 14px monospace }"
    fixed += " .call { font-weight: bold } line { stroke-width: 2 }"
    light = theme(0, ink="#222222", edge="#777777", paper="#f4f5f8")
    dark = theme(1, ink="#e6e6e6", edge="#9a9a9a", paper="#262a33")
    return f"{fixed} {light} @media (prefers-color-scheme: dark) {{ {dark} }}"


def theme(number, ink, edge, paper):
    rules = [f"text {{ fill: {ink} }} .box {{ fill: {paper}; stroke: {edge} }}"]
    for i, (colours, _) in enumerate(WAYS.values()):
        rules.append(
            f".way{i} {{ stroke: {colours[number]} }} .fill{i} {{ fill: {colours[number]} }}"
        )
    return " ".join(rules)


if __name__ == "__main__":
    main()
