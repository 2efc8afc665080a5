"""The shardings of live trees are read back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import extract_shardings, get_partition_spec, shard
from treeshard.compat import extract_sharding_structure, get_shardings_with_structure


@pytest.fixture
def tree(mesh: Mesh) -> dict[str, Any]:
    return {
        "w": shard(np.ones((8, 4)), P("data", "fsdp"), mesh),
        "layers": [{"b": shard(np.ones(8), P(("data", "fsdp")), mesh)}],
        "single": jax.device_put(np.ones(3, np.float32), jax.devices()[1]),
        "numpy": np.ones(3),
        "step": 3,
    }


OTHERS: dict[str, Any] = {"call": jax.nn.relu, "name": "mlp", "gone": None}


def test_shardings_come_in_the_same_containers(mesh: Mesh, tree: dict[str, Any]) -> None:
    expected = {
        "w": NamedSharding(mesh, P("data", "fsdp")),
        "layers": [{"b": NamedSharding(mesh, P(("data", "fsdp")))}],
        **dict.fromkeys(["single", "numpy", "step", "call", "name", "gone"]),
    }
    assert extract_shardings(tree | OTHERS) == expected
    assert extract_sharding_structure(tree | OTHERS) == expected
    assert get_shardings_with_structure(tree | OTHERS) == expected


def test_the_same_specs_on_another_mesh(tree: dict[str, Any]) -> None:
    other = ts.make_mesh("fsdp=4,data=2")
    shardings = extract_shardings(tree, other)
    assert shardings["w"] == NamedSharding(other, P("data", "fsdp"))
    assert shardings["single"] is None
    abstract = extract_shardings(tree, other.abstract_mesh)["layers"][0]["b"]
    assert (abstract.mesh, abstract.spec) == (other.abstract_mesh, P(("data", "fsdp")))
    in_host_memory = jax.ShapeDtypeStruct(
        (8,), "int8", sharding=NamedSharding(other, P(), memory_kind="pinned_host")
    )
    assert extract_shardings(in_host_memory, other).memory_kind == "pinned_host"


def test_specs_that_do_not_fit_another_mesh(tree: dict[str, Any]) -> None:
    with pytest.raises(ts.UnknownAxisError) as caught:
        extract_shardings(tree, ts.make_mesh("fsdp=8"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "extract_shardings: 2 leaves do not fit their specs:"
    assert lines[1] == (
        "  layers/0/b: float32[8] as P(('data', 'fsdp'),) on the mesh (fsdp=8): the mesh has no"
        " axis 'data'. It has fsdp=8."
    )
    assert lines[2].startswith("  w: float32[8,4] as P('data', 'fsdp') on the mesh (fsdp=8): the")


def test_structs_have_the_sharding_they_were_made_with(mesh: Mesh) -> None:
    sharding = NamedSharding(mesh, P("data"))
    tree = [
        jax.ShapeDtypeStruct((8,), "float32", sharding=sharding),
        jax.ShapeDtypeStruct((8,), "float32"),
    ]
    assert extract_shardings(tree) == [sharding, None]
    assert get_partition_spec(tree[0]) == P("data")
    with pytest.raises(ts.SpecError, match="1: it is a ShapeDtypeStruct without"):
        get_partition_spec(tree)


def test_tracers_have_a_sharding_on_explicit_axes_only(mesh: Mesh) -> None:
    explicit = ts.make_mesh("data=2,fsdp=4", axis_types="explicit")
    seen: dict[str, Any] = {}

    def look(name: str, x: jax.Array) -> jax.Array:
        seen[name] = extract_shardings({"x": x})["x"]
        if name == "explicit":
            assert get_partition_spec(x) == P("data", None)
        else:
            with pytest.raises(ts.SpecError, match="the tree: it is traced, and on Auto axes"):
                get_partition_spec(x)
        return x

    for name, on in {"explicit": explicit, "auto": mesh}.items():
        x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(on, P("data")))
        with jax.set_mesh(on):
            jax.eval_shape(lambda x, name=name: look(name, x), x)
    jax.eval_shape(lambda x: look("no mesh", x), jnp.ones((8, 4)))
    assert seen["auto"] is seen["no mesh"] is None
    assert seen["explicit"].spec == P("data", None)


def test_a_spec_per_leaf(mesh: Mesh, tree: dict[str, Any]) -> None:
    deleted = shard(np.ones(8), P("fsdp"), mesh)
    deleted.delete()
    others = {
        "deleted": deleted,
        "keys": shard(jax.random.wrap_key_data(np.zeros((8, 2), "uint32")), P("fsdp"), mesh),
        "flag": True,
        "phase": 1j,
        "half": np.float32(2),
        "gone": None,
    }
    assert get_partition_spec(tree | others) == {
        "w": P("data", "fsdp"),
        "layers": [{"b": P(("data", "fsdp"))}],
        "deleted": P("fsdp"),
        "keys": P("fsdp"),
        **dict.fromkeys(["single", "numpy", "step", "flag", "phase", "half"], P()),
        "gone": None,
    }


def test_all_leaves_without_a_spec_are_listed() -> None:
    with pytest.raises(ts.SpecError) as caught:
        get_partition_spec({"call": jax.nn.relu, "name": "mlp", "w": np.ones(2)})
    assert str(caught.value).splitlines() == [
        "2 leaves have no PartitionSpec:",
        f"  call: {type(jax.nn.relu).__name__} is neither an array nor a number. Remove it from"
        " the tree first.",
        "  name: str is neither an array nor a number. Remove it from the tree first.",
    ]
