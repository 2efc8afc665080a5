"""Arguments of another kind, or in the wrong order: the message shows the right call."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import errors
from treeshard.checkpoint import save
from treeshard.interchange import save_safetensors
from treeshard.training import init_sharded, jit_step

# Where annotations are checked, that check would come first.
pytestmark = pytest.mark.usefixtures("unchecked")

mesh = ts.make_mesh("fsdp=8")
params = {"w": np.ones((8, 8), "float32")}
specs, rules = {"w": P("fsdp")}, [(".*", P("fsdp"))]
plan = ts.plan(params, rules, mesh, min_size=0)
key, x = np.zeros(2, "uint32"), np.ones((16, 8), "float32")


class Model:
    pass


def identity(state: Any, batch: Any) -> Any:
    return state, ()


step = jit_step(identity, plan, donate=False)
NOT_A_TREE = "which is not a pytree of arrays. "
CALL_IT = "Call it first, and pass the arrays that it makes: "
SWAPPED_SPECS = (
    "the tree and its specs are swapped: the first argument has specs, and the second has"
)
PATH_FIRST = "the path is a dict. The path comes first: `save"
CALLS = {
    errors.ArgumentError: [
        (lambda: ts.plan(Model, rules, mesh), f"the class Model, {NOT_A_TREE}{CALL_IT}`plan(tree"),
        (lambda: ts.plan(object(), rules, mesh), f"an object, {NOT_A_TREE}Pass its arrays, or re"),
        (
            lambda: init_sharded(params, key, rules=rules, mesh=mesh),
            "fn is a dict, and not a function that makes the tree. Pa",
        ),
        (
            lambda: init_sharded(Model, rules=rules, mesh=mesh),
            "init_sharded: what fn returns is a Model, which is",
        ),
        (lambda: jit_step(identity, mesh), "jit_step: the plan is a mesh. Plan the state first: "),
        (lambda: jit_step(plan, identity), "the function is a Plan. Call `jit_step(fn, plan)`"),
        (lambda: step(params, x, key), "with 3 arguments. Put a key, or what else it needs, in "),
        (lambda: step(Model, x), f"jit_step: the state is the class Model, {NOT_A_TREE}"),
        (lambda: save(params, "folder"), PATH_FIRST),
        (lambda: save_safetensors(params, "file"), "`save_safetensors(path, tree)`"),
    ],
    errors.ShardingRuleError: [
        (lambda: ts.plan(rules, params, mesh), "the rules are a dict, and the list of rules is e"),
        (
            lambda: ts.plan(params, [(P("fsdp"), ".*")], mesh),
            "The pattern comes first: ('.*', P('fsdp',))",
        ),
        (
            lambda: ts.plan(params, [(None, "norm")], mesh),
            "the action None and the pattern 'norm' are swap",
        ),
        (
            lambda: ts.match_partition_rules(params, rules),
            "Call `match_partition_rules(rules, tree)`.",
        ),
    ],
    errors.MeshError: [
        (lambda: ts.plan(params, rules, 8), "8 (int). Give a mesh, or its axes and their sizes a"),
    ],
    errors.SpecError: [
        (lambda: ts.shard(specs, params, mesh), SWAPPED_SPECS),
        (lambda: ts.shard(plan, params), SWAPPED_SPECS),
        (lambda: ts.unshard(specs, params, "fsdp"), "The tree comes first: `shard(tree, specs)`,"),
        (lambda: ts.with_sharding_constraint(specs, params, mesh), SWAPPED_SPECS),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "part"), [(error, *row) for error, rows in CALLS.items() for row in rows]
)
def test_the_message_shows_the_right_call(error, call, part) -> None:
    with pytest.raises(error) as raised:
        call()
    assert part in str(raised.value)
    assert type(raised.value) is error
    assert issubclass(error, ValueError | TypeError)


def test_what_has_no_arrays_is_right() -> None:
    for empty in ({}, None, (), {"name": "mlp", "act": jax.nn.relu}, 3):
        ts.plan(empty, rules, mesh)
        ts.shard(empty, P("fsdp"), mesh)
    step_of_nothing = jit_step(identity, ts.plan({}, rules, mesh), batch=P("fsdp"))
    step_of_nothing({}, x)
