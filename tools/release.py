"""Makes a release: `make release`, or `make release ARGS=--push` to publish it.

It checks that the version is the same everywhere and has its section in CHANGELOG.md, builds the
wheel and the source, tries the wheel in a new environment, and tags the commit. Without `--push`
it ends there, and `git tag --delete` undoes it; with it the tag is pushed, and the workflow
`release.yml` builds the same again and uploads it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRIED = "import treeshard as ts; print(ts.__version__, ts.make_mesh('data=-1').shape)"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--push", action="store_true", help="push the tag, which publishes it")
    options = parser.parse_args(argv)
    version = version_of(ROOT)
    if wrong := problems(ROOT, version):
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    run("make", "dist")
    try_wheel(ROOT / "dist" / f"treeshard-{version}-py3-none-any.whl", version)
    run("git", "tag", "--annotate", f"v{version}", "--message", f"treeshard {version}")
    if not options.push:
        print(f"dist/ and the tag v{version} are ready. To publish: git push origin v{version}")
        return 0
    run("git", "push", "origin", f"v{version}")
    return 0


def version_of(root: Path) -> str:
    """The version in treeshard/__init__.py."""
    text = (root / "treeshard" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def problems(root: Path, version: str) -> list[str]:
    """What a release has to wait for, all of it."""
    found: list[str] = []
    cited = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited != [version]:
        found.append(f"CITATION.cff has version {', '.join(cited)}, not {version}.")
    top = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", top):
        found.append(f"CHANGELOG.md begins with '{top}', not with '[{version}] - ' and a date.")
    if changed := git(root, "status", "--porcelain"):
        found.append(f"These files are not committed:\n{changed}")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"There is a tag v{version} already.")
    return found


def git(root: Path, *command: str) -> str:
    done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def try_wheel(wheel: Path, version: str) -> None:
    """Installs a wheel into a new environment, outside the repository, and imports it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", str(wheel))
        printed = subprocess.check_output([python, "-c", TRIED], cwd=folder, text=True)
    if not printed.startswith(f"{version} "):
        raise RuntimeError(f"{wheel} has another version than {version}: {printed}")


def run(*command: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
