"""Real signals to runs of one and more processes, and what the handlers leave."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import treeshard as ts
from examples import preemption
from tests.multiprocess import launcher, preemption_checks
from treeshard.checkpoint import Checkpoints, _preemption, _save


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preempted")


@pytest.fixture(scope="module")
def preempted(directory: Path) -> launcher.Verdicts:
    return launcher.launch(preemption_checks, directory, processes=1)


@pytest.mark.parametrize("check", launcher.checks_of(preemption_checks))
def test_preempted(check: str, preempted: launcher.Verdicts) -> None:
    preempted.assert_passed(check)


@pytest.mark.parametrize("processes", preemption_checks.PROCESSES)
def test_a_run_that_was_preempted_trains_as_one_that_was_not(
    processes: int, preempted: launcher.Verdicts, directory: Path
) -> None:
    found = Checkpoints(directory / f"run-of-{processes}", read_only=True).restore_latest()
    assert found is not None
    steps, state = found
    w = np.asarray(jax.random.normal(jax.random.key(0), (16, 4)), np.float64)
    for i in range(1, steps + 1):
        batch = preemption.batch_at(i)
        w = w - 0.01 * 2 / batch["y"].size * batch["x"].T @ (batch["x"] @ w - batch["y"])
    np.testing.assert_allclose(state["w"], w, atol=1e-5)
    assert state["step"] == steps


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Shells ignore SIGINT for background jobs, and other tests leave handlers of SIGTERM."""
    defaults = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_noted_and_the_handlers_from_before_come_back(
    number: int, tmp_path: Path
) -> None:
    before = [signal.SIG_DFL, signal.default_int_handler]
    with Checkpoints(tmp_path / "a") as outer, Checkpoints(tmp_path / "b", every=100) as inner:
        assert [signal.getsignal(x) for x in BOTH] == before  # a run that never asks is as before
        assert not outer.preempted(1)
        assert not inner.preempted(1)
        signal.raise_signal(number)
        assert inner.save(1, {"w": np.ones(3)}, force=inner.preempted(1))
        assert inner.preempted(2)
        assert outer.preempted(2)
    assert [signal.getsignal(x) for x in BOTH] == before
    with pytest.raises(ts.CheckpointError, match="this Checkpoints is closed"):
        outer.preempted(3)


@pytest.mark.parametrize("closes_in_thread", [False, True])
@pytest.mark.parametrize("installs_after", [False, True])
@pytest.mark.parametrize("number", BOTH)
def test_a_run_that_has_ended_leaves_the_signals_to_later_runs(
    number: int, installs_after: bool, closes_in_thread: bool, tmp_path: Path
) -> None:
    runs = [Checkpoints(tmp_path / name) for name in "abc"]
    first, second, later = runs
    first.preempted(0)
    second.preempted(0)
    if not installs_after:
        later.preempted(0)
    for run in (first, second):
        with ThreadPoolExecutor() as threads:
            threads.submit(run.close).result() if closes_in_thread else run.close()
    later.preempted(0)
    signal.raise_signal(number)
    assert later.preempted(1)
    later.close()
    handlers = [signal.getsignal(x) for x in BOTH]
    assert handlers == [signal.SIG_DFL, signal.default_int_handler]


def test_own_handlers_are_called_and_what_is_ignored_stays_so(tmp_path: Path) -> None:
    came: list[int] = []
    term = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under `nohup`
    try:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.preempted(0)
            signal.raise_signal(signal.SIGINT)
            assert not checkpoints.preempted(1)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert checkpoints.preempted(2)
            mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # which was installed since
        signal.signal(signal.SIGTERM, mine)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, term)
    assert came == 3 * [signal.SIGTERM]


def test_a_ctrl_c_during_a_save_is_noted_once(tmp_path: Path, monkeypatch) -> None:
    real = _save.copies

    def interrupted(arrays: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(arrays)

    monkeypatch.setattr(_save, "copies", interrupted)
    with Checkpoints(tmp_path) as checkpoints:
        assert not checkpoints.preempted(1)
        checkpoints.save(1, {"w": np.ones(3)})
        assert checkpoints.preempted(2)
    assert Checkpoints(tmp_path, read_only=True).steps() == (1,)


def test_a_ctrl_c_while_handlers_come_back_leaves_no_lock(tmp_path: Path, monkeypatch) -> None:
    real = signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return real(number, handler)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.preempted(0)
    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.close()
    Checkpoints(tmp_path).close()


def test_a_loop_in_another_thread(tmp_path: Path) -> None:
    """Only the main thread can install handlers; every thread may ask."""
    with Checkpoints(tmp_path) as checkpoints, ThreadPoolExecutor() as threads:
        with pytest.raises(ts.CheckpointError, match=r"Call `checkpoints\.preempted\(0\)` there"):
            threads.submit(checkpoints.preempted, 1).result()
        assert not checkpoints.preempted(0)
        assert not threads.submit(checkpoints.preempted, 1).result()
        signal.raise_signal(signal.SIGTERM)
        assert threads.submit(checkpoints.preempted, 2).result()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_ends_at_sigterm(tmp_path: Path) -> None:
    """As `multiprocessing.Process.terminate` expects."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.preempted(0)
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not checkpoints.preempted(1)


def test_without_the_service_of_jax_it_is_an_error(tmp_path: Path, monkeypatch) -> None:
    def fail(step: int) -> bool:
        raise RuntimeError("Preemption sync manager has not been initialized.")

    with Checkpoints(tmp_path) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(_preemption, "reached_preemption_sync_point", fail)
        patch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(ts.ProcessError, match="`jax.config.update.'jax_enable_preemption_ser"):
            checkpoints.preempted(1)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
