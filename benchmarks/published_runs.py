"""Compares what `cost()` says with times that others measured and published.

    python -m benchmarks.published_runs              # those without a result, and the page
    python -m benchmarks.published_runs 32b/v5e-256  # these
    python -m benchmarks.published_runs --page       # only the table

It needs the compiler of TPUs (`pip install 'treeshard[tpu]'`), none of the devices, and some
minutes for each run. It writes published_runs.json after each.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks.page import between_marks
from examples.compile_llama import rms_norm, rotate
from treeshard.programs import CHIPS, Cost
from treeshard.programs._cost import REACHED
from treeshard.programs._links import Links, torus_of
from treeshard.training import jit_step, value_and_grad

HERE = Path(__file__).parent
RESULTS = HERE / "published_runs.json"
PAGE = HERE.parent / "docs" / "guide" / "the-pod-you-do-not-have.md"
MARKS = "published runs"
HEAD = 128  # the width of a head in all of these models

# ------------------------------------------------------------------ the models


class Model(NamedTuple):
    """The sizes of a decoder with gated MLPs."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int


# MaxText's base.yml, with `global_parameter_scale` of 16 and 32.
MAXTEXT_16B = Model(32, 4096, 28672, 64, 64, 32000)
MAXTEXT_32B = Model(32, 8192, 28672, 64, 64, 32000)
LLAMA_8B = Model(32, 4096, 14336, 32, 8, 128256)

FSDP = [("norm", None), ("layers", ts.fsdp("fsdp", skip=(0,))), (".*", ts.fsdp("fsdp"))]
FSDP_TENSOR = [
    ("norm", None),
    ("layers/(q|k|v|gate|up)$", P(None, "fsdp", "tensor")),
    ("layers/(o|down)$", P(None, "tensor", "fsdp")),
    ("head", P("fsdp", "tensor")),
    ("embed", P("tensor", "fsdp")),
    (".*", None),
]


def parameters(model: Model) -> dict[str, Any]:
    width = model.width

    def stacked(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((model.layers, *shape), "float32")

    return {
        "embed": jax.ShapeDtypeStruct((model.vocabulary, width), "float32"),
        "layers": {
            "attention_norm": stacked(width),
            "q": stacked(width, model.heads * HEAD),
            "k": stacked(width, model.kv_heads * HEAD),
            "v": stacked(width, model.kv_heads * HEAD),
            "o": stacked(model.heads * HEAD, width),
            "mlp_norm": stacked(width),
            "gate": stacked(width, model.hidden),
            "up": stacked(width, model.hidden),
            "down": stacked(model.hidden, width),
        },
        "norm": jax.ShapeDtypeStruct((width,), "float32"),
        "head": jax.ShapeDtypeStruct((width, model.vocabulary), "float32"),
    }


def flash_attention(mesh: Any, tokens: int) -> Callable[..., Any]:
    """JAX's kernel for TPUs that MaxText calls with `attention: flash`, on each device's heads."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    sizes = kernels.BlockSizes(
        **{f"block_{name}": 512 for name in names}, use_fused_bwd_kernel=True
    )
    split = P(tuple(axis for axis in mesh.axis_names if axis != "tensor"))
    if "tensor" in mesh.shape:
        split = P(*split, "tensor")

    def attend(q: Any, k: Any, v: Any) -> Any:
        mask = masks.MultiHeadMask([masks.CausalMask((tokens, tokens))] * q.shape[1])
        kernel = kernels.make_splash_mha_single_device(mask, block_sizes=sizes)
        return jax.vmap(kernel)(q * HEAD**-0.5, k, v)

    return jax.shard_map(
        attend, mesh=mesh, in_specs=(split, split, split), out_specs=split, check_vma=False
    )


def layer(x: Any, w: Any, attend: Callable[..., Any], stream: P) -> Any:
    """A layer, whose input and output have the specs `stream`; what policies of `jax.checkpoint`
    may keep has a name."""

    def placed(x: Any) -> Any:
        return ts.with_sharding_constraint(x, stream)

    batch, tokens, _ = x.shape
    x = checkpoint_name(x, "layer_input")
    h = rms_norm(x, w["attention_norm"])
    q, k, v = ((h @ w[name]).reshape(batch, tokens, -1, HEAD) for name in "qkv")
    q, k, v = (
        checkpoint_name(each, name).swapaxes(1, 2)
        for each, name in ((rotate(q), "q"), (rotate(k), "k"), (v, "v"))
    )
    mixed = attend(q, k, v).swapaxes(1, 2).reshape(batch, tokens, -1)
    x += checkpoint_name(placed(mixed @ w["o"]), "out")
    h = rms_norm(x, w["mlp_norm"])
    return placed(x + placed((jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]))


NOTHING = jax.checkpoint_policies.nothing_saveable  # MaxText's `remat_policy: full`
PRODUCTS = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims  # its `minimal`
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["layer_input", "q", "k", "v", "out"],
    offload_src="device",
    offload_dst="pinned_host",
)


def cross_entropy(x: Any, head: Any, labels: Any, parts: int) -> Any:
    """The loss, over some of the tokens at a time: logits of 8B are the largest array of its step.

    Of each part, the logits are kept in bfloat16.
    """
    batch, tokens, width = x.shape

    @partial(jax.checkpoint, policy=PRODUCTS)
    def add(loss: Any, part: Any) -> Any:
        x, labels = part
        logits = (x @ head).astype("float32")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss + losses.mean() / parts, None

    split = (batch, parts, tokens // parts)
    of_each = x.reshape(*split, width).swapaxes(0, 1), labels.reshape(split).swapaxes(0, 1)
    return jax.lax.scan(add, jnp.zeros((), "float32"), of_each)[0]


class Run(NamedTuple):
    """A training step that others timed.

    Attributes:
        name: What the page calls it.
        model: Its sizes.
        topology: The slice.
        mesh: Its axes.
        rows: Sequences per chip and step.
        tokens: The length of a sequence.
        keeps: What `jax.checkpoint` keeps of a layer, and what the page says of it.
        parts: How many parts of the tokens the loss takes one after another.
        tflops: Teraflops per second and chip as published, by the operations of the model.
        seconds: The time of a step, if that is published instead.
    """

    name: str
    model: Model
    topology: str
    mesh: str
    rows: int
    tokens: int
    keeps: Any
    parts: int = 1
    tflops: float | None = None
    seconds: float | None = None

    @property
    def published_seconds(self) -> float:
        """The time of a step. MaxText counts operations so (`calculate_tflops_training_per_device`
        of its first releases): three passes, attention without the mask, nothing repeated."""
        if self.seconds is not None:
            return self.seconds
        assert self.tflops is not None
        model, tokens = self.model, self.rows * self.tokens
        heads = 2 * HEAD * (model.heads + model.kv_heads)
        weights = model.layers * model.width * (heads + 3 * model.hidden)
        weights += model.width * model.vocabulary
        attention = model.layers * 2 * self.tokens * model.heads * HEAD
        return 6 * (weights + attention) * tokens / (self.tflops * 1e12)

    @property
    def kernels(self) -> dict[str, int]:
        """The operations of the attention kernels, which skip what is masked: two products of each
        pair of a query and a key forward, and five backward."""
        product = self.rows * self.model.heads * self.tokens**2 * HEAD
        return {"splash_mha_fwd": 2 * product, "splash_mha_dkv": 5 * product}


# MaxText's configs/v5e and configs/v5p with their READMEs, and the recipe Llama3.1-8B-MaxText/v6e-8
# of AI-Hypercomputer/tpu-recipes.
RUNS = {
    "16b/v5e-256": Run(
        "MaxText 16B", MAXTEXT_16B, "v5e-256", "fsdp=256", 6, 2048, NOTHING, tflops=120
    ),
    "32b/v5e-256": Run(
        "MaxText 32B", MAXTEXT_32B, "v5e-256", "fsdp=256", 4, 2048, NOTHING, tflops=132
    ),
    "32b/v5p-128": Run(
        "MaxText 32B", MAXTEXT_32B, "v5p-128", "fsdp=16,tensor=4", 6, 2048, PRODUCTS, tflops=328
    ),
    "8b/v6e-8": Run(
        "Llama 3.1 8B", LLAMA_8B, "v6e-8", "fsdp=8", 3, 8192, OFFLOADED, parts=8, seconds=3.443
    ),
}
# The recipe microbenchmarks/trillium/collectives has the bandwidth of one all-reduce, of the bytes
# that a device sends in a ring.
PSUM, PSUM_TOPOLOGY, PSUM_SIDE, PSUM_BANDWIDTH = "psum/v6e-256", "v6e-256", 17408, 235.76e9


def make(run: Run) -> tuple[Any, Any, Any]:
    """A step of AdamW in float32, which computes in bfloat16."""
    mesh = ts.make_mesh(run.mesh, topology=run.topology)
    optimizer = optax.adamw(3e-5, weight_decay=0.1)
    params = parameters(run.model)
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    plan = ts.plan(state, FSDP_TENSOR if "tensor" in mesh.shape else FSDP, mesh)
    rows = P("fsdp")
    # MaxText's rule for `activation_embed` splits what is between layers along `tensor`.
    stream = P("fsdp", None, "tensor") if "tensor" in mesh.shape else rows
    attend = flash_attention(mesh, run.tokens)

    def use(weights: Any) -> Any:
        return ts.unshard(jax.tree.map(lambda w: w.astype("bfloat16"), weights))

    def loss(params: Any, batch: Any) -> Any:
        @partial(jax.checkpoint, policy=run.keeps)
        def body(x: Any, weights: Any) -> Any:
            return layer(x, use(weights), attend, stream), None

        x = ts.with_sharding_constraint(ts.lookup(use(params["embed"]), batch[:, :-1]), stream)
        x, _ = jax.lax.scan(body, x, params["layers"])
        x = rms_norm(x, params["norm"].astype(x.dtype))
        return cross_entropy(x, use(params["head"]), batch[:, 1:], run.parts)

    @jit_step(plan=plan, batch=rows)
    def step(state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(loss)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    batch = jax.ShapeDtypeStruct((run.rows * mesh.size, run.tokens + 1), "int32")
    return step, plan.structs, batch


# ------------------------------------------------------------------ what is said


class Said(NamedTuple):
    """A result, in seconds; `least` and `most` are those of the error bar."""

    name: str
    topology: str
    mesh: str
    published: float
    seconds: float
    least: float
    most: float
    compute: float
    used: dict[str, str]

    @property
    def reached(self) -> float:
        """The share of the peaks that the chip reached, by what is said of the program."""
        return self.seconds / self.published


def said_of(run: Run, cost: Cost) -> Said:
    assert cost.range is not None, cost.unknown
    assert cost.seconds is not None
    assert cost.compute_seconds is not None
    return Said(
        f"{run.name}, {run.rows} x {run.tokens:,} tokens a chip",
        run.topology,
        run.mesh,
        run.published_seconds,
        cost.seconds,
        *cost.range,
        cost.compute_seconds,
        _versions(),
    )


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "libtpu")}


def measure(name: str) -> Said:
    """Compiles a run, and reads its program."""
    if name == PSUM:
        return measure_psum()
    run = RUNS[name]
    step, state, batch = make(run)
    return said_of(run, step.compile(state, batch).cost(kernels=run.kernels))


def measure_psum() -> Said:
    mesh = ts.make_mesh("fsdp=256", topology=PSUM_TOPOLOGY)
    sum_up = jax.shard_map(
        lambda x: jax.lax.psum(x, "fsdp"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    sharding = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((PSUM_SIDE, PSUM_SIDE), "bfloat16", sharding=sharding)
    [moved] = ts.communication.collectives(jax.jit(sum_up).lower(x).compile())
    chip = CHIPS["v6e"]
    links = Links(chip, set(), torus_of(mesh.devices, mesh.axis_names, chip))
    seconds = links.seconds(moved.kind, moved.wire_bytes, moved.axes, moved.links)
    assert seconds is not None
    assert moved.wire_bytes is not None
    assert moved.bytes is not None
    return Said(
        f"all-reduce of {moved.bytes / 2**20:,.0f} MiB",
        PSUM_TOPOLOGY,
        "fsdp=256",
        moved.wire_bytes / PSUM_BANDWIDTH,
        seconds,
        links.least_seconds([(moved.wire_bytes, moved.axes)]),
        seconds / REACHED,
        0.0,
        _versions(),
    )


# ------------------------------------------------------------------ the page


def read_results() -> dict[str, Said]:
    if not RESULTS.exists():
        return {}
    return {name: Said(**one) for name, one in json.loads(RESULTS.read_text()).items()}


def write_results(results: dict[str, Said]) -> None:
    rows = {name: results[name]._asdict() for name in [*RUNS, PSUM] if name in results}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


HEADS = ("run", "slice, mesh", "published", "said", "error bar", "said / published", "matrix units")


def table(results: dict[str, Said]) -> str:
    """The rows, as Markdown."""
    lines = [HEADS, ("---",) * len(HEADS)]
    for one in results.values():
        lines.append(
            (
                one.name,
                f"{one.topology}, `{one.mesh}`",
                _text(one.published),
                _text(one.seconds),
                f"{_text(one.least)} to {_text(one.most)}",
                f"{one.reached:.2f}",
                f"{one.compute / one.published:.0%}" if one.compute else "",
            )
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2f} ms"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="by default those without a result")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.one)._asdict()))
        return
    results = read_results()
    names = [] if args.page else args.names or [x for x in [*RUNS, PSUM] if x not in results]
    for name in names:  # each in a process of its own: they take gigabytes
        print(f"== {name}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.published_runs", "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[name] = Said(**json.loads(done.stdout.splitlines()[-1]))
        write_results(results)
    PAGE.write_text(between_marks(PAGE.read_text(), table(read_results()), MARKS))


if __name__ == "__main__":
    main()
