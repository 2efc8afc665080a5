"""What runs on the host of the repository is what runs here."""

import ast
import re

import floor
import pytest
import yaml
from files import PROJECT, ROOT, SOURCES, parsed

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*")
}
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="not a clone")


def steps(workflow: str) -> list[dict]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]


MATRIX = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["include"] if WORKFLOWS else []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_calls_targets_of_the_makefile(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    called = {
        target
        for step in steps(name)
        for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE)
    }
    if name == "ci":
        called |= {one["target"] for one in MATRIX}
        here = re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
        assert set(here) <= called
    assert called
    assert called <= targets


def test_hooks_before_a_commit_are_those_of_make_lint() -> None:
    lint = re.findall(
        r"^\t\$\(BIN\)/(ruff.*|basedpyright.*)$", (ROOT / "Makefile").read_text(), re.M
    )
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    commands = [hook["entry"].removeprefix(".venv/bin/") for hook in repo["hooks"]]
    assert commands == [command.removesuffix(" .") for command in lint]


def test_every_supported_python_and_line_of_jax_is_tested() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert {one["python"] for one in MATRIX} == {*classified}
    by_target = {(one["target"], one["jax"]) for one in MATRIX}
    assert ("test-floor", dict(pin.split("==") for pin in floor.floor())["jax"]) in by_target
    assert ("test-newest", "newest") in by_target


def test_nothing_in_a_file_is_executed() -> None:
    """What SECURITY.md says."""
    for path, source in SOURCES.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "__import__"), path
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(one.name for one in node.names)]
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {*names}, path
    assert len((ROOT / "SECURITY.md").read_text().strip().splitlines()) <= 7
