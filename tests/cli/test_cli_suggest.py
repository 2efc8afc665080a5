"""`treeshard suggest`: its report, exit codes and errors. Here the devices are simulated CPUs."""

import json

import pytest

from treeshard._cli import main

MODULE = """
import os

from tests.programs.test_suggest import TENSOR, make

STRATEGIES = [TENSOR]


def broken(mesh, rules):
    raise ValueError("no such model")


def fragile(mesh, rules):
    if dict(mesh.shape).get("fsdp") == 4:
        os.abort()
    return make(mesh, rules)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    (tmp_path / "models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "models", raising=False)

    def go(*options: str, function: str = "make"):
        code = main(["suggest", f"models:{function}", "--devices=8", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return go


def test_the_best_is_printed_with_code(run) -> None:
    code, out, err = run("--memory=1GB", "--top=1", "--strategies=FSDP x TP")
    assert code == 0
    assert "mesh = ts.make_mesh(" in out
    assert "FSDP x TP on " in err
    code, out, _ = run("--memory=1GB", "--top=1", "--strategies=FSDP x TP", "--json")
    assert json.loads(out)["rows"][0]["strategy"] == "FSDP x TP"


def test_what_is_only_estimated_does_not_count_as_fitting(run) -> None:
    code, out, _ = run("--memory=1GB", "--budget=0s")
    assert code == 1
    assert "a lower bound" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategies=FSDP2"], "--strategies: there is no 'FSDP2'. Did you mean 'FSDP'?"),
        (["--budget=soon"], "--budget: 'soon' is not a time. Write 90s, 10m or 2h."),
        (["--global-batch=8"], "the function does not take it"),
        (["--memory=lots"], "'lots' is not an amount of memory"),
    ],
)
def test_wrong_input_is_told(run, options, message) -> None:
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert message in err


def test_an_error_of_the_function_has_its_line(run) -> None:
    code, _, err = run(function="broken")
    assert code == 2
    assert "models.py:10: ValueError: no such model" in err


def test_a_compiler_that_ends_its_process_is_left_out(run) -> None:
    code, out, err = run("--memory=1GB", "--strategies=HSDP", function="fragile")
    assert code == 0
    assert "HSDP on data=4,fsdp=2: compiled" in err
    lost = out.partition("lost:")[2]
    assert "HSDP on data=2,fsdp=4: failed: its process ended, as where" in lost
