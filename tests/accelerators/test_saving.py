"""Checkpoints of arrays in the memory of an accelerator."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import arange, assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.accelerators.saving import state_at
from treeshard.checkpoint import Checkpoints, restore, save, verify

ROOT = Path(__file__).parents[2]


def test_save_verify_and_restore(mesh: Mesh, cpu_mesh: Mesh, tmp_path: Path) -> None:
    specs = {"w": P("fsdp"), "bf16": P("fsdp"), "e4m3": P("fsdp"), "keys": P()}
    tree = {
        "w": arange(64, 32),
        "bf16": arange(64, 32, dtype=jnp.bfloat16),
        "e4m3": arange(64, 4, dtype=jnp.float8_e4m3fn),
        "keys": jax.random.split(jax.random.key(0), 8),
    }
    placed = ts.shard(tree, specs, mesh)
    save(tmp_path / "x", placed)
    verify(tmp_path / "x")
    restored = restore(tmp_path / "x", placed)
    assert {k: x.sharding for k, x in restored.items()} == {
        k: x.sharding for k, x in placed.items()
    }
    on_cpu = restore(tmp_path / "x", placed, rules=[(".*", None)], mesh=cpu_mesh)
    assert all(x.sharding.device_set == {*cpu_mesh.devices.flat} for x in on_cpu.values())
    for one in (restored, on_cpu):
        assert_same(ts.gather(one), ts.gather(placed))


@pytest.mark.filterwarnings("ignore:Checkpoints. removed files of interrupted saves")
def test_a_killed_save_leaves_the_one_before(mesh: Mesh, on_cpus: bool, tmp_path: Path) -> None:
    mib = 16 if on_cpus else 512
    command = [sys.executable, "-m", "tests.accelerators.saving", str(tmp_path), str(mib)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append((line.strip(), time.monotonic()))
            if said[-1][0] == "saving 3":
                took = said[-2][1] - said[-3][1]
                time.sleep(took / 2)
                process.kill()
    names = [line for line, _ in said]
    assert names[:5] == ["saving 1", "saved 1", "saving 2", "saved 2", "saving 3"]
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        found = checkpoints.restore_latest(state_at(0, mib, mesh))
    assert found is not None
    step, state = found
    assert step >= 2
    verify(tmp_path / str(step))
    assert_same(ts.gather(state), ts.gather(state_at(step, mib, mesh)))
