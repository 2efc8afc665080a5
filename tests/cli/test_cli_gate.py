"""`treeshard gate`: locks that are written and compared, exit codes, annotations and errors."""

import os
import sys

import pytest
from gated_steps import REGRESSIONS, STEP, edited

from treeshard._cli import main
from treeshard.errors import DoesNotFitError

pytestmark = pytest.mark.usefixtures("full_compiles")


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the command on a text of `steps.py`; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def go(text: str, *options: str, function: str = "make"):
        (tmp_path / "steps.py").write_text(text)
        sys.modules.pop("steps", None)
        code = main(["gate", f"steps:{function}", "--against", "step.lock", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield go
    sys.modules.pop("steps", None)


def test_a_step_is_locked_compared_and_refused(run, tmp_path) -> None:
    code, out, _ = run(STEP, "--write", "--min-size", "256")
    assert (code, out[:17]) == (0, "wrote step.lock: ")
    text = (tmp_path / "step.lock").read_text()
    code, out, _ = run(STEP)
    assert (code, out.splitlines()[-1][:15]) == (0, "as in step.lock")
    worse = edited(REGRESSIONS["one more gather"])
    code, out, _ = run(worse)
    lines = out.splitlines()
    number = 1 + worse.splitlines().index(
        next(line for line in worse.splitlines() if "jnp.max" in line)
    )
    assert code == 1
    head = next(i for i, line in enumerate(lines) if line.endswith(" from step.lock:"))
    assert lines[head] == f"{len(lines) - head - 2} differences from step.lock:"
    assert "  all-gather over fsdp: state/up: 128.0 KiB, was 64.0 KiB (+100%)." in lines
    assert any(line.endswith(f" (steps.py:{number})") for line in lines)
    assert lines[-1].startswith("If this is intended, run the command with --write, and commit")
    code, out, _ = run(worse, "--github")
    start = "::error file=step.lock,title=treeshard gate::all-gather over fsdp: state/up"
    assert code == 1
    assert f"{start}: 128.0 KiB, was 64.0 KiB (+100%25)." in out.splitlines()
    assert f"::error file=steps.py,line={number},title=treeshard gate::steps.py make.loss:" in out
    assert (tmp_path / "step.lock").read_text() == text  # comparing writes nothing


def test_what_does_not_fit_is_a_difference(run, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise DoesNotFitError("The step needs at least 20 GiB.", 20, 16)

    monkeypatch.setattr("treeshard.training._step.Step.compile", refuse)
    code, out, _ = run(STEP, "--write")
    assert code == 1
    assert "  It does NOT fit. The step needs at least 20 GiB." in out
    assert not os.path.exists("step.lock")


@pytest.mark.parametrize(
    ("function", "lock", "options", "message"),
    [
        ("make", None, [], "step.lock does not exist. Add --write to write it, and commit it."),
        ("make", "{}", [], "step.lock: not a lock"),
        ("other", None, ["--write"], "steps:other returned dict. It gets the mesh, and must"),
        ("absent", None, ["--write"], "steps:absent: steps has no function 'absent'."),
        ("make", None, ["--write", "--mesh", "tensor=8"], "fsdp"),
    ],
)
def test_wrong_input_is_exit_code_2(run, tmp_path, function, lock, options, message) -> None:
    if lock is not None:
        (tmp_path / "step.lock").write_text(lock)
    code, out, err = run(STEP, *options, function=function)
    assert (code, out) == (2, "")
    assert f"treeshard: error: {message}" in err or message == "fsdp"
    assert (tmp_path / "step.lock").exists() == (lock is not None)


@pytest.mark.filterwarnings("ignore:jit_step")  # of the axis that nothing uses
def test_a_lock_of_another_mesh_or_size_is_exit_code_2(run) -> None:
    run(STEP, "--write")
    code, _, err = run(STEP, "--mesh", "data=2,fsdp=4")
    assert code == 2
    assert (
        "step.lock is a lock for 8 x cpu (fsdp=8), and the step is for 8 x cpu (data=2, fsdp=4)"
        in err
    )
    code, _, err = run(STEP, "--min-size", "7")
    assert code == 2
    assert "step.lock has values of at least 16384 elements. Add --write" in err
