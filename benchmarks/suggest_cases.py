"""Compares the first suggestion of `ts.suggest` with all candidates compiled, in 12 cases.

Each candidate is compiled once, and what `ts.suggest` would have compiled is taken from them.

    python -m benchmarks.suggest_cases                  # those without a result, and the page
    python -m benchmarks.suggest_cases llama-1b/h100:8  # these
    python -m benchmarks.suggest_cases --page           # only the table of parallelism.md

It needs the compilers (`pip install 'treeshard[tpu,cuda]'`), none of the devices, and hours. It
writes suggest_cases.json after each case.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from examples import compile_llama as llama
from treeshard.programs import Strategy, Suggestion, Suggestions
from treeshard.programs._suggest import compile_in_turn, in_order, probes_of
from treeshard.programs._suggestions import CLOSE, ranked
from treeshard.training import jit_step, value_and_grad

HERE = Path(__file__).parent
RESULTS = HERE / "suggest_cases.json"
PAGE = HERE.parent / "docs" / "how-to" / "parallelism.md"
NAMES = ("DP", "ZeRO-1", "FSDP", "HSDP")

# ------------------------------------------------------------------ the models


def stacked(layers: int, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct((layers, *shape), "float32") for name, shape in shapes.items()
    }


def make_step(mesh: Any, rules: Any, params: Any, loss: Callable[..., Any], batch: Any) -> Any:
    """A step of AdamW, as `ts.suggest` takes it."""
    optimizer = optax.adamw(3e-4)
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    plan = ts.plan(state, rules, mesh)
    rows = P(tuple(axis for axis in mesh.axis_names if axis != "tensor"))

    @jit_step(plan=plan, batch=rows)
    def step(state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(partial(loss, rows=rows))(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, plan.structs, batch


def use(weights: Any) -> Any:
    return ts.unshard(jax.tree.map(lambda w: w.astype("bfloat16"), weights))


def run_layers(layer: Callable[..., Any], x: Any, weights: Any, rows: Any, remat: bool) -> Any:
    def body(x: Any, weights: Any) -> Any:
        return ts.with_sharding_constraint(layer(x, use(weights)), rows), None

    x = ts.with_sharding_constraint(x, rows)
    return jax.lax.scan(jax.checkpoint(body) if remat else body, x, weights)[0]


def attention(x: Any, w: Any, heads: int, causal: bool) -> Any:
    h = llama.rms_norm(x, w["norm1"])
    q, k, v = ((h @ w[name]).reshape(*x.shape[:2], heads, -1) for name in "qkv")
    return x + jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape) @ w["o"]


def make_vit(mesh: Any, rules: Any, remat: bool, global_batch: int) -> Any:
    """ViT-L/16 on images of 256 x 256, as 256 patches."""
    layers, width, heads = 24, 1024, 16
    square = (width, width)
    params = {
        "patch": jax.ShapeDtypeStruct((768, width), "float32"),
        "layers": stacked(layers, norm1=(width,), q=square, k=square, v=square, o=square,
                          norm2=(width,), up=(width, 4 * width), down=(4 * width, width)),
        "head": jax.ShapeDtypeStruct((width, 1000), "float32"),
    }  # fmt: skip

    def layer(x: Any, w: Any) -> Any:
        x = attention(x, w, heads, causal=False)
        return x + jax.nn.gelu(llama.rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"]

    def loss(params: Any, images: Any, rows: Any) -> Any:
        x = images @ use(params["patch"])
        x = run_layers(layer, x, params["layers"], rows, remat)
        logits = (x.mean(axis=1) @ use(params["head"])).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.zeros(logits.shape[0], int)
        ).mean()

    return make_step(
        mesh, rules, params, loss, jax.ShapeDtypeStruct((global_batch, 256, 768), "bfloat16")
    )


def make_moe(mesh: Any, rules: Any, remat: bool, global_batch: int) -> Any:
    """8 experts per layer, each of which computes all tokens (dense dispatch); 1.2B parameters."""
    layers, width, heads, experts, hidden, tokens, vocabulary = 16, 1024, 16, 8, 2816, 1024, 32000
    square = (width, width)
    params = {
        "embed": jax.ShapeDtypeStruct((vocabulary, width), "float32"),
        "layers": stacked(layers, norm1=(width,), q=square, k=square, v=square, o=square,
                          norm2=(width,), router=(width, experts), up=(experts, width, hidden),
                          down=(experts, hidden, width)),
    }  # fmt: skip

    def layer(x: Any, w: Any) -> Any:
        x = attention(x, w, heads, causal=True)
        h = llama.rms_norm(x, w["norm2"])
        weight = jax.nn.softmax((h @ w["router"]).astype("float32")).astype(h.dtype)
        inside = jax.nn.silu(jnp.einsum("btd,edh->bteh", h, w["up"])) * weight[..., None]
        return x + jnp.einsum("bteh,ehd->btd", inside, w["down"])

    def loss(params: Any, batch: Any, rows: Any) -> Any:
        table = use(params["embed"])
        x = run_layers(layer, table[batch[:, :-1]], params["layers"], rows, remat)
        logits = (x @ table.T).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return make_step(
        mesh, rules, params, loss, jax.ShapeDtypeStruct((global_batch, tokens + 1), "int32")
    )


def llama_of(size: llama.Size, tokens: int) -> Callable[..., Any]:
    def make(mesh: Any, rules: Any, remat: bool, global_batch: int) -> Any:
        return llama.make_llama(
            mesh, rules, size=size, remat=remat, global_batch=global_batch, tokens=tokens
        )

    return make


# ------------------------------------------------------------------ the cases

COLUMNS = ("layers/(q|k|v|up)$", P(None, "fsdp", "tensor"))
ROWS = ("layers/(o|down)$", P(None, "tensor", "fsdp"))
REST = [("norm|router", None), (".*", ts.fsdp("fsdp"))]
TENSOR = {
    "llama": Strategy("FSDP x TP", ("fsdp", "tensor"), llama.TENSOR_PARALLEL, {"tensor": 4}),
    "vit": Strategy("FSDP x TP", ("fsdp", "tensor"), [COLUMNS, ROWS, *REST], {"tensor": 16}),
    "moe": Strategy(
        "FSDP x EP",
        ("fsdp", "tensor"),
        [("layers/(up|down)$", P(None, "tensor", "fsdp")), *REST],
        {"tensor": 8},
    ),
}


class Case(NamedTuple):
    """A model on devices.

    Attributes:
        model: For the page.
        make: `make(mesh, rules, remat, global_batch)`.
        topology: The devices.
        batch: Examples per step, of all devices.
        tensor: A strategy with rules for this model, or `None`.
        remat: Whether candidates with and without `remat` are compared; otherwise all have it.
    """

    model: str
    make: Callable[..., Any]
    topology: str
    batch: int
    tensor: Strategy | None = None
    remat: bool = False


LLAMA_SMALL = llama_of(llama.Size(12, 768, 2048, 12, 4, 32000), 1024)
LLAMA_1B = llama_of(llama.SIZES["1b"], 2048)
LLAMA_8B = llama_of(llama.SIZES["8b"], 4096)
LLAMA_70B = llama_of(llama.SIZES["70b"], 4096)
CASES = [
    Case("Llama 0.1B", LLAMA_SMALL, "h100:8", 64, TENSOR["llama"], remat=True),
    Case("ViT-L 0.3B", make_vit, "h100:8", 256, TENSOR["vit"], remat=True),
    Case("MoE 8 x 0.15B", make_moe, "h100:8", 64, TENSOR["moe"]),
    Case("Llama 1B", LLAMA_1B, "h100:8", 32, TENSOR["llama"]),
    Case("Llama 8B", LLAMA_8B, "h100:2x8", 32),
    Case("Llama 8B", LLAMA_8B, "v5e-256", 256),
    Case("Llama 0.1B", LLAMA_SMALL, "v5e-8", 64),
    Case("ViT-L 0.3B", make_vit, "v5e-8", 256),
    Case("Llama 1B", LLAMA_1B, "v5e-16", 16),
    Case("Llama 70B", LLAMA_70B, "v5p-512", 256),
    Case("MoE 8 x 0.15B", make_moe, "v5e-64", 64),
    Case("Llama 8B", LLAMA_8B, "v5p-128", 64),
]


def name_of(case: Case) -> str:
    return f"{case.model.replace(' ', '-').lower()}/{case.topology}"


def suggested(case: Case, top: int) -> Suggestions:
    def with_remat(mesh: Any, rules: Any, global_batch: int) -> Any:
        return case.make(mesh, rules, True, global_batch)

    return ts.suggest(
        case.make if case.remat else with_remat,
        topology=case.topology,
        global_batch=case.batch,
        strategies=[*NAMES, *([case.tensor] if case.tensor else [])],
        top=top,
        progress=True,
    )


def measure(case: Case) -> dict[str, Any]:
    """Compiles all that may fit, and finds what would have been suggested."""
    every = suggested(case, 999)
    return result_of(case, [*every.rows, *every.losers], every.target)


def result_of(case: Case, every: Sequence[Suggestion], target: str) -> dict[str, Any]:
    first = first_of(case, every)
    rows = [row_of(one) for one in ranked(every, target, None).rows]
    lost = {str(one.candidate): one.outcome for one in every if one.lost}
    return {
        "model": case.model,
        "topology": case.topology,
        "devices": target,
        "batch": case.batch,
        "with": {name: version(name) for name in ("jax", "libtpu", "jax-cuda12-plugin")},
        "candidates": len(every),
        "suggested": row_of(first),
        "least_seconds": min(row["seconds"] for row in rows),
        "rows": rows,
        "lost": lost,
    }


def first_of(case: Case, every: Sequence[Suggestion], top: int = 5) -> Suggestion:
    """The first suggestion of `ts.suggest`, which compiles only some."""
    judged = {str(one.candidate): one for one in every if one.estimate is not None}
    offered = {"remat": (False, True)} if case.remat else {}
    order = in_order([replace(one, verdict=None, reason=None) for one in judged.values()])
    compile_in_turn(order, top, probes_of(offered), lambda one: judged[str(one.candidate)])
    first = ranked(order, case.topology, None).best
    assert first is not None
    return first


def row_of(one: Suggestion) -> dict[str, Any]:
    known = one.verdict
    assert known is not None
    return {
        "strategy": one.candidate.strategy.name,
        "mesh": one.candidate.described,
        "need": known.need,
        "capacity": known.capacity,
        "planned": known.planned,
        "moved": known.moved,
        "exposed": known.exposed,
        "exposed_seconds": known.exposed_seconds,
        "seconds": known.seconds,
        "findings": list(known.findings),
    }


# ------------------------------------------------------------------ the page


def holds(result: dict[str, Any]) -> bool:
    """Whether the first suggestion is as fast as the fastest of all that fit, within 3%."""
    return result["suggested"]["seconds"] <= CLOSE * result["least_seconds"]


def unexplained(result: dict[str, Any]) -> list[str]:
    """Programs that move other bytes than their plans, without a finding that says so."""
    rows = [row for row in result["rows"] if not row["findings"]]
    return [f"{row['strategy']} {row['mesh']}" for row in rows if row["planned"] != row["moved"]]


def table(results: dict[str, Any]) -> str:
    """The decision table, as Markdown, with what it is worth."""
    heads = ["model", "devices", "batch", "take", "memory of a device", "time", "exposed"]
    lines = [heads, ["---"] * len(heads)]
    for one in results.values():
        best = one["suggested"]
        lines.append(
            [
                one["model"],
                one["topology"],
                str(one["batch"]),
                f"{best['strategy']}, `{best['mesh']}`",
                f"{best['need'] / 2**30:.1f} of {best['capacity'] / 2**30:.1f} GiB",
                f"{1000 * best['seconds']:,.0f} ms",
                f"{1000 * best['exposed_seconds']:,.0f} ms",
            ]
        )
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    left = len(CASES) - len(results)
    return NOTE.format(
        rows=rows,
        compiled=sum(len(one["rows"]) for one in results.values()),
        count=sum(holds(one) for one in results.values()),
        cases=len(results),
        left=f", and {left} more that have no result yet" if left else "",
    )


NOTE = """\
{rows}

`suggest` chose these. All {compiled:,} candidates that fit were compiled too: in {count} of {cases}
cases its first suggestion is the fastest of all, or at most 3% slower. `batch` is that of all
devices, `time` is computed from published peak speeds, not measured, and `exposed` is the part of
it in which a device waits for others.
`python -m benchmarks.suggest_cases` compiles them again{left}. On v5e-256 and v5p, gradients were
all-reduced then; now [they are scattered](../guide/the-pod-you-do-not-have.md), which sends fewer
bytes and needs less memory.
"""


def between_marks(text: str, made: str, name: str = "table") -> str:
    """A page, with what a script made for the place that it marks."""
    pattern = rf"(?s)(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    return re.sub(pattern, lambda at: f"{at[1]}{made}{at[2]}", text)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="by default those without a result")
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cases = {name_of(case): case for case in CASES}
    names = [] if args.page else args.names or [name for name in cases if name not in results]
    for name in names:
        print(f"== {name}", file=sys.stderr, flush=True)
        results[name] = measure(cases[name])
        results = {name: results[name] for name in cases if name in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(name, "holds" if holds(results[name]) else "DOES NOT HOLD", flush=True)
    PAGE.write_text(between_marks(PAGE.read_text(), table(results)))


if __name__ == "__main__":
    main()
