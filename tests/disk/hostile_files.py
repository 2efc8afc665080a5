"""Files that somebody made to harm their reader: each is refused, quickly and in little memory.

Run as a program it makes the files and reads them under a limit of 8 GiB, and prints a line of JSON
for each.
"""

import json
import os
import resource
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import crafted_index as index

LIMIT = 8 * 2**30
TEN_MB = 10**7

Make = Callable[[Path], Any]


# ------------------------------------------------------------------ special files


def fifo(file: Path) -> None:
    os.mkfifo(file)


def zeros(file: Path) -> None:
    file.symlink_to("/dev/zero")


def link_to_fifo(file: Path) -> None:
    os.mkfifo(file.with_name("a-fifo"))
    file.symlink_to("a-fifo")


def loop(file: Path) -> None:
    file.symlink_to(file.name)


def listener(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # the names of sockets are short
    socket.socket(socket.AF_UNIX).bind(file.name)
    os.chdir(here)


def folder(file: Path) -> None:
    file.mkdir()


def holes(file: Path) -> None:
    """A terabyte that takes no room on disk."""
    with file.open("wb") as out:
        out.truncate(2**40)


SPECIAL: dict[str, Make] = {
    "a FIFO": fifo,
    "a link to /dev/zero": zeros,
    "a link to a FIFO": link_to_fifo,
    "a link to itself": loop,
    "a socket": listener,
    "a folder": folder,
    "a terabyte of holes": holes,
}


def instead_of(name: str, make: Make) -> Make:
    """Replaces a file of a checkpoint."""

    def change(path: Path) -> None:
        (file,) = path.glob(name)
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        make(file)

    return change


def text(data: bytes) -> Make:
    return lambda file: file.write_bytes(data)


# ------------------------------------------------------------------ safetensors


def header(data: bytes, values: bytes = b"", size: int | None = None) -> Make:
    """A safetensors file."""

    def make(file: Path) -> None:
        with file.open("wb") as out:
            out.write(struct.pack("<Q", len(data) if size is None else size) + data + values)

    return make


def tensor(shape: list[int], end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


def holes_as_a_tensor(file: Path) -> None:
    """Four terabytes of zeros, as the header says."""
    header(json.dumps({"w": tensor([2**40], 2**42)}).encode())(file)
    os.truncate(file, file.stat().st_size + 2**42)


def index_of(name: str) -> Make:
    return text(json.dumps({"metadata": {}, "weight_map": {"w": name}}).encode())


def index_of_special(make: Make) -> Make:
    def both(file: Path) -> None:
        index_of("part.safetensors")(file)
        make(file.with_name("part.safetensors"))

    return both


MANY = ",".join(f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(10**6))
TENSORS: dict[str, Make] = {f"x.safetensors is {name}": make for name, make in SPECIAL.items()}
TENSORS |= {
    "a name of 96 MB": header(b'{"' + b"n" * 96_000_000 + b'":{"dtype":"F3"}}'),
    "a valid name of 96 MB": header(
        b'{"' + b"n" * 96_000_000 + b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"
    ),
    "metadata of 96 MB": header(b'{"__metadata__":{"a":"' + b"n" * 96_000_000 + b'"}}'),
    "a million tensors": header(f"{{{MANY}}}".encode()[:99_000_000]),
    "a header of 99 MB of spaces": header(b"{}" + b" " * 99_000_000),
    "a header of 10 MB of brackets": header(b"[" * TEN_MB),
    "ten million empty lists": header(b"[" + b"[]," * TEN_MB + b"[]]"),
    "a header of 2**63 bytes": header(b"{}", size=2**63),
    "a shape beyond any machine": header(json.dumps({"w": tensor([2**62], 4)}).encode(), b"abcd"),
    "a tensor of 4 TiB of holes": holes_as_a_tensor,
    "a number of a million digits": header(b'{"w":{"shape":[1' + b"0" * 10**6 + b"]}}"),
}
INDEX: dict[str, Make] = {f"the index is {name}": make for name, make in SPECIAL.items()}
INDEX |= {
    f"a file of the index is {name}": index_of_special(make) for name, make in SPECIAL.items()
}
INDEX |= {
    "an index that names /dev/zero": index_of("/dev/zero"),
    "an index that names ../x": index_of("../x.safetensors"),
    "an index of 99 MB": text(b'{"weight_map":{"' + b"w" * 99_000_000 + b'":"x"}}'),
    "an index of brackets": text(b"[" * TEN_MB),
    "an index of ten million lists": text(b"[" + b"[]," * TEN_MB + b"[]]"),
    "an index that names a file of 90 MB": index_of("x" * 90_000_000),
}

# ------------------------------------------------------------------ checkpoints


def sealed(path: Path, raw: Any) -> None:
    """Writes a table whose checksums are right."""
    values = {key: value for key, value in raw.items() if key != "crc"}
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    written = json.dumps({**values, "crc": crc32(canonical)})
    (path / "leaves/table.json").write_text(written)
    (path / "state/table.crc32").write_text(str(crc32(written.encode())))


def row(**changes: Any) -> Make:
    """Changes the row of `w`."""

    def change(path: Path) -> None:
        raw = json.loads((path / "leaves/table.json").read_text())
        (of_w,) = [row for row in raw["leaves"] if row["path"] == "w"]
        of_w.update(changes)
        sealed(path, raw)

    return change


def scalar(**values: Any) -> Make:
    def change(path: Path) -> None:
        raw = json.loads((path / "leaves/table.json").read_text())
        raw["leaves"].append({"path": "s", "crc": 0, **values})
        sealed(path, raw)

    return change


def array(shape: list[int], chunk: list[int], data: bytes | None = None, **more: Any) -> Make:
    """Changes the array `w` in the store of a file per shard."""

    def change(path: Path) -> None:
        file = path / "state/w/zarr.json"
        raw = json.loads(file.read_text())
        raw["shape"] = shape
        raw["chunk_grid"]["configuration"]["chunk_shape"] = chunk
        file.write_text(json.dumps(raw | more))
        if data is not None:
            (path / "state/w/c/0/0").write_bytes(data)

    return change


def both(*changes: Make) -> Make:
    return lambda path: [change(path) for change in changes]


def expanding(path: Path) -> None:
    """1 GiB of zeros in a few kilobytes, chunk by chunk, and as the table says."""
    chunk = (path / "state/w/c/0/0").read_bytes()
    row(shape=[2**18, 2**10])(path)
    array([2**18, 2**10], [2**13, 2**10])(path)
    for i in range(32):
        (path / f"state/w/c/{i}").mkdir(exist_ok=True)
        (path / f"state/w/c/{i}/0").write_bytes(chunk)


def expanding_at_once(path: Path) -> None:
    """2 GiB of zeros in 67 kilobytes, in one chunk, and as the table says."""
    row(shape=[2**19, 2**10])(path)
    array([2**19, 2**10], [2**19, 2**10], zeros_by_zstd(2**31))(path)


def zeros_by_zstd(size: int) -> bytes:
    """A frame of blocks of one repeated byte, each of 128 KiB."""
    block = 1 << 1 | 2**17 << 3
    blocks = (block.to_bytes(3, "little") + b"\0") * (size // 2**17 - 1)
    return b"\x28\xb5\x2f\xfd\x00\x38" + blocks + (block | 1).to_bytes(3, "little") + b"\0"


def expanding_manifest(path: Path) -> None:
    data = index.index_file(index.MANIFEST, b"\0\1" + zeros_by_zstd(2**31))
    (path / "state/manifest.ocdbt").write_bytes(data)


def expanding_node() -> list[bytes]:
    return [index.index_file(index.NODE, b"\0\1" + zeros_by_zstd(2**31))]


def coded(data: bytes, *codecs: dict[str, Any]) -> Make:
    """The first chunk of `w`, of 32 MiB, from other codecs."""
    return array([8192, 1024], [8192, 1024], data, codecs=[BYTES, *codecs])


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"level": 3}}
HOW = {"cname": "zstd", "clevel": 5, "typesize": 1, "shuffle": "noshuffle", "blocksize": 0}
BLOSC = {"name": "blosc", "configuration": HOW}


def millions_of_parts(path: Path) -> None:
    """A shard whose parts are single numbers; their index is holes."""
    about = {"chunk_shape": [1, 1], "codecs": [BYTES], "index_codecs": [BYTES]}
    codec = {"name": "sharding_indexed", "configuration": about}
    array([8192, 1024], [8192, 1024], codecs=[codec])(path)
    os.truncate(path / "state/w/c/0/0", 2**27)


def nested(path: Path) -> None:
    """An array in shards of shards of shards ..."""
    begin = '{"name":"sharding_indexed","configuration":{"chunk_shape":[1,1],"codecs":['
    text = begin * 10_000 + json.dumps(BYTES) + "]}}" * 10_000
    file = path / "state/w/zarr.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"codecs": ["?"]}).replace('"?"', text))


def zeros_by_blosc(count: int) -> bytes:
    """Blocks of 256 MiB of zeros, each a frame of zstd."""
    frame = zeros_by_zstd(2**28)
    block = struct.pack("<I", len(frame)) + frame
    starts = [16 + 4 * count + i * len(block) for i in range(count)]
    size = starts[-1] + len(block)
    head = struct.pack("<BBBBIII", 2, 1, 0x90, 1, count * 2**28, 2**28, size)
    return head + struct.pack(f"<{count}I", *starts) + count * block


def deep_link(path: Path) -> None:
    (path / "state/again").symlink_to(".")


def extra(name: str, make: Make) -> Make:
    return lambda path: make(path / name)


HUGE = [2**20, 2**20]  # 4 TiB
FOLDERS: dict[str, Make] = {}
for part in ("leaves/table.json", "state/table.crc32"):
    FOLDERS |= {f"{part} is {kind}": instead_of(part, make) for kind, make in SPECIAL.items()}
for part in ("state/_METADATA", "state/w/zarr.json", "state/w/c/0/0"):
    for kind in ("a FIFO", "a link to /dev/zero", "a link to itself"):
        FOLDERS[f"{part} is {kind}"] = instead_of(part, SPECIAL[kind])
FOLDERS |= {
    "state is a FIFO": instead_of("state", fifo),
    "leaves is a FIFO": instead_of("leaves", fifo),
    "a FIFO beside the arrays": extra("state/w/more", fifo),
    "a link to its own folder": deep_link,
    "4 TiB in the table": row(shape=HUGE),
    "4 TiB in the store": array(HUGE, [1, 1]),
    "4 TiB in the store, in one chunk": array(HUGE, HUGE),
    "4 TiB in both": both(row(shape=HUGE), array(HUGE, [1, 1])),
    "4 TiB in both, in one chunk": both(row(shape=HUGE), array(HUGE, HUGE)),
    "a chunk of 4 TiB": array([8192, 1024], HUGE),
    "chunks of 2 GiB": array([8192, 1024], [2**19, 2**10]),
    "a few kilobytes that expand to 1 GiB": expanding,
    "a few kilobytes that expand to 2 GiB in one chunk": expanding_at_once,
    "keys of 2**61 bytes": row(
        kind="key", shape=[2**58], dtype="key<fry>", impl="threefry2x32", stored="uint32"
    ),
    "a shape of 10,000 dims": row(shape=[1] * 10_000),
    "a dtype of 10 MB": row(dtype="f" * TEN_MB),
    "a PRNG of 10 MB": row(kind="key", dtype="key<fry>", impl="x" * TEN_MB, stored="uint32"),
    "a path of 10 MB": row(path="p" * TEN_MB),
    "a number of a million digits in the table": scalar(kind="int", value="9" * 10**6),
    "bytes of a table that are not base64": scalar(kind="bytes", value="@" * TEN_MB),
    "an unknown kind of 10 MB": scalar(kind="k" * TEN_MB),
    "a table of brackets": instead_of("leaves/table.json", text(b"[" * TEN_MB)),
    "a table of ten million lists": instead_of(
        "leaves/table.json", text(b"[" + b"[]," * TEN_MB + b"[]]")
    ),
    "a table of 90 MB in one string": instead_of(
        "leaves/table.json", text(b'{"crc":"' + b"x" * 90_000_000 + b'"}')
    ),
    "a chunk of a terabyte of holes": instead_of("state/w/c/0/0", holes),
    "a chunk by zstd of 2 GiB": coded(zeros_by_zstd(2**31), ZSTD),
    "a chunk by blosc of 1.75 GiB": coded(zeros_by_blosc(7), BLOSC),
    "a chunk by ten thousand codecs": coded(zeros_by_zstd(2**31), *[ZSTD] * 10_000),
    "a chunk in millions of parts": millions_of_parts,
    "shards of shards of shards": nested,
    "a zarr.json of brackets": instead_of("state/w/zarr.json", text(b"[" * TEN_MB)),
}

FEW = {
    f"the index of few files is {x}": instead_of("state/manifest.ocdbt", SPECIAL[x])
    for x in SPECIAL
}
FEW |= {
    "an index of few files of brackets": instead_of("state/manifest.ocdbt", text(b"[" * TEN_MB)),
    "an index of few files of 90 MB": instead_of("state/manifest.ocdbt", text(bytes(90_000_000))),
    "an index of few files that expands to 2 GiB": expanding_manifest,
    "a node of few files that expands to 2 GiB": index.of_nodes(expanding_node),
    "a node of 2,048 values of 1 MiB": index.of_nodes(index.large_values),
    "a node of 16 GiB of keys": index.of_nodes(index.long_keys),
    "a node of 8 GiB of names of files": index.of_nodes(index.node_of_long_names),
    "an index of few files of 8 GiB of names": index.manifest_of_long_names,
    "100 nodes of 60 MB": index.of_nodes(index.chain),
    "a zarr.json of 4 GiB in few files": index.in_holes("w/zarr.json"),
    "a chunk of 4 GiB in few files": index.in_holes("w/c/0/0"),
}

# ------------------------------------------------------------------ read them


def peak() -> int:
    """The largest resident size since the last `reset`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(where: Path, only: str = "") -> None:
    import jax
    import numpy as np

    import treeshard as ts
    from treeshard._cli import main as command
    from treeshard.checkpoint import Checkpoints, inspect, restore, save, verify
    from treeshard.interchange import load_safetensors

    ts.simulate_devices(2)
    shape = jax.ShapeDtypeStruct
    like = {"w": shape((8192, 1024), "float32"), "n": 3}
    w = np.zeros((8192, 1024), np.float32)
    save(where / "plain/5", {"w": w, "n": 3}, ocdbt=False)
    save(where / "small/5", {"w": w, "n": 3}, ocdbt=False, compress=True)
    save(where / "few/5", {"w": w, "n": 3})
    mesh = ts.make_mesh("fsdp=2")
    restore(where / "small/5", like, rules=[(".*", None)], mesh=mesh)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))

    def read(name: str, what: str, function: Callable[[], Any]) -> None:
        reset()
        before, start = peak(), time.process_time()
        print(json.dumps({"case": name, "call": what}), flush=True)
        try:
            function()
            raised, message = "", ""
        except BaseException as error:
            raised, message = type(error).__name__, str(error)
            typed = isinstance(error, ts.TreeShardError)
        else:
            typed = False
        about = {"case": name, "call": what, "raised": raised, "typed": typed}
        about |= {"seconds": round(time.process_time() - start, 3), "peak": peak() - before}
        print(json.dumps(about | {"length": len(message), "text": message[:300]}), flush=True)

    def quiet(*arguments: str) -> None:
        if command(arguments) == 2:
            raise ts.errors.CheckpointError("as the command line says")

    def read_tensors(name: str, file: Path) -> None:
        read(name, "load", lambda: load_safetensors(file))
        read(name, "load like", lambda: load_safetensors(file, {"v": shape((8,), "float32")}))
        read(name, "inspect", lambda: quiet("inspect", str(file)))

    def read_checkpoint(name: str, path: Path) -> None:
        read(name, "inspect", lambda: inspect(path))
        read(name, "verify", lambda: verify(path))
        if "expand" in name and name not in FEW:
            return  # such arrays may be real, and fit into memory
        read(name, "restore", lambda: restore(path))
        read(name, "restore like", lambda: restore(path, like))
        run = Checkpoints(path.parent, read_only=True)
        read(name, "latest", lambda: run.restore_latest(like, rules=[(".*", None)], mesh=mesh))

    for name, make in (TENSORS | INDEX).items():
        if only in name:
            folder = where / "tensors"
            folder.mkdir()
            file = folder / ("x.safetensors" if name in TENSORS else "x.safetensors.index.json")
            make(file)
            read_tensors(name, file)
            shutil.rmtree(folder)
    for name, make in (FOLDERS | FEW).items():
        if only in name:
            path = where / "run/5"
            base = "few" if name in FEW else "small" if "expand" in name else "plain"
            shutil.copytree(where / base / "5", path)
            make(path)
            read_checkpoint(name, path)
            shutil.rmtree(path.parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
