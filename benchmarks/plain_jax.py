"""Compiles training steps through plain JAX and through treeshard, and sets both beside the plan.

    python -m benchmarks.plain_jax                    # those without a result, and the page
    python -m benchmarks.plain_jax "FSDP 1B h100:8"   # these
    python -m benchmarks.plain_jax --again treeshard  # of all, if treeshard changed
    python -m benchmarks.plain_jax --page             # only the table

All ways have one model, one mesh, and one spec for each leaf of the state. Plain JAX is the usual
code: `jax.jit` with the specs of the state and the batch as `in_shardings` and `out_shardings`,
constraints on the embedded tokens and on the result of each layer, `jax.grad`, and optax. `jit
alone` is the same without constraints.

It needs the compilers (`pip install 'treeshard[tpu,cuda]'`) and none of the devices. It writes
plain_jax.json after each case.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks.llama_pods import sent_by
from benchmarks.page import between_marks
from examples import compile_llama as llama
from treeshard.communication._collectives import bytes_on_the_wire, is_scalar, total
from treeshard.errors import DoesNotFitError
from treeshard.programs import CompiledStep
from treeshard.programs._compiled_step import compile_step
from treeshard.training import jit_step, value_and_grad

HERE = Path(__file__).parent
RESULTS = HERE / "plain_jax.json"
PAGE = HERE.parent / "docs" / "guide" / "tpu-pods.md"
MARK = "plain-jax"
ALONE, PLAIN, OURS = WAYS = ("jit alone", "plain JAX", "treeshard")

# ------------------------------------------------------------------ the cases


class Case(NamedTuple):
    """A training step on some devices.

    Attributes:
        strategy: `FSDP` or `HSDP`; with `embedding and head as they are`, treeshard does not gather
            these two.
        size: A key of `SIZES`.
        topology: The devices.
        mesh: Its axes.
        tokens: The length of each sequence. A device has one.
    """

    strategy: str
    size: str
    topology: str
    mesh: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.size} {self.topology}"

    @property
    def is_explicit(self) -> bool:
        """Whether treeshard has Explicit axes: with HSDP, and along all dims of a TPU's torus,
        compilers would reduce full gradients."""
        return self.strategy.startswith("HSDP") or self.topology == "v5e:16x16"


SIZES = {
    "1B": llama.SIZES["1b"],
    "8B": llama.SIZES["8b"],
}
CASES = [
    Case("FSDP", "8B", "v5e:16x16", "fsdp=256", 4096),
    Case("HSDP", "8B", "v5e:16x16", "data=4,fsdp=64", 4096),
    Case("FSDP", "1B", "h100:8", "fsdp=8", 8192),
    Case("FSDP, embedding and head as they are", "1B", "h100:8", "fsdp=8", 8192),
    Case("HSDP", "1B", "h100:8", "data=2,fsdp=4", 8192),
]

# ------------------------------------------------------------------ the two ways

Constrain = Callable[[Any], Any]


def cast(weights: Any) -> Any:
    return jax.tree.map(lambda w: w.astype("bfloat16"), weights)


def gathered(weights: Any) -> Any:
    return ts.unshard(cast(weights))


def scanned(layer: Callable[..., Any], x: Any, weights: Any, gather: Callable[..., Any]) -> Any:
    body = jax.checkpoint(lambda x, w: (layer(x, gather(w)), None))
    return jax.lax.scan(body, x, weights)[0]


def loss_of(
    size: llama.Size,
    use: Callable[[Any], Any],
    use_ends: Callable[[Any], Any],
    constrain: Constrain,
    look_up: Callable[[Any, Any], Any] = lambda table, ids: table[ids],
    losses: Callable[[Any, Any], Any] = optax.softmax_cross_entropy_with_integer_labels,
) -> Callable[..., Any]:
    """The loss of a Llama.

    `use` makes the weights of a layer ready for use, `use_ends` those of the embedding and of the
    head, and `losses` are those of tokens.
    """

    def loss(params: Any, batch: Any) -> Any:
        x = constrain(look_up(use_ends(params["embed"]), batch[:, :-1]))
        layer = lambda x, w: constrain(llama.layer(x, w, size))  # noqa: E731
        x = scanned(layer, x, params["layers"], gather=use)
        x = llama.rms_norm(x, params["norm"].astype(x.dtype))
        logits = (x @ use_ends(params["head"])).astype("float32")
        return losses(logits, batch[:, 1:]).mean()

    return loss


def step_of(gradient: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        value, grads = gradient(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def planned(params: Any, optimizer: Any, mesh: Mesh) -> ts.Plan:
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}
    return ts.plan(state, llama.FSDP, mesh)


def by_plain_jax(case: Case, mesh: Mesh, *, constrained: bool = True) -> CompiledStep:
    size, rows = SIZES[case.size], P(mesh.axis_names)
    optimizer = optax.adamw(3e-4)
    plan = planned(llama.parameters(size), optimizer, mesh)
    of_rows = NamedSharding(mesh, rows)
    constrain: Constrain = lambda x: x  # noqa: E731
    if constrained:
        constrain = partial(jax.lax.with_sharding_constraint, shardings=of_rows)
    step = step_of(jax.value_and_grad(loss_of(size, cast, cast, constrain)), optimizer)
    shardings = plan.shardings
    jitted = jax.jit(
        step,
        in_shardings=(shardings, of_rows),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    batch = batch_of(case, mesh)
    trace = jitted.trace(plan.structs, batch)
    placed = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=of_rows)
    return compile_step(trace.lower(), trace.jaxpr, plan, (rows,), (placed,), None)


def by_treeshard(case: Case, mesh: Mesh) -> CompiledStep:
    size, rows = SIZES[case.size], P(mesh.axis_names)
    optimizer = optax.adamw(3e-4)
    plan = planned(llama.parameters(size), optimizer, mesh)
    constrain = partial(ts.with_sharding_constraint, sharding=rows)
    use_ends = cast if "as they are" in case.strategy else gathered
    losses = optax.softmax_cross_entropy_with_integer_labels
    if case.is_explicit:  # which JAX does not type: a lookup in logits that are split
        losses = auto_axes(llama.cross_entropy, out_sharding=rows)
    loss = loss_of(size, gathered, use_ends, constrain, ts.lookup, losses)
    gradient = value_and_grad(loss, axis_names=[x for x in mesh.axis_names if x != "tensor"])
    step = jit_step(step_of(gradient, optimizer), plan, batch=rows)
    return step.compile(plan.structs, batch_of(case, mesh))


def batch_of(case: Case, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((mesh.size, case.tokens + 1), "int32")


COMPILERS = {
    ALONE: partial(by_plain_jax, constrained=False),
    PLAIN: by_plain_jax,
    OURS: by_treeshard,
}

# ------------------------------------------------------------------ the figures


def figures(compiled: CompiledStep) -> dict[str, Any]:
    """What a program moves and needs, per device and step, without scalars such as the loss."""
    moved = compiled.communication()
    found = [x for x in moved.compiled if not is_scalar(x)]
    counts = total(x.count for x in found)
    return {
        "collectives": counts,
        "sent": sent_by(moved.compiled),
        "temporaries": compiled.memory().temporaries,
        "kinds": {kind: total(x.count for x in found if x.kind == kind) for kind in kinds(found)},
        "findings": [x.code for x in moved.unplanned],
    }


def kinds(found: Iterable[Any]) -> list[str]:
    return sorted({x.kind for x in found})


def figures_of_plan(compiled: CompiledStep) -> dict[str, Any]:
    """What the plan of a step predicts."""
    moved, sizes = compiled.communication(), compiled.plan.mesh.shape
    leaves = [x for x in moved.planned if x.path is not None]
    wire = [bytes_on_the_wire(x.kind, x.total_bytes, devices_along(x.axes, sizes)) for x in leaves]
    return {
        "collectives": sum(x.count for x in leaves),
        "sent": total(wire),
        "kinds": {kind: sum(x.count for x in leaves if x.kind == kind) for kind in kinds(leaves)},
    }


def devices_along(axes: Iterable[str], sizes: Any) -> int:
    count = 1
    for axis in axes:
        count *= sizes[axis]
    return count


def measure(case: Case, way: str) -> dict[str, Any]:
    kind = "explicit" if way == OURS and case.is_explicit else "auto"
    mesh = ts.make_mesh(case.mesh, topology=case.topology, axis_types=kind)
    try:
        compiled = COMPILERS[way](case, mesh)
    except DoesNotFitError as error:
        return {"does not fit": str(error)}
    result = figures(compiled)
    if way == OURS:
        result["planned"] = figures_of_plan(compiled)
    return result


def measure_apart(case: Case, way: str) -> dict[str, Any]:
    """In a process of its own: compilers keep gigabytes."""
    print(f"== {case.name}, {way}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.plain_jax", "--one", case.name, way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------ the page


def table(results: dict[str, Any]) -> str:
    """A line for each case, as Markdown: MiB that are sent as planned, and that each way sends."""
    lines = [["program", "planned", *WAYS], ["---", *["--:"] * (1 + len(WAYS))]]
    for case in CASES:
        if case.name in results and "as they are" not in case.strategy:
            of_ways = results[case.name]["ways"]
            figures = [of_ways[OURS]["planned"], *(of_ways[way] for way in WAYS)]
            lines.append([f"{case.name}, `{case.mesh}`", *map(cell, figures)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(figures: dict[str, Any]) -> str:
    """MiB that a device sends."""
    if "does not fit" in figures:
        return "does not fit"
    return f"{figures['sent'] / 2**20:,.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="by default those without a result")
    parser.add_argument("--again", choices=WAYS, help="compile this way again, and no other")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--one", action="store_true", help="print the figures of a case and a way")
    args = parser.parse_args(argv)
    cases = {case.name: case for case in CASES}
    if args.one:
        name, way = args.names
        print(json.dumps(measure(cases[name], way)))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = [] if args.page else args.names or list(cases)
    for name in names:
        known = results.get(name, {}).get("ways", {})
        again = WAYS if args.names and not args.again else (args.again,)
        known = {way: known[way] for way in known if way not in again}
        ways = {way: known.get(way) or measure_apart(cases[name], way) for way in WAYS}
        used = {name: version(name) for name in ("jax", "optax", "libtpu", "jax-cuda12-plugin")}
        results[name] = {**cases[name]._asdict(), "ways": ways, "with": used}
        results = {name: results[name] for name in cases if name in results}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(between_marks(PAGE.read_text(), table(results), MARK))


if __name__ == "__main__":
    main()
