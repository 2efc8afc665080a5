"""Tensors in one safetensors file, or in several files with an index, as Hugging Face writes them.

The index names the file of each tensor. It may come from strangers, so it is compared with the
headers of the files, and it cannot name files in other directories:

    {
      "metadata": {"total_size": 2000},
      "weight_map": {
        "layers.0.weight": "model-00001-of-00002.safetensors",
        "layers.1.weight": "model-00002-of-00002.safetensors"
      }
    }

A save replaces all files of an earlier save at once, even if it is killed. The files are written to
a hidden directory, and a single rename, of the only file or of the index, switches to the new save.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import numpy as np

from treeshard._core.processes import all_or_none
from treeshard._disk.files import (
    Lock,
    check_mark,
    close,
    flush,
    make_directory,
    new_mark,
    remove_left,
    warn_of_removed,
)
from treeshard._disk.untrusted import check_size, open_file, parse, read_file
from treeshard.errors import CheckpointError, FormatError, listed
from treeshard.interchange._byte_ranges import Piece, write, write_bytes, write_full
from treeshard.interchange._format import Tensor, lay_out, read_header

SUFFIX = ".safetensors"
# In a folder, `transformers` reads this file, or else its index. Some of its versions reject a
# header without this metadata.
_IN_FOLDER = f"model{SUFFIX}"
_OF_FOLDER = {"format": "pt"}


def _index_of(path: Path) -> Path:
    # As Hugging Face's libraries name it: `model.safetensors.index.json`.
    return path.with_name(f"{path.name}.index.json")


# ------------------------------------------------------------------ what is written


def destination(
    path: Path, metadata: Mapping[str, str] | None
) -> tuple[Path, Mapping[str, str] | None]:
    """The file to write and its metadata. A path without the suffix is a folder."""
    if path.name.endswith(SUFFIX):
        return path, metadata
    return path / _IN_FOLDER, _OF_FOLDER if metadata is None else metadata


class NewFile(NamedTuple):
    """A file to write."""

    path: Path
    head: bytes  # the bytes before the tensors, or the full index
    tensors: list[Tensor]


def lay_out_files(
    path: Path,
    tensors: Iterable[Tensor],
    most: int | None,
    metadata: Mapping[str, str] | None,
) -> list[NewFile]:
    """Assigns tensors to one file at `path`, or to several numbered files and an index.

    If the tensors have more than `most` bytes, they are split into files of at most `most` bytes,
    unless a single tensor is larger. The index comes last.
    """
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if most is not None and groups[-1] and size + tensor.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        files = [NewFile(path, *lay_out(groups[0], metadata))]
    else:
        names = (f"{path.stem}-{i:05d}-of-{len(groups):05d}" for i in range(1, len(groups) + 1))
        paths = (path.with_name(name + path.suffix) for name in names)
        laid_out = (lay_out(group, metadata) for group in groups)
        files = [NewFile(name, *file) for name, file in zip(paths, laid_out, strict=True)]
        files.append(NewFile(_index_of(path), _index_text(files), []))
    for file in files:
        if os.path.isdir(file.path):  # `Path.is_dir` raises if the name is too long
            raise CheckpointError(f"{file.path} is a directory. Pass the path of a file.")
    return files


def _index_text(files: Iterable[NewFile]) -> bytes:
    """The index of some files, as Hugging Face's `save_pretrained` writes it."""
    holders = [(tensor, file.path.name) for file in files for tensor in file.tensors]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor, _ in holders)},
        "weight_map": {tensor.name: name for tensor, name in holders},
    }
    text = f"{json.dumps(index, indent=2, sort_keys=True)}\n".encode()
    try:
        check_size(text)
    except FormatError as error:
        raise FormatError(f"The index would be {error} Shorten names.") from None
    return text


# ------------------------------------------------------------------ how it is written


def write_files(
    path: Path,
    files: Sequence[NewFile],
    values: Iterable[tuple[str, np.ndarray | Iterable[Piece]]],
    where: str,
    timeout: float,
) -> None:
    """Writes the files of one save at `path`, which become visible together.

    `values` has names of tensors, each with the full array or the pieces that this process writes.
    Only one run can write at `path`. The writes of other processes may take longer than `timeout`.
    """
    try:
        with ExitStack() as held:
            _write_files(path, files, values, where, timeout, held)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {path} cannot be written: {error}. What was saved before is unchanged."
        ) from error


def _write_files(
    path: Path,
    files: Sequence[NewFile],
    values: Iterable[tuple[str, np.ndarray | Iterable[Piece]]],
    where: str,
    timeout: float,
    held: ExitStack,
) -> None:
    # Each phase begins once the previous phase has succeeded on all processes.
    first = jax.process_index() == 0
    hidden = path.with_name(f".{path.name}.part")
    mark = hidden / f"{path.name}.mark"  # differs from the names of the files
    with all_or_none(where, phase="create", timeout=timeout) as marks:
        if first:
            make_directory(path.parent)
            lock = path.with_name(f".{path.name}.treeshard-files-lock")
            Lock(lock, f"{where}: {path}", held)
            warn_of_removed(where, path.parent, remove_left(hidden))
            held.callback(remove_left, hidden)  # before the lock is released
            hidden.mkdir()
            marks.own = new_mark(mark) if jax.process_count() > 1 else b""
    with all_or_none(where, phase="open", timeout=timeout):
        if not first:
            check_mark(mark, marks.answer, timeout)
        opened = [_open(hidden / file.path.name, held) for file in files]
    with all_or_none(where, phase="write", timeout=timeout, works=True):
        places = {
            x.name: (to, x) for file, to in zip(files, opened, strict=True) for x in file.tensors
        }
        for name, pieces in values:
            to, tensor = places[name]
            if isinstance(pieces, np.ndarray):
                write_full(to, tensor.start, pieces)
            else:
                write(to, tensor.start, tensor.shape, pieces)
            del pieces  # frees them before the next ones are made
        for file, to in zip(files, opened, strict=True):
            if first:
                write_bytes(to, 0, file.head)
            os.fsync(to)  # the rename must not be durable before these writes
    with all_or_none(where, phase="rename", timeout=timeout, works=True):
        if first:
            _put_in_place(where, path, files, hidden)


def _open(path: Path, held: ExitStack) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    held.callback(close, file)
    return file


def _put_in_place(where: str, path: Path, files: Sequence[NewFile], hidden: Path) -> None:
    """Renames the files of a save, in an order that a power cut does not change.

    1. Several files get free names, so that the earlier index still names its own files.
    2. The rename of the single file or of the index switches to the new save. If an earlier single
       file exists, which is read instead of an index, its removal switches instead.
    3. The files of earlier saves are removed once the new files are durable.
    """
    directory = path.parent
    *shards, last = files
    if shards:
        renamed = _with_free_names(shards)
        for before, after in zip(shards, renamed, strict=True):
            (hidden / before.path.name).rename(after.path)
        if renamed != shards:
            (hidden / last.path.name).write_bytes(_index_text(renamed))
            flush(hidden / last.path.name)
        shards = renamed
        flush(directory)  # the index must not be durable before the files that it names
    hides_index = bool(shards) and path.exists()  # asked before the rename, as it may raise
    (hidden / last.path.name).replace(last.path)
    if hides_index:
        flush(directory)
        path.unlink()
    _remove_earlier(where, path, {file.path for file in (*shards, last)})


def _with_free_names(files: list[NewFile]) -> list[NewFile]:
    """The files with free names: their own, or with `-2`, `-3` and so on before the suffix."""
    for number in count(1):
        tag = f"-{number}" if number > 1 else ""
        renamed = [x._replace(path=x.path.with_stem(f"{x.path.stem}{tag}")) for x in files]
        if not any(_is_taken(x.path) for x in renamed):
            return renamed
    raise AssertionError


def _is_taken(path: Path) -> bool:
    """Whether a file has this name. If the disk does not answer, `os.path.lexists` would return
    False, and the file of an earlier save would be overwritten."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _remove_earlier(where: str, path: Path, kept: set[Path]) -> None:
    """Removes the files of earlier and killed saves at `path`."""
    # Files with other counts and other numbers of the save too: their tensors are from other saves.
    numbered = rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}(-\d+)?{re.escape(path.suffix)}"
    try:
        flush(path.parent)  # the new names are on the disk before the earlier files go
        names = {path.name, _index_of(path).name}
        earlier = [
            name
            for name in {*os.listdir(path.parent)} - {file.name for file in kept}
            if name in names or re.fullmatch(numbered, name)
        ]
        for name in sorted(earlier):
            (path.parent / name).unlink()
        if earlier:
            flush(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {path} is saved, but power loss may undo that, or files of an earlier save"
            f" are still there: {error}. Save again."
        ) from None


# ------------------------------------------------------------------ read


class Stored(NamedTuple):
    """A tensor and the open file with its data."""

    tensor: Tensor
    file: BinaryIO


@contextmanager
def open_tensors(path: Path, shapes_only: bool = False) -> Iterator[dict[str, Stored]]:
    """Opens a safetensors file, an index with all its files, or a directory with one of these.

    Yields the tensors by name, ordered by file and then by offset. With `shapes_only`, the data may
    be missing. Raises as `load_safetensors`, and `OSError` if a file cannot be read.
    """
    path = _find_in_directory(path) if path.is_dir() else path
    if _index_of(path).exists() and not path.exists():  # `path` was saved as several files
        path = _index_of(path)
    open_path = _open_several if path.name.endswith(".json") else _open_one
    with ExitStack() as open_files:
        yield open_path(path, open_files, shapes_only)


def _find_in_directory(path: Path) -> Path:
    """The file in a directory, or the file that its index is named after.

    The choice is `model.safetensors`, or else the only index, or else the only file.
    """
    if (path / _IN_FOLDER).exists() or _index_of(path / _IN_FOLDER).exists():
        return path / _IN_FOLDER
    for end in (f"{SUFFIX}.index.json", SUFFIX):
        names = sorted(file.name for file in path.glob(f"*{end}"))
        if len(names) > 1:
            shown = ", ".join(names if len(names) <= 5 else [*names[:5], "..."])
            raise CheckpointError(
                f"{path} has {len(names)} files *{end}: {shown}. Pass the path of one."
            )
        if names:
            return path / names[0].removesuffix(".index.json")
    raise CheckpointError(f"{path} has no file *{SUFFIX}.")


def _open_one(path: Path, open_files: ExitStack, shapes_only: bool) -> dict[str, Stored]:
    file = open_files.enter_context(open_file(path))
    return {tensor.name: Stored(tensor, file) for tensor in read_header(file, shapes_only)}


def _open_several(path: Path, open_files: ExitStack, shapes_only: bool) -> dict[str, Stored]:
    """Opens an index and its files, all from the same save.

    If another run replaces the save during the call, all files are opened again, until the index
    stays the same. An open file can be read even after its removal.
    """
    while True:
        before = _version(path)
        with ExitStack() as opened:
            try:
                index = _read_index(path)
                names = dict.fromkeys(index.values())
                by_file = {x: _open_one(path.with_name(x), opened, shapes_only) for x in names}
                _check_index(path, index, by_file)
            except (CheckpointError, FormatError, OSError):
                if _version(path) == before:
                    raise
                continue
            if _version(path) == before:
                open_files.enter_context(opened.pop_all())
                tensors = (x for of_file in by_file.values() for x in of_file.items())
                return {name: stored for name, stored in tensors if name in index}


def _version(path: Path) -> tuple[int, ...]:
    """An identity of a file, which changes when another file replaces it."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, which is a name beside the index."""
    data = read_file(path)
    try:
        raw = parse(data)
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or {*map(type, index.values())} - {str}:
        raise FormatError(f"{path} has no 'weight_map', the file of each tensor.")
    for name in dict.fromkeys(index.values()):
        # These are separators and parents on any system.
        if name in ("", ".", "..") or {*name} & {"/", "\\", "\0"}:
            raise FormatError(
                f"{path} names {name!r}, which is not the name of a file beside it. Files outside"
                " its directory are not read."
            )
    return index


def _check_index(
    path: Path, index: Mapping[str, str], by_file: Mapping[str, Iterable[str]]
) -> None:
    """Raises `FormatError` unless each tensor is in the file that the index names, and only there.

    Tensors that the index does not name are ignored.
    """
    holders: dict[str, list[str]] = defaultdict(list)
    for file, names in by_file.items():
        for name in names:
            holders[name].append(file)
    facts = [
        f"{name}: the index says {file}, but"
        f" {' and '.join(holders[name]) or 'none of its files'} has it."
        for name, file in index.items()
        if holders[name] != [file]
    ]
    if facts:
        headline = f"{len(facts)} tensors are not where the index says:"
        raise FormatError(f"{path}: {listed(headline, facts)}")
