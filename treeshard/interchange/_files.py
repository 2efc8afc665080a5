"""Tensors in one safetensors file, or in several with an index, as Hugging Face writes them."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax

from treeshard._disk.files import new_files
from treeshard._disk.untrusted import open_file, parse, read_file
from treeshard.errors import CheckpointError, FormatError, listed
from treeshard.interchange._byte_ranges import Piece, write, write_bytes
from treeshard.interchange._format import Tensor, lay_out, read_header

_INDEX = ".index.json"


class NewFile(NamedTuple):
    """A file to write: its first bytes (of an index, all of them) and the tensors that follow."""

    path: Path
    head: bytes
    tensors: list[Tensor]


class NewFiles(NamedTuple):
    """The files of one save, the last of several their index; `path` stands for all of them."""

    path: Path
    files: list[NewFile]

    def has(self, name: str) -> bool:
        """Whether a save at this path may have written a file of this name."""
        stem, suffix = re.escape(self.path.stem), re.escape(self.path.suffix)
        numbered = re.fullmatch(rf"{stem}-\d{{5}}-of-\d{{5}}{suffix}", name)
        return bool(numbered) or name in (self.path.name, _index_of(self.path).name)


def lay_out_files(
    path: Path,
    tensors: Sequence[Tensor],
    most: int | None,
    metadata: Mapping[str, str] | None,
    where: str,
) -> NewFiles:
    """Assigns tensors to one file at `path`, or to several numbered files and an index.

    There are several if the tensors together have more than `most` bytes. Each of them has at most
    `most` bytes, unless a single tensor has more.
    """
    groups = _grouped(tensors, most)
    count = len(groups)
    names = [f"{path.stem}-{i + 1:05d}-of-{count:05d}{path.suffix}" for i in range(count)]
    files = [
        NewFile(path.with_name(name) if count > 1 else path, *lay_out(group, metadata))
        for name, group in zip(names, groups, strict=True)
    ]
    if count > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {x.name: file.path.name for file in files for x in file.tensors},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        files.append(NewFile(_index_of(path), text.encode(), []))
    if taken := [file.path for file in files if file.path.is_dir()]:
        raise CheckpointError(f"{taken[0]} is a directory. Pass the path of a file.")
    with _as_checkpoint_error(where, path):
        next(path.parent.iterdir(), None)
    return NewFiles(path, files)


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
    new: NewFiles, values: Iterable[tuple[str, Iterable[Piece]]], where: str, timeout: float
) -> None:
    """Writes the files of one save; all of them get their names at the end, or none.

    `values` are names of tensors, each with the pieces that this process writes.
    """
    paths = [file.path for file in new.files]
    with (
        _as_checkpoint_error(where, new.path),
        new_files(new.path, paths, new.has, where, timeout) as opened,
    ):
        pairs = [*zip(new.files, opened, strict=True)]
        positions = {x.name: (file, x) for part, file in pairs for x in part.tensors}
        for name, pieces in values:
            file, tensor = positions[name]
            write(file, tensor.start, tensor.shape, pieces)
        if jax.process_index() == 0:
            for part, file in pairs:
                write_bytes(file, 0, part.head)


@contextmanager
def _as_checkpoint_error(where: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{where}: {path} cannot be written: {error}. Existing files are unchanged."
        ) from error


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
    path, index = _resolve(path)
    with ExitStack() as open_files:
        by_file: dict[str, dict[str, Stored]] = {}
        for name in dict.fromkeys(index.values()) if index is not None else [path.name]:
            file = open_files.enter_context(open_file(path.with_name(name)))
            by_file[name] = {x.name: Stored(x, file) for x in read_header(file, shapes_only)}
        if index is not None:
            _check_index(path, index, by_file)
        everything = (item for tensors in by_file.values() for item in tensors.items())
        yield {name: x for name, x in everything if index is None or name in index}


def _resolve(path: Path) -> tuple[Path, dict[str, str] | None]:
    """The file to read; if that is an index, also what it says: the file of each tensor."""
    if path.is_dir():
        path = _in_directory(path)
    elif not path.exists() and _index_of(path).exists():
        path = _index_of(path)
    return path, _read_index(path) if path.name.endswith(".json") else None


def _in_directory(path: Path) -> Path:
    for pattern in (f"*.safetensors{_INDEX}", "*.safetensors"):
        matches = sorted(path.glob(pattern))
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(x.name for x in matches[:5]) + (", ..." if len(matches) > 5 else "")
            raise CheckpointError(
                f"{path} has {len(matches)} files {pattern}: {names}. Pass the path of one."
            )
    raise CheckpointError(f"{path} has no file *.safetensors.")


def _read_index(path: Path) -> dict[str, str]:
    data = read_file(path)
    try:
        raw = parse(data)
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(index, dict) or not all(isinstance(x, str) for x in index.values()):
        raise FormatError(f"{path} has no 'weight_map', the file of each tensor.")
    names = dict.fromkeys(index.values())
    if bad := [name for name in names if not _is_plain(name)]:
        raise FormatError(
            f"{path} names {bad[0]!r}, which is not the name of a file beside it. Files outside its"
            " directory are not read."
        )
    if missing := [name for name in names if not path.with_name(name).exists()]:
        facts = [f"{name} is missing." for name in missing]
        headline = f"it names {len(missing)} files that are missing:"
        raise CheckpointError(f"{path}: {listed(headline, facts)}")
    return index


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(x in name for x in ("/", "\\", "\0", os.sep))


def _check_index(
    path: Path, index: Mapping[str, str], by_file: Mapping[str, Mapping[str, Stored]]
) -> None:
    facts: list[str] = []
    for name, file in index.items():
        holders = [other for other, tensors in by_file.items() if name in tensors]
        if holders != [file]:
            actual = " and ".join(holders) or "none of its files"
            facts.append(f"{name}: the index says {file}, but {actual} has it.")
    if facts:
        headline = f"{len(facts)} tensors are not where the index says:"
        raise FormatError(f"{path}: {listed(headline, facts)}")
