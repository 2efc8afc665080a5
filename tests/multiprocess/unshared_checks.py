"""Two processes save to directories that one of them has for itself: both raise, nothing is lost.

args: a directory that both share on a disk, one in memory, and one over which process 1 has mounted
a disk of its own. Of the last nothing, where none could be mounted.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import treeshard as ts
from tests.multiprocess.killed_saves_checks import RULES, differing, host_state, like
from tests.multiprocess.worker import Context
from treeshard._core.processes import exchange
from treeshard.checkpoint import Checkpoints, _save, restore, save, verify
from treeshard.interchange import save_safetensors

AXES = "fsdp=4"
NOT_SEEN = "does not see the file that process 0 created in "


def state_at(step: int) -> dict[str, Any]:
    host = host_state(step)
    return ts.shard(host, ts.plan(host, RULES, ts.make_mesh(AXES))) | {"own": host["own"]}


def left_in(directory: Path) -> list[str]:
    """The names that this process sees, while both wait."""
    exchange(f"look into {directory}", b"", lane="of the test")
    names = sorted(path.name for path in directory.iterdir())
    exchange(f"looked into {directory}", b"", lane="of the test")
    return names


def check_shared_directories_on_a_disk_and_in_memory(context: Context) -> None:
    for where in context.args[:2]:
        if where:
            save(Path(where) / "x", state_at(1))
            assert left_in(Path(where) / "x") == ["leaves", "state"]
            assert not differing(restore(Path(where) / "x", like(), rules=RULES, mesh=AXES), 1)


def check_a_save_to_a_directory_that_is_not_shared(context: Context) -> None:
    if not context.args[2]:
        return
    own = Path(context.args[2])
    with pytest.raises(ts.CheckpointError) as told:
        save(own / "x", state_at(1), timeout=1)
    text = str(told.value)
    assert text.startswith(f"{own}/x was not saved; what existed before is unchanged. process 1")
    assert "process 1, on " in text
    assert f"{NOT_SEEN}{own}/x.orbax-checkpoint-tmp. Save to a directory that all" in text
    assert left_in(own) == []


def check_a_run_in_a_directory_that_is_not_shared(context: Context) -> None:
    if not context.args[2]:
        return
    own = Path(context.args[2])
    error = [ts.ProcessError, ts.CheckpointError][context.index]
    with pytest.raises(error, match=NOT_SEEN + f"{own}. Save to"):
        Checkpoints(own, timeout=1)
    with pytest.raises(error, match=NOT_SEEN):
        save_safetensors(own / "model.safetensors", {"w": state_at(1)["w"]}, timeout=1)
    assert left_in(own) == []


def check_no_step_is_removed_for_one_that_is_not_shared(context: Context) -> None:
    """Process 1 loses the directory between two saves."""
    if not context.args[2]:
        return
    run = Path(context.args[0]) / "run"
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


def check_what_a_process_has_written_must_be_there(context: Context) -> None:
    """Process 1 loses what it has written: all of it, a file, or the size of one."""
    run = Path(context.args[0]) / "lost"
    real = _save.flush_tree

    def all_of_it(folder: Path) -> None:
        shutil.rmtree(folder)

    def a_file(folder: Path) -> None:
        min(folder.glob("d/*"), key=lambda file: file.stat().st_size).unlink()

    def its_size(folder: Path) -> None:
        file = max(folder.glob("d/*"), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes() + b"x")

    with Checkpoints(run, keep=1) as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        cases = {
            all_of_it: "CheckpointError: what process 1 has written is not in ",
            a_file: "",  # TensorStore misses it, or its bytes are missing
            its_size: "bytes, and process 0 sees ",
        }
        for step, (lose, says) in enumerate(cases.items(), 2):

            def then_lost(folder: Any, lose: Any = lose) -> dict[str, int]:
                sizes = real(folder)
                lose(Path(folder))
                return sizes

            with pytest.MonkeyPatch.context() as patch:
                if context.index == 1:
                    patch.setattr(_save, "flush_tree", then_lost)
                checkpoints.save(step, state_at(step))
                with pytest.raises(ts.CheckpointError, match=f"/{step} was not saved; ") as told:
                    checkpoints.wait()
            assert says in str(told.value), (lose, told.value)
            assert left_in(run) == [".treeshard-lock", "1"], lose
    verify(run / "1")


def check_a_table_that_reads_otherwise_is_not_saved(context: Context) -> None:
    run = Path(context.args[0]) / "table"
    real = _save.flush_tree

    def changed(folder: Any) -> dict[str, int]:
        sizes = real(folder)
        (Path(folder).parent / "leaves" / "table.json").write_bytes(b"\0" * 100)
        return sizes

    with Checkpoints(run, keep=1) as checkpoints:
        checkpoints.save(1, state_at(1))
        checkpoints.wait()
        with pytest.MonkeyPatch.context() as patch:
            if context.index == 0:
                patch.setattr(_save, "flush_tree", changed)
            checkpoints.save(2, state_at(2))
            with pytest.raises(ts.CheckpointError, match="the table of leaves that was written"):
                checkpoints.wait()
        assert left_in(run) == [".treeshard-lock", "1"]
