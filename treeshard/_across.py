"""Which processes must go together, and what they compare before they do."""

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
    """Whether `x` is an array that lies, at least in part, on devices of other processes."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_fully_addressable


def company(
    leaves: Iterable[Any], meshes: Iterable[AnyMesh] = (), more: Iterable[int] = ()
) -> list[int]:
    """The processes that hold devices of spread leaves or of meshes, and `more`; ascending.

    None if that is this process alone, or not this one: then it has nobody to talk to.
    """
    if jax.process_count() == 1:
        return []
    shardings = {x.sharding for x in leaves if is_spread(x)}
    devices = {device for sharding in shardings for device in sharding.device_set}
    devices |= {d for mesh in meshes if isinstance(mesh, Mesh) for d in mesh.devices.flat}
    if not devices:
        return []
    found = sorted({*processes_of(devices), *more})
    return found if len(found) > 1 and jax.process_index() in found else []


def facts_of(rows: Iterable[tuple[str, Any, Sequence[Sharding]]]) -> dict[str, str]:
    """What processes compare of leaves: the path, the array, and where it goes to and comes from.

    Of a leaf without shardings, which is each process's own, only that it is there.
    """
    meshes: dict[Any, str] = {}
    facts: dict[str, str] = {}
    for path, x, shardings in rows:
        name = path or "the array"
        while name in facts:  # two leaves may share a path
            name += " (again)"
        places = " from ".join(_placement(sharding, meshes) for sharding in shardings)
        facts[name] = f"{array_text(x)} as {places}" if places else "its own"
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
    places = enumerate(device.id for device in mesh.devices.flat)
    for _, run in groupby(places, lambda place: place[1] - place[0]):
        ids = [i for _, i in run]
        runs.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else str(ids[0]))
    return ", ".join(runs)
