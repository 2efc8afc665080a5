"""Tensors in one safetensors file, or in several with an index, as Hugging Face writes them.

Of several files the index says which has a tensor. It comes from strangers too, so what it says is
compared with the headers of the files, and it cannot name files elsewhere on the disk:

    {
      "metadata": {"total_size": 2000},
      "weight_map": {
        "layers.0.weight": "model-00001-of-00002.safetensors",
        "layers.1.weight": "model-00002-of-00002.safetensors"
      }
    }
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax

from treeshard._disk.files import flush, new_files
from treeshard._disk.untrusted import check_size, open_file, parse, read_file
from treeshard.errors import CheckpointError, FormatError, listed
from treeshard.interchange._byte_ranges import Piece, write, write_bytes
from treeshard.interchange._format import Tensor, lay_out, read_header

# As Hugging Face's libraries name it: `model.safetensors.index.json` for `model.safetensors`, whose
# tensors are in `model-00001-of-00002.safetensors` and so on.
_INDEX = ".index.json"


class NewFile(NamedTuple):
    """A file to write: its first bytes (of an index, all of them) and the tensors that follow."""

    path: Path
    head: bytes
    tensors: list[Tensor]


def lay_out_files(
    path: Path,
    tensors: Sequence[Tensor],
    most: int | None,
    metadata: Mapping[str, str] | None,
) -> list[NewFile]:
    """Assigns tensors to one file at `path`, or to several numbered files and an index.

    There are several if the tensors together have more than `most` bytes. Each of them has at most
    `most` bytes, unless a single tensor has more. The index comes last.
    """
    groups = _grouped(tensors, most)
    total = len(groups)
    paths = [path]
    if total > 1:
        names = (f"{path.stem}-{i:05d}-of-{total:05d}{path.suffix}" for i in range(1, total + 1))
        paths = [path.with_name(name) for name in names]
    files = [NewFile(x, *lay_out(group, metadata)) for x, group in zip(paths, groups, strict=True)]
    if total > 1:
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


def _grouped(tensors: Sequence[Tensor], most: int | None) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if most is not None and groups[-1] and size + tensor.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def write_files(
    path: Path,
    files: Sequence[NewFile],
    values: Iterable[tuple[str, Iterable[Piece]]],
    where: str,
    timeout: float,
) -> None:
    """Writes the files of one save at `path`; all of them are read from the end on, or none.

    `values` are names of tensors, each with the pieces that this process writes.
    """
    names = [file.path.name for file in files]
    place = partial(_put_in_place, where, path, files)
    try:
        with new_files(path, names, place, where, timeout) as opened:
            pairs = [*zip(files, opened, strict=True)]
            positions = {x.name: (to, x) for file, to in pairs for x in file.tensors}
            for name, pieces in values:
                to, tensor = positions[name]
                write(to, tensor.start, tensor.shape, pieces)
                del pieces  # or they would stay in memory while the next ones are made
            if jax.process_index() == 0:
                for file, to in pairs:
                    write_bytes(to, 0, file.head)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {path} cannot be written: {error}. What was saved before is unchanged."
        ) from error


def _put_in_place(where: str, path: Path, files: Sequence[NewFile], hidden: Path) -> None:
    """Renames the files of a save, in an order that power loss does not change.

    1. Several files get names that no file has, so that the earlier index still names its own.
    2. One rename decides: of the single file, or of the index. A single file is read instead of an
       index, so an earlier one is removed then, which decides instead.
    3. The files of earlier saves go, once the new ones are durable.
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
        flush(directory)
    (hidden / last.path.name).replace(last.path)
    if shards and path.exists():
        flush(directory)
        path.unlink()
    _remove_earlier(where, path, [file.path for file in (*shards, last)])


def _with_free_names(files: list[NewFile]) -> list[NewFile]:
    """The files under their names if none is taken, or with `-2`, or `-3`, before the suffix."""
    for number in count(1):
        tag = f"-{number}" if number > 1 else ""
        renamed = [x._replace(path=x.path.with_stem(f"{x.path.stem}{tag}")) for x in files]
        if not any(os.path.lexists(x.path) for x in renamed):
            return renamed
    raise AssertionError


def _remove_earlier(where: str, path: Path, kept: Sequence[Path]) -> None:
    """Removes the files of earlier saves at `path`, also of killed ones, from now on."""
    # Of other counts of files and other numbers of the save, too: these have other tensors.
    numbered = rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}(-\d+)?{re.escape(path.suffix)}"
    try:
        flush(path.parent)
        for file in sorted(path.parent.iterdir()):
            is_ours = file in (path, _index_of(path)) or re.fullmatch(numbered, file.name)
            if is_ours and file not in kept:
                file.unlink()
        flush(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{where}: {path} is saved, but power loss may undo that, or files of an earlier save"
            f" are still there: {error}. Save again."
        ) from None


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)


# ------------------------------------------------------------------ read


class Stored(NamedTuple):
    """A tensor, and the open file that has its data."""

    tensor: Tensor
    file: BinaryIO


@contextmanager
def open_tensors(path: Path, shapes_only: bool = False) -> Iterator[dict[str, Stored]]:
    """Opens a safetensors file, an index with all its files, or a directory with one of these.

    Returns the tensors by name, ordered by file and then by offset. With `shapes_only`, data may be
    missing. Raises as `load_safetensors`, and `OSError` if a file cannot be read.
    """
    path = _resolve(path)
    with ExitStack() as open_files:
        open_path = _open_several if path.name.endswith(".json") else _open_one
        yield open_path(path, open_files, shapes_only)


def _open_several(path: Path, open_files: ExitStack, shapes_only: bool) -> dict[str, Stored]:
    """Opens an index and its files, which are of one save: until the index stays the same."""
    while True:
        before = _version(path)
        with ExitStack() as opened:
            try:
                index = _read_index(path)
                by_file = {
                    name: _open_one(path.with_name(name), opened, shapes_only)
                    for name in dict.fromkeys(index.values())
                }
                _check_index(path, index, by_file)
            except (CheckpointError, FormatError, OSError):
                if _version(path) == before:
                    raise
                continue
            if _version(path) == before:
                open_files.enter_context(opened.pop_all())
                tensors = chain.from_iterable(x.items() for x in by_file.values())
                return {name: stored for name, stored in tensors if name in index}


def _version(path: Path) -> tuple[int, ...]:
    """What differs once a file is replaced by another one of this name."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _open_one(path: Path, open_files: ExitStack, shapes_only: bool) -> dict[str, Stored]:
    file = open_files.enter_context(open_file(path))
    return {tensor.name: Stored(tensor, file) for tensor in read_header(file, shapes_only)}


def _resolve(path: Path) -> Path:
    """The file to read: the path, its index if it was saved as several files, or what is in it."""
    if path.is_dir():
        return _in_directory(path)
    index = _index_of(path)
    return index if index.exists() and not path.exists() else path


def _in_directory(path: Path) -> Path:
    for pattern in (f"*.safetensors{_INDEX}", "*.safetensors"):
        matches = sorted(path.glob(pattern))
        if len(matches) > 1:
            names = [match.name for match in matches]
            shown = ", ".join(names if len(names) <= 5 else [*names[:5], "..."])
            raise CheckpointError(
                f"{path} has {len(names)} files {pattern}: {shown}. Pass the path of one."
            )
        if matches:
            return matches[0]
    raise CheckpointError(f"{path} has no file *.safetensors.")


def _read_index(path: Path) -> dict[str, str]:
    data = read_file(path)
    try:
        raw = parse(data)
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or {*map(type, index.values())} - {str}:
        raise FormatError(f"{path} has no 'weight_map', the file of each tensor.")
    for name in dict.fromkeys(index.values()):
        # On any system, and `..` is the parent.
        if name in ("", ".", "..") or {*name} & {"/", "\\", "\0"}:
            raise FormatError(
                f"{path} names {name!r}, which is not the name of a file beside it. Files outside"
                " its directory are not read."
            )
    return index


def _check_index(
    path: Path, index: Mapping[str, str], by_file: Mapping[str, Mapping[str, Stored]]
) -> None:
    holders: dict[str, list[str]] = defaultdict(list)
    for file, tensors in by_file.items():
        for name in tensors:
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
