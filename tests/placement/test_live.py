"""The shardings of live trees are read back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.deprecations import tolerated
from treeshard import extract_shardings, get_partition_spec, shard
from treeshard.compat import extract_sharding_structure, get_shardings_with_structure

with tolerated("haliax"):
    import haliax as hax


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


class Described:
    """What describes an array, as classes of other libraries do."""

    def __init__(self, sharding: Any, **fields: Any) -> None:
        self.sharding = sharding
        vars(self).update(fields)


def test_a_spec_on_a_leaf_goes_on_the_mesh(mesh: Mesh) -> None:
    full = {"shape": (8, 4), "dtype": np.dtype("float32")}
    tree = {
        "spec": Described(P("data"), **full),
        "bare": Described(P(None, "fsdp")),
        "placed": Described(NamedSharding(mesh, P("fsdp")), **full),
        "none": Described(None, **full),
        "other": Described("data"),
        "array": shard(np.ones(8), P("data"), mesh),
    }
    specs = {"spec": P("data"), "bare": P(None, "fsdp"), "placed": P("fsdp"), "array": P("data")}
    other = ts.make_mesh("fsdp=2,data=4")

    def expected(mesh: Any, **own: Any) -> dict[str, Any]:
        shardings = {name: NamedSharding(own.get(name, mesh), x) for name, x in specs.items()}
        return {"none": None, "other": None, **shardings}

    assert extract_shardings(tree, mesh) == expected(mesh)
    assert extract_shardings(tree, "data=2,fsdp=4") == expected(mesh)
    assert extract_shardings(tree, other) == expected(other)
    with jax.set_mesh(other):
        assert extract_shardings(tree) == expected(other, placed=mesh, array=mesh)
    with pytest.raises(ts.NoMeshError, match="^extract_shardings: no mesh is in force. Pass one"):
        extract_shardings(tree)
    with pytest.raises(ts.UnknownAxisError) as told:
        extract_shardings(tree, ts.make_mesh("data=8"))
    assert "\n  bare: " in str(told.value)
    with pytest.raises(ts.SpecError, match=r"spec: float32\[8,4\] as .* has 3 entries"):
        extract_shardings({"spec": Described(P(None, None, "data"), **full)}, mesh)
    del tree["none"], tree["other"]
    assert get_partition_spec(tree) == specs


def test_named_arrays_are_leaves(mesh: Mesh) -> None:
    n, m = hax.make_axes(n=8, m=4)
    tree = {
        "w": hax.NamedArray(shard(np.ones((8, 4)), P("data"), mesh), (n, m)),
        "layers": [hax.NamedArray(jnp.ones(8), (n,))],
        "gone": hax.NamedArray(None, ()),  # as `eqx.filter` leaves it
        "x": shard(np.ones(8), P("fsdp"), mesh),
    }
    specs = get_partition_spec(tree)
    assert specs["w"] == P("data")
    assert (specs["layers"], specs["x"]) == ([P()], P("fsdp"))
    shardings = extract_shardings(tree)
    assert shardings["w"] == NamedSharding(mesh, P("data"))
    assert shardings["layers"] == [None]
    assert extract_shardings(tree, mesh)["w"] == shardings["w"]
    for given in (specs, shardings):
        placed = shard(tree, given, mesh)
        assert jax.tree.structure(placed) == jax.tree.structure(tree)
        assert placed["w"].array.sharding.spec == P("data")
    with pytest.raises(ts.SpecError, match="w: str is neither an array nor a number"):
        get_partition_spec({"w": hax.NamedArray("text", ()), "x": tree["x"]})


@jax.tree_util.register_pytree_node_class
class Packed:
    """Flattens what it is made of, also when it is rebuilt."""

    def __init__(self, *children: Any) -> None:
        self.leaves, self.structure = jax.tree.flatten(children)

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Any, leaves: Any) -> "Packed":
        return cls(*jax.tree.unflatten(structure, leaves))


def test_a_class_that_flattens_what_it_is_rebuilt_from(mesh: Mesh) -> None:
    tree = {"p": Packed(shard(np.ones(8), P("data"), mesh), 3, "text", np.ones(2))}
    shardings = extract_shardings(tree, mesh)["p"].leaves
    assert shardings == [NamedSharding(mesh, P("data"))]
    with pytest.raises(ts.UnknownAxisError, match="p/0: "):
        extract_shardings(tree, ts.make_mesh("fsdp=8"))


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
            with pytest.raises(ts.SpecError, match="the tree: it is a tracer, and on Auto axes"):
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
