"""Saves with two processes, restores with one."""

from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess import checkpoint_checks, launcher
from tests.multiprocess.checkpoint_checks import TENSOR, assert_is_the_state, structs
from treeshard.checkpoint import restore, verify


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def two(directory: Path) -> launcher.Verdicts:
    return launcher.launch(checkpoint_checks, directory)


@pytest.mark.parametrize("check", launcher.checks_of(checkpoint_checks))
def test_two_processes(check: str, two: launcher.Verdicts) -> None:
    two.assert_passed(check)


def test_one_process_on_other_meshes(two: launcher.Verdicts, directory: Path) -> None:
    plan = ts.plan(structs(), TENSOR, ts.make_mesh("data=2,tensor=4"), min_size=0)
    again = restore(directory / "fsdp", plan)
    assert_is_the_state(again)
    assert again["w"].sharding.spec == P("tensor", "data")
    mesh = ts.make_mesh("data=1,tensor=1", devices=jax.devices()[:1])
    again = restore(directory / "fsdp", structs(), rules=TENSOR, mesh=mesh)
    assert_is_the_state(again)
    assert again["half"].devices() == {jax.devices()[0]}
    verify(directory / "fsdp")
