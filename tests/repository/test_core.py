"""The core works without the reports on programs, and a first step loads none."""

import os
import subprocess
import sys

LOOP = """
import os, sys, tempfile, warnings
import numpy as np
import jax
import jax.numpy as jnp
import treeshard as ts
from jax.sharding import PartitionSpec as P
ts.simulate_devices(8)
import treeshard.manual, treeshard.training, treeshard.checkpoint, treeshard.interchange
import treeshard.compat, treeshard._inspection.draw


def init(key):
    return {"up": jax.random.normal(key, (256, 1024)), "down": jnp.zeros((1024, 256))}


def train_step(state, x):
    def loss(state):
        return ((jnp.tanh(x @ state["up"]) @ state["down"] - x) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, grads), value


warnings.simplefilter("ignore")
rules = [("up", P("fsdp")), ("down", P(None, "fsdp"))]
state, plan = ts.init_sharded(init, jax.random.key(0), rules=rules, mesh="fsdp=8")
step = ts.jit_step(train_step, plan)
state, value = step(state, np.ones((4096, 256), "float32"))
assert float(value) == 1.0
whole = ts.gather(state)
with tempfile.TemporaryDirectory() as folder:
    ts.checkpoint.save(folder + "/1", state)
    restored = ts.checkpoint.restore(folder + "/1", plan)
assert np.array_equal(ts.gather(ts.shard(whole, plan))["up"], np.asarray(restored["up"]))
try:
    ts.shard(whole, P("fdsp"), plan.mesh)
except ts.UnknownAxisError as error:
    assert "fsdp" in str(error)


def print_reports():
    reports = ("_trace", "communication", "programs", "testing")
    loaded = [name for name in sys.modules if name.startswith("treeshard.")]
    print(*sorted(name for name in loaded if name.split(".")[1] in reports))


print_reports()
step.communication(state, np.ones((4096, 256), "float32"))
print_reports()
"""


def test_a_training_loop_loads_no_report_until_one_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOP],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    unchecked, checked = done.stdout.splitlines()
    assert unchecked == ""
    assert "treeshard.communication._comparison" in checked.split()
