"""Runs on attached accelerators, or on one CPU device with `TREESHARD_ACCELERATORS=cpu`.

`make test-accelerators` loads this file and not the `conftest.py` above it, whose packages the
Python of such a machine may lack.
"""

import os

# Other processes of a test use the same accelerator.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

import treeshard as ts

NOTHING_ATTACHED = "JAX finds no accelerator; TREESHARD_ACCELERATORS=cpu runs these tests on CPUs"
ON_CPUS = os.environ.get("TREESHARD_ACCELERATORS") == "cpu"
if ON_CPUS:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time


@pytest.fixture(scope="session", autouse=True)
def attached() -> None:
    """Skips these tests where there is no accelerator."""
    if not ON_CPUS and jax.default_backend() == "cpu":
        pytest.skip(NOTHING_ATTACHED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says once why they were skipped."""
    skipped = terminalreporter.getreports("skipped")
    if any(NOTHING_ATTACHED in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"tests/accelerators is skipped: {NOTHING_ATTACHED}")


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """All accelerators on one axis."""
    return ts.make_mesh("fsdp=-1")


@pytest.fixture(scope="session")
def cpu_mesh() -> jax.sharding.Mesh:
    """One CPU."""
    return ts.make_mesh("fsdp=1", devices=jax.devices("cpu")[:1])


@pytest.fixture(scope="session")
def on_cpus() -> bool:
    """Whether CPUs stand in for accelerators, so that sizes are small."""
    return jax.default_backend() == "cpu"


@pytest.fixture(autouse=True)
def exact_products():
    """Multiplies float32 as float32: GPUs round the factors by default."""
    with jax.default_matmul_precision("highest"):
        yield
