"""`with_sharding_constraint` and `unshard`: contexts, axis types, leaves, messages, laws."""

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, legacy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.jax_private import is_in_jit, mesh_of_with_statement, vmapped_axes
from treeshard._core.mesh import context_mesh
from treeshard._core.spec_trees import SpecCarrier

BOTH = P("data", "fsdp")
SOAK = "TREESHARD_SOAK" in os.environ
SQUARE = np.arange(64, dtype=np.float32).reshape(8, 8)


# ------------------------------------------------------------------ the matrix

AXIS_TYPES = {
    "auto": "auto",
    "explicit": "explicit",
    "mixed": {"data": "explicit", "fsdp": "auto"},
}


@cache
def mesh_of(kind: str) -> Mesh:
    return ts.make_mesh("data=2,fsdp=4", axis_types=AXIS_TYPES[kind])


def by_argument(mesh: Mesh, y: Any, spec: P) -> Any:
    return ts.with_sharding_constraint(y, spec, mesh)


def by_sharding(mesh: Mesh, y: Any, spec: P) -> Any:
    return ts.with_sharding_constraint(y, NamedSharding(mesh, spec))


def by_context(mesh: Mesh, y: Any, spec: P) -> Any:
    return ts.with_sharding_constraint(y, spec)


# Sources of the mesh: the context to enter, and how to call the constraint in it.
CONTEXTS = {
    "mesh-argument": (lambda mesh: contextlib.nullcontext(), by_argument),
    "NamedSharding": (lambda mesh: contextlib.nullcontext(), by_sharding),
    "with-mesh": (legacy, by_context),
    "set_mesh": (jax.set_mesh, by_context),
    "set_mesh-and-argument": (jax.set_mesh, by_argument),
    "use_abstract_mesh": (lambda mesh: use_abstract_mesh(mesh.abstract_mesh), by_context),
}


class Case(NamedTuple):
    """Code that calls `c(value, spec)` somewhere inside.

    `specs` are the specs of the result on Auto, Explicit and mixed axes; one stands for all
    three. `start` is the spec of the input.
    """

    run: Callable[[Any, Any, Mesh], Any]  # c, x, mesh
    specs: tuple[P, ...]
    start: P = P()


def loss(c: Any, y: Any) -> Any:
    return (c(y * 2, BOTH) ** 2).sum()


def mapped(c: Any, x: Any, axis: str | None) -> Any:
    return jax.jit(jax.vmap(lambda row: c(row * 2, P(("data", "fsdp"))), spmd_axis_name=axis))(x)


def by_hand(c: Any, x: Any, mesh: Mesh, axes: set[str], check: bool) -> Any:
    return jax.jit(
        jax.shard_map(
            lambda part: c(part * 2, BOTH),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names=axes,
            check_vma=check,
        )
    )(x)


EVERY = {"data", "fsdp"}
CASES = {
    "jit": Case(lambda c, x, _: jax.jit(lambda y: c(y * 2, BOTH))(x), (BOTH,)),
    "filter_jit": Case(lambda c, x, _: eqx.filter_jit(lambda y: c(y * 2, BOTH))(x), (BOTH,)),
    # An Explicit gradient has the type of what it is the gradient of.
    "jit-of-grad": Case(
        lambda c, x, _: jax.jit(jax.grad(partial(loss, c)))(x), (BOTH, P(), P(None, "fsdp"))
    ),
    "checkpoint": Case(
        lambda c, x, _: jax.jit(jax.grad(jax.checkpoint(partial(loss, c))))(x),
        (BOTH, P(), P(None, "fsdp")),
    ),
    "cond": Case(
        lambda c, x, _: jax.jit(
            lambda y: jax.lax.cond(y[0, 0] > 1, lambda: c(y, BOTH), lambda: c(y * 2, BOTH))
        )(x),
        (BOTH,),
    ),
    "scan": Case(
        lambda c, x, _: jax.jit(
            lambda y: jax.lax.scan(lambda z, w: (z, c(z * w, BOTH)), y, jnp.arange(2.0))[1]
        )(x),
        (P(None, "data", "fsdp"),),
    ),
    "vmap": Case(lambda c, x, _: mapped(c, x, None), (P(None, ("data", "fsdp")),)),
    "vmap-spmd": Case(
        # JAX ignores the name where the mapped dim is Explicit and not sharded on it.
        lambda c, x, _: mapped(c, x, "data"),
        (P("data", "fsdp"), P(None, "fsdp"), P("data", "fsdp")),
    ),
    "vmap-of-sharded": Case(
        lambda c, x, _: mapped(c, x, None),
        (P(None, ("data", "fsdp")), BOTH, BOTH),
        start=P("data"),
    ),
    "shard_map": Case(
        lambda c, x, mesh: by_hand(c, x, mesh, EVERY, True), (P("data"),), start=P("data")
    ),
    "shard_map-unchecked": Case(
        lambda c, x, mesh: by_hand(c, x, mesh, EVERY, False), (P("data"),), start=P("data")
    ),
    "shard_map-partial": Case(
        lambda c, x, mesh: by_hand(c, x, mesh, {"data"}, True), (BOTH,), start=P("data")
    ),
    "shard_map-partial-unchecked": Case(
        lambda c, x, mesh: by_hand(c, x, mesh, {"data"}, False), (BOTH,), start=P("data")
    ),
}


def same_spec(x: jax.Array, spec: P, mesh: Mesh) -> bool:
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


@cache
def reference(case: str) -> np.ndarray:
    """The case without any constraint, on one device where it needs no mesh."""
    mesh = ts.make_mesh("data=2,fsdp=4")
    return np.asarray(CASES[case].run(lambda y, _: y, jnp.asarray(SQUARE), mesh))


# All code in one context; in the others what differs in how the mesh is found.
PLACES = [
    (case, context)
    for case in CASES
    for context in CONTEXTS
    if context == "set_mesh" or case in ("jit", "vmap-spmd", "shard_map-partial")
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("kind", AXIS_TYPES)
@pytest.mark.parametrize(("case", "context"), PLACES)
def test_in_a_trace(case: str, context: str, kind: str):
    mesh, (enter, constrain) = mesh_of(kind), CONTEXTS[context]
    run, specs, start = CASES[case]
    x = jax.device_put(SQUARE, NamedSharding(mesh, start))
    want = reference(case)
    with enter(mesh):
        got = run(partial(constrain, mesh), x, mesh)
    spec = specs[list(AXIS_TYPES).index(kind)] if len(specs) > 1 else specs[0]
    assert same_spec(got, spec, mesh), got.sharding
    np.testing.assert_array_equal(np.asarray(got), want)


# Executed at once, operation by operation, as in a notebook.
UNJITTED = {
    "eager": Case(lambda c, x, _: c(x, BOTH), (BOTH,)),
    "grad": Case(lambda c, x, _: jax.grad(partial(loss, c))(x), (BOTH, P(), P(None, "fsdp"))),
    "vmap": Case(
        lambda c, x, _: jax.vmap(lambda row: c(row * 2, P("fsdp")))(x), (P(None, "fsdp"),)
    ),
    "vmap-spmd": Case(
        lambda c, x, _: jax.vmap(lambda row: c(row * 2, P("data")), spmd_axis_name="fsdp")(x),
        (P("fsdp", "data"), P(None, "data"), P("fsdp", "data")),
    ),
    "scan": Case(
        lambda c, x, _: jax.lax.scan(lambda z, w: (z, c(z * w, BOTH)), x, jnp.arange(2.0))[1],
        (P(None, "data", "fsdp"),),
    ),
}
# Elsewhere JAX itself cannot run a gradient of values on Explicit axes.
UNJITTED_PLACES = [
    *(("eager", context, "auto") for context in CONTEXTS),
    *((case, "mesh-argument", "auto") for case in UNJITTED if case != "eager"),
    *((case, "set_mesh", kind) for case in UNJITTED for kind in AXIS_TYPES if case != "eager"),
    *(
        ("eager", context, kind)
        for context in ("set_mesh", "set_mesh-and-argument")
        for kind in ("explicit", "mixed")
    ),
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("case", "context", "kind"), UNJITTED_PLACES)
def test_executed_at_once(case: str, context: str, kind: str):
    mesh, (enter, constrain) = mesh_of(kind), CONTEXTS[context]
    run, specs, start = UNJITTED[case]
    x = jax.device_put(SQUARE, NamedSharding(mesh, start))
    want = np.asarray(run(lambda y, _: y, jnp.asarray(SQUARE), mesh))
    with enter(mesh):
        got = run(partial(constrain, mesh), x, mesh)
    np.testing.assert_array_equal(np.asarray(got), want)
    if case == "eager" and context == "use_abstract_mesh":
        assert got is x  # no devices to place it on
    else:
        spec = specs[list(AXIS_TYPES).index(kind)] if len(specs) > 1 else specs[0]
        assert same_spec(got, spec, mesh), got.sharding


# A constraint under `vmap(spmd_axis_name="data")`, on a mesh of Explicit and Auto axes.
MIXED = {
    "one-of-each": ("data=2,fsdp=4", {"data": "explicit", "fsdp": "auto"}),
    "two-explicit": (
        "data=2,tensor=2,fsdp=2",
        {"data": "explicit", "tensor": "explicit", "fsdp": "auto"},
    ),
}


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("execute", [jax.jit, lambda f: f], ids=["jit", "at-once"])
@pytest.mark.parametrize(
    ("axes", "context", "start"),
    [
        *(("one-of-each", "set_mesh", start) for start in (P(), P("data"))),
        *(("two-explicit", context, P("data")) for context in CONTEXTS),
    ],
    ids=str,
)
def test_under_vmap_on_a_mixed_mesh_as_in_plain_jax(
    axes: str, context: str, start: P, execute: Any
):
    mesh = ts.make_mesh(MIXED[axes][0], axis_types=MIXED[axes][1])
    enter, constrain = CONTEXTS[context]
    tensor = "tensor" if "tensor" in mesh.axis_names else None

    def plain(row: Any) -> Any:
        row = row * 2
        if tensor:
            row = jax.sharding.reshard(row, NamedSharding(mesh.abstract_mesh, P(tensor)))
        return jax.lax.with_sharding_constraint(row, NamedSharding(mesh, P(None, "fsdp")))

    def ours(row: Any) -> Any:
        return constrain(mesh, row * 2, P(tensor, "fsdp"))

    cube = np.arange(512, dtype=np.float32).reshape(8, 8, 8)
    x = jax.device_put(cube, NamedSharding(mesh, start))
    with enter(mesh):
        got = execute(jax.vmap(ours, spmd_axis_name="data"))(x)
        # Executed at once, plain JAX loses "tensor".
        want = jax.jit(jax.vmap(plain, spmd_axis_name="data"))(x)
    assert got.sharding == want.sharding
    if start == P("data"):  # else JAX 0.10.0 does not shard the mapped dim
        assert got.sharding == NamedSharding(mesh, P("data", tensor, "fsdp"))
    np.testing.assert_array_equal(np.asarray(got), cube * 2)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("named", ["set_mesh", "mesh-argument"])
def test_manual_explicit_and_auto_axes_at_once(named: str, check: bool):
    mesh = ts.make_mesh("m=2,e=2,a=2", axis_types={"m": "auto", "e": "explicit", "a": "auto"})
    x = jax.device_put(SQUARE, NamedSharding(mesh, P("m")))
    enter, constrain = CONTEXTS[named]
    part = jax.shard_map(
        lambda y: constrain(mesh, y * 2, P(("m", "a"), "e")),
        mesh=mesh,
        in_specs=P("m"),
        out_specs=P("m"),
        axis_names={"m"},
        check_vma=check,
    )
    with enter(mesh):
        got = jax.jit(part)(x)
        # shard_map's own out_specs drop "e" again, so the program must tell.
        assert '[{"a"}, {"e"}]' in jax.jit(part).lower(x).as_text()
    np.testing.assert_array_equal(np.asarray(got), SQUARE * 2)


def test_outside_a_trace_one_process_exchanges_nothing(mesh: Mesh, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was exchanged")

    monkeypatch.setattr("treeshard._core.meetings._client", refuse)
    assert same_spec(ts.with_sharding_constraint(SQUARE, BOTH, mesh), BOTH, mesh)


def test_an_abstract_mesh_in_a_trace_uses_the_devices_of_the_inputs(mesh: Mesh):
    def f(x: Any) -> Any:
        with use_abstract_mesh(mesh.abstract_mesh):
            return ts.with_sharding_constraint(x * 2, BOTH)

    whole = jax.device_put(SQUARE, NamedSharding(mesh, P()))
    assert same_spec(jax.jit(f)(whole), BOTH, mesh)
    alone = jax.jit(f)(jnp.asarray(SQUARE))
    assert len(alone.sharding.device_set) == 1
    # Executed at once on one device, there is nothing to be done either.
    assert len(jax.grad(lambda x: f(x).sum())(jnp.asarray(SQUARE)).sharding.device_set) == 1


# ------------------------------------------------------------------ kinds of leaves

LEAVES = {
    "numpy": SQUARE,
    "jax": jnp.asarray(SQUARE),  # on one device
    "bfloat16": jnp.asarray(SQUARE, jnp.bfloat16),
    "bool": SQUARE > 3,
    "typed keys": jax.random.split(jax.random.key(0), (8, 8)),
    "no elements": np.zeros((0, 8), np.float32),
}


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_kinds_of_arrays(kind: str):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = ts.with_sharding_constraint(LEAVES, BOTH)
        traced = jax.jit(lambda tree: ts.with_sharding_constraint(tree, BOTH))(LEAVES)
        constant = jax.jit(lambda: ts.with_sharding_constraint(LEAVES, BOTH))()
    assert placed["no elements"].sharding.spec == BOTH
    for name, x in LEAVES.items():
        for got in (placed[name], traced[name], constant[name]):
            assert (got.shape, got.dtype, bits(got)) == (x.shape, x.dtype, bits(x)), name
            assert x.size == 0 or same_spec(got, BOTH, mesh), name


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_typed_keys_inside_shard_map_and_vmap(kind: str):
    mesh = mesh_of(kind)
    keys = jax.device_put(LEAVES["typed keys"], NamedSharding(mesh, P("data")))
    by_hand = jax.shard_map(
        lambda part: ts.with_sharding_constraint(part, BOTH),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    mapped = jax.vmap(lambda k: ts.with_sharding_constraint(k, P("fsdp")))
    with jax.set_mesh(mesh):
        both = jax.jit(lambda keys: (by_hand(keys), mapped(keys)))(keys)
    for got in both:
        assert got.sharding.shard_shape(got.shape)[1] == 2
        assert bits(got) == bits(keys)


class Layer(eqx.Module):
    weight: jax.Array
    activation: Callable[[Any], Any]
    name: str
    depth: int
    bias: None = None


def layer() -> Layer:
    return Layer(jnp.asarray(SQUARE), jax.nn.relu, "mlp", 3)


def test_a_module_keeps_leaves_that_are_not_arrays(mesh: Mesh):
    got = ts.with_sharding_constraint(layer(), BOTH, mesh)
    assert same_spec(got.weight, BOTH, mesh)
    assert (got.activation, got.name, got.depth) == (jax.nn.relu, "mlp", 3)
    traced = eqx.filter_jit(lambda m: ts.with_sharding_constraint(m, BOTH, mesh))(layer())
    assert same_spec(traced.weight, BOTH, mesh)
    assert traced.activation is jax.nn.relu


def test_structs_get_the_sharding(mesh: Mesh):
    struct = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, weak_type=False)
    with pytest.warns(ts.ShardingWarning, match="6 is not divisible"):
        got = ts.with_sharding_constraint(struct, BOTH, mesh)
    assert got == struct.update(sharding=NamedSharding(mesh, P("data")))


def test_structs_on_abstract_meshes_of_any_size():
    big = AbstractMesh((4096, 16), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    got = ts.with_sharding_constraint(jax.ShapeDtypeStruct((8192, 32), "float32"), P("fsdp"), big)
    assert got.sharding == NamedSharding(big, P("fsdp"))
    with use_abstract_mesh(big):
        again = ts.with_sharding_constraint(got, P("fsdp", "tensor"))
    assert again.sharding == NamedSharding(big, P("fsdp", "tensor"))


# ------------------------------------------------------------------ unchanged leaves

STRUCT = jax.ShapeDtypeStruct((8, 8), "float32")


@pytest.mark.parametrize(
    "leaf",
    [SQUARE, jax.nn.relu, "name", 3, 2.5, True, STRUCT, np.array([None])],
    ids=lambda leaf: type(leaf).__name__,
)
def test_without_a_mesh_leaves_are_unchanged(leaf: Any):
    assert ts.with_sharding_constraint([leaf], [BOTH])[0] is leaf
    assert ts.unshard([leaf], [BOTH], "fsdp")[0] is leaf


@pytest.mark.parametrize(
    "leaf", [jax.nn.relu, "name", 3, 2.5, np.array([None])], ids=lambda leaf: type(leaf).__name__
)
def test_leaves_that_are_not_arrays_are_unchanged(leaf: Any, mesh: Mesh):
    assert ts.with_sharding_constraint([leaf], BOTH, mesh)[0] is leaf


def test_none_leaves_a_subtree_unchanged(mesh: Mesh):
    tree = {"a": {"w": SQUARE, "v": STRUCT}, "b": SQUARE}
    got = ts.with_sharding_constraint(tree, {"a": None, "b": P("data")}, mesh)
    assert got["a"] == tree["a"]
    assert got["a"]["w"] is SQUARE
    assert same_spec(got["b"], P("data"), mesh)


def test_an_abstract_mesh_outside_a_trace_moves_no_arrays(mesh: Mesh):
    x = jax.device_put(SQUARE, NamedSharding(mesh, P()))
    assert ts.with_sharding_constraint(x, BOTH, mesh.abstract_mesh) is x
    # unless the context knows the devices
    with jax.set_mesh(mesh):
        assert same_spec(ts.with_sharding_constraint(x, BOTH, mesh.abstract_mesh), BOTH, mesh)


def traced(f: Callable[[Any], Any], *args: Any) -> None:
    jax.jit(f).trace(*args)


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_a_mesh_foreign_to_explicit_axes_is_ignored(kind: str, fsdp_mesh: Mesh):
    def f(x: Any) -> Any:
        assert ts.with_sharding_constraint(x, P("fsdp"), fsdp_mesh) is x
        assert ts.with_sharding_constraint(x, NamedSharding(fsdp_mesh, P("fsdp"))) is x
        return x

    with jax.set_mesh(mesh_of(kind)):
        traced(f, SQUARE)
        f(SQUARE)
    # Without a context, traced values bring their Explicit mesh with them.
    traced(f, jax.device_put(SQUARE, NamedSharding(mesh_of(kind), P("data"))))


@pytest.mark.parametrize("axes", [{"data"}, EVERY], ids=["partial", "full"])
def test_a_mesh_foreign_to_manual_axes_is_ignored(axes: set[str], mesh: Mesh, fsdp_mesh: Mesh):
    def f(x: Any) -> Any:
        assert ts.with_sharding_constraint(x, P("fsdp"), fsdp_mesh) is x
        return x

    traced(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axes), SQUARE)


def test_a_mesh_foreign_to_auto_axes_is_used(mesh: Mesh, fsdp_mesh: Mesh):
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: ts.with_sharding_constraint(x * 2, P("fsdp"), fsdp_mesh))(SQUARE)
    assert same_spec(got, P("fsdp"), fsdp_mesh)


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_fully_manual_is_the_identity(kind: str):
    def f(x: Any) -> Any:
        assert ts.with_sharding_constraint(x, BOTH) is x
        assert ts.with_sharding_constraint(x, P(None, "tensor")) is x
        assert ts.with_sharding_constraint(x, NamedSharding(mesh_of(kind), BOTH)) is x
        return x

    x = jax.device_put(SQUARE, NamedSharding(mesh_of(kind), BOTH))
    traced(jax.shard_map(f, mesh=mesh_of(kind), in_specs=BOTH, out_specs=BOTH), x)


def test_explicit_axes_that_lie_right_are_left_alone():
    def f(x: Any) -> Any:
        assert ts.with_sharding_constraint(x, P("data", None)) is x
        assert ts.with_sharding_constraint(x, P(P.UNCONSTRAINED)) is x
        assert ts.with_sharding_constraint(x, P("fsdp")) is not x
        return x

    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        traced(f, jax.device_put(SQUARE, NamedSharding(mesh, P("data"))))


# ------------------------------------------------------------------ which mesh


class Carrier(SpecCarrier):
    """Stands for a tree of specs, as a Plan does."""

    def __init__(self, specs: Any, mesh: Any):
        self.specs, self.mesh = specs, mesh


def test_the_argument_goes_before_the_sharding_before_the_context(mesh: Mesh, fsdp_mesh: Mesh):
    own = NamedSharding(mesh, P("fsdp"))
    with jax.set_mesh(ts.make_mesh("data=4,fsdp=2")):
        assert ts.with_sharding_constraint(SQUARE, P("fsdp")).sharding.shard_shape((8, 8)) == (4, 8)
        assert ts.with_sharding_constraint(SQUARE, own).sharding == own
        got = ts.with_sharding_constraint(SQUARE, own, fsdp_mesh)
        assert got.sharding == NamedSharding(fsdp_mesh, P("fsdp"))


def test_a_sharding_keeps_its_memory_kind(mesh: Mesh):
    pinned = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    assert ts.with_sharding_constraint(STRUCT, pinned).sharding == pinned
    assert ts.with_sharding_constraint(SQUARE, pinned).sharding == pinned


def test_a_carrier_brings_its_mesh(mesh: Mesh, fsdp_mesh: Mesh):
    carrier = Carrier({"w": P("fsdp")}, mesh)
    got = ts.with_sharding_constraint({"w": SQUARE}, carrier)["w"]
    assert got.sharding == NamedSharding(mesh, P("fsdp"))
    got = ts.with_sharding_constraint({"w": SQUARE}, carrier, fsdp_mesh)["w"]
    assert got.sharding == NamedSharding(fsdp_mesh, P("fsdp"))
    assert ts.unshard(got, carrier.specs["w"], "data") is got
    assert ts.unshard({"w": got}, carrier, "fsdp")["w"].sharding == NamedSharding(mesh, P())


def test_an_explicit_mesh_given_to_an_auto_trace_speaks_of_auto_axes(mesh: Mesh):
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: by_argument(mesh_of("explicit"), x * 2, BOTH))(SQUARE)
    assert same_spec(got, BOTH, mesh)


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_an_explicit_mesh_that_nothing_else_names_speaks_of_auto_axes(kind: str, fsdp_mesh: Mesh):
    def f(x: Any) -> Any:
        return by_argument(mesh_of(kind), x * 2, BOTH)

    assert same_spec(jax.jit(f)(SQUARE), BOTH, mesh_of(kind))
    assert same_spec(f(SQUARE), BOTH, mesh_of(kind))
    with jax.set_mesh(fsdp_mesh):
        assert same_spec(jax.jit(f)(SQUARE), BOTH, mesh_of(kind))


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_the_context_knows_the_types_of_a_mesh_better(kind: str, mesh: Mesh):
    typed = mesh_of(kind)
    with jax.set_mesh(typed):
        assert ts.with_sharding_constraint(SQUARE, BOTH, mesh).sharding == NamedSharding(
            typed, BOTH
        )
    x = jax.device_put(SQUARE, NamedSharding(typed, P()))
    with use_abstract_mesh(typed.abstract_mesh):
        got = jax.jit(lambda y: ts.with_sharding_constraint(y * 2, BOTH, mesh))(x)
    assert same_spec(got, BOTH, mesh)


def test_the_context_knows_the_devices_better_in_a_trace(mesh: Mesh):
    turned = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)

    def f(x: Any) -> Any:
        return ts.with_sharding_constraint(x * 2, BOTH, turned)

    part = partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert same_spec(jax.jit(part(f, axis_names={"data"}))(SQUARE), BOTH, mesh)
    with jax.set_mesh(mesh):
        assert same_spec(jax.jit(f)(SQUARE), BOTH, mesh)
        assert same_spec(ts.with_sharding_constraint(SQUARE, BOTH, turned), BOTH, turned)


def test_the_context_is_the_threads_own(mesh: Mesh):
    seen: list[Any] = []
    with jax.set_mesh(mesh):
        thread = threading.Thread(
            target=lambda: seen.append(ts.with_sharding_constraint(SQUARE, BOTH) is SQUARE)
        )
        thread.start()
        thread.join()
    assert seen == [True]


def test_a_jax_without_the_private_lookups(monkeypatch: pytest.MonkeyPatch, mesh: Mesh):
    assert jax.jit(lambda: is_in_jit())()
    with monkeypatch.context() as patch:
        patch.delattr("jax._src.core.unsafe_am_i_under_a_jit")
        assert not jax.jit(lambda: is_in_jit())()
    with jax.set_mesh(mesh):
        assert context_mesh() == mesh
        monkeypatch.delattr("jax._src.mesh.get_concrete_mesh")
        assert context_mesh() == mesh.abstract_mesh
    monkeypatch.delattr("jax._src.core.get_axis_env")
    assert vmapped_axes() == frozenset()
    monkeypatch.delattr("jax._src.mesh.thread_resources")
    assert mesh_of_with_statement() is None


# ------------------------------------------------------------------ projection

PROJECTED = {
    "unknown axes of one dim": (P(("pipe", "data", "tensor")), P("data")),
    "names of other meshes": (P("dp", "sp"), P()),
    "a near name beside the known one": (P(("data", "data2")), P("data")),
    "trailing None beyond the rank": (P("data", None, None, None), P("data")),
    "major axis first": (P(("fsdp", "data")), P(("fsdp", "data"))),
    "unconstrained": (P("data", P.UNCONSTRAINED), P("data")),
}


def test_axes_dropped_silently(mesh: Mesh):
    def constrained(x: Any) -> dict[str, Any]:
        return {
            name: ts.with_sharding_constraint(x, asked, mesh)
            for name, (asked, _) in PROJECTED.items()
        }

    for got in (constrained(SQUARE), jax.jit(constrained)(SQUARE)):
        wrong = {
            name for name, (_, spec) in PROJECTED.items() if not same_spec(got[name], spec, mesh)
        }
        assert not wrong


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_unconstrained_keeps_the_current_axes(kind: str):
    mesh = mesh_of(kind)

    def constrained(x: Any) -> Any:
        kept = ts.with_sharding_constraint(x, P(P.UNCONSTRAINED, "fsdp"))
        return kept, ts.with_sharding_constraint(x, P(P.UNCONSTRAINED, "data"))

    x = jax.device_put(SQUARE, NamedSharding(mesh, P("data")))
    for run in (constrained, jax.jit(constrained)):
        with jax.set_mesh(mesh):
            kept, taken = run(x)
        assert same_spec(kept, BOTH, mesh)
        assert taken.sharding.shard_shape(taken.shape)[1] == 4


WARNED = {
    "near miss": (
        P("fdsp"),
        P(),
        "w: the mesh has no axis 'fdsp'. It has data=2, fsdp=4. Did you mean 'fsdp'?",
    ),
    "repeated": (
        BOTH.update(partitions=("data", ("data", "fsdp"))),
        BOTH,
        "w: P('data', ('data', 'fsdp')) names the axis 'data' twice. An axis can split one dim"
        " only.",
    ),
}


@pytest.mark.parametrize(("asked", "given", "message"), WARNED.values(), ids=WARNED)
@pytest.mark.parametrize("uneven", ["warn", "drop", "error", "keep"])
def test_axes_dropped_with_a_warning(asked: P, given: P, message: str, uneven: Any, mesh: Mesh):
    with pytest.warns(ts.ShardingWarning) as caught:
        got = ts.with_sharding_constraint({"w": SQUARE}, asked, mesh, uneven=uneven)
    assert [str(w.message) for w in caught] == [f"with_sharding_constraint: {message}"]
    assert same_spec(got["w"], given, mesh)


UNEVEN = {"w": np.ones((6, 8), np.float32), "v": [np.ones((8, 3), np.float32)]}


def test_uneven_dims_are_reported(mesh: Mesh):
    with pytest.warns(ts.ShardingWarning) as caught:
        got = ts.with_sharding_constraint(UNEVEN, P(("data", "fsdp")), mesh)
    assert [str(w.message) for w in caught] == [
        "with_sharding_constraint: w: P(('data', 'fsdp'),) splits dim 0 of shape (6, 8) into 8"
        " parts, and 6 is not divisible by 8. Pad it to 8, or use another dim or axis. The mesh:"
        " data=2, fsdp=4. It is constrained to P('data',) instead."
    ]
    assert same_spec(got["w"], P("data"), mesh)
    assert same_spec(got["v"][0], P(("data", "fsdp")), mesh)


def test_several_uneven_dims_are_reported_at_once(mesh: Mesh):
    with pytest.warns(ts.ShardingWarning) as caught:
        ts.with_sharding_constraint(UNEVEN, P("fsdp", "data"), mesh)
    (warning,) = caught
    head, first, second = str(warning.message).split("\n")
    assert head == "with_sharding_constraint: 2 constraints were only applied in part:"
    assert first.startswith("  v/0: P('fsdp', 'data') splits dim 1 of shape (8, 3) into 2 parts")
    assert second.startswith("  w: P('fsdp', 'data') splits dim 0 of shape (6, 8) into 4 parts")


def test_uneven_drop_is_silent(mesh: Mesh):
    got = ts.with_sharding_constraint(UNEVEN, P("fsdp", "data"), mesh, uneven="drop")
    assert same_spec(got["w"], P(None, "data"), mesh)


@pytest.mark.parametrize("where", ["eager", "jit"])
def test_uneven_error_names_all_and_does_nothing(where: str, mesh: Mesh, compiles: list[str]):
    run = jax.jit if where == "jit" else lambda f: f
    f = run(lambda t: ts.with_sharding_constraint(t, P("fsdp", "data"), mesh, uneven="error"))
    with pytest.raises(ts.SpecError) as error:
        f(UNEVEN)
    assert str(error.value) == (
        "with_sharding_constraint: 2 constraints do not fit:\n"
        "  v/0: float32[8,3] as P('fsdp', 'data') on the mesh (data=2, fsdp=4): P('fsdp', 'data')"
        " splits dim 1 of shape (8, 3) into 2 parts, and 3 is not divisible by 2. Pad it to 4, or"
        " use another dim or axis.\n"
        "  w: float32[6,8] as P('fsdp', 'data') on the mesh (data=2, fsdp=4): P('fsdp', 'data')"
        " splits dim 0 of shape (6, 8) into 4 parts, and 6 is not divisible by 4. Pad it to 8, or"
        " use another dim or axis."
    )
    assert compiles == []


@pytest.mark.parametrize("execute", [jax.jit, lambda f: f], ids=["jit", "at-once"])
@pytest.mark.parametrize("kind", ["auto", "mixed"])
def test_uneven_keep_pads_intermediates(execute: Any, kind: str):
    def f(x: Any) -> Any:
        kept = ts.with_sharding_constraint(x * 2, P("data", "fsdp"), uneven="keep")
        return (kept**2).sum()

    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    with jax.set_mesh(mesh_of(kind)):
        got = execute(jax.grad(f))(jnp.asarray(x))
        text = jax.jit(f).lower(x).as_text()
    np.testing.assert_array_equal(np.asarray(got), x * 8)
    assert '[{"data"}, {"fsdp"}]' in text


KEEP_FAILS = {
    "eager": ("auto", lambda x: ts.with_sharding_constraint(x, P("data"), uneven="keep")),
    "struct": (
        "auto",
        lambda x: ts.with_sharding_constraint(
            jax.ShapeDtypeStruct(x.shape, x.dtype), P("data"), uneven="keep"
        ),
    ),
    "explicit": (
        "explicit",
        jax.jit(lambda x: ts.with_sharding_constraint(x, P("data"), uneven="keep")),
    ),
    "mixed": ("mixed", jax.jit(lambda x: ts.with_sharding_constraint(x, P("data"), uneven="keep"))),
}


@pytest.mark.parametrize(("kind", "f"), KEEP_FAILS.values(), ids=KEEP_FAILS)
def test_uneven_keep_elsewhere_is_an_error(kind: str, f: Any):
    with jax.set_mesh(mesh_of(kind)), pytest.raises(ts.SpecError) as error:
        f(np.ones((3, 2), np.float32))
    assert str(error.value) == (
        "with_sharding_constraint: the array: float32[3,2] as P('data',) on the mesh (data=2,"
        " fsdp=4): P('data',) splits dim"
        " 0 of shape (3, 2) into 2 parts, and 3 is not divisible by 2. Pad it to 4, or use another"
        ' dim or axis.\n`uneven="keep"` works inside jit, on Auto axes: arrays are stored in equal'
        " shards."
    )


# ------------------------------------------------------------------ messages

MISTAKES = {
    "rank": (
        {"a": SQUARE, "b": {"c": SQUARE}},
        P("data", None, "fsdp"),
        "with_sharding_constraint: 2 constraints do not fit:\n"
        "  a: float32[8,8] as P('data', None, 'fsdp') on the mesh (data=2, fsdp=4): P('data', None,"
        " 'fsdp') has 3 entries, but shape (8, 8) has 2 dims. Drop the last entry.\n"
        "  b/c: float32[8,8] as P('data', None, 'fsdp') on the mesh (data=2, fsdp=4): P('data',"
        " None, 'fsdp') has 3 entries, but shape (8, 8) has 2 dims. Drop the last entry.",
    ),
    "logical names": (
        {"w": SQUARE},
        {"w": ("embed", "heads")},
        "w: ('embed', 'heads') is a tuple of logical names, and no rules are in force to resolve"
        " them. Write P('embed', 'heads') if these are mesh axes, or run inside"
        " `with treeshard.logical_axis_rules(rules):`.",
    ),
    "structure": (
        {"w": SQUARE},
        {"v": P()},
        "at the root: the shardings lack 'w' and the tree has no 'v'. The shardings must have the"
        " tree's structure, or be a prefix of it, where one spec serves a whole subtree.",
    ),
}


@pytest.mark.parametrize(("tree", "specs", "message"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("execute", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_mistakes(tree: Any, specs: Any, message: str, execute: Any, mesh: Mesh):
    with jax.set_mesh(mesh), pytest.raises(ts.SpecError) as error:
        execute(lambda t: ts.with_sharding_constraint(t, specs))(tree)
    assert str(error.value) == message


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_value_of_uneven():
    message = "uneven='eror' is none of 'warn', 'error', 'drop', 'keep'. Did you mean 'error'?"
    with pytest.raises(ValueError, match=re.escape(message)):
        ts.with_sharding_constraint(SQUARE, P(), uneven="eror")  # pyright: ignore


# ------------------------------------------------------------------ unshard


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_unshard_gathers_over_one_axis(kind: str):
    mesh, specs = mesh_of(kind), {"w": P("data", "fsdp"), "b": P("data"), "m": P(("fsdp", "data"))}
    tree = {name: jax.device_put(SQUARE, NamedSharding(mesh, s)) for name, s in specs.items()}
    want = {"w": P("data"), "b": P("data"), "m": P("data")}
    with jax.set_mesh(mesh):
        eager = ts.unshard(tree, specs, "fsdp")
        traced = jax.jit(lambda t: ts.unshard(t, specs, "fsdp"))(tree)
    for name in tree:
        for got in (eager, traced):
            assert same_spec(got[name], want[name], mesh), name
            np.testing.assert_array_equal(np.asarray(got[name]), SQUARE)
    assert eager["b"] is tree["b"]


def test_unshard_over_several_axes_and_by_named_shardings(mesh: Mesh):
    x = jax.device_put(SQUARE, NamedSharding(mesh, BOTH))
    assert same_spec(ts.unshard(x, BOTH, "fsdp"), P("data"), mesh) is False  # no mesh: as it is
    assert same_spec(ts.unshard(x, x.sharding, "fsdp"), P("data"), mesh)
    assert same_spec(ts.unshard(x, BOTH, "fsdp", mesh), P("data"), mesh)
    assert same_spec(ts.unshard(x, x.sharding, ["data", "fsdp"]), P(), mesh)


def test_unshard_of_an_axis_that_no_spec_names(mesh: Mesh):
    with jax.set_mesh(mesh):
        traced(lambda x: (ts.unshard(x, BOTH, "tensor") is x) or 1 / 0, SQUARE)
        with pytest.warns(ts.ShardingWarning) as caught:
            ts.unshard(SQUARE, BOTH, "fdsp")
    assert [str(w.message) for w in caught] == [
        "unshard: no spec names the axis 'fdsp', so nothing is gathered. Did you mean 'fsdp'?"
    ]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("specs", [BOTH, None])
def test_unshard_of_no_axis(specs: Any, mesh: Mesh):
    with (
        jax.set_mesh(mesh),
        pytest.raises(TypeError, match="unshard: 3 is int; axis names are a string"),
    ):
        ts.unshard(SQUARE, specs, 3)  # pyright: ignore


def test_unshard_in_a_scan_gathers_each_layer_once_and_moves_no_activation(fsdp_mesh: Mesh):
    stacked = {"w": P(None, "fsdp"), "skip": None}
    weights = {"w": jnp.ones((3, 16, 16)), "skip": jnp.ones(3)}
    weights["w"] = jax.device_put(weights["w"], NamedSharding(fsdp_mesh, stacked["w"]))
    x = jax.device_put(jnp.ones((64, 16)), NamedSharding(fsdp_mesh, P("fsdp")))
    specs = ts.layer_specs(stacked)

    def loss(weights: Any, x: Any) -> Any:
        def layer(y: Any, leaf: Any) -> Any:
            leaf = ts.unshard(leaf, specs, "fsdp")
            return jnp.tanh(y @ leaf["w"] * leaf["skip"]), None

        return jax.lax.scan(layer, x, weights)[0].sum()

    with jax.set_mesh(fsdp_mesh):
        text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    # Left alone, the partitioner gathers again in the backward pass.
    assert len(re.findall(r" all-gather\(", text)) == 1
    assert not re.search(r" (all-to-all|collective-permute)\(", text)
    assert "f32[64,16]" not in text  # no activation is ever whole


# ------------------------------------------------------------------ laws

AXES = st.sampled_from(["data", "fsdp", "tensor", None, P.UNCONSTRAINED, ("data", "fsdp")])


@st.composite
def constraints(draw: st.DrawFn) -> tuple[np.ndarray, P]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 4, 8]), max_size=3)))
    parts = draw(st.lists(AXES, max_size=len(shape)))
    return np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape), P(*parts)


def unwarned(f: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ts.ShardingWarning)
        return f()


@pytest.mark.parametrize("kind", AXIS_TYPES)
@settings(deadline=None, max_examples=60 if SOAK else 20)
@given(case=constraints(), uneven=st.sampled_from(["warn", "drop"]))
def test_a_constraint_changes_no_value(case: tuple[np.ndarray, P], uneven: Any, kind: str):
    x, spec = case
    constrain = partial(ts.with_sharding_constraint, shardings=spec, uneven=uneven)
    with jax.set_mesh(mesh_of(kind)):
        got = unwarned(lambda: constrain([x]))[0]
        assert unwarned(lambda: jax.eval_shape(constrain, [x])[0]).shape == x.shape
    assert got.dtype == x.dtype
    assert all((np.asarray(s.data) == x[s.index]).all() for s in got.addressable_shards)
    assert got.sharding.mesh == mesh_of(kind)


@pytest.mark.parametrize("kind", AXIS_TYPES)
@settings(deadline=None, max_examples=12 if SOAK else 6)
@given(case=constraints())
def test_a_traced_constraint_changes_no_value(case: tuple[np.ndarray, P], kind: str):
    x, spec = case
    with jax.set_mesh(mesh_of(kind)):
        f = jax.jit(lambda y: ts.with_sharding_constraint(y + 1, spec, uneven="drop"))
        got = unwarned(lambda: f(x))
    if x.size:
        np.testing.assert_array_equal(np.asarray(got), x + 1)


def test_a_second_call_compiles_nothing(mesh: Mesh, compiles: list[str]):
    f = jax.jit(lambda x: ts.with_sharding_constraint(x * 2, BOTH))
    x = jax.device_put(SQUARE, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        for _ in range(3):
            f(x)
            ts.with_sharding_constraint(SQUARE, BOTH)
    assert len(compiles) == 1


# ------------------------------------------------------------------ in any jit


def _two_layers(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


TWO_LAYERS = {"up": np.ones((16, 64), "float32"), "down": np.ones((64, 16), "float32")}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("of", ["whole", "subtree"])
def test_a_plan_gathers_weights_in_a_plain_jit(kind: Any, of: str) -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types=kind)
    rules = [("up", P(None, "fsdp")), ("down", P("fsdp"))]
    state = TWO_LAYERS, TWO_LAYERS  # parameters and a moment
    plan = ts.plan(state, rules, mesh, min_size=0)
    params, _ = ts.shard(state, plan)
    rows = ts.shard(np.ones((32, 16), "float32"), P(("data", "fsdp")), mesh)
    given = plan if of == "whole" else plan[0]
    step = jax.jit(jax.value_and_grad(lambda p, x: _two_layers(ts.unshard(p, given), x)))
    gathers = [x for x in ts.collectives(step.lower(params, rows).compile()) if "gather" in x.kind]
    assert {(x.path, x.axes, x.bytes) for x in gathers} == {
        ("p/up", ("fsdp",), 4096),
        ("p/down", ("fsdp",), 4096),
    }
    value, grads = step(params, rows)
    expected, of_one = jax.value_and_grad(_two_layers)(TWO_LAYERS, np.ones((32, 16), "float32"))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), grads, of_one)


def test_what_does_nothing_without_a_mesh_says_so_once_a_line() -> None:
    plan = ts.plan(TWO_LAYERS, [(".*", P("fsdp"))], "fsdp=8", min_size=0)
    params = ts.shard(TWO_LAYERS, plan)
    for call, message in (
        (ts.unshard, "unshard: nothing is gathered: no plan is in force here. Pass it, as in"),
        (lambda p: ts.unshard(p, plan.specs, "fsdp"), "unshard: there is no mesh here, so nothing"),
        (
            lambda p: ts.with_sharding_constraint(p, P("fsdp")),
            "with_sharding_constraint: there is no mesh here, so nothing is constrained. Pass the",
        ),
    ):
        with pytest.warns(ts.ShardingWarning, match=re.escape(message)) as caught:
            jax.jit(lambda p, call=call: call(p)["up"] * 1).lower(params)
        assert caught[0].filename == __file__
    # Nothing is to be done here.
    jax.jit(lambda p: ts.with_sharding_constraint(p, P())).lower(params)


def test_on_one_device_a_model_runs_in_silence() -> None:
    f = jax.jit(lambda p: ts.with_sharding_constraint(ts.unshard(p) * 2, P("fsdp")))
    assert f(jnp.ones(8)).sum() == f(np.ones(8, "float32")).sum() == 16
    assert jax.grad(lambda p: f(p).sum())(jnp.ones(8))[0] == 2
