"""Rules on large trees, against the least work that names their leaves.

The floor is `tree_flatten_with_path` and `keystr(simple=True)` of the same tree; "vs." is
the plain loop that EasyLM and its descendants run, every path built and every rule tried, and
eformer's and scalax's own functions where they are installed.

    python -m benchmarks.bench_rules [--json] [--rounds 15]
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_flatten_with_path

from benchmarks._harness import Row, options, ratios, report
from treeshard._core.paths import named_tree_map
from treeshard._planning.plan import plan
from treeshard._planning.rules import match_partition_rules
from treeshard._planning.tactics import fsdp

Rules = list[tuple[str, Any]]
MESH = AbstractMesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

# What decides the leaves of the LLM tree, as EasyLM writes it for LLaMA.
LLAMA: Rules = [
    ("embed/embedding", P("tensor", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "tensor")),
    ("attention/wo/kernel", P("tensor", "fsdp")),
    ("feed_forward/w1/kernel", P("fsdp", "tensor")),
    ("feed_forward/w2/kernel", P("tensor", "fsdp")),
    ("feed_forward/w3/kernel", P("fsdp", "tensor")),
    ("attention_norm/kernel", P(None)),
    ("ffn_norm/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "tensor")),
    (".*", P(None)),
]

# Rules of other models, as lists that serve many grow: none of these matches.
_OTHERS = [
    "transformer/h/.*/attn/c_attn/kernel$",
    "(encoder|decoder)/block/.*/SelfAttention/(q|k|v)/kernel",
    "mixture/experts/(gate|up|down)_proj/.*",
    "vision_tower/patch_embedding/(kernel|bias)",
    "self_attn/(q_proj|k_proj|v_proj)/(kernel|weight)$",
    "^visual/blocks/.*/mlp/fc[12]/kernel",
    "cross_attention/query_key_value/kernel",
    "moe_block/router/kernel|shared_expert_gate/kernel",
    "conv_in/kernel|conv_out/kernel",
    r"time_embedding/linear_\d/kernel",
    "mamba/(in|x|dt|out)_proj/kernel",
    "logits_dense/(kernel|scale)$",
    "pre_self_attention_layer_norm/scale",
]


def rules_of(count: int, first: bool = False) -> Rules:
    """`count` rules, of which ten are LLaMA's: the last ones, or the first but for `.*`.

    Rules that match nothing cost a loop most if they are tried before the others.
    """
    variants = [f"{'v' * (i // len(_OTHERS))}{_OTHERS[i % len(_OTHERS)]}" for i in range(count)]
    others = [(pattern, P("fsdp", "tensor")) for pattern in variants[: count - 10]]
    return [*LLAMA[:-1], *others, LLAMA[-1]] if first else [*others, *LLAMA]


# ------------------------------------------------------------------ trees


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def llm(layers: int = 1110) -> dict[str, Any]:
    """A LLaMA as dicts and a list of layers: nine leaves each."""

    def layer() -> dict[str, Any]:
        attention = {name: {"kernel": _array(4096, 4096)} for name in ("wq", "wk", "wv", "wo")}
        mlp = {"w1": (4096, 11008), "w2": (11008, 4096), "w3": (4096, 11008)}
        return {
            "attention": attention,
            "feed_forward": {name: {"kernel": _array(*shape)} for name, shape in mlp.items()},
            "attention_norm": {"kernel": _array(4096)},
            "ffn_norm": {"kernel": _array(4096)},
        }

    return {
        "embed": {"embedding": _array(32000, 4096)},
        "layers": [layer() for _ in range(layers)],
        "norm": {"kernel": _array(4096)},
        "lm_head": {"kernel": _array(4096, 32000)},
    }


def all_different(layers: int = 1110) -> dict[str, Any]:
    """The same with a name of its own for every layer, without digits."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz_"))
    tree = llm(layers)
    for layer in tree.pop("layers"):
        tree["".join(rng.choice(letters, 12))] = layer
    return tree


class _Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear


class _Block(eqx.Module):
    attention: _Attention
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable[..., Any]


class _Model(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[_Block]
    head: eqx.nn.Linear


def modules(layers: int = 720) -> Any:
    """Equinox modules: fourteen arrays and a function a layer."""

    def block(key: Any) -> _Block:
        q, k, v, o, up, down = (eqx.nn.Linear(64, 64, key=key) for _ in range(6))
        return _Block(_Attention(q, k, v, o), eqx.nn.LayerNorm(64), up, down, jax.nn.gelu)

    def make(key: Any) -> _Model:
        return _Model(
            eqx.nn.Embedding(64, 64, key=key), [block(key)], eqx.nn.Linear(64, 64, key=key)
        )

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    copies = [jax.tree.map(lambda x: x, model.blocks[0]) for _ in range(layers)]
    return eqx.tree_at(lambda m: m.blocks, model, copies)


# ------------------------------------------------------------------ ways


def floor(tree: Any) -> list[str]:
    """Names every leaf."""
    flat, _ = tree_flatten_with_path(tree)
    return [keystr(path, simple=True, separator="/") for path, _ in flat]


def by_key_path(f: Callable[[str, Any], Any], tree: Any) -> Any:
    """What `named_tree_map` does, by JAX's own functions."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: f(keystr(path, simple=True, separator="/"), x), tree
    )


def plain_loop(rules: Rules, tree: Any) -> Any:
    """Every path built, every rule tried."""

    def decide(path: Any, leaf: Any) -> P:
        if not getattr(leaf, "shape", ()):
            return P()
        name = keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name) is not None:
                return spec
        raise ValueError(name)

    return jax.tree_util.tree_map_with_path(decide, tree)


def peers() -> dict[str, Callable[[Rules, Any], Any]]:
    """What the packages that are installed offer."""
    found: dict[str, Callable[[Rules, Any], Any]] = {}
    with contextlib.suppress(ImportError):
        from eformer.escale import match_partition_rules as of_eformer

        found["eformer"] = of_eformer
    with contextlib.suppress(ImportError):
        from scalax.sharding import TreePathShardingRule

        found["scalax"] = lambda rules, tree: TreePathShardingRule(*rules).apply(tree)
    return found


def main() -> None:
    rounds = options().rounds
    llama, unique, equinox = llm(), all_different(), modules()
    tactics: Rules = [(pattern, fsdp("fsdp")) for pattern, _ in rules_of(30)]
    cases: list[tuple[str, str, Any, Rules]] = [
        ("LLM of dicts, 10 rules", "<= 1.5", llama, rules_of(10)),
        ("LLM of dicts, 30 rules", "<= 1.5", llama, rules_of(30)),
        ("LLM of dicts, 100 rules", "<= 1.5", llama, rules_of(100)),
        ("LLM of dicts, 30 rules, the model's first", "<= 1.5", llama, rules_of(30, first=True)),
        ("LLM of dicts, 100 rules, the model's first", "<= 1.5", llama, rules_of(100, first=True)),
        ("all names different, 30 rules", "<= 1.5", unique, rules_of(30)),
        ("all names different, 100 rules", "", unique, rules_of(100)),
        ("Equinox modules, 30 rules", "<= 1.5", equinox, rules_of(30)),
        ("LLM, 30 rules of fsdp", "", llama, tactics),
    ]
    rows: list[Row] = []
    for case, reach, tree, rules in cases:
        calls = {
            "floor": lambda tree=tree: floor(tree),
            "ours": lambda rules=rules, tree=tree: match_partition_rules(rules, tree, MESH),
        }
        others = {"plain loop": plain_loop}
        if isinstance(tree, dict) and all(isinstance(action, P) for _, action in rules):
            others |= peers()  # which know dicts and specs
        for name, way in others.items():
            calls[name] = lambda way=way, rules=rules, tree=tree: way(rules, tree)
        found = ratios(calls, "floor", rounds)
        rows.append(Row(f"specs: {case}", found["ours"], reach, {n: found[n] for n in others}))
    for case, tree in (("LLM of dicts", llama), ("all names different", unique)):
        calls = {
            "floor": lambda tree=tree: by_key_path(lambda path, _: path, tree),
            "ours": lambda tree=tree: named_tree_map(lambda path, _: path, tree),
        }
        found = ratios(calls, "floor", rounds)
        rows.append(
            Row(f"named_tree_map: {case}, x tree_map_with_path and keystr", found["ours"], "<= 1.1")
        )
    small = llm(222)
    found = ratios(
        {
            "loop": lambda: plain_loop(rules_of(10), small),
            "plan": lambda: plan(small, rules_of(10), MESH),
        },
        "loop",
        rounds,
    )
    rows.append(Row("plan: LLM of 2,000 leaves, 10 rules, x the plain loop", found["plan"], "<= 1"))
    for case, reach, tree in [
        ("LLM of dicts, 30 rules", "<= 1.5", llama),
        ("all names different, 30 rules", "", unique),
        ("Equinox modules, 30 rules", "", equinox),
    ]:
        found = ratios(
            {
                "floor": lambda tree=tree: floor(tree),
                "ours": lambda tree=tree: plan(tree, rules_of(30), MESH),
            },
            "floor",
            rounds,
        )
        rows.append(Row(f"plan: {case}", found["ours"], reach))
    packages = ("jax", "jaxlib", "numpy", "equinox", "eformer", "scalax")
    report("Rules on 10,000 leaves, x naming them with JAX alone", rows, packages)


if __name__ == "__main__":
    main()
