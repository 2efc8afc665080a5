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


# Each with the function that the message names, and the path of the reference.
CALLS: dict[str, tuple[Callable[[Any, Path], Any], str]] = {
    "shard": (lambda tree, _: ts.shard(tree, P("fsdp"), MESH), "w"),
    "shard by a plan": (lambda tree, _: ts.shard(tree, PLAN), "w"),
    "reshard": (lambda tree, _: ts.reshard(tree, P("fsdp"), MESH), "w"),
    "gather": (lambda tree, _: ts.gather(tree), "w"),
    "iter_gather": (lambda tree, _: ts.iter_gather(tree), "w"),
    "make_shard_and_gather_fns": (
        lambda tree, _: ts.make_shard_and_gather_fns(PLAN)[0]["w"](tree["w"]),
        "w",
    ),
    "gather_fns": (lambda tree, _: ts.make_shard_and_gather_fns(PLAN)[1]["w"](tree["w"]), "w"),
    "from_process_local": (lambda tree, _: ts.from_process_local(tree, P("fsdp"), MESH), "w"),
    "with_sharding_constraint": (
        lambda tree, _: ts.with_sharding_constraint(tree, P("fsdp"), MESH),
        "w",
    ),
    "with_sharding_constraint in jit": (
        lambda *_: in_jit(lambda tree: ts.with_sharding_constraint(tree, P("fsdp"), MESH)),
        "w",
    ),
    "unshard": (lambda tree, _: ts.unshard(tree, PLAN), "w"),
    "unshard in jit": (lambda *_: in_jit(lambda tree: ts.unshard(tree, PLAN)), "w"),
    "extract_shardings": (lambda tree, _: ts.extract_shardings(tree), "w"),
    "get_partition_spec": (lambda tree, _: ts.get_partition_spec(tree), "w"),
    "plan": (lambda tree, _: ts.plan(tree, [(".*", None)], MESH), "w"),
    "Plan.follow": (lambda tree, _: PLAN.follow({"ema": tree}), "ema/w"),
    "match_partition_rules": (lambda tree, _: ts.match_partition_rules([(".*", None)], tree), "w"),
    "init_sharded": (lambda *_: ts.init_sharded(with_ref, rules=[(".*", None)], mesh=MESH), "w"),
    "init_sharded of arguments": (
        lambda tree, _: ts.init_sharded(
            lambda tree: tree["w"][...], tree, rules=[(".*", None)], mesh=MESH
        ),
        "argument/0/w",
    ),
    "jit_step": (lambda tree, _: step()(tree, np.ones((8, 2), "float32")), "w"),
    "jit_step of a batch": (lambda tree, _: step()(ts.shard(ARRAYS, PLAN), tree), "batch/w"),
    "jit_step, lowered": (lambda tree, _: step().lower(PLAN.structs, tree), "batch/w"),
    "shard_map_step": (
        lambda tree, _: ts.shard_map_step(keep, PLAN, batch=P("fsdp"))(tree, np.ones(8)),
        "w",
    ),
    "training.value_and_grad": (lambda tree, _: training.value_and_grad(total, PLAN)(tree), "w"),
    "accumulate_gradients": (
        lambda tree, _: training.accumulate_gradients(lambda x, _: (x, 0), tree, 2),
        "batch/w",
    ),
    "by_matrix": (lambda tree, _: training.by_matrix(optax.sgd(0.1), PLAN).init(tree), "w"),
    "gather_params": (lambda *_: by_hand(lambda t: manual.gather_params(t, "fsdp", P())), "w"),
    "sync_gradients": (lambda *_: by_hand(lambda t: manual.sync_gradients(t, "fsdp", P())), "w"),
    "shard_params": (lambda *_: by_hand(lambda t: manual.shard_params(t, "fsdp", P())), "w"),
    "vary": (lambda *_: by_hand(lambda t: manual.vary(t, "fsdp")), "w"),
    "manual.value_and_grad": (
        lambda *_: by_hand(lambda t: manual.value_and_grad(total, "fsdp", P())(t)),
        "w",
    ),
    "partition_specs": (lambda tree, _: manual.partition_specs(tree), "w"),
    "save": (lambda tree, folder: checkpoint.save(folder / "c", tree), "w"),
    "save_safetensors": (
        lambda tree, folder: interchange.save_safetensors(folder / "t", tree),
        "w",
    ),
    "restore": (lambda tree, folder: checkpoint.restore(folder / "of arrays", tree), "w"),
    "load_safetensors": (
        lambda tree, folder: interchange.load_safetensors(folder / "arrays", like=tree),
        "w",
    ),
    "draw": (lambda tree, _: ts.draw(tree), "w"),
    "diff_shardings": (lambda tree, _: testing.diff_shardings(tree, PLAN), "0/w"),
    "assert_stable_step": (lambda tree, _: testing.assert_stable_step(lambda s: s, tree), "w"),
    "assert_trees_sharded_as": (lambda tree, _: testing.assert_trees_sharded_as(tree, P()), "w"),
    "check_step": (
        lambda tree, _: testing.check_step(step(), tree, np.ones((8, 2), "float32")),
        "w",
    ),
    "check_gradients": (
        lambda tree, _: testing.check_gradients(lambda p, x: total(p), tree, np.ones((8, 2)), PLAN),
        "w",
    ),
    "analyze_sharding_strategy": (
        lambda tree, _: compat.analyze_sharding_strategy(tree, P(), MESH),
        "w",
    ),
    "infer_sharding": (lambda tree, _: ts.infer_sharding(tree, [(".*", "replicate")], MESH), "w"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mutable_reference_is_an_error(name: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "of arrays", ARRAYS)
    interchange.save_safetensors(tmp_path / "arrays", ARRAYS)
    call, path = CALLS[name]
    with pytest.raises(ts.LeafError) as error:
        call(with_ref(), tmp_path)
    lines = str(error.value).split("\n")
    assert lines[0].endswith(": leaves are mutable references, not arrays:")
    assert lines[1] == f"  {path}: a mutable reference (`jax.Ref`)."
    assert "x[...] if isinstance(x, jax.Ref)" in lines[2]
    assert not (tmp_path / "c").exists()
    assert not (tmp_path / "t").exists()
