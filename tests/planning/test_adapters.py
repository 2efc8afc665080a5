"""LoRA factors, scales and averages follow the base leaf, and using them moves no base weight."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import qwix
from helpers import mesh_of, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import jit_step

MESH = mesh_of(fsdp=4, tensor=2)
BASE = ("weight", P("fsdp", "tensor"))


@pytest.mark.parametrize(
    ("shape", "blocks", "spec"),
    [
        ((8, 256), False, P(None, "tensor")),  # a LoRA factor on the inputs
        ((512, 8), False, P("fsdp")),  # and on the outputs
        ((512, 4), True, P("fsdp", "tensor")),  # scales of blocks of 64 inputs
        ((512, 1), True, P("fsdp")),  # of whole rows: one block belongs to every shard
        ((256,), False, P("tensor")),
        ((7,), False, P()),
    ],
    ids=str,
)
def test_roles_of_dims(shape: Any, blocks: bool, spec: P) -> None:
    tree = {"layer": {"weight": struct(512, 256), "own": struct(*shape)}}
    plan = ts.plan(tree, [BASE, ("own", ts.follow("weight", blocks=blocks))], MESH, min_size=0)
    assert not [x for x in plan.findings if x.code != "left-whole"]
    assert plan.specs["layer"]["own"] == spec
    assert plan.on(MESH) == plan


# The shapes of a base and of its factors, and the specs of both by that of the base.
FACTORS: dict[str, tuple[Any, P, Any, Any, P, P]] = {
    "in x out": ((32, 64), P("fsdp", "tensor"), (32, 4), (4, 64), P("fsdp"), P(None, "tensor")),
    "the rank is the number of heads": (
        (32, 4, 8),
        P("fsdp", "tensor"),
        (32, 4),
        (4, 4, 8),
        P("fsdp"),
        P(None, "tensor"),
    ),
    "a dim inside of one that is merged": (
        (32, 4, 8),
        P("fsdp", None, "tensor"),
        (32, 4),
        (4, 32),
        P("fsdp"),
        P(),
    ),
    "heads and their dims, to the outputs": (
        (4, 8, 32),
        P("tensor", None, "fsdp"),
        (32, 4),
        (4, 32),
        P("tensor"),
        P(None, "fsdp"),
    ),
    "stacked experts": (
        (8, 32, 64),
        P("fsdp", None, "tensor"),
        (8, 32, 8),
        (8, 8, 64),
        P("fsdp"),
        P("fsdp", None, "tensor"),
    ),
    "any dim may be the rank": ((8, 8), P("fsdp", "tensor"), (8, 8), (8, 8), P(), P()),
}


@pytest.mark.parametrize("case", FACTORS.values(), ids=FACTORS)
def test_the_rank_of_a_factor_is_not_sharded(case: Any) -> None:
    shape, spec, a, b, of_a, of_b = case
    paths = ["q/kernel_lora_a", "q/lora_b/kernel"]
    tree = {"q/kernel": struct(*shape), "q/bias": struct(shape[-1])}
    tree |= {paths[0]: struct(*a), paths[1]: struct(*b)}
    rules = [("lora", ts.follow("kernel")), ("kernel", spec), ("bias", None)]
    plan = ts.plan(tree, rules, MESH, min_size=0)
    assert [plan.specs[path] for path in paths] == [of_a, of_b]
    if of_a == of_b == P():
        why = f"any dim of shape {a} may be the rank of the factor, so it is replicated."
        assert [x.why for x in plan.leaves[-1].adjustments] == [why]


def test_moments_of_factors_follow_them_where_the_base_is_frozen() -> None:
    params = {"q": {"kernel": struct(32, 4, 8), "lora_a": struct(32, 4), "lora_b": struct(4, 32)}}
    labels = {"q": {"kernel": "freeze", "lora_a": "adam", "lora_b": "adam"}}
    optimizers = {"adam": optax.adam(0.1), "freeze": optax.set_to_zero()}
    optimizer = optax.partition(optimizers, labels)
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    rules = [("lora", ts.follow("kernel")), ("kernel", P("fsdp", "tensor")), (".*", None)]
    plan = ts.plan(state, rules, MESH, min_size=0)
    given = {leaf.path: leaf.given for leaf in plan.leaves}
    moments = [path for path in given if "/mu/" in path or "/nu/" in path]
    assert len(moments) == 4
    for path in moments:
        assert given[path] == given["params/q/" + path.rpartition("/")[2]] != P()
    assert not [x for x in plan.findings if x.code == "no-base"]
    follows = ts.plan(params, rules, MESH, min_size=0).follow(state["opt_state"])
    assert follows.specs == plan.specs["opt_state"]


def test_flat_numbers_follow_rows() -> None:
    tree = {"weight": struct(512, 256), "packed": struct(512 * 128, dtype="uint8")}
    rules = [("weight", P("fsdp")), ("packed", ts.follow("weight"))]
    assert ts.plan(tree, rules, MESH).specs["packed"] == P("fsdp")
    rules[0] = BASE
    assert ts.plan(tree, rules, MESH).specs["packed"] == P()  # a shard is no run of the numbers
    for base in ((), (0, 8)):  # without rows
        tree = {"weight": struct(*base), "packed": struct(1)}
        assert ts.plan(tree, rules, MESH).specs["packed"] == P()


def test_a_branch_and_its_memory() -> None:
    params = {"mlp": {"w": struct(512, 256), "a": struct(8, 256)}}
    rules = [
        ("ema", ts.follow("params")),  # of which one follows itself
        ("a$", ts.follow("w")),
        ("^params", ts.fsdp("fsdp", memory="pinned_host")),
    ]
    plan = ts.plan({"params": params, "ema": params}, rules, MESH)
    assert plan.specs["ema"] == plan.specs["params"]
    assert [leaf.memory for leaf in plan.leaves] == ["pinned_host"] * 4


def test_findings() -> None:
    base = struct(512, 256)
    tree = {"a": {"weight": base, "scale": struct(2, 256)}, "b": {"lora": struct(8, 256)}}
    rules = [BASE, ("scale|lora", ts.follow("weight", blocks=True))]
    plan = ts.plan(tree, rules, MESH, min_size=0)
    assert [str(x) for x in plan.findings if x.code in ("cuts-block", "no-base")] == [
        "warning cuts-block: a/scale: rule 1 'scale|lora': a/weight has dim 0 split over 'fsdp',"
        " which would cut a block: dim 0 of shape (2, 256) is not divisible by it. Use larger"
        " shards of the base, or smaller blocks.",
        "warning no-base: b/lora: rule 1 'scale|lora': no leaf 'weight' is beside it or its"
        " ancestors, so it is replicated. Give the path of the base relative to an ancestor of the"
        " leaf.",
    ]


def test_leaves_that_follow_each_other_are_replicated_and_told() -> None:
    tree = {"a": {"k": {"w": struct(8, 8)}}, "b": {"n": {"k": {"w": struct(8, 8)}}}}
    rules = [("^a", ts.follow("b/n/k/w")), ("^b", ts.follow("a/k/w"))]
    plan = ts.plan(tree, rules, MESH, min_size=0)
    assert {leaf.given for leaf in plan.leaves} == {P()}
    assert [x.paths for x in plan.findings if x.code == "no-base"] == [("b/n/k/w",)]


def test_a_qarray_is_dequantised_without_communication() -> None:
    make = partial(qwix.quantize, qtype="int8", calibration_method="minmax", channelwise_axes=(0,))
    state = {"up": jax.eval_shape(make, struct(512, 256))}
    rules = [("qvalue", P("fsdp")), ("", ts.follow("qvalue", blocks=True))]
    plan = ts.plan(state, rules, ts.make_mesh("fsdp=8"), min_size=0)
    assert [leaf.given for leaf in plan.leaves] == [P("fsdp")] * 3  # values, scale, zero point

    def dequantise(state: Any, batch: Any) -> Any:
        return state, qwix.dequantize(state["up"])

    compiled = jit_step(dequantise, plan, batch=P("fsdp")).lower(plan.structs, struct(8, 2))
    assert ts.collectives(compiled.compile()) == []


def test_merging_and_dequantising_move_nothing() -> None:
    quantised = {"weight": struct(512, 256), "scale": struct(512, 4), "zero": struct(512)}
    factors = {"weight": struct(512, 256), "a": struct(8, 256), "b": struct(512, 8)}
    state = {"model": factors, "quantised": quantised}
    rules = [
        BASE,
        ("/a$|/b$|zero", ts.follow("weight")),
        ("scale", ts.follow("weight", blocks=True)),
    ]
    plan = ts.plan(state, rules, "fsdp=4,tensor=2", min_size=0)

    def merge_and_dequantise(state: Any, batch: Any) -> Any:
        model, quantised = state["model"], state["quantised"]
        scale = jnp.repeat(quantised["scale"], 64, axis=1)
        values = (quantised["weight"] - quantised["zero"][:, None]) * scale
        merged = model["weight"] + model["b"] @ model["a"] + values
        return {**state, "model": model | {"weight": merged}}, None

    step = jit_step(merge_and_dequantise, plan, batch=P("fsdp"))
    compiled = step.lower(plan.structs, struct(8, 2)).compile()
    assert ts.collectives(compiled) == []
