"""The built package installs with its declared dependencies only, and works."""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from email import message_from_bytes
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import floor
import pytest
from files import EXTRAS, PAGES, PROJECT, ROOT, SOURCES
from packaging.requirements import Requirement

import treeshard as ts


def run(*command: object, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it; `make dist` isolates the build."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (file,) = built.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_works_with_its_declared_dependencies_only(built: Path, tmp_path: Path) -> None:
    """Beside links to the dependencies as they are here: a download would take most of the time."""
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin" / "python"
    (file,) = built.glob("*.whl")
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-compile", "--no-deps")
    run(sys.executable, *install, file)
    (packages,) = fresh.glob("lib/python*/site-packages")
    (ours,) = distributions(name="treeshard", path=[str(packages)])
    link_dependencies(ours, packages)
    script = tmp_path / "smoke.py"
    script.write_text((ROOT / "tests" / "smoke.py").read_text())
    assert run(python, "-W", "error", script, cwd=tmp_path) == f"passed {ts.__version__}\n"


def link_dependencies(package: Distribution, packages: Path) -> None:
    """Links what a package requires without extras, and what that requires in turn."""
    for requirement in map(Requirement, package.requires or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = distribution(requirement.name)
        assert needed.files, requirement.name
        linked = False
        for top in {file.parts[0] for file in needed.files} - {"..", "__pycache__"}:
            # Several distributions may share a top: a namespace, which the first one has linked.
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(needed.locate_file(top))))
                linked = True
        if linked:
            link_dependencies(needed, packages)


def test_the_wheel_has_the_library_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert files == SOURCES.keys() | {"treeshard/__init__.pyi", "treeshard/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_sdist_has_the_repository_and_nothing_built(built: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as sdist:
        files = {x.name.partition("/")[2]: sdist.extractfile(x) for x in sdist.getmembers()}
        members = {name: file.read() for name, file in files.items() if file is not None}
    assert "tests/conftest.py" in members
    assert built_files(members) == []
    assert file.stat().st_size < 2**21


def built_files(members: Mapping[str, bytes]) -> list[str]:
    """The files that something built, by their names or contents; not what tests read."""
    built = re.compile(r"\.(pyc|whl)$|(^|/)(site|out|dist|build|__pycache__|[^/]+\.egg-info)/")
    kept = re.compile(r"^tests/.*\.(zip|txt\.gz|json\.xz)$")
    return [
        name
        for name, data in members.items()
        if built.search(name) or (b"\0" in data and not kept.search(name))
    ]


def test_the_metadata_are_those_of_the_project(wheel: zipfile.ZipFile) -> None:
    file = f"treeshard-{ts.__version__}.dist-info/METADATA"
    metadata = message_from_bytes(wheel.read(file))
    assert metadata["Version"] == ts.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(EXTRAS) == set(metadata.get_all("Provides-Extra")) >= {"checkpoint", "show"}


# ------------------------------------------------------------------ defined once


def test_the_version_is_defined_once() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ts.__version__)
    assert "version" in PROJECT["dynamic"]
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert top is not None
    assert top[1] == ts.__version__
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert citation is not None
    assert citation[1] == ts.__version__


def test_the_floor_is_what_pyproject_allows() -> None:
    pins = floor.floor()
    assert "jax==0.10.2" in pins
    names = [pin.partition("==")[0] for pin in pins]
    assert len(names) == len(set(names)), f"two lower bounds for one package: {pins}"
    assert {"equinox", "numpy", "tensorstore", "flax", "rich"} <= set(names)
    assert "pytest" not in names


def test_pages_state_the_floor() -> None:
    bounds = dict(pin.split("==") for pin in floor.floor())
    jax = ".".join(bounds["jax"].split(".")[:2])
    python = PROJECT["requires-python"].removeprefix(">=")
    for page in ("README.md", "docs/index.md"):
        assert re.search(rf"JAX {re.escape(jax)}\b", PAGES[page])
        assert f"Python {python}" in PAGES[page]
