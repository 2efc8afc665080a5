"""What `import treeshard` costs: nothing heavy, no backend, no device."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from surface import SUBMODULES

HEAVY = ["chex", "equinox", "flax", "matplotlib", "optax", "rich", "tensorstore", "tqdm"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(statement: str) -> set[str]:
    out = run(f"import sys; {statement}; print(*(m for m in {HEAVY} if m in sys.modules))")
    return set(out.split())


def test_importing_treeshard_loads_nothing_heavy() -> None:
    assert loaded_by("import treeshard") == set()


def test_a_heavy_import_would_be_seen() -> None:
    assert loaded_by("import treeshard, tqdm") == {"tqdm"}


def test_importing_treeshard_starts_no_backend() -> None:
    ask = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert run(f"import treeshard, treeshard.interchange, treeshard.training; {ask}") == "False"
    assert run(f"import treeshard, jax; jax.devices(); {ask}") == "True"


def test_submodules_load_on_first_touch() -> None:
    out = run(
        "import sys, treeshard as ts; before = 'equinox' in sys.modules;"
        "ts.training.init_sharded; print(before, 'equinox' in sys.modules)"
    )
    assert out == "False True"


def test_without_tensorstore_checkpoints_say_how_to_get_it() -> None:
    said = run(
        "import sys; sys.modules['tensorstore'] = None\n"
        "try: import treeshard.checkpoint\n"
        "except ImportError as error: print(error)"
    )
    install = "Install them with `pip install 'treeshard[checkpoint]'`."
    assert said == f"treeshard.checkpoint needs TensorStore and etils. {install}"


def test_an_unknown_name_says_what_is_near() -> None:
    import treeshard as ts

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
    import treeshard as ts

    for submodule, names in ELSEWHERE.items():
        for name in names.split():
            assert name not in dir(ts)
            assert getattr(ts, name) is getattr(getattr(ts, submodule), name), name


def test_a_name_of_two_submodules_is_not_chosen_between() -> None:
    import treeshard as ts

    homes = "'treeshard.training.value_and_grad' and 'treeshard.manual.value_and_grad'"
    with pytest.raises(AttributeError, match=f"no attribute 'value_and_grad'. There are {homes}"):
        ts.value_and_grad  # noqa: B018  (touching it is the test)
    assert ts.assert_collectives is ts.communication.assert_collectives  # one function, two homes


def test_a_name_that_nobody_has_is_not_looked_for() -> None:
    code = "import sys, treeshard; print(hasattr(treeshard, '_repr_html_'), 'jax' in sys.modules)"
    assert run(code) == "False False"


# What one plugs into a training loop of one's own, in the order in which pages list it.
TOOLKIT = [
    "match_partition_rules",
    "make_shard_and_gather_fns",
    "with_sharding_constraint",
    "PartitionAxis",
    "get_submesh_device_index",
    "get_mesh_axis_size",
    "get_axes_size_in_mesh",
    "get_mesh_axis_names",
    "get_incontext_mesh",
    "names_in_current_mesh",
    "get_partition_spec",
    "extract_shardings",
    "get_names_from_partition_spec",
    "infer_sharding",
    "shard_params",
    "gather_params",
    "sync_gradients",
]


def test_the_toolkit_comes_first() -> None:
    import treeshard as ts

    stub = Path(ts.__file__).with_suffix(".pyi")
    listed = re.findall(r"^from .+ import (\w+) as", stub.read_text(), re.MULTILINE)
    assert listed[: len(TOOLKIT)] == TOOLKIT
    page = (stub.parents[1] / "docs/reference/treeshard.md").read_text()
    shown = re.findall(r"^::: treeshard\.(?:\w+\.)?(\w+)$", page, re.MULTILINE)
    assert shown[: len(TOOLKIT)] == TOOLKIT
    assert set(TOOLKIT) <= set(dir(ts))
    translations = set(TOOLKIT) & set(ts.compat.__all__)
    assert translations == {"infer_sharding"}  # strategies of big_vision, as text


def test_the_first_page_is_short_and_type_checkers_see_it() -> None:
    import treeshard as ts

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


def test_importing_training_loads_no_reader_of_programs_and_few_modules() -> None:
    """What a training loop does not need, it does not load."""
    out = run(
        "import sys, treeshard.training;"
        "print(*sorted(name for name in sys.modules if name.startswith('treeshard')))"
    ).split()
    assert not [name for name in out if name.startswith(("treeshard.communication", "treeshard.m"))]
    assert len(out) <= 45, out
