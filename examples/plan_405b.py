"""Plans the training state of a 405B-parameter decoder for thousands of devices, without any.

    python examples/plan_405b.py
    python examples/plan_405b.py --memory 80GB --mesh "data=16,fsdp=256,tensor=8"

It uses shapes only: parameters, gradients and AdamW's two moments. It compares several meshes:
the bytes per device, whether they fit, which leaves are replicated, and why.
"""

import argparse
import time

import jax
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import treeshard as ts

# Llama 3.1 405B: https://arxiv.org/abs/2407.21783, table 3
LAYERS, WIDTH, FFN, HEADS, KV_HEADS, VOCAB = 126, 16384, 53248, 128, 8, 128256
HEAD_WIDTH = WIDTH // HEADS

MESHES = [
    "data=128,fsdp=4,tensor=8",
    "data=8,fsdp=64,tensor=8",
    "data=8,fsdp=256,tensor=8",
    "data=8,fsdp=512,tensor=16",
    "fsdp=1024,tensor=64",
]

# Weights that expand the activations' last dim are split by column, those that reduce it by row.
RULES = [
    ("norm", None),
    (r"attn/(q|k|v)$|mlp/(gate|up)$|head", P("fsdp", "tensor")),
    (r"attn/o$|mlp/down$|embed", P("tensor", "fsdp")),
]


def decoder(dtype):
    """The parameters, by shape."""

    def weight(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def block():
        return {
            "attn": {
                "q": weight(WIDTH, HEADS * HEAD_WIDTH),
                "k": weight(WIDTH, KV_HEADS * HEAD_WIDTH),
                "v": weight(WIDTH, KV_HEADS * HEAD_WIDTH),
                "o": weight(HEADS * HEAD_WIDTH, WIDTH),
            },
            "mlp": {
                "gate": weight(WIDTH, FFN),
                "up": weight(WIDTH, FFN),
                "down": weight(FFN, WIDTH),
            },
            "attn_norm": weight(WIDTH),
            "mlp_norm": weight(WIDTH),
        }

    return {
        "embed": weight(VOCAB, WIDTH),
        "layers": [block() for _ in range(LAYERS)],
        "norm": weight(WIDTH),
        "head": weight(WIDTH, VOCAB),
    }


def training_state(dtype="bfloat16"):
    """Parameters and gradients in `dtype`, AdamW's moments in float32."""
    optimizer = optax.adamw(1e-4)
    moments = jax.eval_shape(optimizer.init, decoder("float32"))
    return {"params": decoder(dtype), "grads": decoder(dtype), "opt_state": moments}


def mesh_of(text, kind):
    """A mesh without devices, of axes of one kind."""
    sizes = dict(axis.split("=") for axis in text.split(","))
    return AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes), (kind,) * len(sizes))


def gigabytes(count):
    return f"{count / 1e9:,.2f} GB"


PARTS = ("params", "grads", "opt_state")


def held_on_a_device(plan):
    """The bytes per device of each part of the state, of all, and of replicated leaves."""
    held = dict.fromkeys((*PARTS, "in all", "of it whole"), 0)
    for leaf in plan.leaves:
        count = leaf.bytes_per_device(plan.mesh)
        held[leaf.path.split("/")[0]] += count
        held["in all"] += count
        held["of it whole"] += count if count == leaf.bytes else 0
    return held


def compare(plans, memory):
    """Prints one line per mesh: devices, bytes per device, and whether they fit."""
    rows = [("mesh", "devices", *PARTS, "in all", "of it whole", "fits", "planned in")]
    for text, (plan, seconds) in plans.items():
        held = held_on_a_device(plan)
        fits = "yes" if held["in all"] <= memory else "NO"
        count, took = f"{plan.mesh.size:,}", f"{seconds * 1e3:.0f} ms"
        rows.append((text, count, *map(gigabytes, held.values()), fits, took))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", action="append", help="a mesh to plan for; may be repeated")
    parser.add_argument("--memory", default="80GB", help="memory of a device for the state")
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    memory = float(args.memory.upper().removesuffix("GB")) * 1e9
    state = training_state()
    plans = {}
    kind = AxisType.Explicit if args.explicit else AxisType.Auto
    for text in args.mesh or MESHES:
        start = time.perf_counter()
        plan = ts.plan(state, RULES, mesh_of(text, kind))
        plans[text] = plan, time.perf_counter() - start

    total = sum(leaf.bytes for leaf in next(iter(plans.values()))[0].leaves)
    params = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    print(f"{params / 1e9:.1f}B parameters; with gradients and moments {total / 1e12:.2f} TB\n")
    compare(plans, memory)

    for text, (plan, _) in plans.items():
        print(f"\nOn {text}:")
        for finding in plan.findings or ["no findings: no large leaf is replicated."]:
            print(f"  {finding}")
    print(f"\nEach leaf of the last plan, with the rule that decided it:\n\n{plan}")
    return plans


if __name__ == "__main__":
    main()
