"""`infer_sharding` on large trees, against the least work that names their leaves.

The floor is that of `bench_rules`; "vs." is the plain loop: every tactic read from its string once,
as big_vision does it, every path built, every pattern tried, the tactic run for each leaf.

    python -m benchmarks.bench_strategies [--json] [--rounds 15]
"""

import re
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
        found = ratios(
            {
                "floor": lambda tree=tree: floor(tree),
                "ours": lambda tree=tree, each=strategy: infer_sharding(tree, each, MESH),
                "loop": lambda tree=tree, each=strategy: plain_loop(tree, each),
            },
            "floor",
            rounds,
        )
        rows.append(Row(case, found["ours"], reach, {"plain loop": found["loop"]}))
    report("infer_sharding on 10,000 leaves, x naming them with JAX alone", rows)


if __name__ == "__main__":
    main()
