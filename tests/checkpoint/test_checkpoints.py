"""The checkpoints of a training run."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ctrl_c import is_interrupted
from full_disk import files_of_at_most
from helpers import files_in
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal

import treeshard as ts
from treeshard.checkpoint import Checkpoints, _checkpoints, _save, restore, save, verify
from treeshard.checkpoint._paths import _REMOVED
from treeshard.errors import CheckpointError

BIG = {"w": np.random.default_rng(0).normal(size=(512, 512))}


def state_at(step: int) -> dict[str, Any]:
    return {"w": jnp.full((8, 4), step, jnp.float32), "step": step}


def test_a_run_saves_and_restores_its_latest_state(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run", keep=np.int64(2), every=2) as checkpoints:
        assert checkpoints.restore_latest(state_at(0)) is None
        assert (checkpoints.latest, checkpoints.steps()) == (None, ())
        saved = [checkpoints.save(step, state_at(step)) for step in range(7)]
        assert saved == [True, False] * 3 + [True]
        like = {"w": jnp.zeros((8, 4), jnp.float16), "step": 0}
        step, again = checkpoints.restore_latest(like, cast="float16") or (0, None)
        assert step == again["step"] == 6
        assert_array_equal(again["w"], np.full((8, 4), 6, np.float16), strict=True)
        assert checkpoints.restore(np.int64(4), state_at(0))["step"] == 4
        assert (checkpoints.latest, checkpoints.steps()) == (6, (4, 6))
        assert repr(checkpoints) == f"<Checkpoints: {tmp_path}/run, 2 steps>"
    assert files_in(tmp_path / "run") == ["4", "6"]
    assert restore(tmp_path / "run" / "4")["step"] == 4


def test_a_state_may_be_donated_while_it_is_written(tmp_path: Path) -> None:
    mesh = ts.make_mesh("fsdp=8")
    step = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    specs = {"w": P("fsdp"), "v": P()}
    for i in range(3):
        like = {name: np.full((1024, 256), i + 1, np.float32) for name in specs}
        state = ts.shard(like, specs, mesh)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(i, state)
            for _ in range(3):
                state = step(state)
        assert (restore(tmp_path / str(i))["w"] == i + 1).all()


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_are_errors(tmp_path: Path) -> None:
    for wrong in ({"keep": 0}, {"every": -1}):
        with pytest.raises(ValueError, match="both must be positive"):
            Checkpoints(tmp_path / "run", **wrong)
    wrong: Any
    for wrong in ({"keep": 1.5}, {"every": 2.5}, {"keep": "2"}):
        with pytest.raises(TypeError, match=r"^Checkpoints: keep=.*: both must be whole numbers"):
            Checkpoints(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"save\(step=-1\)"):
        checkpoints.save(-1, {})


def test_what_treeshard_did_not_write_is_no_step_and_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024" / "precious.csv").write_text("mine")
    (tmp_path / "99999").mkdir()
    (tmp_path / "7").write_text("a file")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_at(step))
        checkpoints.wait()
        assert (checkpoints.latest, checkpoints.steps()) == (3, (3,))
        with pytest.raises(ts.CheckpointError, match="already a directory at .*2024, and `save`"):
            checkpoints.save(2024, state_at(0))
    assert files_in(tmp_path) == ["2024", "3", "7", "99999"]
    assert (tmp_path / "2024" / "precious.csv").read_text() == "mine"


def test_a_lower_step_than_the_latest_is_told_and_kept(tmp_path: Path) -> None:
    for step in (200, 300, 400):
        save(tmp_path / str(step), state_at(step))
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        told = (
            rf"save\(10\): {tmp_path} has later steps, up to 400, which `restore_latest` restores"
        )
        with pytest.warns(ts.ShardingWarning, match=told):
            assert checkpoints.save(10, state_at(10))
        checkpoints.wait()
        assert checkpoints.steps() == (10, 300, 400)
        checkpoints.save(401, state_at(401))
        checkpoints.wait()
        assert checkpoints.steps() == (400, 401)


TREE = {f"w{i}": np.ones((64, 64), np.float32) for i in range(40)}


def test_progress_is_shown_on_request_and_needs_tqdm(tmp_path, capfd, monkeypatch) -> None:
    def shown() -> str:
        return capfd.readouterr().err

    with Checkpoints(tmp_path / "run", progress=True) as run:
        run.save(1, TREE)
        run.wait()
        assert re.search(r"save: 100%.* 100/100 ", shown())
        run.restore_latest()
        assert re.search(r"restore: 100%.* 40/40 ", shown())
        run.restore(1, progress=False)
    save(tmp_path / "1", TREE)
    restore(tmp_path / "1")
    assert shown() == ""
    save(tmp_path / "2", TREE | {"large": np.ones((1024, 1024), np.float32)}, progress=True)
    assert re.search(r"save: 100%.* 100/100 ", shown())
    restore(tmp_path / "2", progress=True)
    assert re.search(r"restore: 100%.* 41/41 ", shown())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for name, needs_tqdm in {
        "save": lambda: save(tmp_path / "3", TREE, progress=True),
        "Checkpoints": lambda: Checkpoints(tmp_path / "3", progress=True),
        "restore": lambda: restore(tmp_path / "1", progress=True),
    }.items():
        with pytest.raises(ImportError, match=rf"{name}\(progress=True\) needs tqdm"):
            needs_tqdm()
    assert files_in(tmp_path) == ["1", "2", "run"]


def test_a_reader_takes_no_lock(tmp_path: Path) -> None:
    reader = Checkpoints(tmp_path / "run", read_only=True)
    assert reader.restore_latest() is None
    assert not (tmp_path / "run").exists()
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        assert reader.latest == 1
        with pytest.raises(ts.CheckpointError, match="run: this Checkpoints is read-only"):
            reader.save(2, state_at(2))
    with pytest.raises(ts.CheckpointError, match="run: this Checkpoints is closed"):
        checkpoints.save(2, state_at(2))
    assert checkpoints.restore(1, state_at(0))["step"] == 1


def test_a_disk_too_full_for_the_table_is_an_error(tmp_path: Path) -> None:
    """The last step fails, on process 0 alone."""
    with files_of_at_most(10_000), pytest.raises(ts.CheckpointError, match="File too large"):
        save(tmp_path / "x", {f"layers/{i}": i for i in range(500)})
    assert files_in(tmp_path) == []


def test_a_full_disk_is_told_once_and_changes_no_earlier_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with files_of_at_most(100_000):
        checkpoints.save(1, BIG)
        checkpoints._writing[0]._end.wait()  # wait until it has failed
    assert files_in(tmp_path) == [".treeshard-lock"]
    says = "1 was not saved; what existed before is unchanged. .*File too large"
    with pytest.raises(ts.CheckpointError, match=says):
        checkpoints.save(2, state_at(2))
    checkpoints.save(2, state_at(2))
    with files_of_at_most(100_000):
        checkpoints.wait()
        checkpoints.save(3, BIG)
        with pytest.raises(ts.CheckpointError, match="3 was not saved"):
            checkpoints.close()
    checkpoints.close()
    assert files_in(tmp_path) == ["2"]
    assert (restore(tmp_path / "2")["w"] == 2).all()


def test_a_step_that_is_being_copied_is_not_the_latest(tmp_path: Path) -> None:
    """As `rsync` copies it: file by file, each under another name until it is complete."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_at(step) | BIG)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run/1", copy / "1")
    reader = Checkpoints(copy, read_only=True)
    sources = sorted(path for path in (tmp_path / "run/2").rglob("*") if path.is_file())
    targets = [copy / source.relative_to(tmp_path / "run") for source in sources]
    for source, target in zip(sources, targets, strict=True):
        with warnings.catch_warnings(action="ignore", category=ts.ShardingWarning):
            assert reader.latest == 1
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target.with_name(f".{target.name}.Xa3b9k"))
        target.with_name(f".{target.name}.Xa3b9k").rename(target)
    assert reader.latest == 2
    os.truncate(targets[-1], 0)
    lost = rf"{copy}/2 lacks 1 file or part of them, such as .*: it is being copied, or dam"
    with pytest.warns(ts.ShardingWarning, match=lost):
        assert (reader.restore_latest() or (0, 0))[0] == 1


def run_python(code: str, directory: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("during", ["_create", "merge"])
def test_ctrl_c_during_a_save_leaves_no_half_checkpoint(during, tmp_path, monkeypatch) -> None:
    real = getattr(_save, during)

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return real(*args, **options)

    # Shells ignore SIGINT for background jobs.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Checkpoints(tmp_path, background=False) as checkpoints:
            checkpoints.save(1, state_at(1))
            monkeypatch.setattr(_save, during, interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(2, state_at(2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert files_in(tmp_path) == ["1", "2"]
    verify(tmp_path / "2")


def test_a_save_that_a_ctrl_c_has_interrupted_ends_before_close_and_is_told(
    tmp_path, monkeypatch
) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def fail(*_: Any) -> str:
        begun.append(at)
        time.sleep(0.02)
        ended.append(at)
        raise OSError("the disk is gone")

    monkeypatch.setattr(_save, "_commit", fail)
    at = 1
    while True:
        run = Checkpoints(tmp_path)
        was_interrupted = is_interrupted(partial(run.save, 1, BIG), at, _checkpoints, _save)
        error = ""
        try:
            run.close()
        except CheckpointError as raised:
            error = str(raised)
        assert begun == ended, f"moment {at}"
        assert ("the disk is gone" in error) == (at in begun), f"moment {at}"
        if not was_interrupted:
            break
        at += 1
    assert not _save.untold
    assert 10 < len(ended) < at  # before and after the thread has started


def test_a_ctrl_c_while_old_steps_are_removed_leaves_no_files(tmp_path: Path) -> None:
    at = 1
    while True:
        with Checkpoints(tmp_path, keep=1) as run:
            run.save(1, state_at(1))
            run.save(2, state_at(2))
            was_interrupted = is_interrupted(run.wait, at, _checkpoints)
        assert set(files_in(tmp_path)) <= {"1", "2"}, f"moment {at}"
        with Checkpoints(tmp_path) as run:
            run.remove_after(0)
        assert files_in(tmp_path) == []
        if not was_interrupted:
            break
        at += 1
    assert at > 10


@pytest.fixture
def slow(monkeypatch) -> dict[str, threading.Event]:
    """Slows the stages of a save down, and says when each has begun."""
    begun = {name: threading.Event() for name in ("_create", "_commit")}

    def slow_down(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any) -> Any:
            begun[name].set()
            time.sleep(0.3)
            return real(*args)

        return stage

    for name in begun:
        monkeypatch.setattr(_save, name, slow_down(name, getattr(_save, name)))
    return begun


def writers() -> list[str]:
    return [x.name for x in threading.enumerate() if x.name.startswith("treeshard-")]


@pytest.mark.filterwarnings("ignore:.*has later steps")
@pytest.mark.parametrize("stage", ["_create", "_commit"])
def test_close_waits_for_the_saves_of_other_threads(stage, tmp_path: Path, slow) -> None:
    with ThreadPoolExecutor() as threads:
        with Checkpoints(tmp_path) as run:
            saves = [threads.submit(run.save, step, state_at(step)) for step in range(4)]
            slow[stage].wait()
        assert writers() == []
        steps = run.steps()
        errors = [str(save.exception()) for save in saves if save.exception()]
    assert run.steps() == steps
    assert len(steps) >= 1
    assert len(steps) + len(errors) == 4
    assert all("this Checkpoints is closed" in error for error in errors)


@pytest.mark.filterwarnings("ignore:.*has later steps")
def test_saves_of_several_threads_are_all_kept(tmp_path: Path, slow) -> None:
    with ThreadPoolExecutor() as threads, Checkpoints(tmp_path) as run:
        steps = (5, 5, 6, 6, 7)  # two threads may even save one step
        list(threads.map(lambda step: run.save(step, state_at(step)), steps))
    assert files_in(tmp_path) == ["5", "6", "7"]


def test_a_ctrl_c_interrupts_the_wait_for_another_thread(tmp_path: Path, slow) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor() as threads, Checkpoints(tmp_path) as run:
            save = threads.submit(run.save, 1, state_at(1))
            slow["_create"].wait()
            main = threading.main_thread().ident
            threads.submit(lambda: time.sleep(0.1) or signal.pthread_kill(main, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                run.save(2, state_at(2))
            assert not save.done()
    finally:
        signal.signal(signal.SIGINT, before)
    assert files_in(tmp_path) == ["1"]


def test_a_failure_while_the_arrays_are_written_leaves_no_files(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_save, "write_arrays", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "x", BIG)
    assert files_in(tmp_path) == []
    save(tmp_path / "x", BIG)
    assert_array_equal(restore(tmp_path / "x")["w"], BIG["w"])


AT_THE_END = """
import atexit, sys, threading, time
import numpy as np
from treeshard.checkpoint import Checkpoints, save

run, state = sys.argv[1], {"w": np.ones((2048, 1024))}


def later():
    threading.main_thread().join()
    save(run + "/thread", state)


def saves():
    save(run + "/atexit", state)
    Checkpoints(run + "/steps").save(1, state)


threading.Thread(target=later).start()
atexit.register(saves)
Checkpoints(run + "/begun").save(1, state)
"""


def test_what_is_saved_at_the_end_of_a_process_is_whole(tmp_path: Path) -> None:
    done = run_python(AT_THE_END, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for name in ["thread", "atexit", "steps/1", "begun/1"]:
        verify(tmp_path / name)


FAILS_AT_THE_END = """
import os, sys, warnings
import numpy as np
from treeshard.checkpoint import Checkpoints, _checkpoints, _save
from treeshard.errors import CheckpointError


def fails(*args):
    raise OSError("the disk is gone")


warnings.simplefilter("ignore")  # Python warns of forks beside threads
_save._commit = fails
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"w": np.ones(8)})
checkpoints._writing[0]._end.wait()
child = os.fork()
if not child:  # a child of JAX cannot end in the ordinary way
    try:
        with checkpoints:
            checkpoints.wait()
    except CheckpointError as error:
        print(error, flush=True)
    _checkpoints._tell_at_exit()
    os._exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_failed_save_that_nothing_waits_for_is_told_at_exit(tmp_path: Path) -> None:
    done = run_python(FAILS_AT_THE_END, tmp_path)
    forked, child = done.stdout.splitlines()
    assert "is saving step 1, and this one, " in forked
    assert "was forked from it. Only process " in forked
    assert (done.returncode, child) == (1, "child 0")
    assert done.stderr.startswith("A save in the background failed: ")
    said = "1 was not saved; what existed before is unchanged. OSError: the disk is gone"
    assert done.stderr.count(said) == 1  # the child says nothing
    assert not list(tmp_path.glob("1*"))


def test_old_steps_are_removed_where_directories_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def on_an_overlay(old: Any, new: Any, **options: Any) -> None:
        if str(new).endswith(_REMOVED):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(old, new, **options)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        monkeypatch.setattr(os, "rename", on_an_overlay)
        checkpoints.save(2, state_at(2))
    assert files_in(tmp_path) == ["2"]
    verify(tmp_path / "2")


def test_a_directory_that_is_renamed_meanwhile_is_not_created_again(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(CheckpointError, match="run was renamed or removed"):
            checkpoints.save(2, state_at(2))
        assert not (tmp_path / "run").exists()
