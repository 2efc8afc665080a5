"""Locks of steps for TPUs that are not attached: the examples, and planted regressions."""

import os

import jax
import pytest
from gated_steps import HARMLESS, REGRESSIONS, edited, load

import treeshard as ts
from tools import gate
from treeshard._cli import main
from treeshard.programs._lock import Lock, compare_locks, lock_of

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)


def lock(edit: tuple[str, str], folder) -> Lock:
    step, state, batch = load(edited(edit), folder).make(ts.make_mesh("fsdp=8", topology="v5e:2x4"))
    return lock_of(step.compile(state, batch), 256)


@pytest.fixture(scope="module")
def locked(tmp_path_factory) -> Lock:
    return lock(("", ""), tmp_path_factory.mktemp("steps"))


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_planted_regression_is_found(name, locked, tmp_path) -> None:
    assert compare_locks(locked, lock(REGRESSIONS[name], tmp_path), "step.lock").changes


@pytest.mark.parametrize("name", HARMLESS)
def test_an_edit_that_changes_nothing_is_no_difference(name, locked, tmp_path) -> None:
    assert compare_locks(locked, lock(HARMLESS[name], tmp_path), "step.lock").changes == ()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("step", gate.STEPS)
def test_a_step_is_as_locked_on_v5e(step, monkeypatch, capsys) -> None:
    monkeypatch.chdir(gate.ROOT)
    with jax.numpy_rank_promotion("allow"):  # which `compile_llama` needs
        code = main(["gate", *gate.arguments(step, "v5e-2x4")])
    assert code == 0, capsys.readouterr().out


@pytest.mark.usefixtures("standard_promotion")
def test_what_does_not_fit_on_gpus_is_not_locked(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(gate.ROOT)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.00001")
    lock = tmp_path / "step.lock"
    command = ["gate", "examples.gated:by_hand", "--topology", "h100:8", "--mesh", "data=8"]
    with jax.numpy_rank_promotion("allow"):
        code = main([*command, "--against", str(lock), "--write"])
    printed = capsys.readouterr()
    assert code == 1, printed.err
    assert "  It does NOT fit. " in printed.out
    assert "--write" not in printed.out
    assert not lock.exists()
