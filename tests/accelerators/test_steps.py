"""Steps on an accelerator: as on a CPU, with moments on the host, in long loops."""

import itertools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import resident_mib
from examples import train_fsdp
from treeshard.checkpoint import restore, save
from treeshard.training import jit_step, value_and_grad

WIDTH = 128
OPTIMIZER = optax.adamw(1e-2)

# ------------------------------------------------------------------ the example


def test_the_example_trains_as_on_one_cpu(mesh: Mesh, cpu_mesh: Mesh, on_cpus: bool) -> None:
    sizes = "--layers 1 --width 32 --batch 4" if on_cpus else "--layers 6"
    args = train_fsdp.parse([*sizes.split(), "--warmup=2", "--steps=20", "--text-bytes=200000"])
    optimizer = train_fsdp.make_optimizer(args)
    init = train_fsdp.make_init(args, optimizer)
    text, _ = train_fsdp.read_text(args.text_bytes)
    batches = list(itertools.islice(train_fsdp.batches(text, args), 5))

    start, plan = ts.init_sharded(
        init, jax.random.key(0), rules=train_fsdp.RULES, mesh=mesh, min_size=0
    )
    cpu_plan = plan.on(cpu_mesh)
    start = ts.gather(start)
    losses, grads = [], []
    for one in (plan, cpu_plan):
        state = ts.shard(start, one)
        first = ts.shard(batches[0], P("fsdp"), one.mesh)
        gradient = eqx.filter_jit(value_and_grad(train_fsdp.loss_fn, one))
        with jax.set_mesh(one.mesh):
            grads.append(ts.gather(gradient(state.model, first)[1]))
        # Both states share the memory of the key, which a step that donates would delete.
        train_step = train_fsdp.make_train_step(optimizer)
        step = jit_step(train_step, one, batch=P("fsdp"), donate=False)
        losses.append([])
        for batch in batches:
            state, loss = step(state, batch)
            losses[-1].append(float(loss))
    assert_close(*grads, tolerance=1e-4)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    assert losses[0][-1] < losses[0][0]


# ------------------------------------------------------------------ moments on the host


def init(key: Any) -> Any:
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (WIDTH, 4 * WIDTH)) / 8,
        "down": jax.random.normal(down, (4 * WIDTH, WIDTH)) / 16,
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((batch + jax.nn.relu(batch @ params["up"]) @ params["down"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    loss, grads = value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def initialised(mesh: Mesh, memory: str | None = None) -> Any:
    rules = [("opt_state", ts.fsdp("fsdp", memory=memory)), (".*", ts.fsdp("fsdp"))]
    return ts.init_sharded(init, jax.random.key(0), rules=rules, mesh=mesh, min_size=0)


def memory_kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def test_moments_stay_on_the_host_also_after_a_restore(mesh: Mesh, tmp_path: Path) -> None:
    batch = np.ones((8, WIDTH), "float32")
    losses = {}
    for memory in (None, "pinned_host"):
        state, plan = initialised(mesh, memory)
        step = jit_step(train_step, plan, batch=P("fsdp"))
        losses[memory] = []
        for i in range(4):
            if i == 2:
                path = tmp_path / str(memory)
                save(path, state)
                saved, state = ts.gather(state), restore(path, plan)
                assert_same(ts.gather(state), saved)
            state, loss = step(state, batch)
            losses[memory].append(float(loss))
            assert memory_kinds(state["opt_state"]) == {memory or "device"}
            assert memory_kinds(state["params"]) == {"device"}
    np.testing.assert_allclose(losses["pinned_host"], losses[None], rtol=1e-5)


# ------------------------------------------------------------------ donated states, long loops


def test_a_donated_state_is_an_error_and_no_crash(mesh: Mesh, tmp_path: Path) -> None:
    old, plan = initialised(mesh)
    batch = np.ones((8, WIDTH), "float32")
    step = jit_step(train_step, plan, batch=P("fsdp"))
    new, _ = step(old, batch)
    calls = (
        lambda: step(old, batch),
        lambda: ts.gather(old),
        lambda: ts.reshard(old, plan),
        lambda: save(tmp_path / "old", old),
    )
    for call in calls:
        with pytest.raises(ts.DeletedLeafError):
            call()
    new, loss = step(new, batch)
    assert np.isfinite(float(loss))


def bytes_in_use() -> int:
    """The bytes on all accelerators; 0 on CPUs, which do not count them."""
    return sum((device.memory_stats() or {}).get("bytes_in_use", 0) for device in jax.devices())


def test_a_thousand_steps_need_no_more_memory(mesh: Mesh) -> None:
    state, plan = initialised(mesh)
    batch = np.ones((8, WIDTH), "float32")
    step = jit_step(train_step, plan, batch=P("fsdp"))
    before = None
    for i in range(1_000):
        state, loss = step(state, batch)
        jax.block_until_ready(loss)
        if i == 99:
            before = len(jax.live_arrays()), bytes_in_use(), resident_mib()
    assert before is not None
    assert len(jax.live_arrays()) <= before[0]
    assert bytes_in_use() <= before[1]
    assert resident_mib() <= before[2] + 16
