"""What `import treeshard` costs: nothing heavy, no backend, no device."""

import subprocess
import sys

import pytest
from surface import public_names

HEAVY = ["chex", "equinox", "flax", "matplotlib", "optax", "orbax", "rich", "tqdm"]


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


def test_without_orbax_checkpoints_say_how_to_get_it() -> None:
    said = run(
        "import sys; sys.modules['etils'] = None\n"
        "try: import treeshard.checkpoint\n"
        "except ImportError as error: print(error)"
    )
    install = "Install it with `pip install 'treeshard[checkpoint]'`."
    assert said == f"treeshard.checkpoint needs Orbax. {install}"


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


def test_what_loads_on_first_touch_is_what_the_table_of_contents_says() -> None:
    import treeshard as ts

    hooked = {"jaxtyping"}  # what the annotation checks put into modules
    assert set(dir(ts)) - hooked == {
        *public_names(ts),
        "checkpoint",
        "interchange",
        "manual",
        "training",
    }
