"""What runs on the host of the repository is what runs here."""

import ast
import re
import shlex
import subprocess
import sys

import floor
import pytest
import yaml
from files import DOCS, PROJECT, README, ROOT, SOURCES, parsed

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*")
}
TEMPLATES = [*ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")]
pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="not a clone")


def steps(workflow: str) -> list[dict]:
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]


MATRIX = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["include"] if WORKFLOWS else []


def test_there_are_three() -> None:
    assert set(WORKFLOWS) == {"ci", "docs", "release"}


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


def test_every_supported_python_and_line_of_jax_is_tested() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert {one["python"] for one in MATRIX} == {*classified}
    by_target = {(one["target"], one["jax"]) for one in MATRIX}
    assert ("test-floor", dict(pin.split("==") for pin in floor.floor())["jax"]) in by_target
    assert ("test-newest", "newest") in by_target
    page = DOCS["docs/versions.md"]
    rows = re.findall(r"^\|.*\| (3\.\d+) \| (\d\.\d+)", page, re.M)
    lines = {(one["python"], ".".join(one["jax"].split(".")[:2])) for one in MATRIX}
    assert {row for row in rows if row[0] != "3.13"} <= lines
    status = " ".join(README[README.index("**Status") :].partition("\n\n")[0].split())
    for python, jax in re.findall(r"^\|.*\| (3\.\d+) \| (\d[\d.]+) \|", page, re.M):
        assert python in status
        assert re.search(rf"{re.escape(jax)}[^.\d]", status)
    for chip in ("v5e", "v6e", "v5p", "H100"):
        assert chip in status
        assert chip in page
    for text in (status, page):
        assert "No accelerator has run treeshard" in text


def test_a_release_is_published_without_a_token() -> None:
    publish = WORKFLOWS["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "password" not in str(publish)
    assert "secrets." not in str(WORKFLOWS)


def test_the_templates_ask_for_the_plan_and_versions() -> None:
    text = "".join(path.read_text() for path in TEMPLATES)
    assert "print(plan)" in text
    [command] = {*re.findall(r"`(python -c .*)`$", text, re.MULTILINE)}
    words = shlex.split(command)
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "jax:" in done.stdout
    for path in TEMPLATES:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert all(one["attributes"]["label"] for one in form["body"])


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
