"""`shard`, `reshard` and functions per leaf: placement, round trips, costs and errors."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from helpers import arange, assert_same
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from rebuilt_classes import Checked, Rebuilt

import treeshard as ts
from treeshard import shard
from treeshard.errors import LeafError


def pieces(x: jax.Array) -> list[tuple[int, ...]]:
    return [piece.data.shape for piece in x.addressable_shards]


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Memory as XLA likes it, which JAX takes over instead of copying."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)


# ------------------------------------------------------------------ placement


@pytest.mark.parametrize(
    ("spec", "piece"),
    [
        pytest.param(P(), (16, 8), id="whole"),
        pytest.param(P("fsdp", "data"), (4, 4), id="both dims"),
        pytest.param(P(("fsdp", "data")), (2, 8), id="two axes on a dim"),
        pytest.param(P("fsdp", None, None, None), (4, 8), id="Nones beyond the rank"),
    ],
)
@pytest.mark.parametrize("move", [ts.shard, ts.reshard])
def test_each_device_gets_its_shard(mesh: Mesh, spec: P, piece: tuple, move: Any) -> None:
    x = arange(16, 8)
    sources = {
        "numpy": x,
        "one device": jax.device_put(x, jax.devices()[3]),
        "many devices": ts.shard(x, P("data", "fsdp"), mesh),
    }
    for name, placed in move(sources, spec, mesh).items():
        assert set(pieces(placed)) == {piece}, name
        assert placed.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[:2])), 2)
        assert placed.sharding.mesh == mesh
        np.testing.assert_array_equal(ts.gather(placed), x)


def test_where_the_mesh_comes_from(mesh: Mesh, fsdp_mesh: Mesh) -> None:
    x, own = arange(16, 8), NamedSharding(mesh, P("fsdp"))
    plan = ts.plan(x, [(".*", P("fsdp"))], mesh, min_size=0)
    assert ts.shard(x, plan).sharding == own
    with jax.set_mesh(mesh):
        assert ts.shard(x, P("fsdp")).sharding == own
    with jax.set_mesh(fsdp_mesh):  # the argument wins, then the sharding
        assert ts.shard(x, own).sharding == own
        assert ts.shard(x, NamedSharding(fsdp_mesh, P("fsdp")), mesh).sharding == own


# ------------------------------------------------------------------ the round trip


@pytest.mark.parametrize("skew", [0, 4, 16])
@pytest.mark.parametrize("flip", [False, True], ids=["rows", "columns"])
def test_a_source_changed_after_shard_changes_nothing(mesh: Mesh, skew: int, flip: bool) -> None:
    for spec in (P(), P("fsdp"), P(None, "fsdp"), P("data", "fsdp")):
        source = aligned((24 * 16,))[skew // 4 :][: 16 * 16].reshape(16, 16)
        source[:] = arange(16, 16)
        source = source.T if flip else source
        before = source.copy()
        placed = ts.shard({"x": source}, spec, mesh)
        source[:] = -1
        np.testing.assert_array_equal(ts.gather(placed)["x"], before)


def test_deleting_the_source_does_not_change_the_result(mesh: Mesh) -> None:
    source = jax.device_put(arange(16, 16), jax.devices()[0])
    placed = ts.shard(source, P("fsdp"), mesh)
    source.delete()
    np.testing.assert_array_equal(ts.gather(placed), arange(16, 16))


@pytest.mark.parametrize("spec", [P("fsdp"), P()], ids=str)
def test_the_result_can_be_donated(mesh: Mesh, spec: P) -> None:
    source = aligned((16, 16))
    placed = ts.shard(source, spec, mesh)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for _ in range(3):
        placed = step(placed)
    np.testing.assert_array_equal(ts.gather(placed), np.full((16, 16), 3, np.float32))
    np.testing.assert_array_equal(source, np.zeros((16, 16), np.float32))


# ------------------------------------------------------------------ what it costs


def test_a_hundred_shapes_from_host_or_one_device_compile_nothing(
    mesh: Mesh, compiles: list[str]
) -> None:
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
    host = [arange(8, n + 1) for n in range(100)]
    compiles.clear()
    placed = ts.shard([*host, keys], P("fsdp"), mesh)
    ts.shard(jax.device_put(host, jax.devices()[0]), P("fsdp"), mesh)
    assert compiles == []
    assert_same(ts.gather(placed[-1]), keys)


@pytest.mark.parametrize("source", ["one device", "many devices"])
def test_resharding_a_tree_compiles_once(mesh: Mesh, source: str, compiles: list[str]) -> None:
    host = [arange(8, 4 * n) for n in range(1, 6)]
    if source == "one device":
        placed = jax.device_put(host, jax.devices()[1])
    else:
        placed = ts.shard(host, P("data"), mesh)
    assert compiles == []
    for _ in range(2):
        moved = ts.reshard(placed, P("data", "fsdp"), mesh)
        assert len(compiles) == 1
    for x, y in zip(host, moved, strict=True):
        assert pieces(y)[0] == (4, x.shape[1] // 4)
        np.testing.assert_array_equal(ts.gather(y), x)


@pytest.mark.parametrize("dtype", ["U1", "O", "M8[s]"])
def test_numpy_arrays_of_other_dtypes_are_returned_unchanged(mesh: Mesh, dtype: str) -> None:
    names = np.zeros(2, dtype)
    for tree in (names, [names]):
        for move in (ts.shard, ts.reshard, ts.from_process_local, ts.with_sharding_constraint):
            assert jax.tree.leaves(move(tree, P(), mesh))[0] is names
    shard_fn, gather_fn = ts.make_shard_and_gather_fns(P(), mesh)
    assert gather_fn(shard_fn(names)) is names


# ------------------------------------------------------------------ device to device


def test_leaves_already_in_place_are_returned_unchanged(mesh: Mesh, fsdp_mesh: Mesh) -> None:
    placed = ts.shard(arange(16, 8), P("fsdp"), mesh)
    for move in (ts.shard, ts.reshard):
        assert move(placed, P("fsdp"), mesh) is placed
        assert move(placed, P(("fsdp",), None), mesh) is placed
    whole = ts.shard(arange(16, 8), P(), mesh)
    renamed = ts.shard(whole, P(), fsdp_mesh)
    assert renamed.sharding.mesh == fsdp_mesh
    first = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in (whole, renamed)]
    assert first[0] == first[1]  # relabelled, not copied


@pytest.mark.parametrize("dtype", ["int2", "uint2", "float4_e2m1fn"])
@pytest.mark.parametrize("move", [ts.reshard, ts.shard, ts.with_sharding_constraint])
def test_dtypes_smaller_than_a_byte_move_as_they_are(mesh: Mesh, dtype: str, move: Any) -> None:
    full = (np.arange(64).reshape(8, 8) % 2).astype(dtype)
    placed = ts.shard(full, P("fsdp"), mesh)
    for spec in (P(None, "data"), P("data", "fsdp"), P()):
        placed = move(placed, spec, mesh)
        assert placed.sharding.spec == spec
        np.testing.assert_array_equal(ts.gather(placed), full)


def test_leaves_may_go_to_meshes_of_different_devices(mesh: Mesh) -> None:
    halves = [ts.make_mesh("fsdp=4", devices=jax.devices()[i : i + 4]) for i in (0, 4)]
    specs = [NamedSharding(half, P("fsdp")) for half in halves]
    tree = [jax.device_put(arange(8), jax.devices()[7]) for _ in specs]
    moved = ts.reshard(tree, specs)
    assert [x.sharding for x in moved] == specs
    for x in ts.gather(moved):
        np.testing.assert_array_equal(x, arange(8))


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_reshard_to_a_single_device(mesh: Mesh, kind: str) -> None:
    one = SingleDeviceSharding(jax.devices()[3], memory_kind=kind)
    placed = ts.shard({"w": arange(8, 4), "b": arange(8)}, P("fsdp"), mesh)
    moved = ts.reshard(placed, {"w": one, "b": None})
    assert moved["w"].sharding.is_equivalent_to(one, 2)
    assert moved["w"].sharding.memory_kind == kind
    assert moved["b"] is placed["b"]
    assert_same(ts.gather(moved), ts.gather(placed))
    back = ts.reshard(moved, {"w": NamedSharding(mesh, P("fsdp")), "b": one})
    assert back["w"].sharding == placed["w"].sharding
    assert [*back["b"].devices()] == [jax.devices()[3]]
    with pytest.raises(ts.SpecError, match=r"^reshard: a SingleDeviceSharding has its own device,"):
        ts.reshard(placed, {"w": one, "b": P()}, mesh)


# ------------------------------------------------------------------ errors


def deleted() -> jax.Array:
    x = jax.device_put(arange(8))
    x.delete()
    return x


# A leaf, its spec, the error and a part of its message.
BAD: dict[str, tuple[Any, P, type[Exception], str]] = {
    "unknown axis": (
        arange(8, 4),
        P("fdsp"),
        ts.UnknownAxisError,
        "w/0: float32[8,4] as P('fdsp',) on the mesh (data=2, fsdp=4): the mesh has no axis 'fdsp'."
        " It has data=2, fsdp=4. Did you mean 'fsdp'?",
    ),
    "unconstrained": (
        arange(8),
        P(P.UNCONSTRAINED),
        ts.SpecError,
        "dim 0 is UNCONSTRAINED, which has a meaning only inside jit. Write an axis, or None",
    ),
    "deleted": (
        deleted(),
        P(),
        ts.DeletedLeafError,
        "w/0: float32[8]: the array was deleted, or donated to a compiled function. A"
        " step that donates its state also deletes the arrays that `shard` reused without a copy."
        " Use the result of that function, or do not donate the array.",
    ),
    "struct": (
        jax.ShapeDtypeStruct((8,), "bfloat16"),
        P(),
        LeafError,
        "w/0: bfloat16[8]: a ShapeDtypeStruct describes an array and has no values. Make the"
        " array first.",
    ),
    "record": (np.zeros(8, "i4,f4"), P(), LeafError, "JAX does not support this dtype. Convert it"),
    "masked": (np.ma.ones(8), P(), LeafError, "JAX does not support masked arrays."),
}


@pytest.mark.parametrize(("leaf", "spec", "error", "fact"), BAD.values(), ids=BAD)
def test_a_bad_leaf(mesh: Mesh, leaf: Any, spec: P, error: type[Exception], fact: str) -> None:
    with pytest.raises(error, match=re.escape(fact)):
        ts.shard({"w": [leaf], "fine": arange(8)}, {"w": [spec], "fine": P("fsdp")}, mesh)


@pytest.mark.parametrize("move", [ts.shard, ts.reshard])
def test_one_error_names_all_bad_leaves_and_no_leaf_moves(
    mesh: Mesh, move: Any, monkeypatch: Any
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was moved")

    tree = {"a": arange(6), "b": arange(8), "c": deleted(), "d": arange(8)}
    specs = {"a": P("fsdp"), "b": P("model"), "c": P(), "d": P()}
    monkeypatch.setattr(jax, "make_array_from_callback", refuse)
    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(ts.UnknownAxisError) as caught:
        move(tree, specs, mesh)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{move.__name__}: 3 leaves cannot be moved:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  a", "  b", "  c"]


def test_the_error_for_a_tracer_names_with_sharding_constraint(mesh: Mesh) -> None:
    def step(x: jax.Array) -> jax.Array:
        return ts.shard({"w": x}, P("fsdp"), mesh)["w"]

    fact = "w: float32[8]: a tracer has no values. Inside `jit`, call"
    with pytest.raises(LeafError, match=re.escape(fact)):
        jax.jit(step)(arange(8))


def test_a_mesh_without_devices_is_an_error() -> None:
    with pytest.raises(ts.NoMeshError, match=re.escape("shard: no mesh is in force. Pass one")):
        ts.shard(arange(8), P("fsdp"))
    abstract = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    for mesh, spec in [(abstract, P("fsdp")), (None, NamedSharding(abstract, P("fsdp")))]:
        with pytest.raises(ts.NoMeshError) as caught:
            ts.shard(arange(8), spec, mesh)
        assert str(caught.value) == (
            "shard: the mesh (fsdp=8) is an AbstractMesh: it has sizes, but no devices to hold"
            " arrays. Pass a mesh with devices, as `treeshard.make_mesh` returns; `plan.on(mesh)`"
            " makes a plan again for it."
        )


# ------------------------------------------------------------------ leaf by leaf


def apply(fns: Any, tree: Any) -> Any:
    return jax.tree.map(lambda f, x: f(x), fns, tree)


@pytest.mark.parametrize("by_plan", [False, True], ids=["specs", "plan"])
def test_functions_do_what_shard_and_gather_do(
    mesh: Mesh, by_plan: bool, compiles: list[str]
) -> None:
    tree = {"w": arange(16, 8), "layers": [{"b": arange(8)}], "kept": arange(4), "gone": None}
    # A prefix: one function moves all layers.
    specs: Any = {"w": NamedSharding(mesh, P("data")), "layers": P("fsdp")}
    specs |= {"kept": None, "gone": None}
    if by_plan:
        rules = [("w", P("data")), ("b", P("fsdp")), (".*", None)]
        specs = ts.plan(tree, rules, mesh, min_size=0)
    with jax.set_mesh(mesh):  # plain specs need it, only when the functions are made
        shard_fns, gather_fns = ts.make_shard_and_gather_fns(specs)
    placed = apply(shard_fns, tree)
    assert pieces(placed["w"])[0] == (8, 8)
    assert pieces(placed["layers"][0]["b"])[0] == (2,)
    assert_same(apply(gather_fns, placed), tree, kinds=True)
    assert compiles == []


def test_functions_name_the_path_of_their_leaf(mesh: Mesh) -> None:
    specs = {"layers": [{"b": P("fsdp")}], "block": P("data")}
    shard_fns, gather_fns = ts.make_shard_and_gather_fns(specs, mesh)
    with pytest.raises(ts.SpecError, match=re.escape("layers/0/b: float32[6] as P('fsdp',)")):
        shard_fns["layers"][0]["b"](arange(6))
    with pytest.raises(ts.SpecError, match="block/x: float32"):
        shard_fns["block"]({"x": arange(3)})
    with pytest.raises(
        ts.DeletedLeafError, match=re.escape("layers/0/b: float32[8]: the array was")
    ):
        gather_fns["layers"][0]["b"](deleted())
    with pytest.raises(ts.SpecError, match=re.escape("w: 3 (int) is not a spec.")):
        ts.make_shard_and_gather_fns({"w": 3}, mesh)
    with pytest.raises(ts.NoMeshError, match="make_shard_and_gather_fns: the mesh"):
        ts.make_shard_and_gather_fns({"w": P()}, mesh.abstract_mesh)


def test_local_parts_that_are_structs_are_checked(mesh: Mesh) -> None:
    struct = jax.ShapeDtypeStruct((3,), "int32")
    with pytest.raises(ts.SpecError, match="3 is not divisible by 8"):
        ts.from_process_local(struct, P(("data", "fsdp")), mesh)
    with pytest.raises(LeafError, match="has no values"):
        ts.from_process_local({"x": arange(8), "y": struct}, P("data"), mesh)


# ------------------------------------------------------------------ logical names

NAMED = {"x": np.ones((8, 8), "float32"), "y": np.ones(8, "float32")}
NAMES = {"x": ("batch", "embed"), "y": P("fsdp")}
NAME_RULES = [("batch", ("data", "absent")), ("embed", "fsdp")]


def test_logical_names_are_resolved_where_specs_are_given(mesh: Mesh) -> None:
    specs = {"x": P("data", "fsdp"), "y": P("fsdp")}
    with ts.logical_axis_rules(NAME_RULES):
        placed = [move(NAMED, NAMES, mesh) for move in (ts.shard, ts.reshard)]
        assert ts.shard(NAMED["x"], NAMES["x"], mesh).sharding.spec == specs["x"]
        shard_fns, _ = ts.make_shard_and_gather_fns(NAMES, mesh)
    for tree in (*placed, apply(shard_fns, NAMED)):  # outside the rules
        assert ts.get_partition_spec(tree) == specs
    with pytest.raises(ts.SpecError, match="x: .'batch', 'embed'. is a tuple of logical names"):
        ts.shard(NAMED, NAMES, mesh)


def test_logical_names_of_a_batch(mesh: Mesh) -> None:
    plan = ts.plan(NAMED, [(".*", P("fsdp"))], mesh, min_size=0)
    with ts.logical_axis_rules([("batch", ("data", "fsdp"))]):
        step = ts.jit_step(lambda s, x: (s, x * 2), plan, batch=("batch", None))
    _, doubled = step(ts.shard(NAMED, plan), np.ones((8, 2), "float32"))  # outside the rules
    assert doubled.sharding.spec == P(("data", "fsdp"))
    with pytest.raises(ts.SpecError, match="no rules are in force"):
        ts.jit_step(lambda s, x: (s, x), plan, batch=("batch",))


@pytest.mark.parametrize("kind", [Checked, Rebuilt])
def test_no_class_is_rebuilt_from_the_specs_of_its_plan(kind, mesh) -> None:
    tree = {"x": kind(np.ones((8, 2), np.float32), np.ones(8, np.float32)), "act": jax.nn.relu}
    plan = ts.plan(tree, [(".*", P("data"))], mesh, min_size=0)
    placed = shard(tree, plan)
    assert not ts.diff_shardings(placed, plan)
    assert_same(ts.gather(placed["x"]), tree["x"])
    x = jax.jit(lambda x: ts.with_sharding_constraint(x, plan["x"]))(tree["x"])
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(x)} == {P("data")}
