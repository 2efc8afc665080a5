"""Eight simulated devices, every warning an error, every annotation checked."""

import importlib
import pkgutil
import threading

import jax
import pytest
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

with install_import_hook("treeshard", "beartype.beartype"):
    import treeshard as ts

    for module in pkgutil.walk_packages(ts.__path__, "treeshard."):
        if module.name != "treeshard.__main__":
            importlib.import_module(module.name)

ts.simulate_devices(8)
# JAX 0.10.0 notes 10 frames, and half of them belong to the annotation checks.
jax.config.update("jax_traceback_in_locations_limit", 100)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)


def pytest_terminal_summary(terminalreporter) -> None:
    """Shows what tests have counted."""
    for report in terminalreporter.getreports("passed"):
        for what, counts in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {what}: {counts}")


@pytest.fixture(scope="module", autouse=True)
def no_compile_goes_on():
    """Waits for what `suggest` left compiling: the import hook checks what that thread defines, and
    records warnings while it does, those of other tests too."""
    yield
    for thread in threading.enumerate():
        if thread.name == "treeshard-suggest":
            thread.join()


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """2 x 4 devices, Auto axes."""
    return ts.make_mesh("data=2,fsdp=4")


@pytest.fixture(scope="session")
def fsdp_mesh() -> jax.sharding.Mesh:
    """8 devices on one axis."""
    return ts.make_mesh("fsdp=8")


@pytest.fixture
def unchecked():
    """Runs without annotation checks, to see what treeshard itself says of a wrong type."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


@pytest.fixture
def compiles():
    """A list that gets an entry for every program that XLA compiles."""
    seen: list[str] = []

    def listen(name: str, seconds: float, **_: object) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def standard_promotion():
    """Allows dtypes to be promoted: optax mixes counts and floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def quick_compiles():
    """Compiles without optimizations, for functions that run a few times only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rules shard small arrays too."""
    monkeypatch.setenv("MIN_SHARDING_SIZE", "0")
