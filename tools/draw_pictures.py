"""Draws the pictures of the README and of the docs from the demo.

    python -m tools.draw_pictures           # as `make docs`
    python -m tools.draw_pictures --loss    # also the loss, after a short run

Writes to docs/pictures: the plan as it prints, the communication of a step as planned and as
compiled (`step.communication`), and the model of the quick start (`ts.draw`). Every machine draws
the same files. The curve of the loss differs between machines, because processors round differently
and the text is the source of the installed standard library. It is therefore drawn on request.
"""

import argparse
from pathlib import Path

import equinox as eqx
import jax
import matplotlib
import numpy as np
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import treeshard as ts
from examples import train_fsdp
from tools import draw_diagrams
from tools.draw_diagrams import themes
from tools.pages import ROOT, blocks
from treeshard._inspection.draw import as_svg
from treeshard.training import init_sharded, jit_step

PLANNED, COMPILED = "#7570b3", "#1b9e77"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), help="the folder")
    parser.add_argument("--loss", action="store_true", help="train, and draw the loss too")
    chosen, rest = parser.parse_known_args(argv)
    args = train_fsdp.parse(rest)
    ts.simulate_devices(8)
    chosen.to.mkdir(parents=True, exist_ok=True)
    draw_diagrams.main([f"--to={chosen.to}"])

    mesh = ts.make_mesh(args.mesh)
    optimizer = train_fsdp.make_optimizer(args)
    init, key = train_fsdp.make_init(args, optimizer), jax.random.key(args.seed)
    state, plan = init_sharded(init, key, rules=train_fsdp.RULES, mesh=mesh)
    train_step = train_fsdp.make_train_step(optimizer)
    step = jit_step(train_step, plan, batch=P(mesh.axis_names))
    text, _ = train_fsdp.read_text(args.text_bytes)
    first = next(train_fsdp.batches(text, args))
    draw_sharding(state, step, first, mesh, chosen.to)
    ts.draw(quick_start(), to=chosen.to / "quick-start.svg")
    if not chosen.loss:
        return

    alone = eqx.filter_jit(train_fsdp.make_train_step(optimizer), donate="all-except-first")
    losses = {
        f"{mesh.size} devices": losses_of(step, state, text, args),
        "one device": losses_of(alone, eqx.filter_jit(init)(key), text, args),
    }
    draw_losses(losses, chosen.to / "loss.svg")


def draw_sharding(state, step, batch, mesh, folder):
    # The optimizer's moments are sharded like the parameters, so drawing these is enough.
    plan = ts.plan(state.model, train_fsdp.RULES, mesh)
    (folder / "plan.svg").write_text(as_svg(str(plan), mesh.axis_names), encoding="utf-8")
    moved = step.communication(state, batch)
    draw_communication(moved, folder / "communication.svg")


def quick_start():
    """The model of docs/quick-start.md, after the blocks that make and train it."""
    names = {}
    for block in blocks((ROOT / "docs" / "quick-start.md").read_text())[:3]:
        exec(block.code, names)
    return names["state"]["model"]


def losses_of(step, state, text, args):
    """Bits per byte, step by step; to 0.01, since the last digits differ between machines."""
    losses = []
    for _, batch in zip(range(args.steps), train_fsdp.batches(text, args), strict=False):
        state, loss = step(state, batch)
        losses.append(float(loss) / np.log(2))
    return np.round(losses, 2)


def draw_communication(moved, path):
    """Bytes and counts per kind of collective, as planned and as compiled."""
    rows = moved.rows[::-1]
    figure = Figure(figsize=(8, 0.6 + 0.8 * len(rows)), layout="constrained")
    axes = figure.add_subplot(xlabel="MiB per step", title="communication of a step")
    for name, shift, colour in [("planned", 0.2, PLANNED), ("compiled", -0.2, COMPILED)]:
        counts = [row.planned_count if name == "planned" else row.count for row in rows]
        sizes = [row.planned_bytes if name == "planned" else row.bytes for row in rows]
        places = np.arange(len(rows)) + shift
        bars = axes.barh(places, [(n or 0) / 2**20 for n in sizes], 0.36, color=colour, label=name)
        axes.bar_label(bars, [f"{'?' if n is None else n} x" for n in counts], padding=4)
    names = [f"{row.kind}\n{', '.join(row.axes or ['unknown axes'])}" for row in rows]
    axes.set_yticks(range(len(rows)), labels=names)
    axes.margins(x=0.1)
    axes.legend(frameon=False)
    save(figure, path)


def draw_losses(losses, path):
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte", title="training loss")
    for (name, found), style in zip(losses.items(), ["-", ":"], strict=True):
        axes.plot(np.arange(1, len(found) + 1), found, style, label=name, linewidth=2)
    axes.legend(frameon=False)
    save(figure, path)


def save(figure, path):
    """Saves text as text, and the same figure as the same file, in the colours of the theme."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "treeshard"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None}, transparent=True)
    path.write_text(themed(path.read_text(encoding="utf-8")), encoding="utf-8")


def themed(svg):
    style = f"text {{ fill: var(--ink) }} {themes()} </style>"
    return svg.replace("</style>", style, 1).replace("#000000", "var(--ink)")


if __name__ == "__main__":
    main()
