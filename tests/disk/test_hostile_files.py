"""Tensor files that somebody made to harm their reader: each is a short typed error.

None takes long or 1 GiB, or ends the process. Run as a program, this makes the files and reads them
under a limit of 8 GiB. Checkpoints are trusted: see `SECURITY.md`.
"""

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import treeshard as ts
from treeshard._cli import main as command
from treeshard.interchange import load_safetensors

LIMIT = 8 * 2**30
TEN_MB = 10**7

Make = Callable[[Path], Any]


def holes(file: Path) -> None:
    """A terabyte that takes no room on disk."""
    with file.open("wb") as out:
        out.truncate(2**40)


SPECIAL: dict[str, Make] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a terabyte of holes": holes,
}


def text(make_data: Callable[[], bytes]) -> Make:
    return lambda file: file.write_bytes(make_data())


def header(make_data: Callable[[], bytes], values: bytes = b"", size: int | None = None) -> Make:
    """A safetensors file."""

    def make(file: Path) -> None:
        data = make_data()
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(data) if size is None else size) + data + values)

    return make


def tensor(shape: list[int], end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


def holes_as_a_tensor(file: Path) -> None:
    """Four terabytes of zeros, as the header says."""
    header(lambda: json.dumps({"w": tensor([2**40], 2**42)}).encode())(file)
    os.truncate(file, file.stat().st_size + 2**42)


def header_in_holes(file: Path) -> None:
    """A file of a terabyte that takes no room on disk, and is all header."""
    header(lambda: b"{}", size=2**63)(file)
    os.truncate(file, 2**40)


def a_million_tensors() -> bytes:
    empty = '"dtype":"U8","shape":[0],"data_offsets":[0,0]'
    return ("{" + ",".join(f'"{i}":{{{empty}}}' for i in range(10**6)) + "}").encode()


def index_of(name: str) -> Make:
    return text(lambda: json.dumps({"metadata": {}, "weight_map": {"w": name}}).encode())


def index_of_special(make: Make) -> Make:
    def both(file: Path) -> None:
        index_of("part.safetensors")(file)
        make(file.with_name("part.safetensors"))

    return both


TENSORS: dict[str, Make] = {f"x.safetensors is {name}": make for name, make in SPECIAL.items()}
TENSORS |= {
    "a million tensors": header(a_million_tensors),
    "a name of 96 MB": header(lambda: b'{"' + b"n" * 96_000_000 + b'":{"dtype":"F3"}}'),
    "ten million empty lists": header(lambda: b"[" + b"[]," * TEN_MB + b"[]]"),
    "a header of 2**63 bytes, in a terabyte of holes": header_in_holes,
    "a shape beyond any machine": header(
        lambda: json.dumps({"w": tensor([2**62], 4)}).encode(), b"abcd"
    ),
    "a tensor of 4 TiB of holes": holes_as_a_tensor,
    "a number of a million digits": header(lambda: b'{"w":{"shape":[1' + b"0" * 10**6 + b"]}}"),
}
INDEX: dict[str, Make] = {f"the index is {name}": make for name, make in SPECIAL.items()}
INDEX |= {
    f"a file of the index is {name}": index_of_special(make) for name, make in SPECIAL.items()
}
INDEX |= {
    "an index of 99 MB": text(lambda: b'{"weight_map":{"' + b"w" * 99_000_000 + b'":"x"}}'),
    "an index of ten million lists": text(lambda: b"[" + b"[]," * TEN_MB + b"[]]"),
    "an index that names a file of 90 MB": index_of("x" * 90_000_000),
}


def peak() -> int:
    """The largest resident size since the last `reset`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(where: Path) -> None:
    ts.simulate_devices(2)
    like = {"v": jax.ShapeDtypeStruct((8,), "float32")}
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))

    def read(function: Callable[[], Any]) -> None:
        reset()
        before, start = peak(), time.process_time()
        with pytest.raises(ts.TreeShardError) as told:
            function()
        message = str(told.value)
        assert len(message) <= 5000
        assert message.replace("\n", "").isprintable()
        # On two quiet cores the slowest takes 0.1 s; what this finds takes minutes.
        assert time.process_time() - start < 30
        assert peak() - before < 2**30

    def inspect(file: Path) -> None:
        if command(("inspect", str(file))) == 2:
            raise ts.CheckpointError("as the command line says")

    for name, make in (TENSORS | INDEX).items():
        print(name, flush=True)
        folder = where / "tensors"
        folder.mkdir()
        file = folder / ("x.safetensors" if name in TENSORS else "x.safetensors.index.json")
        make(file)
        read(lambda file=file: load_safetensors(file))
        read(lambda file=file: load_safetensors(file, like))
        read(lambda file=file: inspect(file))
        shutil.rmtree(folder)


def test_every_hostile_file_is_a_short_typed_error(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.disk.test_hostile_files", tmp_path],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parents[2],
    )
    read = ended.stdout.splitlines()
    assert ended.returncode == 0, f"{read[-1:]}\n{ended.stderr[-3000:]}"
    assert [name for name in TENSORS | INDEX if name not in read] == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
