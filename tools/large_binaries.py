"""Names the large binary files that git tracks. `make lint` fails if there are any.

python tools/large_binaries.py
"""

import subprocess
import sys
from pathlib import Path

LIMIT = 100_000  # bytes


def large_binaries(repository: Path) -> list[str]:
    """The tracked files of more than `LIMIT` bytes that are not text, with their sizes."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True)
    files = (repository / name for name in listed.stdout.split("\0") if name)
    large = [file for file in files if file.is_file() and file.stat().st_size > LIMIT]
    return [
        f"{file.relative_to(repository)}: {file.stat().st_size:,} bytes"
        for file in large
        if b"\0" in file.read_bytes()  # as git itself tells binary files from text
    ]


if __name__ == "__main__":
    found = large_binaries(Path(__file__).parents[1])
    print("\n".join(found), end="\n" if found else "")
    sys.exit(f"git tracks binary files of more than {LIMIT:,} bytes." if found else 0)
