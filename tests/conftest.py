"""Eight simulated devices, every warning an error."""

from isolation import pytest_sessionfinish as pytest_sessionfinish  # isort: skip  (before JAX)

import gc
import importlib
import os
import pkgutil
from contextlib import nullcontext

import annotations
import helpers
import hypothesis
import jax
import pytest

# A fifth of the time: `make test-newest` and `make test-floor` check annotations.
CHECKS_ANNOTATIONS = "TREESHARD_ANNOTATIONS" in os.environ
with annotations.checking("treeshard") if CHECKS_ANNOTATIONS else nullcontext():
    import treeshard as ts

    for module in pkgutil.walk_packages(ts.__path__, "treeshard."):
        if module.name != "treeshard.__main__":
            importlib.import_module(module.name)

# By default hypothesis begins with what failed in an earlier run, and then tries other examples in
# each run, but where CI is set.
hypothesis.settings.register_profile("the same everywhere", derandomize=True, database=None)
if "TREESHARD_SOAK" not in os.environ:
    hypothesis.settings.load_profile("the same everywhere")

ts.simulate_devices(8)
if CHECKS_ANNOTATIONS:
    # JAX notes 10 frames, and half of them belong to these checks.
    jax.config.update("jax_traceback_in_locations_limit", 100)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Few programs of a run are equal, so that keeping them all takes longer than to compile them again.
jax.config.update("jax_enable_compilation_cache", False)
# The same HLO, compiled in half the time: how fast it runs is not tested. Not where every way is
# tried, nor for the compilers of TPUs and GPUs.
QUICKLY = not {"TREESHARD_SOAK", "TREESHARD_TARGETS"} & {*os.environ}
jax.config.update("jax_disable_most_optimizations", QUICKLY)

# The longest files. With `--dist loadfile` a core would be idle while the last of them runs, so
# they run first.
LONG = (
    "placement/test_moving_across_processes.py",
    "repository/test_docs.py",
    "product/test_examples_processes.py",
    "product/test_examples.py",
    "training/test_waiting.py",
    "training/test_training_processes.py",
    "core/test_processes.py",
    "checkpoint/test_preemption.py",
    "testing/test_verdicts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of long files first, and leaves the others in their order."""
    order = {f"tests/{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.nodeid.partition("::")[0], len(LONG)))


def pytest_collection_finish() -> None:
    """Spares a twentieth of the time: the collector need not look at what was imported again, and
    tracing makes many objects that a count of references frees."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_terminal_summary(terminalreporter) -> None:
    """Shows what tests have counted."""
    for report in terminalreporter.getreports("passed"):
        for what, counts in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{report.nodeid.split('::')[-1]}: {what}: {counts}")


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
    with annotations.off():
        yield


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


@pytest.fixture(scope="module")
def broadcasting():
    """Allows biases to be added to rows."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def quick_compiles():
    """Compiles without optimizations, for functions that run a few times only."""
    with helpers.compiling_quickly():
        yield


@pytest.fixture(scope="module")
def full_compiles():
    """Compiles with all optimizations, where a test looks at what they make of a program."""
    with helpers.compiling_quickly(False):
        yield


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rules shard small arrays too."""
    monkeypatch.setenv("MIN_SHARDING_SIZE", "0")
