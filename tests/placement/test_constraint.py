"""`with_sharding_constraint` and `unshard`: contexts, axis types, leaves, messages."""

import contextlib
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, legacy
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.jax_private import is_in_jit, mesh_of_with_statement, vmapped_axes
from treeshard._core.mesh import context_mesh

BOTH = P("data", "fsdp")
SQUARE = np.arange(64, dtype=np.float32).reshape(8, 8)


# ------------------------------------------------------------------ the matrix

AXIS_TYPES = {
    "auto": "auto",
    "explicit": "explicit",
    "mixed": ["explicit", "auto"],
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
    return jax.vmap(lambda row: c(row * 2, P(("data", "fsdp"))), spmd_axis_name=axis)(x)


def layers(c: Any, x: Any) -> Any:
    return jax.lax.scan(lambda y, w: (y, c(y * w, BOTH)), x, jnp.arange(2.0))[1]


def by_hand(c: Any, x: Any, mesh: Mesh) -> Any:
    return jax.jit(
        jax.shard_map(
            lambda part: c(part * 2, BOTH),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            axis_names={"data"},
        )
    )(x)


OF_GRADIENT = (BOTH, P(), P(None, "fsdp"))  # an Explicit one has the type of its parameter
# JAX ignores the name where the mapped dim is Explicit and not sharded on it.
NAMED = (BOTH, P(None, "fsdp"), BOTH)
CASES = {
    "jit": Case(lambda c, x, _: jax.jit(lambda y: c(y * 2, BOTH))(x), (BOTH,)),
    "checkpoint": Case(
        lambda c, x, _: jax.jit(jax.grad(jax.checkpoint(partial(loss, c))))(x), OF_GRADIENT
    ),
    "scan": Case(lambda c, x, _: jax.jit(partial(layers, c))(x), (P(None, "data", "fsdp"),)),
    "vmap": Case(
        lambda c, x, _: jax.jit(lambda y: mapped(c, y, None))(x), (P(None, ("data", "fsdp")),)
    ),
    "vmap-spmd": Case(lambda c, x, _: jax.jit(lambda y: mapped(c, y, "data"))(x), NAMED),
    "vmap-of-sharded": Case(
        lambda c, x, _: jax.jit(lambda y: mapped(c, y, None))(x),
        (P(None, ("data", "fsdp")), BOTH, BOTH),
        start=P("data"),
    ),
    "shard_map": Case(by_hand, (BOTH,), start=P("data")),
    # Executed at once, operation by operation, as in a notebook.
    "eager": Case(lambda c, x, _: c(x, BOTH), (BOTH,)),
    "eager grad": Case(lambda c, x, _: jax.grad(partial(loss, c))(x), OF_GRADIENT),
    "eager vmap-spmd": Case(lambda c, x, _: mapped(c, x, "data"), NAMED),
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
    *((case, "set_mesh", kind) for case in CASES for kind in AXIS_TYPES),
    *(("jit", context, kind) for context in CONTEXTS for kind in ("auto", "explicit")),
    *((case, "mesh-argument", "mixed") for case in ("vmap-spmd", "shard_map")),
    *(("eager", context, "auto") for context in CONTEXTS if context != "use_abstract_mesh"),
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("case", "context", "kind"), dict.fromkeys(PLACES))
def test_it_constrains_and_changes_no_value_in(case: str, context: str, kind: str):
    mesh, (enter, constrain) = mesh_of(kind), CONTEXTS[context]
    run, specs, start = CASES[case]
    x = jax.device_put(SQUARE, NamedSharding(mesh, start))
    want = reference(case)
    with enter(mesh):
        got = run(partial(constrain, mesh), x, mesh)
    spec = specs[list(AXIS_TYPES).index(kind)] if len(specs) > 1 else specs[0]
    assert same_spec(got, spec, mesh), got.sharding
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("execute", [jax.jit, lambda f: f], ids=["jit", "at-once"])
def test_under_vmap_two_explicit_axes_and_one_auto_axis_stay(execute: Any):
    kinds = ["explicit", "explicit", "auto"]
    mesh = ts.make_mesh("data=2,tensor=2,fsdp=2", axis_types=kinds)
    cube = np.arange(512, dtype=np.float32).reshape(8, 8, 8)
    x = jax.device_put(cube, NamedSharding(mesh, P("data")))

    def f(row: Any) -> Any:
        return ts.with_sharding_constraint(row * 2, P("tensor", "fsdp"))

    with jax.set_mesh(mesh):
        got = execute(jax.vmap(f, spmd_axis_name="data"))(x)
    assert got.sharding == NamedSharding(mesh, P("data", "tensor", "fsdp"))
    np.testing.assert_array_equal(np.asarray(got), cube * 2)


def test_an_abstract_mesh_uses_the_devices_of_the_inputs_of_a_trace_or_of_the_context(mesh: Mesh):
    def f(x: Any) -> Any:
        with use_abstract_mesh(mesh.abstract_mesh):
            return ts.with_sharding_constraint(x * 2, BOTH)

    whole = jax.device_put(SQUARE, NamedSharding(mesh, P()))
    assert same_spec(jax.jit(f)(whole), BOTH, mesh)
    alone = jax.jit(f)(jnp.asarray(SQUARE))
    assert len(alone.sharding.device_set) == 1
    # Executed at once on one device, there is nothing to be done either.
    assert len(jax.grad(lambda x: f(x).sum())(jnp.asarray(SQUARE)).sharding.device_set) == 1
    # Outside a trace, no array is moved, unless the context knows the devices.
    assert ts.with_sharding_constraint(whole, BOTH, mesh.abstract_mesh) is whole
    with jax.set_mesh(mesh):
        assert same_spec(ts.with_sharding_constraint(whole, BOTH, mesh.abstract_mesh), BOTH, mesh)


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


def test_structs_get_the_sharding(mesh: Mesh):
    struct = jax.ShapeDtypeStruct((8, 6), jnp.bfloat16, weak_type=False)
    with pytest.warns(ts.ShardingWarning, match="6 is not divisible"):
        got = ts.with_sharding_constraint(struct, BOTH, mesh)
    assert got == struct.update(sharding=NamedSharding(mesh, P("data")))
    big = AbstractMesh((4096, 16), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    got = ts.with_sharding_constraint(jax.ShapeDtypeStruct((8192, 32), "float32"), P("fsdp"), big)
    assert got.sharding == NamedSharding(big, P("fsdp"))
    with use_abstract_mesh(big):
        again = ts.with_sharding_constraint(got, P("fsdp", "tensor"))
    assert again.sharding == NamedSharding(big, P("fsdp", "tensor"))


# ------------------------------------------------------------------ unchanged leaves

STRUCT = jax.ShapeDtypeStruct((8, 8), "float32")
OTHERS = [jax.nn.relu, "name", 3, 2.5, True, np.array([None])]


def test_without_a_mesh_leaves_are_unchanged():
    leaves = [SQUARE, STRUCT, *OTHERS]
    for got in (ts.with_sharding_constraint(leaves, BOTH), ts.unshard(leaves, BOTH, "fsdp")):
        assert all(x is y for x, y in zip(got, leaves, strict=True))


def test_leaves_without_a_spec_and_those_that_are_no_arrays_are_unchanged(mesh: Mesh):
    tree = {"none": {"w": SQUARE, "v": STRUCT}, "others": OTHERS}

    def f(w: Any) -> Any:
        specs = {"none": None, "others": BOTH, "w": P("data")}
        got = ts.with_sharding_constraint({**tree, "w": w}, specs, mesh)
        assert got["none"]["w"] is SQUARE
        assert got["none"]["v"] is STRUCT
        assert all(x is y for x, y in zip(got["others"], OTHERS, strict=True))
        return got["w"]

    assert same_spec(f(SQUARE), P("data"), mesh)
    assert same_spec(jax.jit(f)(SQUARE), P("data"), mesh)


def traced(f: Callable[[Any], Any], *args: Any) -> None:
    jax.jit(f).trace(*args)


def test_a_mesh_foreign_to_explicit_or_manual_axes_is_ignored_and_one_foreign_to_auto_axes_used(
    mesh: Mesh, fsdp_mesh: Mesh
):
    def f(x: Any) -> Any:
        assert ts.with_sharding_constraint(x, P("fsdp"), fsdp_mesh) is x
        assert ts.with_sharding_constraint(x, NamedSharding(fsdp_mesh, P("fsdp"))) is x
        return x

    for kind in ("explicit", "mixed"):
        with jax.set_mesh(mesh_of(kind)):
            traced(f, SQUARE)
            f(SQUARE)
        # Without a context, traced values bring their Explicit mesh with them.
        traced(f, jax.device_put(SQUARE, NamedSharding(mesh_of(kind), P("data"))))
    traced(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"data"}), SQUARE)
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


# ------------------------------------------------------------------ which mesh


def test_the_argument_goes_before_the_sharding_and_the_plan_before_the_context(
    mesh: Mesh, fsdp_mesh: Mesh
):
    own = NamedSharding(mesh, P("fsdp"), memory_kind="pinned_host")
    plan = ts.plan({"w": SQUARE}, [("w", P("fsdp"))], mesh, min_size=0)
    with jax.set_mesh(ts.make_mesh("data=4,fsdp=2")):
        assert ts.with_sharding_constraint(SQUARE, P("fsdp")).sharding.shard_shape((8, 8)) == (4, 8)
        assert ts.with_sharding_constraint(SQUARE, own).sharding == own
        got = ts.with_sharding_constraint(SQUARE, NamedSharding(mesh, P("fsdp")), fsdp_mesh)
        assert got.sharding == NamedSharding(fsdp_mesh, P("fsdp"))
        got = ts.with_sharding_constraint({"w": SQUARE}, plan, fsdp_mesh)["w"]
        assert got.sharding == NamedSharding(fsdp_mesh, P("fsdp"))
        got = ts.with_sharding_constraint({"w": SQUARE}, plan)["w"]
        assert got.sharding == NamedSharding(mesh, P("fsdp"))
        assert ts.unshard({"w": got}, plan.specs, "data")["w"] is got
        assert ts.unshard({"w": got}, plan, "fsdp")["w"].sharding == NamedSharding(mesh, P())
    assert ts.with_sharding_constraint(STRUCT, own).sharding == own


def test_the_context_knows_the_types_of_a_mesh_better_and_in_a_trace_its_devices(
    mesh: Mesh, fsdp_mesh: Mesh
):
    mixed = mesh_of("mixed")
    with jax.set_mesh(mixed):
        assert by_argument(mesh, SQUARE, BOTH).sharding == NamedSharding(mixed, BOTH)
    for context in (mesh, fsdp_mesh):
        with jax.set_mesh(context):
            got = jax.jit(partial(by_argument, mixed, spec=BOTH))(SQUARE)
        assert same_spec(got, BOTH, mesh)
    turned = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    with jax.set_mesh(mesh):
        assert same_spec(jax.jit(partial(by_argument, turned, spec=BOTH))(SQUARE), BOTH, mesh)
        assert same_spec(by_argument(turned, SQUARE, BOTH), BOTH, turned)


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


def test_names_of_other_meshes_are_dropped_in_silence(mesh: Mesh):
    # Beside the known name, `data2` is no misspelling of it.
    for asked in (P(("pipe", "data"), "sp"), P(("data", "data2"))):
        assert same_spec(ts.with_sharding_constraint(SQUARE, asked, mesh), P("data"), mesh)


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
@pytest.mark.parametrize("uneven", ["drop", "error"])
def test_axes_dropped_with_a_warning(asked: P, given: P, message: str, uneven: Any, mesh: Mesh):
    with pytest.warns(ts.ShardingWarning) as caught:
        got = ts.with_sharding_constraint({"w": SQUARE}, asked, mesh, uneven=uneven)
    assert [str(w.message) for w in caught] == [f"with_sharding_constraint: {message}"]
    assert same_spec(got["w"], given, mesh)


UNEVEN = {"w": np.ones((6, 8), np.float32), "v": [np.ones((8, 3), np.float32)]}


def test_uneven_dims_are_reported_in_one_warning_or_dropped_in_silence(mesh: Mesh):
    asked = P(("data", "fsdp"))
    with pytest.warns(ts.ShardingWarning) as caught:
        got = ts.with_sharding_constraint(UNEVEN, asked, mesh)
    assert [str(w.message) for w in caught] == [
        "with_sharding_constraint: w: P(('data', 'fsdp'),) splits dim 0 of shape (6, 8) into 8"
        " parts, and 6 is not divisible by 8. Pad it to 8, or use another dim or axis. The mesh:"
        " data=2, fsdp=4. It is constrained to P('data',) instead."
    ]
    for part in (got, ts.with_sharding_constraint(UNEVEN, asked, mesh, uneven="drop")):
        assert same_spec(part["w"], P("data"), mesh)
        assert same_spec(part["v"][0], asked, mesh)
    with pytest.warns(ts.ShardingWarning) as caught:
        ts.with_sharding_constraint(UNEVEN, P("fsdp", "data"), mesh)
    head, first, second = str(caught.pop().message).split("\n")
    assert head == "with_sharding_constraint: 2 constraints were applied in part:"
    assert first.startswith("  v/0: P('fsdp', 'data') splits dim 1 of shape (8, 3) into 2 parts")
    assert second.startswith("  w: P('fsdp', 'data') splits dim 0 of shape (6, 8) into 4 parts")


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


@pytest.mark.parametrize(
    ("execute", "kind"), [(jax.jit, "mixed"), (lambda f: f, "auto")], ids=["jit", "at once"]
)
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


def kept(x: Any) -> Any:
    return ts.with_sharding_constraint(x, P("data"), uneven="keep")


@pytest.mark.parametrize(
    ("kind", "f"),
    [
        ("auto", kept),
        ("auto", lambda x: kept(jax.ShapeDtypeStruct(x.shape, x.dtype))),
        ("mixed", jax.jit(kept)),
    ],
    ids=["eager", "struct", "mixed"],
)
def test_uneven_keep_elsewhere_is_an_error(kind: str, f: Any):
    with jax.set_mesh(mesh_of(kind)), pytest.raises(ts.SpecError) as error:
        f(np.ones((3, 2), np.float32))
    assert str(error.value).startswith("with_sharding_constraint: the array: float32[3,2] as P('da")
    assert '\n`uneven="keep"` works inside jit, on Auto axes: arrays are stored' in str(error.value)


def test_a_spec_beyond_the_rank(mesh: Mesh):
    message = (
        "w: float32[8,8] as P('data', None, 'fsdp') on the mesh (data=2, fsdp=4): P('data', None,"
        " 'fsdp') has 3 entries, but shape (8, 8) has 2 dims. Drop the last entry."
    )
    with pytest.raises(ts.SpecError, match=re.escape(message)):
        ts.with_sharding_constraint({"w": SQUARE}, {"w": P("data", None, "fsdp")}, mesh)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_value_of_uneven():
    message = "uneven='eror' is not one of 'warn', 'error', 'drop', 'keep'. Did you mean 'error'?"
    with pytest.raises(ValueError, match=re.escape(message)):
        ts.with_sharding_constraint(SQUARE, P(), uneven="eror")  # pyright: ignore


# ------------------------------------------------------------------ unshard


@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_unshard_gathers_over_one_axis(kind: str):
    mesh, specs = mesh_of(kind), {"w": P("data", "fsdp"), "b": P("data"), "m": P(("fsdp", "data"))}
    tree = {name: jax.device_put(SQUARE, NamedSharding(mesh, s)) for name, s in specs.items()}
    with jax.set_mesh(mesh):
        eager = ts.unshard(tree, specs, "fsdp")
        traced = jax.jit(lambda t: ts.unshard(t, specs, "fsdp"))(tree)
    for got in (*eager.values(), *traced.values()):
        assert same_spec(got, P("data"), mesh)
        np.testing.assert_array_equal(np.asarray(got), SQUARE)
    assert eager["b"] is tree["b"]


def test_unshard_over_several_axes_and_over_one_that_no_spec_names(mesh: Mesh):
    x = jax.device_put(SQUARE, NamedSharding(mesh, BOTH))
    assert same_spec(ts.unshard(x, x.sharding, ["data", "fsdp"]), P(), mesh)
    with jax.set_mesh(mesh):
        traced(lambda x: (ts.unshard(x, BOTH, "tensor") is x) or 1 / 0, SQUARE)
        with pytest.warns(ts.ShardingWarning) as caught:
            ts.unshard(SQUARE, BOTH, "fdsp")
    assert [str(w.message) for w in caught] == [
        "unshard has no effect over 'fdsp': no spec names this axis. Did you mean 'fsdp'?"
    ]


# ------------------------------------------------------------------ in any jit


def _two_layers(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


TWO_LAYERS = {"up": np.ones((16, 64), "float32"), "down": np.ones((64, 16), "float32")}


@pytest.mark.parametrize(("kind", "of"), [("auto", "whole"), ("explicit", "subtree")])
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
        (ts.unshard, "unshard has no effect: no plan is in force here. Pass the plan, `unshard("),
        (
            lambda p: ts.unshard(p, plan.specs, "fsdp"),
            "unshard has no effect: there is no mesh here.",
        ),
        (
            lambda p: ts.with_sharding_constraint(p, P("fsdp")),
            "with_sharding_constraint has no effect: there is no mesh here. Pass the",
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


def test_errors_of_placing_name_the_constraint() -> None:
    """It places arrays as `shard` does, and has no `timeout`."""
    deleted = jnp.ones((8, 4))
    deleted.delete()
    with pytest.raises(ts.DeletedLeafError, match=r"^with_sharding_constraint: "):
        ts.with_sharding_constraint({"x": deleted}, P("fsdp"), ts.make_mesh("fsdp=8"))
