"""What `make release` refuses."""

from pathlib import Path

import release


def test_a_release_that_is_ready_and_all_that_another_waits_for(tmp_path: Path) -> None:
    (tmp_path / "treeshard").mkdir()
    (tmp_path / "treeshard" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - 2030-01-31\n")
    release.git(tmp_path, "init")
    release.git(tmp_path, "add", ".")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    release.git(tmp_path, *author, "commit", "-m", "ready")
    assert release.version_of(tmp_path) == "1.2.0"
    assert release.problems(tmp_path, "1.2.0") == []
    release.git(tmp_path, "tag", "v1.3.0")
    (tmp_path / "new.txt").write_text("")
    assert release.problems(tmp_path, "1.3.0") == [
        "CITATION.cff has version 1.2.0, not 1.3.0.",
        "CHANGELOG.md begins with '[1.2.0] - 2030-01-31', not with '[1.3.0] - ' and a date.",
        "These files are not committed:\n?? new.txt",
        "There is a tag v1.3.0 already.",
    ]
