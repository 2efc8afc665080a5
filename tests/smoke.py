"""What must work where nothing but treeshard and what it depends on is installed.

`test_package.py` runs this in an environment of its own, away from the repository.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import init_sharded, jit_step

assert "site-packages" in ts.__file__, ts.__file__
for extra in ("tensorstore", "safetensors", "rich", "tqdm", "matplotlib", "optax", "flax"):
    assert importlib.util.find_spec(extra) is None, f"{extra} is here, so nothing is shown"

# plan, shard, gather, train ---------------------------------------------------------------

ts.simulate_devices(2)
mesh = ts.make_mesh("fsdp=2")
rules = [("bias", None), (".*", ts.fsdp("fsdp"))]


def init(key):
    return eqx.nn.MLP(8, 8, 16, 1, key=key)


def train_step(model, batch):
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss


model, plan = init_sharded(init, jax.random.key(0), rules=rules, mesh=mesh, min_size=1)
assert "rule 1 '.*' fsdp('fsdp')" in str(plan)
assert plan == ts.plan(eqx.filter_eval_shape(init, jax.random.key(0)), rules, mesh, min_size=1)
step = jit_step(train_step, plan, batch=P("fsdp"))
losses = []
for _ in range(3):
    model, loss = step(model, np.ones((4, 8), np.float32))
    losses.append(float(loss))
assert losses[2] < losses[0], losses
assert ts.extract_shardings(model).layers[0].weight.spec == P("fsdp")

tree = {"w": np.arange(16.0, dtype=np.float32).reshape(4, 4)}
placed = ts.shard(tree, P("fsdp"), mesh)
assert [piece.data.shape for piece in placed["w"].addressable_shards] == [(2, 4), (2, 4)]
np.testing.assert_array_equal(ts.gather(placed)["w"], tree["w"])

# the command line -------------------------------------------------------------------------

Path("shapes.json").write_text('{"w": {"shape": [1024, 1024], "dtype": "float32"}}')
Path("rules.toml").write_text("[[rules]]\npattern = 'w'\naction = \"P('fsdp')\"\n")
command = ["plan", "--shapes=shapes.json", "--rules=rules.toml", "--mesh=fsdp=8"]
done = subprocess.run(
    [Path(sys.executable).parent / "treeshard", *command], capture_output=True, text=True
)
assert done.returncode == 0, done.stderr
assert "P('fsdp',)" in done.stdout, done.stdout

# what needs more says so ------------------------------------------------------------------

ts.interchange.save_safetensors("params.safetensors", placed)

NEEDS = [
    ("show", lambda: ts.gather(placed, progress=True)),
    ("show", lambda: ts.draw(placed, to="tree.svg")),
    ("checkpoint", lambda: ts.checkpoint.save("here", placed)),
    ("checkpoint", lambda: ts.checkpoint.restore("here")),
    ("checkpoint", lambda: ts.checkpoint.inspect("here")),
    ("checkpoint", lambda: ts.interchange.load_safetensors("params.safetensors")),
]
for i, (extra, call) in enumerate(NEEDS):
    said = "nothing"
    try:
        call()
    except ImportError as error:
        said = str(error)
    assert f"pip install 'treeshard[{extra}]'" in said, f"call {i}: {said}"
print("passed", ts.__version__)
