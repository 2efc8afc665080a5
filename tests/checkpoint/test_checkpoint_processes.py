"""Saves with two processes, restores with one and with four; tensor files of four."""

from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess import (
    checkpoint_checks,
    checksum_checks,
    interchange_checks,
    launcher,
    restoring_checks,
)
from tests.multiprocess.checkpoint_checks import TENSOR, assert_is_the_state, structs
from treeshard.checkpoint import restore, verify

FOUR = [restoring_checks, checksum_checks, interchange_checks]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(directory: Path) -> launcher.Verdicts:
    return launcher.launch(checkpoint_checks, directory)


@pytest.fixture(scope="module")
def four(two: launcher.Verdicts, directory: Path) -> launcher.Verdicts:
    args = [str(directory / "fsdp")]
    return launcher.launch(FOUR, directory / "four", processes=4, devices=2, args=args)


@pytest.mark.parametrize("check", launcher.checks_of(checkpoint_checks))
def test_two_processes(check: str, two: launcher.Verdicts) -> None:
    two.assert_passed(check)


@pytest.mark.parametrize("check", launcher.checks_of(*FOUR))
def test_four_processes(check: str, four: launcher.Verdicts) -> None:
    four.assert_passed(check)


@pytest.mark.parametrize(("axes", "devices"), [("data=2,tensor=4", 8), ("data=1,tensor=1", 1)])
def test_one_process(axes: str, devices: int, two: launcher.Verdicts, directory: Path) -> None:
    mesh = ts.make_mesh(axes, devices=jax.devices()[:devices])
    again = restore(directory / "fsdp", structs(), rules=TENSOR, mesh=mesh, min_size=0)
    assert_is_the_state(again)
    assert again["w"].sharding == NamedSharding(mesh, P("tensor", "data"))
    verify(directory / "fsdp")
