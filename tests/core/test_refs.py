"""Mutable references are refused by every function that takes a tree, and never left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import checkpoint, compat, interchange, manual, testing, training

Call = Callable[[Any, Path], Any]
MESH = ts.make_mesh("fsdp=8")
ARRAYS = {"b": np.ones(8, "float32"), "w": np.ones((8, 8), "float32")}
PLAN = ts.plan(ARRAYS, [(".*", P("fsdp"))], MESH, min_size=0)


def with_ref() -> dict[str, Any]:
    return {"b": jnp.ones(8), "w": jax.new_ref(jnp.ones((8, 8)))}


def keep(state: Any, batch: Any) -> Any:
    return state, 0


def step() -> Any:
    return ts.jit_step(keep, PLAN, batch=P("fsdp"), donate=False)


def by_hand(use: Callable[[Any], Any]) -> Any:
    """Calls `use` inside `shard_map`, where it makes the reference."""

    def run(x: Any) -> Any:
        use({"b": x, "w": jax.new_ref(jnp.ones((8, 8)))})
        return x

    mapped = jax.shard_map(run, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(jnp.ones(8))


def in_jit(use: Callable[[Any], Any]) -> Any:
    def run(x: Any) -> Any:
        use({"b": x, "w": jax.new_ref(jnp.ones((8, 8)))})
        return x

    return jax.jit(run)(jnp.ones(8))


def total(tree: Any) -> Any:
    return jnp.sum(tree["b"])


def hand(use: Callable[..., Any], *args: Any, **options: Any) -> Call:
    return lambda *_: by_hand(lambda tree: use(tree, *args, **options))


BATCH = np.ones((8, 2), "float32")
REPLICATED = [(".*", None)]
# Calls with a tree and a folder.
CALLS: dict[str, Call] = {
    "shard": lambda tree, _: ts.shard(tree, P("fsdp"), MESH),
    "shard by a plan": lambda tree, _: ts.shard(tree, PLAN),
    "reshard": lambda tree, _: ts.reshard(tree, P("fsdp"), MESH),
    "gather": lambda tree, _: ts.gather(tree),
    "iter_gather": lambda tree, _: ts.iter_gather(tree),
    "shard_fns": lambda tree, _: ts.make_shard_and_gather_fns(PLAN)[0]["w"](tree["w"]),
    "gather_fns": lambda tree, _: ts.make_shard_and_gather_fns(PLAN)[1]["w"](tree["w"]),
    "from_process_local": lambda tree, _: ts.from_process_local(tree, P("fsdp"), MESH),
    "constraint": lambda tree, _: ts.with_sharding_constraint(tree, P("fsdp"), MESH),
    "constraint in jit": lambda *_: in_jit(
        lambda tree: ts.with_sharding_constraint(tree, P("fsdp"), MESH)
    ),
    "unshard": lambda tree, _: ts.unshard(tree, PLAN),
    "unshard in jit": lambda *_: in_jit(lambda tree: ts.unshard(tree, PLAN)),
    "extract_shardings": lambda tree, _: ts.extract_shardings(tree),
    "get_partition_spec": lambda tree, _: ts.get_partition_spec(tree),
    "plan": lambda tree, _: ts.plan(tree, REPLICATED, MESH),
    "Plan.follow": lambda tree, _: PLAN.follow({"ema": tree}),
    "match_partition_rules": lambda tree, _: ts.match_partition_rules(REPLICATED, tree),
    "init_sharded": lambda *_: ts.init_sharded(with_ref, rules=REPLICATED, mesh=MESH),
    "init_sharded of arguments": lambda tree, _: ts.init_sharded(
        lambda tree: tree["w"][...], tree, rules=REPLICATED, mesh=MESH
    ),
    "jit_step": lambda tree, _: step()(tree, BATCH),
    "jit_step of a batch": lambda tree, _: step()(ts.shard(ARRAYS, PLAN), tree),
    "jit_step, lowered": lambda tree, _: step().lower(PLAN.structs, tree),
    "shard_map_step": lambda tree, _: ts.shard_map_step(keep, PLAN, batch=P("fsdp"))(tree, BATCH),
    "training.value_and_grad": lambda tree, _: training.value_and_grad(total, PLAN)(tree),
    "accumulate_gradients": lambda tree, _: training.accumulate_gradients(
        lambda x, _: (x, 0), tree, 2
    ),
    "by_matrix": lambda tree, _: training.by_matrix(optax.sgd(0.1), PLAN).init(tree),
    "gather_params": hand(manual.gather_params, "fsdp", P()),
    "sync_gradients": hand(manual.sync_gradients, "fsdp", P()),
    "shard_params": hand(manual.shard_params, "fsdp", specs=P()),
    "vary": hand(manual.vary, "fsdp"),
    "manual.value_and_grad": hand(lambda t: manual.value_and_grad(total, "fsdp", P())(t)),
    "partition_specs": lambda tree, _: manual.partition_specs(tree),
    "save": lambda tree, folder: checkpoint.save(folder / "c", tree),
    "save_safetensors": lambda tree, folder: interchange.save_safetensors(folder / "t", tree),
    "restore": lambda tree, folder: checkpoint.restore(folder / "of arrays", tree),
    "load_safetensors": lambda tree, folder: interchange.load_safetensors(folder / "arrays", tree),
    "draw": lambda tree, _: ts.draw(tree),
    "diff_shardings": lambda tree, _: testing.diff_shardings(tree, PLAN),
    "assert_stable_step": lambda tree, _: testing.assert_stable_step(lambda s: s, tree),
    "assert_trees_sharded_as": lambda tree, _: testing.assert_trees_sharded_as(tree, P()),
    "check_step": lambda tree, _: testing.check_step(step(), tree, BATCH),
    "check_gradients": lambda tree, _: testing.check_gradients(
        lambda p, x: total(p), tree, BATCH, PLAN
    ),
    "analyze_sharding_strategy": lambda t, _: compat.analyze_sharding_strategy(t, P(), MESH),
    "infer_sharding": lambda tree, _: ts.infer_sharding(tree, [(".*", "replicate")], MESH),
}
# The path of the reference in messages, where it is not `w`.
PATHS = {
    "Plan.follow": "ema/w",
    "init_sharded of arguments": "argument/0/w",
    "jit_step of a batch": "batch/w",
    "jit_step, lowered": "batch/w",
    "accumulate_gradients": "batch/w",
    "diff_shardings": "0/w",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mutable_reference_is_an_error(name: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "of arrays", ARRAYS)
    interchange.save_safetensors(tmp_path / "arrays", ARRAYS)
    with pytest.raises(ts.LeafError) as error:
        CALLS[name](with_ref(), tmp_path)
    lines = str(error.value).split("\n")
    assert lines[0].endswith(": leaves are mutable references, not arrays:")
    assert lines[1] == f"  {PATHS.get(name, 'w')}: a mutable reference (`jax.Ref`)."
    assert "x[...] if isinstance(x, jax.Ref)" in lines[2]
    assert not (tmp_path / "c").exists()
    assert not (tmp_path / "t").exists()
