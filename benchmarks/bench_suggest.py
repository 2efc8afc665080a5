"""Scoring the candidates of `ts.suggest` from their plans: python -m benchmarks.bench_suggest"""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Row, medians, options, report
from examples import compile_llama as llama
from treeshard.programs import Strategy, Suggestions
from treeshard.training import jit_step

TOPOLOGY, BATCH, TOKENS = "v5p-512", 1024, 4096
SIZE = llama.SIZES["8b"]
COLUMNS, ROWS = "(q|k|v|gate|up)$", "(o|down)$"
MLP_COLUMNS, MLP_ROWS = "(gate|up)$", "down$"


def tensor_parallel(columns: str, rows: str, stacked: bool) -> list[tuple[str, Any]]:
    front = (None,) * stacked
    return [
        ("norm", None),
        (f"layers/.*{columns}", P(*front, "fsdp", "tensor")),
        (f"layers/.*{rows}", P(*front, "tensor", "fsdp")),
        (".*", ts.fsdp("fsdp")),
    ]


def strategies(stacked: bool) -> list[str | Strategy]:
    axes = ("fsdp", "tensor")
    every = tensor_parallel(COLUMNS, ROWS, stacked)
    mlp = tensor_parallel(MLP_COLUMNS, MLP_ROWS, stacked)
    return [
        *("DP", "ZeRO-1", "FSDP", "HSDP"),
        Strategy("FSDP x TP", axes, every, {"tensor": SIZE.kv_heads}),
        Strategy("FSDP x TP of MLPs", axes, mlp),
    ]


def scanned(mesh: Any, rules: Any, remat: bool, accumulate: int, global_batch: int) -> Any:
    """The 8B of the example, whose layers are stacked."""
    return llama.make_llama(mesh, rules, size=SIZE, global_batch=global_batch, tokens=TOKENS)


def layer_by_layer(mesh: Any, rules: Any, remat: bool, accumulate: int, global_batch: int) -> Any:
    """The same weights as a list of layers, with AdamW: what most models have."""
    stacked = llama.parameters(SIZE)
    one = {
        name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in stacked["layers"].items()
    }
    params = {**stacked, "layers": [one] * SIZE.layers}
    state = {"params": params, "opt": jax.eval_shape(optax.adamw(1e-3).init, params)}
    plan = ts.plan(state, rules, mesh)

    @jit_step(plan=plan, batch=P(mesh.axis_names[0]))
    def step(state: Any, batch: Any) -> Any:
        raise AssertionError("scoring runs no step")

    return step, plan.structs, jax.ShapeDtypeStruct((global_batch, TOKENS + 1), "int32")


def score(make: Callable[..., Any]) -> Suggestions:
    """All candidates in order, none compiled."""
    chosen = strategies(make is scanned)
    return ts.suggest(make, topology=TOPOLOGY, global_batch=BATCH, strategies=chosen, top=0)


def main() -> None:
    models = {"stacked layers": scanned, "a list of layers": layer_by_layer}
    seconds = medians(
        {name: lambda make=make: score(make) for name, make in models.items()}, options().rounds
    )
    one, rows = ts.make_mesh("data=1", devices=jax.devices()[:1]), list[Row]()
    for name, make in models.items():
        found = score(make)
        candidates = [*found.rows, *found.losers]
        leaves = len(jax.tree.leaves(make(one, [(".*", None)], False, 1, BATCH)[1]))
        case = (
            f"{len(candidates)} candidates for 8B on {TOPOLOGY}, {name} ({leaves} leaves):"
            f" {len(found.rows)} scored, s"
        )
        rows.append(Row(case, seconds[name], "<= 10"))
    report("Scoring candidates of suggest without compiling", rows)


if __name__ == "__main__":
    main()
