"""How tensors are spread over files: one, or several with an index, as Hugging Face has them."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from treeshard._errors import CheckpointError, FormatError, listed
from treeshard._literals import parse_json
from treeshard._safetensors import (
    Tensor,
    byte_size,
    check_complete,
    is_text_by_text,
    lay_out,
    make_header,
    read_header,
)

_INDEX = ".index.json"
Described = tuple[str, str, tuple[int, ...]]  # name, dtype as the format calls it, shape


class NewFile(NamedTuple):
    """A file to be written.

    Attributes:
        path: Where.
        head: What it begins with; for an index, all of it.
        tensors: What follows, and where after the head.
    """

    path: Path
    head: bytes
    tensors: list[Tensor]


def spread(
    path: Path, tensors: Sequence[Described], most: int | None, metadata: Mapping[str, str] | None
) -> list[NewFile]:
    """Gives tensors their places in one file at `path`; or, if they have more than `most` bytes
    together, in numbered ones beside it, of at most so many bytes or one tensor, and an index.

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
        "weight_map": {one.name: file.path.name for file in files for one in file.tensors},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    return [*files, NewFile(_index_of(path), text.encode(), [])]


def _grouped(tensors: Sequence[Described], most: int | None) -> list[list[Described]]:
    groups: list[list[Described]] = [[]]
    size = 0
    for one in tensors:
        more = byte_size(*one[1:])
        if most is not None and groups[-1] and size + more > most:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += more
    return groups


def left_over(path: Path, new: Sequence[NewFile]) -> list[Path]:
    """The files that an earlier save to `path` made and these do not replace.

    Raises:
        CheckpointError: If a directory stands where one of the new files goes.
    """
    if taken := [file.path for file in new if file.path.is_dir()]:
        raise CheckpointError(f"{taken[0]} is a directory. Name a file that may be there.")
    numbered = re.compile(rf"{re.escape(path.stem)}-\d{{5}}-of-\d{{5}}{re.escape(path.suffix)}")
    there = [x for x in path.parent.iterdir() if numbered.fullmatch(x.name)]
    mine = {file.path for file in new}
    return [x for x in (path, _index_of(path), *there) if x not in mine and x.exists()]


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)


# ------------------------------------------------------------------ read


class Stored(NamedTuple):
    """A tensor in an open file.

    Attributes:
        tensor: What the header says of it.
        file: The file.
        at: Where in the file it begins.
    """

    tensor: Tensor
    file: BinaryIO
    at: int


@contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, Stored]]:
    """Opens a file of tensors, an index with all its files, or a directory with one of these.

    Returns:
        The tensors by name, in the order of the files and of their bytes.

    Raises:
        FormatError: If a header or the index is malformed, or they contradict each other.
        DamagedError: If a file is cut short, or goes on after its last tensor.
        CheckpointError: If a directory has no such files, or several; if files of the index are
            not there.
        OSError: If one cannot be read.
    """
    path, map_ = _found(path)
    with ExitStack() as held:
        found: dict[str, dict[str, Stored]] = {}
        for name in dict.fromkeys(map_.values()) if map_ is not None else [path.name]:
            file = held.enter_context(path.with_name(name).open("rb"))
            header = read_header(file)
            check_complete(file, header)
            stored = [Stored(x, file, header.length + x.start) for x in header.tensors.values()]
            found[name] = {x.tensor.name: x for x in stored}
        if map_ is not None:
            _check_index(path, map_, found)
        everything = (item for tensors in found.values() for item in tensors.items())
        yield {name: x for name, x in everything if map_ is None or name in map_}


def _found(path: Path) -> tuple[Path, dict[str, str] | None]:
    """The file at a path, or the index and what it says: the file of each tensor."""
    if path.is_dir():
        path = _in_directory(path)
    elif not path.exists() and _index_of(path).exists():
        path = _index_of(path)
    return path, _read_index(path) if path.name.endswith(".json") else None


def _in_directory(path: Path) -> Path:
    for pattern in (f"*.safetensors{_INDEX}", "*.safetensors"):
        there = sorted(path.glob(pattern))
        if len(there) == 1:
            return there[0]
        if there:
            names = ", ".join(x.name for x in there[:5]) + (", ..." if len(there) > 5 else "")
            raise CheckpointError(
                f"{path} has {len(there)} files {pattern}: {names}. Say which to load."
            )
    raise CheckpointError(f"{path} has no file *.safetensors.")


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = parse_json(path.read_bytes())
    except FormatError as error:
        raise FormatError(f"{path} is {error}") from None
    found = raw.get("weight_map") if isinstance(raw, dict) else None
    if not is_text_by_text(found):
        raise FormatError(f"{path} has no 'weight_map' that says in which file each tensor is.")
    names = dict.fromkeys(found.values())
    if bad := [name for name in names if not _is_plain(name)]:
        raise FormatError(
            f"{path} names {bad[0]!r}, which is not the name of a file beside it. Nothing outside"
            " its directory is read."
        )
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        facts = [f"{name} is not there." for name in missing]
        headline = f"it names {len(missing)} files that are not there:"
        raise CheckpointError(f"{path}: {listed(headline, facts)}")
    return found


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(x in name for x in ("/", "\\", "\0", os.sep))


def _check_index(
    path: Path, map_: Mapping[str, str], found: Mapping[str, Mapping[str, Stored]]
) -> None:
    facts: list[str] = []
    for name, file in map_.items():
        there = [other for other, tensors in found.items() if name in tensors]
        if there != [file]:
            where = " and ".join(there) or "none of its files"
            facts.append(f"{name}: it says {file}, and {where} has it.")
    if facts:
        raise FormatError(f"{path}: " + listed(f"{len(facts)} tensors are elsewhere:", facts))
