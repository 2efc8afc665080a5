"""The communication that a plan predicts."""

from typing import Any

import jax
import optax
import pytest
from helpers import struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.mesh import abstract_mesh
from treeshard.communication._forecast import parameters

KIB = 1024


W = {"w": struct(64, 128)}  # 32 KiB
STACKED = {"layers": struct(4, 64, 32)}


@pytest.mark.parametrize(
    ("tree", "spec", "axes", "batch", "options", "moved"),
    [
        pytest.param(
            W,
            P("fsdp"),
            "data=2,fsdp=4",
            P(("data", "fsdp")),
            {"remat": True, "dtype": "bfloat16"},
            [
                ("all-gather", ("fsdp",), 16 * KIB, 1),
                ("all-gather", ("fsdp",), 16 * KIB, 1),
                ("reduce-scatter", ("fsdp",), 16 * KIB, 1),
                ("all-reduce", ("data",), 8 * KIB, 1),
            ],
            id="HSDP, remat, bf16 on the wire",
        ),
        pytest.param(
            W,
            P("data", "fsdp"),
            "data=2,fsdp=4",
            P(("data", "fsdp")),
            {},
            [
                ("all-gather", ("data",), 8 * KIB, 1),
                ("all-gather", ("fsdp",), 32 * KIB, 1),
                ("reduce-scatter", ("data",), 32 * KIB, 1),
                ("reduce-scatter", ("fsdp",), 16 * KIB, 1),
            ],
            id="two dims",
        ),
        pytest.param(
            STACKED,
            P(None, "fsdp"),
            "fsdp=8",
            P("fsdp"),
            {"scan": "layers"},
            [("all-gather", ("fsdp",), 8 * KIB, 4), ("reduce-scatter", ("fsdp",), 8 * KIB, 4)],
            id="scan",
        ),
        pytest.param(
            {"model": {"w": struct(16, 16)}, "opt": {"mu": {"w": struct(16, 16)}}},
            {"opt": P("data"), ".*": None},
            "data=2,fsdp=4",
            P(("data", "fsdp")),
            {},
            [
                ("reduce-scatter", ("data",), KIB, 1),
                ("all-reduce", ("fsdp",), KIB // 2, 1),
                ("all-gather", ("data",), KIB, 1),
            ],
            id="ZeRO-1 on one of two axes",
        ),
    ],
)
def test_the_prediction_from_a_plan(
    tree: Any, spec: Any, axes: str, batch: Any, options: Any, moved: list[Any]
) -> None:
    rules = [*spec.items()] if isinstance(spec, dict) else [(".*", spec)]
    plan = ts.plan(tree, rules, abstract_mesh(axes), min_size=0)
    transfers = ts.predict_communication(plan, batch=batch, **options)
    of_leaves = [(x.kind, x.axes, x.bytes, x.count) for x in transfers if x.path is not None]
    assert of_leaves == moved


def test_optimizer_state_is_not_taken_for_parameters() -> None:
    params = {"layers": [{"w": struct(64, 64)}], "head": struct(64, 8)}
    state = {"model": params, "opt": jax.eval_shape(optax.adamw(1e-3).init, params)}
    rules = [("opt.*w|opt.*head", P("data")), (".*", None)]
    plan = ts.plan(state, rules, abstract_mesh("data=8"), min_size=0)
    assert [x.path for x in parameters(plan.leaves)] == ["model/head", "model/layers/0/w"]
    assert len(parameters(plan.leaves, "model|mu")) == 4
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    of_factored = {"model": params, "opt": jax.eval_shape(factored.init, params)}
    assert len(parameters(ts.plan(of_factored, rules, plan.mesh).leaves)) == 2
    # ZeRO-1: the state is sharded further than its parameter.
    moved = ts.predict_communication(plan, batch=P("data"))
    assert [(x.kind, x.bytes, x.path, x.why) for x in moved] == [
        ("reduce-scatter", 2 * KIB, "model/head", "gradient"),
        ("all-gather", 2 * KIB, "model/head", "update"),
        ("reduce-scatter", 16 * KIB, "model/layers/0/w", "gradient"),
        ("all-gather", 16 * KIB, "model/layers/0/w", "update"),
        ("all-reduce", 4, None, "loss"),
    ]


def test_a_layer_is_not_the_state_of_a_norm_above_it() -> None:
    layer = {"norm": {"w": struct(8), "b": struct(8)}, "q": {"w": struct(8, 8), "b": struct(8)}}
    tree = {"layers": [layer] * 2, "norm": {"w": struct(8), "b": struct(8)}}
    plan = ts.plan(tree, [(".*", None)], abstract_mesh("data=8"))
    assert len(parameters(plan.leaves)) == 10


def test_a_batch_over_an_unknown_axis_raises() -> None:
    plan = ts.plan(W, [(".*", None)], abstract_mesh("data=8"))
    with pytest.raises(ts.UnknownAxisError, match="batch: the mesh has no axis 'dta'.*'data'?"):
        ts.predict_communication(plan, batch=P("dta"))
