"""Which processes participate in a call, and what they compare before it."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, Sharding

from treeshard._mesh import AnyMesh, describe_mesh
from treeshard._processes import processes_of
from treeshard._specs import array_text, entries, with_entries


def is_spread(x: Any) -> bool:
    """Whether `x` is an array with shards on devices of other processes."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable


def company(
    leaves: Iterable[Any], meshes: Iterable[AnyMesh] = (), more: Iterable[int] = ()
) -> list[int]:
    """The processes that own devices of spread leaves or of meshes, and `more`; ascending.

    Empty if this process is the only one, or is not among them: then there is no exchange.
    """
    if jax.process_count() == 1:
        return []
    me = jax.process_index()
    shardings = {x.sharding for x in leaves if is_spread(x)}
    devices = {device for sharding in shardings for device in sharding.device_set}
    devices |= {d for mesh in meshes if isinstance(mesh, Mesh) for d in mesh.devices.flat}
    if not devices:
        return []
    participants = sorted({*processes_of(devices), *more})
    return participants if participants != [me] and me in participants else []


def facts_of(rows: Iterable[tuple[str, Any, Sequence[Sharding]]]) -> dict[str, str]:
    """The facts about leaves that processes compare: path, array, target and source sharding.

    A row is a path, a leaf and its shardings. A leaf without shardings belongs to each process
    alone, and only its presence is compared.
    """
    meshes: dict[Any, str] = {}
    facts: dict[str, str] = {}
    for path, x, shardings in rows:
        name = path or "the array"
        while name in facts:  # leaves may share a path
            name += " (again)"
        placements = " from ".join(_placement(sharding, meshes) for sharding in shardings)
        facts[name] = f"{array_text(x)} as {placements}" if placements else "its own"
    described = {
        name or "the mesh": f"{describe_mesh(mesh)} on the devices {_ids(mesh)}"
        for mesh, name in meshes.items()
    }
    return described | facts


def _placement(sharding: Sharding, meshes: dict[Any, str]) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    name = meshes.setdefault(sharding.mesh, f"mesh {len(meshes) + 1}" if meshes else "")
    spec, kind = with_entries(sharding.spec, entries(sharding)), sharding.memory_kind
    return f"{spec}{name and f' on {name}'}{f' in {kind}' if kind not in (None, 'device') else ''}"


def _ids(mesh: Mesh) -> str:
    """`0-3, 8`"""
    runs = []
    numbered = enumerate(device.id for device in mesh.devices.flat)
    for _, run in groupby(numbered, lambda pair: pair[1] - pair[0]):
        ids = [i for _, i in run]
        runs.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0]))
    return ", ".join(runs)
