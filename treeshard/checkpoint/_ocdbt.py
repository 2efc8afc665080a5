"""Limits the index of arrays in few files (OCDBT), before TensorStore reads it.

The index is a manifest and a tree of nodes. They may be compressed, and their keys and names of
files share prefixes, so that a few kilobytes can take more than all memory. The format is that of
https://google.github.io/tensorstore/kvstore/ocdbt/.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from treeshard._core.text import human_bytes
from treeshard._disk.untrusted import LARGE, check_metadata, open_file, read_file
from treeshard.errors import CheckpointError

MANIFEST = "manifest.ocdbt"

_MAGIC_OF_MANIFEST, _MAGIC_OF_NODE = bytes.fromhex("0cdb3a2a"), bytes.fromhex("0cdb20de")
_MISSING = 2**64 - 1  # offset and length of the root of an empty store
_MOST = 2**28  # bytes of a manifest or node in memory; Orbax writes nodes of up to 10**8
# Of all nodes, compared with all files on disk, in which Orbax also lists the arrays as JSON.
_MOST_EXPANSION = 16
_LEAST = 2**16  # bytes that a node counts at least
_MOST_ENTRIES = 2**20  # of a list; TensorStore's limit for keys, and none for files
_MOST_LENGTH = 2**16 - 1  # of a key or the name of a file


class _MalformedError(Exception):
    """TensorStore refuses this too, and before it takes more memory than was counted."""


class _Node(NamedTuple):
    """Where a node is. `base` begins the names of files in it, and `prefix` its keys."""

    base: bytes
    file: bytes
    offset: int
    length: int
    prefix: bytes = b""


class Index:
    """The index of a store. `on_disk` is what all files of the store take."""

    def __init__(self, folder: Path, on_disk: int) -> None:
        self._folder = folder
        self._most = self._left = max(_MOST, _MOST_EXPANSION * on_disk)

    def large_values(self) -> dict[str, int]:
        """The sizes of the values that are larger than `LARGE`, by key.

        Raises `CheckpointError` if the index, or an array's metadata in it, takes more memory
        than any that treeshard or Orbax writes. What is malformed is left to TensorStore, whose
        errors say which arrays cannot be read.
        """
        large: dict[str, int] = {}
        nodes: list[_Node] = []
        with suppress(_MalformedError):
            nodes += self._root(MANIFEST)
        seen: set[_Node] = set()
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                with suppress(_MalformedError):
                    nodes += self._children(node, large)
        return large

    def hold(self, count: int, part: int, name: str) -> None:
        """Counts memory, of which a part now takes as much as given."""
        self._left -= count
        if part > _MOST or self._left < 0:
            most = human_bytes(_MOST if part > _MOST else self._most)
            raise CheckpointError(
                f"{name}: the index of the arrays takes more than {most} of memory, and none that"
                " treeshard or Orbax writes does."
            )

    def _root(self, manifest: str) -> list[_Node]:
        """The root of the latest version; an empty store has none."""
        try:
            data = read_file(self._folder / manifest)
        except OSError as error:
            raise _MalformedError from error
        fields = _Fields(data, _MAGIC_OF_MANIFEST, self, manifest)
        is_numbered = fields.take(17)[16]  # after the identity of the store
        fields.numbers(2)  # sizes
        fields.take(1)  # versions per node
        if fields.number():
            fields.take(4)  # level of compression
        if is_numbered:  # TensorStore numbers them where it cannot replace a file atomically
            names = os.listdir(self._folder) if manifest == MANIFEST else []
            found = [re.fullmatch(r"manifest\.(\d[\da-fA-F]{15})", name) for name in names]
            latest = max((int(match[1], 16) for match in found if match), default=0)
            return self._root(f"manifest.{latest:016x}") if latest else []
        files = fields.files(b"")
        count = fields.number()
        fields.numbers(count)  # of versions
        fields.take(count)  # heights
        nodes = fields.nodes(files, count)[-1:]
        return [node for node in nodes if not node.offset == node.length == _MISSING]

    def _children(self, node: _Node, large: dict[str, int]) -> list[_Node]:
        name = os.fsdecode(node.base + node.file)
        fields = _Fields(self._read(name, node), _MAGIC_OF_NODE, self, name)
        is_leaf = fields.take(1) == b"\0"
        files = fields.files(node.base)
        if not (count := fields.number()):
            raise _MalformedError
        kept, added = fields.prefixed(count)
        shared = fields.lengths(0 if is_leaf else count)
        common = min(int(x.min()) for x in (added[:1], kept[1:], shared) if x.size)
        fields.hold(int((kept + added - common).sum()))
        keys = _joined(fields.take(int(added.sum())), kept, added)
        if is_leaf:
            sizes = fields.numbers(count)
            if sizes.max() > LARGE:
                for key, size in zip(keys, sizes.tolist(), strict=True):
                    if size > LARGE:
                        path = (node.prefix + key).decode(errors="replace")
                        check_metadata(path, size)
                        large[path] = max(size, large.get(path, 0))
            return []
        fields.hold(count * _LEAST)
        rows = zip(fields.nodes(files, count), keys, shared.tolist(), strict=True)
        return [child._replace(prefix=node.prefix + key[:length]) for child, key, length in rows]

    def _read(self, name: str, node: _Node) -> bytes:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):  # TensorStore reads no such names
            raise _MalformedError
        self.hold(0, node.length, name)
        try:
            with open_file(self._folder / name) as file:
                file.seek(node.offset)
                return file.read(node.length)
        except (OSError, ValueError, OverflowError) as error:
            raise _MalformedError from error


class _Fields:
    """The fields of a manifest or node, read one after another."""

    def __init__(self, data: bytes, magic: bytes, index: Index, name: str) -> None:
        self._data, self._index, self._name = data[12:-4], index, name
        self._at = self._held = 0
        if data[:4] != magic or int.from_bytes(data[4:12], "little") != len(data):
            raise _MalformedError
        version, compression = self.numbers(2)
        self.hold(len(data))
        if version or compression > 1:
            raise _MalformedError
        if compression:
            self._data, self._at = self._expanded(), 0

    def hold(self, count: int) -> None:
        """Counts memory that TensorStore takes for what follows."""
        self._held += count
        self._index.hold(count, self._held, self._name)

    def _expanded(self) -> bytes:
        expanded = bytearray()
        with zstandard.ZstdDecompressor().stream_reader(self._data[self._at :]) as reader:
            try:
                while block := reader.read(LARGE):
                    self.hold(len(block))
                    expanded += block
            except zstandard.ZstdError as error:
                raise CheckpointError(f"{self._name}: the index is damaged: {error}.") from None
        return bytes(expanded)

    def take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            raise _MalformedError
        self._at += count
        return taken

    def number(self) -> int:
        return int(self.numbers(1)[0])

    def numbers(self, count: int) -> np.ndarray:
        """Numbers in groups of seven bits, the lowest first; the last has the high bit 0."""
        if count > _MOST_ENTRIES:
            text = f"a list of the index has {count:,} entries, more than {_MOST_ENTRIES:,}."
            raise CheckpointError(f"{self._name}: {text}")
        groups = np.frombuffer(self._data[self._at : self._at + 10 * count], np.uint8)
        ends = np.flatnonzero(groups < 128)[:count]
        starts = np.append(0, ends + 1)
        lengths = np.diff(starts)
        if len(ends) < count or lengths.max(initial=0) > 10:
            raise _MalformedError
        self._at += int(starts[-1])
        values = np.zeros(count, np.uint64)
        for i in range(lengths.max(initial=0)):
            longer = np.flatnonzero(lengths > i)
            bits = (groups[starts[longer] + i] & 127).astype(np.uint64)
            values[longer] |= bits << np.uint64(7 * i)
        return values

    def lengths(self, count: int) -> np.ndarray:
        lengths = self.numbers(count)
        if lengths.max(initial=0) > _MOST_LENGTH:
            raise _MalformedError
        return lengths.astype(np.int64)

    def prefixed(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """How many bytes each text keeps of the one before, and how many it adds."""
        return np.append(0, self.lengths(max(0, count - 1)))[:count], self.lengths(count)

    def files(self, base: bytes) -> list[tuple[bytes, bytes]]:
        """A table of files, as bases and names in them."""
        count = self.number()
        kept, added = self.prefixed(count)
        bases = self.lengths(count).tolist()
        self.hold(int((kept + added).sum()))
        paths = _joined(self.take(int(added.sum())), kept, added)
        return [(base + path[:n], path[n:]) for path, n in zip(paths, bases, strict=True)]

    def nodes(self, files: list[tuple[bytes, bytes]], count: int) -> list[_Node]:
        numbers, offsets, lengths = (self.numbers(count).tolist() for _ in range(3))
        try:
            named = [files[number] for number in numbers]
        except IndexError:
            raise _MalformedError from None
        rows = zip(named, offsets, lengths, strict=True)
        return [_Node(base, name, at, length) for (base, name), at, length in rows]


def _joined(text: bytes, kept: np.ndarray, added: np.ndarray) -> Iterator[bytes]:
    whole, at = b"", 0
    for keep, add in zip(kept.tolist(), added.tolist(), strict=True):
        whole, at = whole[:keep] + text[at : at + add], at + add
        yield whole
