"""Every number of the analysis, compared with arrays on devices."""

from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.compat import analyze_sharding_strategy

SPECS = {
    "whole": P(),
    "split": P("data", "fsdp"),
    "tuple": P(("fsdp", "data")),
    "layers": P(None, "fsdp", None),
    "bias": P("fsdp"),
}


@pytest.fixture
def tree() -> dict[str, Any]:
    return {
        "whole": np.ones((3, 5), np.float32),
        "split": np.ones((4, 8), np.float16),
        "tuple": np.ones(16, np.int8),
        "layers": [np.ones((2, 4, 2), np.float32) for _ in range(3)],
        "bias": np.ones(8, np.float32),
        "call": jax.nn.relu,
        "name": "mlp",
        "count": 3,
    }


def specs_of(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: SPECS.get(name) for name in tree}


def measured(tree: Any) -> dict[int, int]:
    """The bytes of a live tree on each device."""
    held: Counter[int] = Counter()
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            held.update({piece.device.id: piece.data.nbytes for piece in x.addressable_shards})
    return dict(held)


def test_every_field_against_live_arrays(mesh: Mesh, tree: dict[str, Any]) -> None:
    specs = specs_of(tree)
    analysis = analyze_sharding_strategy(tree, specs, mesh)
    live = ts.shard(tree, specs, mesh)
    assert analysis["memory_per_device"] == measured(live)
    assert analysis["balance_score"] == 1.0
    assert analysis["total_parameters"] == 15 + 32 + 16 + 48 + 8
    assert analysis["sharded_parameters"] == 32 + 16 + 48 + 8
    assert analysis["replicated_parameters"] == 15
    assert analysis["partition_stats"] == {
        P(): {"leaves": 1, "parameters": 15, "bytes": 60, "bytes_per_device": 60},
        P("data", "fsdp"): {"leaves": 1, "parameters": 32, "bytes": 64, "bytes_per_device": 8},
        P(("fsdp", "data")): {"leaves": 1, "parameters": 16, "bytes": 16, "bytes_per_device": 2},
        P(None, "fsdp"): {"leaves": 3, "parameters": 48, "bytes": 192, "bytes_per_device": 48},
        P("fsdp"): {"leaves": 1, "parameters": 8, "bytes": 32, "bytes_per_device": 8},
    }


def test_specs_in_every_form_give_the_same(mesh: Mesh, tree: dict[str, Any]) -> None:
    expected = analyze_sharding_strategy(tree, specs_of(tree), mesh)
    live = ts.shard(tree, specs_of(tree), mesh)
    rules = [(f"^{name}", spec) for name, spec in SPECS.items()]
    plan = ts.plan(tree, rules, mesh, min_size=0)
    forms = {
        "a plan": (tree, plan),
        "shardings": (tree, ts.extract_shardings(live)),
        "as it is sharded": (live, None),
        "shapes": (plan.structs, None),
    }
    for name, (what, specs) in forms.items():
        assert analyze_sharding_strategy(what, specs) == expected, name
    with jax.set_mesh(mesh):
        assert analyze_sharding_strategy(tree, specs_of(tree)) == expected


def test_uneven_dims_are_split_as_the_compiler_does(mesh: Mesh) -> None:
    tree = {"a": np.ones((9, 2), np.float32), "b": np.ones(8, np.float32)}
    analysis = analyze_sharding_strategy(tree, P("fsdp"), ts.make_mesh("fsdp=8"))
    # Rows of two floats: parts of 2, 2, 2, 2, 1, 0, 0, 0 rows; and one float of the other leaf.
    assert list(analysis["memory_per_device"].values()) == [20, 20, 20, 20, 12, 4, 4, 4]
    assert analysis["balance_score"] == 104 / 8 / 20
    # Over two axes, the parts are numbered along the last one first.
    by_two = analyze_sharding_strategy(np.ones((5, 3), np.int8), P(("fsdp", "data")), mesh)
    assert list(by_two["memory_per_device"].values()) == [3, 3, 3, 0, 3, 3, 0, 0]


def test_leaves_without_specs_count_where_they_are(mesh: Mesh) -> None:
    tree = {
        "here": jax.device_put(np.ones(4, np.float32), jax.devices()[3]),
        "host": np.ones(4, np.float32),
        "split": np.ones(8, np.float32),
    }
    analysis = analyze_sharding_strategy(
        tree, {"here": None, "host": None, "split": P("fsdp")}, mesh
    )
    assert list(analysis["memory_per_device"].values()) == [8, 8, 8, 24, 8, 8, 8, 8]
    assert analysis["balance_score"] == 80 / 8 / 24
    assert analysis["partition_stats"][None]["leaves"] == 2
    analysis = analyze_sharding_strategy(
        {"w": np.ones(8)}, P("data"), ts.make_mesh("data=1,fsdp=8")
    )
    assert (analysis["sharded_parameters"], analysis["replicated_parameters"]) == (0, 8)
    analysis = analyze_sharding_strategy({"call": jax.nn.relu}, None, mesh)
    assert (analysis["total_parameters"], analysis["balance_score"]) == (0, 1.0)
    assert analysis["memory_per_device"] == analysis["partition_stats"] == {}


def test_arrays_in_host_memory_take_no_device_memory(mesh: Mesh) -> None:
    offloaded = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    tree = {"off": np.ones(8, np.float32), "on": np.ones(8, np.float32)}
    specs = {"off": offloaded, "on": NamedSharding(mesh, P("fsdp"))}
    analysis = analyze_sharding_strategy(tree, specs)
    assert set(analysis["memory_per_device"].values()) == {8}
    assert analyze_sharding_strategy(jax.device_put(tree, specs), None) == analysis


def test_all_specs_that_do_not_fit_are_listed(mesh: Mesh) -> None:
    tree = {name: np.ones((8, 8)) for name in "abcd"}
    specs = {"a": P("fdsp"), "b": P("data", "data"), "c": P(None, None, "fsdp"), "d": P()}
    with pytest.raises(ts.UnknownAxisError) as caught:
        analyze_sharding_strategy(tree, specs, mesh)
    lines = str(caught.value).splitlines()
    assert lines[0] == "analyze_sharding_strategy: 3 leaves do not fit their specs:"
    assert lines[1] == (
        "  a: float64[8,8] as P('fdsp',) on the mesh (data=2, fsdp=4): the mesh has no axis 'fdsp'."
        " It has data=2, fsdp=4. Did you mean 'fsdp'?"
    )
    assert len(lines) == 4
    with pytest.raises(ts.SpecError, match="dim 1 is UNCONSTRAINED, which has a meaning only"):
        analyze_sharding_strategy(tree, P(None, P.UNCONSTRAINED), mesh)
    with pytest.raises(ts.NoMeshError, match="^analyze_sharding_strategy: no mesh is in force"):
        analyze_sharding_strategy(tree, P())
