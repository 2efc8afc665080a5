"""Calls with wrong arguments; prints each error as JSON. Where annotations are checked, that check
would come first."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import restore, save
from treeshard.interchange import save_safetensors
from treeshard.training import init_sharded, jit_step, shard_map_step

ts.simulate_devices(8)
mesh = ts.make_mesh("fsdp=8")
params = {"w": jnp.ones((8, 8))}
specs, rules = {"w": P("fsdp")}, [(".*", P("fsdp"))]
plan = ts.plan(params, rules, mesh, min_size=0)
key, x = jax.random.key(0), np.ones((16, 8), "float32")


class Model:
    pass


def init(key: Any) -> Any:
    return params


def identity(state: Any, batch: Any) -> Any:
    return state, ()


step = jit_step(identity, plan, donate=False)
state = ts.shard(params, plan)
CALLS = {
    "plan a class": lambda: ts.plan(Model, rules, mesh),
    "plan a function": lambda: ts.plan(init, rules, mesh),
    "plan an object": lambda: ts.plan(object(), rules, mesh),
    "plan, swapped": lambda: ts.plan(rules, params, mesh),
    "plan, mesh before rules": lambda: ts.plan(params, mesh, rules),
    "plan, number as mesh": lambda: ts.plan(params, rules, 8),
    "plan, dict as mesh": lambda: ts.plan(params, rules, {"fsdp": 8}),
    "rule, swapped": lambda: ts.plan(params, [(P("fsdp"), ".*")], mesh),
    "rule, swapped None": lambda: ts.plan(params, [(None, "norm")], mesh),
    "match, swapped": lambda: ts.match_partition_rules(params, rules),
    "match a class": lambda: ts.match_partition_rules(rules, Model),
    "init of params": lambda: init_sharded(params, key, rules=rules, mesh=mesh),
    "init makes an object": lambda: init_sharded(Model, rules=rules, mesh=mesh),
    "step, mesh as plan": lambda: jit_step(identity, mesh),
    "step, specs as plan": lambda: shard_map_step(identity, specs),
    "step, swapped": lambda: jit_step(plan, identity),
    "step with a key": lambda: step(state, x, key),
    "step of a class": lambda: step(Model, x),
    "shard, swapped": lambda: ts.shard(specs, params, mesh),
    "shard, plan first": lambda: ts.shard(plan, params),
    "shard a function": lambda: ts.shard(init, P(), mesh),
    "reshard, swapped": lambda: ts.reshard(specs, params, mesh),
    "unshard, swapped": lambda: ts.unshard(specs, params, "fsdp"),
    "constraint, swapped": lambda: ts.with_sharding_constraint(specs, params, mesh),
    "save, swapped": lambda: save(params, "folder"),
    "restore, swapped": lambda: restore(params, "folder"),
    "safetensors, swapped": lambda: save_safetensors(params, "file"),
}


def error_of(call: Any) -> list[str]:
    try:
        call()
    except ts.TreeShardError as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


# What is right, although it has no arrays.
for empty in ({}, None, (), {"name": "mlp", "act": jax.nn.relu}, 3):
    ts.plan(empty, rules, mesh)
    ts.shard(empty, P("fsdp"), mesh)
step_of_nothing = jit_step(identity, ts.plan({}, rules, mesh), batch=P("fsdp"))
step_of_nothing({}, x)
print(json.dumps({name: error_of(call) for name, call in CALLS.items()}))
