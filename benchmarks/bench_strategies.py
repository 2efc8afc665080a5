"""`infer_sharding` on large trees, against the least work that names their leaves.

The floor is that of `bench_rules`; "vs." is the plain loop: every tactic read from its string once,
as big_vision does it, every path built, every pattern tried, the tactic run for each leaf.
"Patterns alone" tries them on paths that are built already, which is the least that any way takes.

    python -m benchmarks.bench_strategies [--json] [--rounds 15]
"""

import re
from functools import partial
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_map_with_path

from benchmarks._harness import Row, options, ratios, report
from benchmarks.bench_rules import MESH, all_different, floor, llm, modules, rules_of
from treeshard.compat._big_vision import _read_ops, infer_sharding

Strategy = list[tuple[str, str]]


def strategy_of(count: int) -> Strategy:
    """`count` patterns that match whole paths, with tactics as big_vision writes them."""
    tactics = ["fsdp('fsdp', 4)", "shard_dim('tensor', -1) | fsdp('fsdp')", "fsdp('fsdp')"]
    patterns = [pattern for pattern, _ in rules_of(count)]
    strategy = [(f".*({p}).*", tactics[i % len(tactics)]) for i, p in enumerate(patterns)]
    return [*strategy[:-1], (".*", "replicate")]


def plain_loop(tree: Any, strategy: Strategy) -> Any:
    """Every string read once; every path built, every pattern tried."""
    tactics = [(pattern, _read_ops(text)) for pattern, text in strategy]

    def decide(path: Any, leaf: Any) -> NamedSharding:
        name = keystr(path, simple=True, separator="/")
        for pattern, tactic in tactics:
            if re.fullmatch(pattern, name) and getattr(leaf, "shape", ()):
                return NamedSharding(MESH, tactic(P(), MESH, name, leaf))
        return NamedSharding(MESH, P())

    return tree_map_with_path(decide, tree)


def patterns_alone(paths: list[str], strategy: Strategy) -> list[str]:
    """Every pattern tried on the paths that none before it matches; what is left."""
    for pattern, _ in strategy:
        matches = re.compile(pattern).fullmatch
        paths = [path for path in paths if not matches(path)]
    return paths


def main() -> None:
    rounds = options().rounds
    llama = llm()
    cases = [
        ("LLM of dicts, 10 patterns", "", llama, strategy_of(10)),
        ("LLM of dicts, 30 patterns", "<= 2", llama, strategy_of(30)),
        ("LLM of dicts, 100 patterns", "", llama, strategy_of(100)),
        ("Equinox modules, 30 patterns", "", modules(), strategy_of(30)),
        ("all names different, 30 patterns", "", all_different(), strategy_of(30)),
    ]
    rows: list[Row] = []
    for case, reach, tree, strategy in cases:
        calls = {
            "floor": partial(floor, tree),
            "ours": partial(infer_sharding, tree, strategy, MESH),
            "plain loop": partial(plain_loop, tree, strategy),
            "patterns alone": partial(patterns_alone, floor(tree), strategy),
        }
        found = ratios(calls, "floor", rounds)
        others = {name: found[name] for name in ("plain loop", "patterns alone")}
        rows.append(Row(case, found["ours"], reach, others))
    report("infer_sharding on 10,000 leaves, x naming them with JAX alone", rows)


if __name__ == "__main__":
    main()
