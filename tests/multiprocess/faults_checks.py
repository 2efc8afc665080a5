"""Two processes save while a disk, another run, or one of them fails: both raise, nothing is lost.

args: a disk with little room, a directory that another run writes to, and one over which process 1
has mounted a disk of its own. A disk that could not be made is nothing.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.states import AXES, RULES, differing, left_in, like, state_at
from tests.multiprocess.worker import Context, error_of, start_again
from treeshard.checkpoint import Checkpoints, _save, restore, save, verify
from treeshard.interchange import load_safetensors, save_safetensors

NOT_SEEN = "does not see the file that process 0 created in "


def check_a_directory_that_is_not_shared(context: Context) -> None:
    if not context.args[-1]:
        return
    own = Path(context.args[-1])
    with pytest.raises(ts.CheckpointError) as told:
        save(own / "x", state_at(1), timeout=1)
    text = str(told.value)
    assert text.startswith(f"{own}/x was not saved; what existed before is unchanged. process 1")
    assert "process 1, on " in text
    assert f"{NOT_SEEN}{own}/x.orbax-checkpoint-tmp. Save to a directory that all" in text
    error = [ts.ProcessError, ts.CheckpointError][context.index]
    with pytest.raises(error, match=NOT_SEEN + f"{own}. Save to"):
        Checkpoints(own, timeout=1)
    assert left_in(own) == []


def check_a_copy_of_one_process_has_arrays_of_another_step(context: Context) -> None:
    if not context.args[-1]:
        return
    copy = Path(context.args[-1]) / "copy"
    for step in (1, 2):
        save(context.directory / "copied" / str(step), state_at(step))
    one, two = (context.directory / "copied" / step for step in "12")
    shutil.copytree(one, copy)
    if context.index == 1:  # as if the copy of the second step had been interrupted
        shutil.copytree(two / "state", copy / "state", dirs_exist_ok=True)
        shutil.copy(one / "state" / "table.crc32", copy / "state")
    with pytest.raises(ts.DamagedError, match=r"w: its file state/manifest\.ocdbt has"):
        restore(copy, like(), rules=RULES, mesh=AXES)


def check_no_step_is_removed_for_one_that_is_not_shared(context: Context) -> None:
    """Process 1 loses the directory between two saves."""
    if not context.args[-1]:
        return
    run = context.directory / "not-shared"
    with Checkpoints(run, keep=1, timeout=2) as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        if context.index == 1:
            subprocess.run(["mount", "-t", "tmpfs", "none", str(run)], check=True)
        checkpoints.save(2, state_at(2))
        with pytest.raises(ts.CheckpointError, match=f"2 was not saved.*{NOT_SEEN}"):
            checkpoints.wait()
        assert left_in(run) == ([".treeshard-lock", "1"] if context.index == 0 else [])
    if context.index == 1:
        subprocess.run(["umount", "--lazy", str(run)], check=True)
    assert not differing(restore(run / "1", like(), rules=RULES, mesh=AXES), 1)


def check_what_was_written_must_be_there(context: Context) -> None:
    """Process 1 loses what it has written, or the size of a file; process 0 finds another table of
    leaves than it wrote."""
    run = context.directory / "lost"

    def all_of_it(folder: Path) -> None:
        shutil.rmtree(folder)

    def its_size(folder: Path) -> None:
        file = max(folder.glob("d/*"), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes() + b"x")

    def the_table(folder: Path) -> None:
        (folder / "leaves" / "table.json").write_bytes(b"\0" * 100)

    with Checkpoints(run, keep=1) as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        cases = {
            all_of_it: (1, "facts_of_files", "what process 1 has written is not in "),
            its_size: (1, "facts_of_files", "bytes, and process 0 sees "),
            the_table: (0, "flush_tree", "the table of leaves that was written"),
        }
        for step, (lose, (who, after, says)) in enumerate(cases.items(), 2):
            real = getattr(_save, after)

            def then_lost(folder: Any, lose: Any = lose, real: Any = real) -> Any:
                found = real(folder)
                lose(Path(folder))
                return found

            with pytest.MonkeyPatch.context() as patch:
                if context.index == who:
                    patch.setattr(_save, after, then_lost)
                checkpoints.save(step, state_at(step))
                with pytest.raises(ts.CheckpointError, match=f"/{step} was not saved; ") as told:
                    checkpoints.wait()
            assert says in str(told.value), (lose, told.value)
            assert left_in(run) == [".treeshard-lock", "1"], lose
    verify(run / "1")


def assert_latest_is(checkpoints: Checkpoints, step: int) -> None:
    found = checkpoints.restore_latest(like(), rules=RULES, mesh=ts.make_mesh(AXES))
    assert found is not None
    assert found[0] == step
    assert not differing(found[1], step)


def check_a_full_disk(context: Context) -> None:
    if not context.args[0]:
        return
    run = Path(context.args[0]) / "run"
    rows = np.ones((4096, 1024), np.float32)  # 16 MiB
    large = ts.shard({"w": rows}, P("fsdp"), ts.make_mesh(AXES))
    with Checkpoints(run) as checkpoints:
        checkpoints.save(1, state_at(1))
        with pytest.raises(ts.CheckpointError) as told:
            _ = checkpoints.save(2, large), checkpoints.wait()
        said = f"{run}/2 was not saved; what existed before is unchanged. "
        assert str(told.value).startswith(said)
        assert "No space left on device" in str(told.value)
        assert_latest_is(checkpoints, 1)
        assert left_in(run) == [".treeshard-lock", "1"]


def check_another_run_that_is_writing_is_an_error(context: Context) -> None:
    held = Path(context.args[1])
    before = left_in(held)
    error = [ts.CheckpointError, ts.ProcessError][context.index]
    for do in (lambda: Checkpoints(held), lambda: save(held / "2", state_at(2))):
        with pytest.raises(error, match="another run is writing here: process "):
            do()
    assert left_in(held) == before
    assert_latest_is(Checkpoints(held, read_only=True), 1)


def check_a_process_that_raises_is_absent_from_later_calls(context: Context) -> None:
    """Each of these calls raises in time, and nothing is written. It is the last check, since the
    two processes make different calls from here on."""
    run, file = context.directory / "run", context.directory / "x.safetensors"
    state = state_at(1)
    tensors = {"w": state["w"], "half": state["half"]}
    save_safetensors(file, tensors)

    def go_on() -> None:
        with Checkpoints(run, timeout=20) as checkpoints:
            checkpoints.save(1, state)
            checkpoints.wait()
            checkpoints._timeout = 0.5
            if context.index == 1:
                raise ZeroDivisionError("mine")
            checkpoints.save(2, state)

    told = error_of(go_on, [ts.ProcessError, ZeroDivisionError][context.index])
    assert ["save: process 1 of 2 did not arrive within 0.5 s", "mine"][context.index] in told
    assert left_in(run) == ["1"]
    assert not differing(restore(run / "1"), 1)
    reader = Checkpoints(run, read_only=True, timeout=0.3)
    for what, do in [
        ("save", lambda: save(run / "2", state, timeout=0.3)),
        ("restore_latest", lambda: reader.restore_latest(state)),
        ("load_safetensors", lambda: load_safetensors(file, tensors, timeout=0.3)),
    ]:
        if context.index == 0:
            absent = f"{what}: process 1 of 2 did not arrive within 0.3 s. The call was cancelled."
            assert absent in error_of(do)
        else:
            start_again()
        assert left_in(run) == ["1"]
    assert not differing(restore(run / "1"), 1)  # takes part in no exchange
