"""What FSDP by hand computes, sends, holds and costs: python -m benchmarks.bench_manual

A decoder of 12 scanned layers under `jax.checkpoint`, on 8 simulated devices. Bytes are read
off the compiled programs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Figure, Row, medians, options, report
from treeshard import manual
from treeshard.training import jit_step

LAYERS, WIDTH, HEADS, VOCAB, TIME, BATCH, LR = 12, 256, 4, 256, 32, 16, 0.1
Tree = dict[str, Any]


# ------------------------------------------------------------------ the model


def make_params(layers: int = LAYERS) -> Tree:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / math.sqrt(shape[-2])).astype(np.float32)

    return {
        "embed": normal(VOCAB, WIDTH),
        "layers": {
            "norm": np.ones((layers, 2, WIDTH), np.float32),
            "qkv": normal(layers, WIDTH, 3 * WIDTH),
            "out": normal(layers, WIDTH, WIDTH),
            "up": normal(layers, WIDTH, 4 * WIDTH),
            "down": normal(layers, 4 * WIDTH, WIDTH),
        },
        "norm": np.ones(WIDTH, np.float32),
        "head": normal(WIDTH, VOCAB),
    }


RULES = [("norm", None), ("layers", ts.fsdp("fsdp", skip=(0,))), (".*", ts.fsdp("fsdp"))]


def normalized(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


def block(x: Any, w: Tree) -> Any:
    q, k, v = jnp.split(normalized(x, w["norm"][0]) @ w["qkv"], 3, -1)
    split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)  # noqa: E731
    mixed = jax.nn.dot_product_attention(split(q), split(k), split(v), is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(normalized(x, w["norm"][1]) @ w["up"]) @ w["down"]


def as_it_is(tree: Any) -> Any:
    return tree


def mean_loss(
    params: Tree,
    tokens: Any,
    layer: Callable[[Any], Any] = as_it_is,
    rest: Callable[[Any], Any] = as_it_is,
) -> Any:
    """Cross-entropy; `layer` and `rest` gather a layer's weights and all the others."""
    others = rest({name: params[name] for name in ("embed", "norm", "head")})

    @jax.checkpoint
    def body(x: Any, weights: Any) -> Any:
        return block(x, layer(weights)), None

    x, _ = lax.scan(body, others["embed"][tokens[:, :-1]], params["layers"])
    logits = jax.nn.log_softmax(normalized(x, others["norm"]) @ others["head"])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def descend(params: Tree, grads: Tree) -> Tree:
    return jax.tree.map(lambda x, g: x - LR * g, params, grads)


# ------------------------------------------------------------------ four ways to step


def by_hand(mesh: Mesh, specs: Tree, check_vma: bool = True, scanned: bool = True) -> Any:
    """With treeshard; `scanned` gathers layer by layer, else everything is gathered in front."""
    gather = partial(manual.gather_params, axis_name="fsdp")
    loss = partial(
        mean_loss,
        layer=partial(gather, specs=ts.layer_specs(specs["layers"])),
        rest=partial(gather, specs={name: specs[name] for name in ("embed", "norm", "head")}),
    )
    grad = manual.value_and_grad(loss if scanned else mean_loss, "fsdp", specs, gather=not scanned)
    return stepping(mesh, specs, grad, check_vma)


def written_out(mesh: Mesh, specs: Tree) -> Any:
    """The same in JAX alone."""

    def whole(tree: Tree, beside: Tree) -> Tree:
        def one(x: Any, spec: P) -> Any:
            for dim, axis in enumerate(spec):
                x = x if axis is None else lax.all_gather(x, axis, axis=dim, tiled=True)
            return x

        return {name: one(x, beside[name]) for name, x in tree.items()}

    one_layer = {name: P(*tuple(spec)[1:]) for name, spec in specs["layers"].items()}
    loss = partial(
        mean_loss, layer=partial(whole, beside=one_layer), rest=partial(whole, beside=specs)
    )

    def grad(params: Tree, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        mean = lambda g, spec: g / 8 if "fsdp" in tuple(spec) else lax.pmean(g, "fsdp")  # noqa: E731
        return lax.pmean(value, "fsdp"), jax.tree.map(mean, grads, specs)

    return stepping(mesh, specs, grad, check_vma=False)


def stepping(mesh: Mesh, specs: Tree, grad: Callable[..., Any], check_vma: bool) -> Any:
    def step(params: Tree, tokens: Any) -> Any:
        value, grads = grad(params, tokens)
        return descend(params, grads), value

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P("fsdp")),
        out_specs=(specs, P()),
        check_vma=check_vma,
    )
    return jax.jit(mapped, donate_argnums=0)


def by_jit(plan: ts.Plan) -> Any:
    gather = partial(ts.unshard, axis="fsdp")
    others = {name: plan.specs[name] for name in ("embed", "norm", "head")}
    loss = partial(
        mean_loss,
        layer=lambda w: gather(w, ts.layer_specs(plan.specs["layers"])),
        rest=lambda w: gather(w, others),
    )

    def step(params: Tree, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return descend(params, grads), value

    return jit_step(step, plan, batch=P("fsdp"))


# ------------------------------------------------------------------ what it computes


def gradient_error(mesh: Mesh, plan: ts.Plan, tokens: Any, check_vma: bool) -> float:
    """The worst leaf's, relative, against one device."""
    params = make_params()
    wanted = jax.jit(jax.grad(mean_loss))(params, tokens)
    f = jax.shard_map(
        manual.value_and_grad(mean_loss, "fsdp", plan),
        mesh=mesh,
        in_specs=(plan.specs, P("fsdp")),
        out_specs=(P(), plan.specs),
        check_vma=check_vma,
    )
    _, found = jax.jit(f)(ts.shard(params, plan), tokens)
    apart = jax.tree.map(
        lambda a, b: float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()), found, wanted
    )
    return max(jax.tree.leaves(apart))


# ------------------------------------------------------------------ what it sends

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
WIDTHS = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}


def bytes_sent(program: str) -> Counter[str]:
    """Bytes of the whole arrays by kind of collective, loop trips included."""
    bodies = dict(re.findall(r"^(?:ENTRY )?(%[\w.\-]+) [^\n]*\{\n(.*?)^\}", program, re.M | re.S))
    entry = re.search(r"^ENTRY (%[\w.\-]+)", program, re.M)
    assert entry is not None
    total: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        for line in bodies.get(name, "").splitlines():
            if found := re.search(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line):
                size = 8 if found[2] == "reduce-scatter" else 1
                total[found[2]] += times * size * bytes_of(found[1])
            inner = re.findall(r"(?:body|to_apply|calls)=(%[\w.\-]+)", line)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for called in inner:
                visit(called, times * (int(trips[1]) if trips else 1))

    visit(entry[1], 1)
    return total


def bytes_of(types: str) -> int:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    return sum(WIDTHS[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in arrays)


def predicted(plan: ts.Plan) -> Counter[str]:
    total: Counter[str] = Counter({"all-reduce": 4})  # the loss
    for leaf in plan.leaves:
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        if "fsdp" not in tuple(leaf.given):
            total["all-reduce"] += size
            continue
        # Layers are gathered again for the backward pass.
        total["all-gather"] += size * (2 if leaf.path.startswith("layers") else 1)
        total["reduce-scatter"] += size
    return total


# ------------------------------------------------------------------ the table


def compiled(step: Any, plan: ts.Plan) -> Any:
    tokens = jax.ShapeDtypeStruct(
        (BATCH, TIME + 1), jnp.int32, sharding=NamedSharding(plan.mesh, P("fsdp"))
    )
    return step.lower(plan.structs, tokens).compile()


def temp(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def planned(mesh: Mesh, layers: int = LAYERS) -> ts.Plan:
    return ts.plan(make_params(layers), RULES, mesh, min_size=0)


def rows(rounds: int) -> list[Row]:
    mesh = ts.make_mesh("fsdp=8")
    plan = planned(mesh)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (BATCH, TIME + 1)).astype(np.int32)
    tokens = ts.shard(tokens, P("fsdp"), mesh)
    made = [
        Row(
            f"raw gradients against one device, worst leaf, check_vma={check_vma}",
            gradient_error(mesh, plan, tokens, check_vma),
            "<= 1e-05",
        )
        for check_vma in (True, False)
    ]
    programs = {
        check_vma: compiled(by_hand(mesh, plan.specs, check_vma), plan)
        for check_vma in (True, False)
    }
    wanted = predicted(plan)
    for check_vma, program in programs.items():
        found = bytes_sent(program.as_text())
        case = f"bytes sent that are not as predicted, check_vma={check_vma}"
        off = sum(abs(found[kind] - wanted[kind]) for kind in {*found, *wanted})
        shown = ", ".join(f"{kind} {size / 2**20:.2f} MiB" for kind, size in sorted(found.items()))
        made.append(Row(case, off, "0", shown))
    took = times(mesh, plan, tokens, rounds)
    vs = {"written out (ms)": took["written out"] * 1e3}
    return [
        *made,
        *memory(mesh, programs[True]),
        *(
            Row(f"step time, {way}, x written out", took[way] / took["written out"], "<= 1.05", vs)
            for way in ("by hand", "by jit")
        ),
    ]


def memory(mesh: Mesh, program: Any = None) -> list[Row]:
    """Temp memory of the compiled steps; `program` is the one that gathers layer by layer."""
    plan, more = planned(mesh), planned(mesh, 2 * LAYERS)
    inside = temp(program or compiled(by_hand(mesh, plan.specs), plan))
    in_front = temp(compiled(by_hand(mesh, plan.specs, scanned=False), plan))
    layer = sum(x.nbytes for x in jax.tree.leaves(make_params(1)["layers"]))
    growth = (temp(compiled(by_hand(mesh, more.specs), more)) - inside) / LAYERS / layer
    return [
        Row(
            "temp memory, gathered in front, x layer by layer",
            in_front / inside,
            ">= 5",
            {"in front (MiB)": in_front / 2**20, "layer by layer (MiB)": inside / 2**20},
        ),
        Row("temp memory for one more layer, in layers", growth, "<= 0.2"),
    ]


def times(mesh: Mesh, plan: ts.Plan, tokens: Any, rounds: int) -> dict[str, Figure]:
    steps = {
        "written out": written_out(mesh, plan.specs),
        "by hand": by_hand(mesh, plan.specs),
        "by jit": by_jit(plan),
    }
    states = {way: ts.shard(make_params(), plan) for way in steps}
    losses: dict[str, Any] = {}

    def call(way: str) -> None:
        states[way], losses[way] = steps[way](states[way], tokens)
        jax.block_until_ready(states[way])

    found = medians({way: partial(call, way) for way in steps}, rounds)
    assert np.ptp([float(loss) for loss in losses.values()]) < 1e-4
    return found


def main() -> None:
    ts.simulate_devices(8)
    report("FSDP by hand", rows(options().rounds), ("jax", "jaxlib", "numpy", "optax"))


if __name__ == "__main__":
    main()
