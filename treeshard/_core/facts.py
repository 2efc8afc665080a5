"""The facts that processes compare before a call, and the text of their differences.

Most facts are known to all processes. Only the holders of a part of an array know its values, so
each set of processes compares the parts that it shares.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from treeshard._core.arrays import array_text, is_array, is_spread, processes_of
from treeshard._core.meetings import origin
from treeshard._core.mesh import describe_mesh
from treeshard._core.replicas import Part, checksum_text, is_shared
from treeshard._core.specs import entries, with_entries
from treeshard._core.text import consecutive, describe_groups
from treeshard.errors import counted

# Arrays of at most this size are compared between processes by default.
SMALL_BYTES = 2**16
_VALUES = " (values)"  # in the names of facts
UNKNOWN = "made by another program"  # the fact about an array that treeshard did not make


class Facts(dict[str, str]):
    """The facts about the next call, by leaf path or another name, which all processes must
    share."""

    def __init__(self) -> None:
        super().__init__()
        # Checksums on the devices of this process, by the processes that share a part, its leaf
        # and its name.
        self.shared = defaultdict[tuple[int, ...], dict[str, dict[str, list[int]]]](dict)
        # Arrays whose values are compared after all other facts: reading one waits for the program
        # that makes it, which other processes may not have started.
        self.unread: dict[str, Any] = {}

    def describe(
        self,
        rows: Iterable[tuple[str, Any, Sequence[Sharding]]],
        among: Sequence[int] = (),
        compared_bytes: int = 0,
    ) -> None:
        """Adds facts about leaves: path, array, target and source sharding.

        A row is a path, a leaf and its shardings. A leaf without shardings belongs to each process
        alone, and only its presence is compared. For a spread leaf, the call of the processes
        `among` that made it is compared, too. For other arrays of at most `compared_bytes`, a
        checksum is compared. If treeshard did not make an array, its values are read last.
        """
        # Facts about forms come before facts about values: a message lists the first few facts, and
        # should show that shapes differ, not the consequences.
        meshes: dict[Any, str] = {}
        places: dict[Sharding, str] = {}
        leaves: dict[str, Any] = {}
        placements: dict[str, str] = {}
        for path, x, shardings in rows:
            name = path or "the array"
            while name in leaves:  # leaves may share a path
                name += " (again)"
            leaves[name] = x
            for where in shardings:
                if where not in places:
                    places[where] = _placement(where, meshes)
            placements[name] = " from ".join(map(places.__getitem__, shardings))
        for mesh, name in meshes.items():
            self[name or "the mesh"] = f"{describe_mesh(mesh)} on the devices {_ids(mesh)}"
        for name, x in leaves.items():
            placed = placements[name]
            self[name] = f"{array_text(x)} as {placed}" if placed else "its own"
            if placed:
                self.add_values(name, x, among, compared_bytes)

    def add_values(self, name: str, x: Any, among: Sequence[int], compared_bytes: int) -> None:
        """Adds the known facts about the values of a leaf."""
        if is_spread(x):
            self.add_origin(name, x, among, compared_bytes)
        elif is_array(x) and 0 < x.nbytes <= compared_bytes:
            self[name + _VALUES] = checksum_text(x)

    def add_origin(
        self, name: str, x: Any, among: Sequence[int], compared_bytes: int = SMALL_BYTES
    ) -> None:
        """Adds the call of the processes `among` that made an array, if several of them have it."""
        if len(among) < 2 or not isinstance(x, jax.Array):
            return
        if made_in := origin(x, among):
            self[name + _VALUES] = f"made in {made_in}"
        elif len(processes_of(x.sharding)) > 1:
            self[name + _VALUES] = UNKNOWN
            if 0 < x.nbytes <= compared_bytes and is_shared(x):
                self.unread[name] = x

    def share(self, name: str, parts: Iterable[Part]) -> None:
        """Adds the values of parts of an array, which must be equal on all their holders."""
        for part in parts:
            leaf = self.shared[part.holders].setdefault(name, {})
            leaf[part.name] = part.checksums()

    def hashes(self) -> dict[str, str]:
        """A hash of the common facts, and of the parts that each set of processes shares.

        A hash is empty if devices of this process differ.
        """
        hashes = {"": _hash(list(self.items()))}  # a list: the order counts too
        for processes, leaves in self.shared.items():
            counts = {len(found) for parts in leaves.values() for found in parts.values()}
            hashes[_hash(processes)] = "" if counts - {1} else _hash(leaves)
        return hashes

    def select_groups(self, groups: Container[str]) -> list[Any]:
        """The facts as JSON values: the common facts, and the parts that groups share."""
        shared = [
            (leaf, parts)
            for processes, leaves in self.shared.items()
            if _hash(processes) in groups
            for leaf, parts in leaves.items()
        ]
        return [self, shared]


def _hash(x: Any) -> str:
    return hashlib.sha256(json.dumps(x).encode()).hexdigest()[:16]


def _placement(sharding: Sharding, meshes: dict[Any, str]) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    text = str(with_entries(sharding.spec, entries(sharding)))  # without trailing `None`s
    if sharding.mesh not in meshes:  # the first mesh has no name
        meshes[sharding.mesh] = f"mesh {len(meshes) + 1}" if meshes else ""
    name, kind = meshes[sharding.mesh], sharding.memory_kind
    if name:
        text += f" on {name}"
    if kind not in (None, "device"):
        text += f" in {kind}"
    return text


def _ids(mesh: Mesh) -> str:
    """`0-3, 8`"""
    runs = consecutive(device.id for device in mesh.devices.flat)
    return ", ".join(str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}" for ids in runs)


# ------------------------------------------------------------------ differences


class Differences(NamedTuple):
    """The differences between processes."""

    facts: dict[str, str]  # the differing facts, by name
    values: dict[
        str, tuple[str, str]
    ]  # by leaf: the first part whose holders differ, its checksums

    def lines(self) -> list[str]:
        lines = [f"{name}: {groups}" for name, groups in self.facts.items()]
        values = self.values.items()
        return lines + [f"{leaf}{part}{_VALUES}: {groups}" for leaf, (part, groups) in values]


def differences(by_process: Mapping[int, list[Any]]) -> Differences:
    """Compares the facts that each process has sent: see `Facts.select_groups`."""
    facts = _differences_of_all({i: facts for i, (facts, _) in by_process.items()})
    values = _differences_of_some({i: shared for i, (_, shared) in by_process.items()})
    # If shapes differ, values do too, so only the shapes are reported.
    return Differences(facts, {leaf: x for leaf, x in values.items() if leaf not in facts})


def _differences_of_all(by_process: Mapping[int, Mapping[str, str]]) -> dict[str, str]:
    """The facts that differ, by name; if all are equal, the first fact that is out of order."""
    names = dict.fromkeys(name for facts in by_process.values() for name in facts)
    differing: dict[str, str] = {}
    for name in names:
        row = {i: facts.get(name, "nothing") for i, facts in by_process.items()}
        # If shapes differ, values do too, so only the shapes are reported.
        explained = name.endswith(_VALUES) and name.removesuffix(_VALUES) in differing
        if len(set(row.values())) > 1 and not explained:
            differing[name] = describe_groups(row)
    if differing:
        return differing
    # Equal facts in another order: programs would take the leaves in another order, too.
    for position, order in enumerate(zip(*by_process.values(), strict=True)):
        if len(set(order)) > 1:
            row = dict(zip(by_process, map(repr, order), strict=True))
            return {f"leaf {position}": describe_groups(row)}
    return {}


def _differences_of_some(
    by_process: Mapping[int, Iterable[Sequence[Any]]],
) -> dict[str, tuple[str, str]]:
    """The leaves with parts whose holders differ: the first such part, and its checksums.

    Each process has sent pairs of a leaf and its parts, as JSON values.
    """
    held = defaultdict[str, dict[str, dict[int, list[int]]]](lambda: defaultdict(dict))
    for i, leaves in by_process.items():
        for leaf, parts in leaves:
            for part, checksums in parts.items():
                held[leaf][part][i] = checksums
    differing: dict[str, tuple[str, str]] = {}
    for leaf, parts in held.items():
        bad = {
            part: {i: _checksums_text(found) for i, found in row.items()}
            for part, row in parts.items()
            if len({x for found in row.values() for x in found}) > 1
        }
        if bad:
            part, *more = bad
            others = f" and {counted(len(more), 'more part')}" if more else ""
            differing[leaf] = part + others, describe_groups(bad[part])
    return differing


def _checksums_text(found: Sequence[int]) -> str:
    return f"CRC-32 {found[0]}" if len(found) == 1 else f"{len(found)} different checksums"
