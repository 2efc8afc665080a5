"""One spec for a tree: cut to the rank of each leaf, and never for an array itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import pytest
from helpers import arange
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import compat, manual, testing, training

KINDS = {"auto": "auto", "explicit": "explicit", "mixed": ["explicit", "explicit", "auto"]}
ROWS = ("dp", "fsdp")
SPEC = P(ROWS, "sp")


def mesh_of(kind: str) -> Mesh:
    return ts.make_mesh("dp=2,fsdp=2,sp=2", axis_types=KINDS[kind])


def batch() -> dict[str, Any]:
    """Leaves of every rank; and the specs that they get of `SPEC`."""
    return {
        "ids": arange(8, 16),
        "labels": arange(8),
        "cube": arange(4, 2, 3),
        "step": np.int32(1),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 8),
        "name": "train",
    }


GIVEN = {
    "ids": SPEC,
    "labels": P(ROWS),
    "cube": SPEC,
    "step": P(),
    "key": P(),
    "keys": P(ROWS),
}


class Pair(NamedTuple):
    ids: Any
    labels: Any


class Module(eqx.Module):
    ids: Any
    labels: Any
    size: int = eqx.field(static=True, default=3)


IDS, LABELS = arange(8, 16), arange(8)

# A tree, a spec for it or specs for its subtrees, and the specs of its arrays.
TREES: dict[str, tuple[Any, Any, list[P | None]]] = {
    "dict": ({"a": IDS, "b": LABELS}, SPEC, [SPEC, P(ROWS)]),
    "list": ([LABELS, IDS], SPEC, [P(ROWS), SPEC]),
    "tuple in a list": ([(LABELS,), IDS], SPEC, [P(ROWS), SPEC]),
    "NamedTuple": (Pair(IDS, LABELS), SPEC, [SPEC, P(ROWS)]),
    "Module": (Module(IDS, LABELS), SPEC, [SPEC, P(ROWS)]),
    "box": ({"w": nn.Partitioned(LABELS, ("x",))}, SPEC, [P(ROWS)]),
    "one leaf": ([LABELS], SPEC, [P(ROWS)]),
    "a subtree": (
        {"x": {"a": IDS, "b": LABELS}, "y": IDS},
        {"x": SPEC, "y": P()},
        [SPEC, P(ROWS), P()],
    ),
    "None": ({"x": {"a": IDS}, "y": LABELS}, {"x": None, "y": P()}, [None, P()]),
    "no leaf of this rank": ({"b": LABELS}, P("sp", None, "dp"), [P("sp")]),
    "empty": ({}, SPEC, []),
}


def in_jit(tree: Any, specs: Any, mesh: Mesh) -> Any:
    arrays, rest = eqx.partition(tree, eqx.is_array_like)

    def constrain(arrays: Any) -> Any:
        return ts.with_sharding_constraint(arrays, specs, mesh)

    with jax.set_mesh(mesh):
        return eqx.combine(jax.jit(constrain)(arrays), rest)


def in_a_step(tree: Any, specs: Any, mesh: Mesh) -> Any:
    plan = ts.plan({"w": np.ones(8)}, [("w", None)], mesh, min_size=0)
    step = training.jit_step(lambda state, batch: (state, batch), plan, batch=specs, donate=False)
    arrays, rest = eqx.partition(tree, eqx.is_array_like)
    return eqx.combine(step(ts.shard({"w": np.ones(8)}, plan), arrays)[1], rest)


def by_struct(tree: Any, specs: Any, mesh: Mesh) -> Any:
    structs = jax.tree.map(as_struct, tree)
    return ts.from_process_local(structs, specs, mesh)


def as_struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x


USES: dict[str, Callable[..., Any]] = {
    "shard": ts.shard,
    "reshard": ts.reshard,
    "from_process_local": ts.from_process_local,
    "from_process_local of structs": by_struct,
    "with_sharding_constraint": ts.with_sharding_constraint,
    "with_sharding_constraint in jit": in_jit,
    "jit_step": in_a_step,
}


def specs_in(tree: Any) -> list[Any]:
    return [getattr(getattr(x, "sharding", None), "spec", None) for x in jax.tree.leaves(tree)]


def is_sharded_as(x: Any, spec: P | None, mesh: Mesh) -> bool:
    if spec is None:
        return isinstance(x, np.ndarray)
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_each_leaf_gets_the_entries_of_its_dims(use: str, kind: str) -> None:
    mesh, tree = mesh_of(kind), batch()
    for spec in (SPEC, NamedSharding(mesh, SPEC)):
        placed = USES[use](tree, spec, mesh)
        assert {name: is_sharded_as(placed[name], GIVEN[name], mesh) for name in GIVEN} == (
            dict.fromkeys(GIVEN, True)
        )
        assert placed["name"] == "train"


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("use", USES)
def test_containers_and_subtrees(use: str, name: str) -> None:
    tree, specs, given = TREES[name]
    mesh = mesh_of("auto")
    placed = USES[use](tree, specs, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    found = jax.tree.leaves(placed)
    if use in ("with_sharding_constraint in jit", "jit_step"):  # whose results are all on devices
        pairs = [pair for pair in zip(found, given, strict=True) if pair[1] is not None]
        found, given = [x for x, _ in pairs], [spec for _, spec in pairs]
    if use == "from_process_local of structs":
        found = [x if x.sharding else np.zeros(0) for x in found]
    assert [is_sharded_as(x, spec, mesh) for x, spec in zip(found, given, strict=True)] == [
        True
    ] * len(given)


# An array, or a tree of specs for arrays: a spec that is too long is an error, as in JAX.
TOO_LONG: dict[str, tuple[Any, Any]] = {
    "array": (LABELS, SPEC),
    "scalar": (np.float32(1), P("dp")),
    "key": (jax.random.key(0), P("dp")),
    "a spec for each": ({"a": IDS, "b": LABELS}, {"a": SPEC, "b": SPEC}),
    "in a Module": (Module(IDS, LABELS), Module(SPEC, SPEC)),
    "in a list": ([IDS, LABELS], [SPEC, SPEC]),
}


@pytest.mark.parametrize("name", TOO_LONG)
@pytest.mark.parametrize("use", USES)
def test_a_spec_for_an_array_has_no_more_entries_than_dims(use: str, name: str) -> None:
    tree, specs = TOO_LONG[name]
    mesh = mesh_of("auto")
    if use == "jit_step" and not getattr(tree, "shape", 1):  # scalars of a batch are replicated
        assert in_a_step(tree, specs, mesh).sharding.is_fully_replicated
        return
    with pytest.raises(ts.SpecError, match="entr(y|ies), but shape .* has . dim"):
        USES[use](tree, specs, mesh)


@pytest.mark.parametrize("use", [name for name in USES if "constraint" not in name])
def test_an_unknown_axis_is_an_error_for_leaves_of_any_rank(use: str) -> None:
    with pytest.raises(ts.UnknownAxisError, match="the mesh has no axis 'fdsp'.*mean 'fsdp'"):
        USES[use]({"labels": LABELS}, P("dp", "fdsp"), mesh_of("auto"))


def test_a_misspelt_axis_of_a_constraint_is_told_for_leaves_of_any_rank() -> None:
    with pytest.warns(ts.ShardingWarning, match="the mesh has no axis 'fdsp'.*mean 'fsdp'"):
        ts.with_sharding_constraint({"labels": LABELS}, P("dp", "fdsp"), mesh_of("auto"))


def test_what_reads_specs_reads_them_alike() -> None:
    """One spec, passed to everything that a user calls with the tree that it has placed."""
    mesh = mesh_of("auto")
    tree = {"w": arange(8, 16), "b": arange(8), "n": np.int32(1)}
    placed = ts.shard(tree, SPEC, mesh)
    testing.assert_trees_sharded_as(placed, SPEC)
    with pytest.raises(ts.TreeShardError, match="b: is P"):
        testing.assert_trees_sharded_as(placed, P("sp", "dp"))
    shard_fns, gather_fns = ts.make_shard_and_gather_fns(SPEC, mesh)
    testing.assert_trees_sharded_as(shard_fns(tree), SPEC)
    assert gather_fns(placed)["n"] == 1
    [rows] = {
        x.sharding.spec for x in jax.tree.leaves(ts.unshard({"b": placed["b"]}, SPEC, "dp", mesh))
    }
    assert rows == P("fsdp")
    with ts.logical_axis_rules([("rows", ROWS), ("time", "sp")]):
        testing.assert_trees_sharded_as(ts.shard(tree, ("rows", "time"), mesh), SPEC)
    assert compat.analyze_sharding_strategy(tree, SPEC, mesh)


def test_a_step_by_hand_gets_shards_of_each_rank() -> None:
    mesh = mesh_of("auto")
    plan = ts.plan({"w": np.ones(8)}, [("w", None)], mesh, min_size=0)
    seen: dict[str, tuple[int, ...]] = {}

    def step(state: Any, batch: Any) -> Any:
        seen.update({name: x.shape for name, x in batch.items()})
        return state, 0.0

    tree = {"ids": IDS, "labels": LABELS, "n": np.float32(1)}
    training.shard_map_step(step, plan, batch=SPEC)(ts.shard({"w": np.ones(8)}, plan), tree)
    assert seen == {"ids": (2, 8), "labels": (2,), "n": ()}


def test_shards_by_hand_are_as_shard_map_cuts_them() -> None:
    """JAX raises for `in_specs` that are too long, and a shard taken for a full array is wrong."""
    mesh = mesh_of("auto")

    def gather(layer: Any) -> Any:
        return manual.gather_params(layer, "sp", P(None, "sp"))

    def unshard(layer: Any) -> Any:
        return ts.unshard(layer, P(None, "sp"), "sp")

    for f in (gather, unshard):
        by_hand = jax.shard_map(f, mesh=mesh, in_specs=P("sp"), out_specs=P(), check_vma=False)
        with pytest.raises(ts.SpecError, match="has 2 entries, but shape"):
            by_hand({"w": LABELS})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", ["with_sharding_constraint", "with_sharding_constraint in jit"])
def test_a_constraint_without_axes_replicates(use: str, kind: str) -> None:
    mesh = mesh_of(kind)
    tree = {"x": ts.shard(IDS, SPEC, mesh), "n": ts.shard(LABELS, P("dp"), mesh)}
    for spec in (P(), P(None), P(None, None), NamedSharding(mesh, P())):
        placed = USES[use](tree, spec, mesh)
        assert all(x.sharding.is_fully_replicated for x in placed.values())
        alone = USES[use](tree["x"], spec, mesh)
        assert alone.sharding.is_fully_replicated
