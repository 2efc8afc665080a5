"""Draws the diagrams of the README and of the docs into docs/pictures, and the logo.

    python -m tools.draw_diagrams           # as `make docs`

`specs.svg` shows an array on a mesh under three specs, `fsdp.svg` one layer of FSDP, `loop.svg` a
loop before and after, and `tree.svg` the bytes of the README's state. Shapes and bytes come from
JAX and from plans. Colours follow the light or dark theme of the reader.
"""

import argparse
import re
from html import escape
from itertools import product
from pathlib import Path

import equinox as eqx
import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.text import human_bytes

# Ink, edges and fills for the light theme, and for the dark.
LIGHT = {"ink": "#24292f", "faint": "#6e7781", "edge": "#8c959f", "empty": "#eef0f3"}
DARK = {"ink": "#e2e4e9", "faint": "#a0a5b1", "edge": "#7d8590", "empty": "#2e303e"}
# Eight devices: one hue for each row of the mesh, lighter from column to column.
ROWS = ((170, 55), (22, 75))
COLUMNS = (24, 33, 42, 51)
FIXED = (
    "text { font: 15px sans-serif; fill: var(--ink) } .code { font: 14px monospace }"
    " .middle { text-anchor: middle } .faint { fill: var(--faint) } .bold { font-weight: bold }"
    " .right { text-anchor: end } .on { fill: white } rect { stroke: var(--edge); stroke-width: 1 }"
    " .empty { fill: var(--empty) } line { stroke: var(--faint) }"
    " .added { fill: #1b9e77; fill-opacity: 0.22; stroke: none } path { fill: var(--faint) }"
)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), help="the folder")
    to = parser.parse_args(argv).to
    ts.simulate_devices(8)
    for draw in (specs, fsdp, loop, tree, logo):
        (to / f"{draw.__name__}.svg").write_text(draw(), encoding="utf-8")


# ------------------------------------------------------------------ shapes


def themes():
    """The colours as variables. A page passes its own theme on to its pictures."""
    colours = [" ".join(f"--{name}: {x};" for name, x in theme.items()) for theme in (LIGHT, DARK)]
    light, dark = (f":root {{ {theme} }}" for theme in colours)
    return f"{light} @media (prefers-color-scheme: dark) {{ {dark} }}"


def svg(width, height, lines):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    head += f' viewBox="0 0 {width} {height}">'
    return "\n".join([head, f"<style>{FIXED} {themes()}</style>", *lines, "</svg>", ""])


def text(x, y, words, kind=""):
    return f'<text class="{kind}" x="{x}" y="{y}" xml:space="preserve">{escape(words)}</text>'


def box(x, y, width, height, fill="", kind="", round=0):
    fill = fill and f' fill="{fill}"'
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"'
        f' rx="{round}"{fill}/>'
    )


def arrow(x, y, down):
    yield f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + down - 6}"/>'
    yield f'<path d="M{x - 5} {y + down - 8}h10l-5 8z"/>'


def colour(device):
    (hue, saturation), light = ROWS[device // 4], COLUMNS[device % 4]
    return f"hsl({hue} {saturation}% {light}%)"


# ------------------------------------------------------------------ an array on a mesh


def specs():
    """The mesh, and which devices hold which part of an array of shape (8, 16)."""
    mesh, shape, cell = ts.make_mesh("data=2,tensor=4"), (8, 16), 16
    lines = [text(20, 22, "mesh", "bold"), text(66, 22, "data=2, tensor=4", "code")]
    for row, column in product(range(2), range(4)):
        lines += part(52 + 52 * column, 60 + 46 * row, 48, 42, [4 * row + column])
    lines.append(text(156, 52, "tensor", "middle faint"))
    lines.append('<text class="middle faint" transform="translate(40 104) rotate(-90)">data</text>')
    lines.append(text(20, 178, "array of shape (8, 16):", "faint"))
    places = ((340, 0), (10, 200), (340, 200))
    for (left, top), spec in zip(
        places, (P("data", "tensor"), P(None, "tensor"), P(("data", "tensor"))), strict=True
    ):
        sharding = NamedSharding(mesh, spec)
        parts = {}
        for device, index in sharding.devices_indices_map(shape).items():
            where = tuple(x.indices(n)[:2] for x, n in zip(index, shape, strict=True))
            parts.setdefault(where, []).append(device.id)
        of = sharding.shard_shape(shape)
        lines.append(text(left, top + 22, str(spec).replace(",)", ")"), "code bold"))
        lines.append(text(left, top + 44, f"{of} per device", "faint"))
        for ((top_row, below), (first, last)), devices in parts.items():
            x, y = left + cell * first, top + 54 + cell * top_row
            lines += part(x, y, cell * (last - first), cell * (below - top_row), devices)
    return svg(610, 390, lines)


def part(x, y, width, height, devices):
    """A part of an array, in the colour of the first device that holds it."""
    yield box(x, y, width, height, colour(devices[0]))
    yield text(x + width / 2, y + height / 2 + 5, ", ".join(map(str, devices)), "middle on")


# ------------------------------------------------------------------ one layer of FSDP


def fsdp():
    """Gather, compute, scatter on four devices."""
    steps = (
        ("at rest", "1/4 of the weights each", False),
        ("all-gather", "all weights of this layer", True),
        ("compute", "gradients of own rows", True),
        ("reduce-scatter", "1/4 of the summed gradients", False),
    )
    lines = [text(250 + 100 * i + 44, 20, f"device {i}", "middle faint") for i in range(4)]
    for step, (name, what, is_full) in enumerate(steps):
        y = 36 + 78 * step
        lines += [text(0, y + 16, name, "bold"), text(0, y + 36, what, "faint")]
        for device, quarter in product(range(4), range(4)):
            x = 250 + 100 * device + 22 * quarter
            held = is_full or quarter == device
            fill = colour(quarter + 4 * (step >= 2)) if held else ""  # weights, then gradients
            lines.append(box(x, y, 22, 40, fill, "" if held else "empty"))
        if step:
            for device in range(4):
                lines += arrow(250 + 100 * device + 44, y - 32, 26)
    return svg(650, 320, lines)


# ------------------------------------------------------------------ a loop

LOOP = """\
 state = model, opt_state
+plan = ts.plan(state, rules, "fsdp=8")
+state = ts.shard(state, plan)

 @eqx.filter_jit
 def step(state, batch):
     model, opt_state = state

     def loss_fn(model):
+        model = ts.unshard(model, plan)
         return mse(model, batch)
     ...
+    state = ts.with_sharding_constraint(
+        state, plan)
     return state, loss"""


def loop():
    """The lines of a loop for one device, and with those that shard it."""
    rows = LOOP.split("\n")
    lines = [text(0, 20, "one device", "bold"), text(308, 20, "FSDP on eight devices", "bold")]
    for i, row in enumerate(rows):
        y = 50 + 21 * i
        if row.startswith("+"):
            lines.append(box(302, y - 15, 366, 21, kind="added"))
        else:
            lines.append(text(0, y, row[1:], "code"))
        lines.append(text(308, y, row[1:], "code"))
    return svg(670, 60 + 21 * len(rows), lines)


# ------------------------------------------------------------------ a tree with its bytes


def tree():
    """The state of the README's loop: for each leaf its bytes, and how many a device holds."""

    def init():
        model = eqx.nn.MLP(64, 64, 512, depth=2, key=jax.random.key(0))
        return {"model": model, "opt_state": optax.adam(1).init(eqx.filter(model, eqx.is_array))}

    rules = [("bias", None), (".*", ts.fsdp("fsdp"))]
    plan = ts.plan(eqx.filter_eval_shape(init), rules, "fsdp=8")
    groups = (
        ("state", ""),
        ("├ model", "model"),
        ("│ ├ layers/0/weight", "model/layers/0/weight"),
        ("│ ├ layers/1/weight", "model/layers/1/weight"),
        ("│ ├ layers/2/weight", "model/layers/2/weight"),
        ("│ └ layers/{0..2}/bias", "model/layers/./bias"),
        ("└ opt_state", "opt_state"),
        ("  ├ 0/mu", "opt_state/0/mu"),
        ("  └ 0/nu", "opt_state/0/nu"),
    )
    largest, width = sum(leaf.bytes for leaf in plan.leaves), 190
    lines = [
        text(456, 20, "total", "right bold"),
        text(560, 20, "per device", "right bold"),
    ]
    for i, (name, pattern) in enumerate(groups):
        leaves = [leaf for leaf in plan.leaves if re.match(pattern, leaf.path)]
        full = sum(leaf.bytes for leaf in leaves)
        held = sum(leaf.bytes_per_device(plan.mesh) for leaf in leaves)
        y = 50 + 26 * i
        lines += [text(0, y, name, "code"), text(456, y, human_bytes(full), "right")]
        lines += [text(560, y, human_bytes(held), "right")]
        scale = width / largest
        lines.append(box(200, y - 12, max(1, full * scale), 14, kind="empty"))
        lines.append(box(200, y - 12, max(1, held * scale), 14, colour(1)))
    return svg(570, 60 + 26 * len(groups), lines)


def logo():
    """A tree, cut into shards."""
    shards = ("32,8 43,27 21,27", "20,29 31,48 9,48", "44,29 55,48 33,48", "22,29 42,29 32,46")
    inside = "".join(f'<polygon points="{points}"/>' for points in shards)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 64 64"><rect width="64" height="64"'
        f' rx="12" fill="#0f766e"/><g fill="white">{inside}</g></svg>\n'
    )


if __name__ == "__main__":
    main()
