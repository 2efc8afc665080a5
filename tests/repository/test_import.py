"""What `import treeshard` costs: nothing heavy, no backend, no device; and what a loop loads."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from surface import SUBMODULES

import treeshard as ts

HEAVY = ["chex", "equinox", "flax", "matplotlib", "optax", "rich", "tensorstore", "tqdm"]
# A new process imports ever more, trains, and writes down what that has loaded.
IMPORTS = f"""
import json, sys, tempfile
loaded = lambda: [name for name in {HEAVY} if name in sys.modules]
ours = lambda: [name for name in sys.modules if name.startswith("treeshard.")]
facts = {{}}
import treeshard as ts
facts["an unknown name"] = hasattr(ts, "_repr_html_")
facts["modules of treeshard"] = ours()
facts["treeshard"] = loaded()
ts.training.init_sharded
facts["a name of training"] = loaded()
facts["modules"] = ["treeshard", *ours()]
import jax, numpy as np, treeshard.interchange
from jax._src import xla_bridge
facts["backends"] = [xla_bridge.backends_are_initialized()]
ts.simulate_devices(8)
jax.devices()
facts["backends"].append(xla_bridge.backends_are_initialized())
sys.modules["tensorstore"] = None
try:
    import treeshard.checkpoint
except ImportError as error:
    facts["without tensorstore"] = str(error)
del sys.modules["tensorstore"]

def init(key):
    return {{"w": jax.random.normal(key, (8, 8))}}

def train_step(state, x):
    value, grads = jax.value_and_grad(lambda state: ((x @ state["w"]) ** 2).mean())(state)
    return jax.tree.map(lambda a, g: a - 0.1 * g, state, grads), value

def reports():
    packages = ("_trace", "communication", "programs", "testing")
    return [name for name in ours() if name.split(".")[1] in packages]

import treeshard.manual, treeshard.checkpoint, treeshard.compat, treeshard._inspection.draw
rules, x = [("w", jax.P("fsdp"))], np.ones((8, 8), "float32")
state, plan = ts.init_sharded(init, jax.random.key(0), rules=rules, mesh="fsdp=8", min_size=0)
step = ts.jit_step(train_step, plan)
state, _ = step(state, x)
with tempfile.TemporaryDirectory() as folder:
    ts.checkpoint.save(folder + "/1", state)
    state = ts.checkpoint.restore(folder + "/1", plan)
ts.shard(ts.gather(state), plan)
try:
    ts.shard(state, jax.P("fdsp"), plan.mesh)
except ts.UnknownAxisError:
    facts["reports in a loop"] = reports()
step.communication(state, x)
facts["reports"] = reports()
print(json.dumps(facts))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return json.loads(run(IMPORTS))


def test_importing_treeshard_loads_nothing_heavy_and_starts_no_backend(facts) -> None:
    assert facts["an unknown name"] is False
    assert facts["modules of treeshard"] == ["treeshard._core", "treeshard._core.contexts"]
    assert facts["treeshard"] == []
    assert "equinox" in facts["a name of training"]
    assert facts["backends"] == [False, True]


def test_importing_training_loads_no_reader_of_programs_and_few_modules(facts) -> None:
    """What a training loop does not need, it does not load."""
    modules = facts["modules"]
    unneeded = ("treeshard.communication", "treeshard.m")
    assert not [name for name in modules if name.startswith(unneeded)]
    assert len(modules) <= 52, sorted(modules)


def test_a_training_loop_loads_no_report_until_one_is_asked_for(facts) -> None:
    assert facts["reports in a loop"] == []
    assert "treeshard.communication._comparison" in facts["reports"]


def test_without_tensorstore_checkpoints_say_how_to_get_it(facts) -> None:
    install = "Install them with `pip install 'treeshard[checkpoint]'`."
    needs = "treeshard.checkpoint needs TensorStore and etils."
    assert facts["without tensorstore"] == f"{needs} {install}"


def test_an_unknown_name_says_what_is_near() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainin'. Did you mean 'training'"):
        ts.trainin  # noqa: B018  (touching it is the test)
    assert "training" in dir(ts)


def test_simulated_devices_after_the_import() -> None:
    code = """
import os; os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
import jax, treeshard as ts
ts.simulate_devices(5); print(jax.device_count(), os.environ["XLA_FLAGS"])
ts.simulate_devices(5)
"""
    assert run(code) == "5"


# Names of the libraries that treeshard grew from, and of submodules, which people look for here.
ELSEWHERE = {
    "communication": "Collective assert_collectives collectives",
    "compat": (
        "analyze_sharding_strategy create_pattern_based_partition_spec extract_sharding_structure"
        " get_shardings_with_structure logical_to_mesh_spec"
    ),
    "errors": "CheckpointError DamagedError LeafError NoMeshError ProcessError UnknownAxisError",
    "manual": "fold_rng_over_axis gather_array_with_mean_grads shard_module_params",
    "testing": "assert_stable_step diff_shardings",
    "training": "accumulate_gradients print_metrics",
}


def test_a_name_of_a_submodule_is_found_at_the_top() -> None:
    for submodule, names in ELSEWHERE.items():
        for name in names.split():
            assert name not in dir(ts)
            assert getattr(ts, name) is getattr(getattr(ts, submodule), name), name


def test_a_name_of_two_submodules_is_not_chosen_between() -> None:
    homes = "'treeshard.training.value_and_grad' and 'treeshard.manual.value_and_grad'"
    with pytest.raises(AttributeError, match=f"no attribute 'value_and_grad'. There are {homes}"):
        ts.value_and_grad  # noqa: B018  (touching it is the test)
    assert ts.assert_collectives is ts.communication.assert_collectives  # one function, two homes


def test_the_first_page_is_short_and_type_checkers_see_it() -> None:
    tree = ast.parse(Path(ts.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases)  # else it is private to them
    names = [alias.name for alias in aliases]
    assert dir(ts) == sorted([*names, "__version__"])
    assert len(names) - len(SUBMODULES) < 60
    assert all(getattr(ts, name) is not None for name in names)


def test_a_submodule_shows_public_names_only() -> None:
    for module in SUBMODULES.values():
        assert dir(module) == sorted(module.__all__)
        assert all(getattr(module, name) is not None for name in module.__all__)
