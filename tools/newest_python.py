"""Prints the path of a Python 3.13 or newer, for `make test-newest`.

    python tools/newest_python.py    # PYTHON_NEWEST=/path/to/python3.13 overrides

It takes the first that runs of: `PYTHON_NEWEST`; `python3.13` and newer on PATH; pyenv's versions,
though none is selected; and, where apt-get is, the packages of Debian 13 unpacked into a folder,
where they change nothing of the system.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

OLDEST, NEWEST = 13, 19  # Python 3.x; the oldest first, since packages come late for the newest
UNPACKED = Path(__file__).parents[1] / ".venv-python"
WAYS_OUT = f"""\
No Python 3.{OLDEST} or newer was found. Tried: {{tried}}. Use one of these:
- PYTHON_NEWEST=/path/to/python3.{OLDEST} make test-newest
- a python3.{OLDEST} on PATH, as python.org, your system or uv installs it
- pyenv install 3.{OLDEST}"""


def runs(python: str) -> bool:
    """Whether it is a Python that is new enough and can make virtual environments."""
    probe = f"import ensurepip, ssl, sys, venv; sys.exit(sys.version_info < (3, {OLDEST}))"
    try:
        return subprocess.run([python, "-c", probe], capture_output=True).returncode == 0
    except OSError:
        return False


def candidates() -> Iterator[str]:
    """Pythons that may be there, the preferred ones first."""
    for minor in range(OLDEST, NEWEST + 1):
        if path := shutil.which(f"python3.{minor}"):
            yield path
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True).stdout.strip()
        for minor in range(OLDEST, NEWEST + 1):
            yield from map(str, sorted(Path(root).glob(f"versions/3.{minor}*/bin/python3")))


def from_debian(folder: Path) -> str:
    """Unpacks Python 3.13 of Debian 13 into a folder; returns the path of a script that runs it.

    It needs a newer C library than older systems have, so the script starts it through the
    loader that is unpacked with it.
    """
    if (folder / "usr/bin/python").exists():
        return str(folder / "usr/bin/python")
    with tempfile.TemporaryDirectory() as scratch:
        apt = Path(scratch)
        for name in ("state/lists/partial", "cache/archives/partial"):
            (apt / name).mkdir(parents=True)
        (apt / "status").touch()  # nothing is installed: everything that it needs is downloaded
        keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
        source = f"deb [signed-by={keys}] http://deb.debian.org/debian trixie main\n"
        (apt / "sources.list").write_text(source)
        options = {
            "Dir::State": apt / "state",
            "Dir::State::status": apt / "status",
            "Dir::Cache": apt / "cache",
            "Dir::Etc::sourcelist": apt / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Debug::NoLocking": "1",
            "APT::Sandbox::User": "root",
        }
        get = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
        run(*get, "update")
        wanted = ("python3.13-venv", "libstdc++6")
        run(*get, "--yes", "--no-install-recommends", "--download-only", "install", *wanted)
        partial = folder.with_name(f"{folder.name}-partial")
        shutil.rmtree(partial, ignore_errors=True)
        for package in sorted((apt / "cache/archives").glob("*.deb")):
            run("dpkg-deb", "--extract", package, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    wheels = "/usr/share/python-wheels/"  # of pip, for venv
    for settings in {x.resolve() for x in folder.glob("usr/lib/python3.13/_sysconfigdata_*.py")}:
        settings.write_text(settings.read_text().replace(wheels, f"{folder}{wheels}"))
    loader = next(folder.glob("usr/lib*/**/ld-linux*.so.*"))
    libraries = ":".join(str(path) for path in sorted(folder.glob("usr/lib/*-linux-gnu")))
    script = folder / "usr/bin/python"
    script.write_text(
        "#!/bin/sh\n"
        f'exec "{loader}" --argv0 "$0" --library-path "{libraries}"'
        f' "{folder}/usr/bin/python3.13" "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(
            f"{Path(str(command[0])).name}: {(done.stderr or done.stdout).strip()[-500:]}"
        )


def find(unpacked: Path = UNPACKED) -> str:
    """The path of a Python that runs; raises `SystemExit` with the ways out if there is none."""
    if chosen := os.environ.get("PYTHON_NEWEST"):
        path = shutil.which(chosen)
        if path is None or not runs(path):
            raise SystemExit(
                f"PYTHON_NEWEST={chosen} is not a Python 3.{OLDEST} or newer with venv."
            )
        return path
    tried = []
    for python in candidates():
        if runs(python):
            return python
        tried.append(f"{python} (does not run)")
    try:
        if (python := from_debian(unpacked)) and runs(python):
            return python
        tried.append(f"{python} (does not run)")
    except OSError as error:
        tried.append(f"the packages of Debian 13 ({error})")
    raise SystemExit(WAYS_OUT.format(tried=", ".join(tried)))


if __name__ == "__main__":
    sys.stdout.write(find() + "\n")
