"""What `make release` refuses."""

import subprocess
from pathlib import Path

import pytest
import release


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that is ready for a release."""
    (tmp_path / "treeshard").mkdir()
    (tmp_path / "treeshard" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - 2030-01-31\n")
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init"], ["add", "."], [*author, "commit", "-m", "ready"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_nothing_stops_a_release_that_is_ready(repository: Path) -> None:
    assert release.version_of(repository) == "1.2.0"
    assert release.problems(repository, "1.2.0") == []


def test_all_that_a_release_waits_for_is_listed(repository: Path) -> None:
    release.git(repository, "tag", "v1.3.0")
    (repository / "new.txt").write_text("")
    assert release.problems(repository, "1.3.0") == [
        "CITATION.cff has version 1.2.0, not 1.3.0.",
        "CHANGELOG.md begins with '[1.2.0] - 2030-01-31', not with '[1.3.0] - ' and a date.",
        "These files are not committed:\n?? new.txt",
        "There is a tag v1.3.0 already.",
    ]
