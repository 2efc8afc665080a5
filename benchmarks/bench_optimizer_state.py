"""Where three methods place optimizer state, and what treeshard's method costs.

Each optimizer of optax gets a cell a way: "right" if every leaf of its state gets the spec
that is written down for it by hand, "wrong" if some do not, "invalid" if a spec cannot be laid
on its leaf, "error" if the way gives up. "Rules" are a list that places the parameters,
searched for in the paths of the state, as EasyLM and its descendants do it.

    python -m benchmarks.bench_optimizer_state [--json] [--rounds 15]
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._harness import Row, options, ratios, report
from benchmarks._optimizers import CASES, SPECS, Case, nested, structs
from treeshard import leaf_paths, match_partition_rules
from treeshard._planning.plan import plan

MESH = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
Way = Callable[[Any, Any, Any, Any], Any]  # (optimizer, state, params, specs) -> specs

# ------------------------------------------------------------------ ways


def treeshard(optimizer: Any, state: Any, params: Any, specs: Any) -> Any:
    spec_of = dict(zip(leaf_paths(params), jax.tree.leaves(specs), strict=True))
    rules = [("", lambda path, leaf: spec_of[path])]
    return plan(params, rules, MESH, min_size=0).follow(state).specs


def tree_map_params(optimizer: Any, state: Any, params: Any, specs: Any) -> Any:
    def is_masked(x: Any) -> bool:  # as its documentation says for masked states
        return isinstance(x, optax.MaskedNode)

    return optax.tree_map_params(
        optimizer,
        lambda x, spec: x if is_masked(x) else spec,
        state,
        specs,
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )


def rules(optimizer: Any, state: Any, params: Any, specs: Any) -> Any:
    longest_first = sorted(SPECS.items(), key=lambda item: -len(item[0]))
    whole_keys = [(f"(^|/){path}$", spec) for path, spec in longest_first]
    return match_partition_rules([*whole_keys, (".*", None)], state, strict=False, min_size=0)


WAYS: dict[str, Way] = {
    "treeshard": treeshard,
    "optax.tree_map_params": tree_map_params,
    "rules on the state": rules,
}


def verdict(way: Way, case: Case) -> str:
    """What becomes of one optimizer's state."""
    params, specs = structs(), nested(SPECS)
    if isinstance(case.params, optax.LookaheadParams):
        params, specs = case.params, optax.LookaheadParams(specs, specs)
    state, expected = case.state(), case.expected()
    try:
        found = way(case.make(), state, params, specs)
        leaves = zip(leaf_paths(state), jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
        rows = [(path, leaf.shape, spec) for path, leaf, spec in leaves]
    except Exception:
        return "error"
    try:
        for _, shape, spec in rows:
            NamedSharding(MESH, spec).shard_shape(shape)
    except Exception:
        return "invalid"
    right = all(same_placement(spec, expected[path], len(shape)) for path, shape, spec in rows)
    return "right" if right else "wrong"


def same_placement(a: P, b: P, rank: int) -> bool:
    """Whether two specs say the same, as `P("data", None)` and `P("data")` do."""
    return NamedSharding(MESH, a).is_equivalent_to(NamedSharding(MESH, b), rank)


# ------------------------------------------------------------------ cost


def llm(layers: int = 1110) -> dict[str, Any]:
    """A LLaMA as dicts and a list of layers: nine leaves each."""
    shape = jax.ShapeDtypeStruct((4096, 4096), "float32")
    names = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "norm1", "norm2")
    return {"layers": [{name: {"kernel": shape} for name in names} for _ in range(layers)]}


def cost(name: str, optimizer: Any, rounds: int, layers: int = 1110) -> Row:
    """Ours over optax's, on a state that both of them can place."""
    params = llm(layers)
    specs = jax.tree.map(lambda _: P("fsdp"), params)
    planned = plan(params, [("", P("fsdp"))], MESH)
    state = jax.eval_shape(optimizer.init, params)
    calls = {
        "treeshard": lambda: planned.follow(state).specs,
        "tree_map_params": lambda: tree_map_params(optimizer, state, params, specs),
    }
    ratio = ratios(calls, "tree_map_params", rounds)["treeshard"]
    leaves = len(jax.tree.leaves(state))
    return Row(f"specs of {name}, {leaves:,} leaves, x optax.tree_map_params", ratio, "<= 2")


def main() -> None:
    warnings.simplefilter("ignore")  # optax warns of what it deprecates
    table = {
        name: {key: verdict(way, case) for key, way in WAYS.items()} for name, case in CASES.items()
    }
    rows = []
    split = {name for name, case in CASES.items() if any(map(tuple, case.expected().values()))}
    for kind, names in ((f"{len(table)} states", set(table)),
                        (f"{len(split)} states with a leaf to split", split)):  # fmt: skip
        for way in WAYS:
            right = [table[name][way] == "right" for name in names]
            reach = "1" if way == "treeshard" else ""
            rows.append(Row(f"right, of {kind}: {way}", float(np.mean(right)), reach))
    if not options().json:
        width = max(map(len, table))
        print(f"{'optimizer':{width}} | {' | '.join(WAYS)}")
        for name, verdicts in table.items():
            cells = (f"{verdicts[way]:{len(way)}}" for way in WAYS)
            print(f"{name:{width}} | {' | '.join(cells)}".rstrip())
        print()
    clipped = optax.chain(optax.clip(1.0), optax.adamw(0.1), optax.ema(0.9))
    timed = {
        "adamw": optax.adamw(0.1),
        "clip, adamw, ema": clipped,
        "sgd with momentum": optax.sgd(0.1, momentum=0.9),
        "trace": optax.trace(0.9),
        "lion": optax.lion(0.1),
        "adafactor": optax.adafactor(0.1),
    }
    rows.append(cost("adamw", optax.adamw(0.1), options().rounds, layers=333))
    for name, optimizer in timed.items():
        rows.append(cost(name, optimizer, options().rounds))
    report("Optimizer state", rows, ("jax", "optax", "numpy"))


if __name__ == "__main__":
    main()
