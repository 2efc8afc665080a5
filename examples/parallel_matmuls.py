"""Four ways to split a matrix product over 2 x 4 devices, compared with the product on one.

    python examples/parallel_matmuls.py

FSDP splits rows of the input and gathers weights; tensor parallelism splits weights and gathers
activations. The first three run once per device, on its shards (`jax.shard_map`); the fourth says
how each array is split where it is used, and the compiler derives the rest.
"""

import argparse
import re
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import column_parallel, gather_params, row_parallel


def product(x, up, down):
    """The computation on one device."""
    return jax.nn.relu(x @ up) @ down


def fsdp(x, up, down):
    """Each device has some rows of x, and shards of the weights, gathered before use."""
    up, down = gather_params((up, down), "data", P("data"))
    return product(x, up, down)


def tensor_parallel(x, up, down):
    """Each device has some hidden units: columns of `up`, rows of `down`.

    The features of x are split too: they are all-gathered at the start, and the result is
    reduce-scattered.
    """
    hidden = jax.nn.relu(column_parallel(x, up, "model", dim=-1))
    return row_parallel(hidden, down, "model", dim=-1)


def both(x, up, down):
    """Tensor parallelism with weights that are also split over the other axis, to save memory."""
    up, down = gather_params((up, down), "data", (P("data", "model"), P("model", "data")))
    return tensor_parallel(x, up, down)


def constrained(x, up, down):
    """The third as it is written for one device, with the shardings in which arrays are used."""
    x, up, down = ts.with_sharding_constraint((x, up, down), USED)
    return ts.matmul(jax.nn.relu(x @ up), down)


# The specs of x, up and down, and of the result.
FSDP = (P("data"), P("data"), P("data")), P("data")
TENSOR = (P(None, "model"), P(None, "model"), P("model")), P(None, "model")
USED = P("data"), P(None, "model"), P("model")
BOTH = (P("data", "model"), P("data", "model"), P("model", "data")), P("data", "model")


def by_hand(mesh, f, in_specs, out_specs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def by_jit(mesh, in_specs, out_specs):
    shardings = tuple(NamedSharding(mesh, spec) for spec in in_specs)
    return jax.jit(
        constrained, in_shardings=shardings, out_shardings=NamedSharding(mesh, out_specs)
    )


def sent(compiled):
    """The collectives of the compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    counts = Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"


def parse(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--mesh", default="data=2,model=4")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--explicit", action="store_true", help="a mesh with Explicit axes")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    ts.simulate_devices(8)  # JAX still prefers real accelerators
    kind = "explicit" if args.explicit else "auto"
    mesh = ts.make_mesh(args.mesh, axis_types=kind)
    shapes = (args.rows, args.features), (args.features, args.hidden), (args.hidden, args.features)
    rng = np.random.default_rng(0)
    inputs = tuple((rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32) for s in shapes)
    wanted = np.asarray(product(*map(jnp.asarray, inputs)))

    ways = {
        "fsdp": (by_hand(mesh, fsdp, *FSDP), FSDP[0]),
        "tensor parallel": (by_hand(mesh, tensor_parallel, *TENSOR), TENSOR[0]),
        "fsdp and tensor parallel": (by_hand(mesh, both, *BOTH), BOTH[0]),
        "the same by jit": (by_jit(mesh, *BOTH), BOTH[0]),
    }
    wrong = False
    for name, (f, specs) in ways.items():
        placed = ts.shard(inputs, specs, mesh)
        with jax.set_mesh(mesh):
            out, compiled = f(*placed), f.lower(*placed).compile()
        error = np.abs(ts.gather(out) - wanted).max() / np.abs(wanted).max()
        wrong |= bool(error > 1e-5)
        print(f"{name:<25} off by {error:.1e}; result sharded as {out.sharding.spec}")
        print(f"{'':<25} sends {sent(compiled)}")
    if wrong:
        sys.exit("a product on several devices differs from the product on one")


if __name__ == "__main__":
    main()
