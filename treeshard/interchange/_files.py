"""Tensors in one safetensors file, or in several with an index, as Hugging Face writes them."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from treeshard._core.text import parse_json
from treeshard.errors import CheckpointError, FormatError, listed
from treeshard.interchange._format import (
    Tensor,
    byte_size,
    check_complete,
    is_text_by_text,
    lay_out,
    make_header,
    read_header,
)

_INDEX = ".index.json"
Described = tuple[str, str, tuple[int, ...]]  # name, the format's code for the dtype, shape


class NewFile(NamedTuple):
    """A file to write.

    Attributes:
        path: Its path.
        head: Its first bytes; of an index, all of them.
        tensors: The tensors that follow, with their offsets after the head.
    """

    path: Path
    head: bytes
    tensors: list[Tensor]


def spread(
    path: Path, tensors: Sequence[Described], most: int | None, metadata: Mapping[str, str] | None
) -> list[NewFile]:
    """Assigns tensors to one file at `path`, or to several numbered files and an index.

    There are several if the tensors together have more than `most` bytes. Each of them has at
    most `most` bytes, unless a single tensor has more.

    Raises:
        FormatError: If a header would be longer than the format allows.
    """
    groups = _grouped(tensors, most)
    if len(groups) == 1:
        placed = lay_out(groups[0])
        return [NewFile(path, make_header(placed, metadata), placed)]
    files: list[NewFile] = []
    for i, group in enumerate(groups):
        name = f"{path.stem}-{i + 1:05d}-of-{len(groups):05d}{path.suffix}"
        placed = lay_out(group)
        files.append(NewFile(path.with_name(name), make_header(placed, metadata), placed))
    index = {
        "metadata": {"total_size": sum(file.tensors[-1].stop for file in files)},
        "weight_map": {tensor.name: file.path.name for file in files for tensor in file.tensors},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return [*files, NewFile(_index_of(path), text.encode(), [])]


def _grouped(tensors: Sequence[Described], most: int | None) -> list[list[Described]]:
    groups: list[list[Described]] = [[]]
    size = 0
    for name, code, shape in tensors:
        nbytes = byte_size(code, shape)
        if most is not None and groups[-1] and size + nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append((name, code, shape))
        size += nbytes
    return groups


def left_over(path: Path, new: Sequence[NewFile]) -> list[Path]:
    """The files of an earlier save to `path` that the new ones do not replace.

    Raises:
        CheckpointError: If the path of a new file is a directory.
    """
    if taken := [file.path for file in new if file.path.is_dir()]:
        raise CheckpointError(f"{taken[0]} is a directory. Pass the path of a file.")
    numbered = re.compile(rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    earlier = [x for x in path.parent.iterdir() if numbered.fullmatch(x.name)]
    replaced = {file.path for file in new}
    return [x for x in (path, _index_of(path), *earlier) if x not in replaced and x.exists()]


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)


# ------------------------------------------------------------------ read


class Stored(NamedTuple):
    """A tensor in an open file.

    Attributes:
        tensor: Its entry in the header.
        file: The file.
        at: The byte of the file where its data begins.
    """

    tensor: Tensor
    file: BinaryIO
    at: int


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, Stored]]:
    """Opens a safetensors file, an index with all its files, or a directory with one of these.

    Returns:
        The tensors by name, ordered by file and then by offset.

    Raises:
        FormatError: If a header or the index is malformed, or they contradict each other.
        DamagedError: If a file is cut short, or goes on after its last tensor.
        CheckpointError: If a directory has no such file, or several; if a file of the index is
            missing.
        OSError: If a file cannot be read.
    """
    path, index = _resolve(path)
    with ExitStack() as open_files:
        by_file: dict[str, dict[str, Stored]] = {}
        for name in dict.fromkeys(index.values()) if index is not None else [path.name]:
            file = open_files.enter_context(path.with_name(name).open("rb"))
            header = read_header(file)
            check_complete(file, header)
            stored = [Stored(x, file, header.length + x.start) for x in header.tensors.values()]
            by_file[name] = {x.tensor.name: x for x in stored}
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
    try:
        raw = parse_json(path.read_bytes())
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    index = raw.get("weight_map") if isinstance(raw, dict) else None
    if not is_text_by_text(index):
        raise FormatError(f"{path} has no 'weight_map', the file of each tensor.")
    names = dict.fromkeys(index.values())
    if bad := [name for name in names if not _is_plain(name)]:
        raise FormatError(
            f"{path} names {bad[0]!r}, which is not the name of a file beside it. Files outside its"
            " directory are not read."
        )
    if missing := [name for name in names if not path.with_name(name).is_file()]:
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
