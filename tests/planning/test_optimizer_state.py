import inspect
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen
from helpers import mesh_of, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._optimizers import CASES, SPECS, Case, nested, structs
from tests.deprecations import tolerated
from treeshard._core.spec_trees import specs_of_leaves

MESH = mesh_of(data=2, fsdp=4)
PARAMS = structs()
PARAM_SPECS = nested(SPECS)


def by_path(state: Any, specs: Any) -> dict[str, P]:
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    return dict(zip(ts.leaf_paths(state), jax.tree.leaves(specs), strict=True))


def planned(params: Any, specs: Any, min_size: int = 0) -> ts.Plan:
    """The plan of parameters that have these specs, which may be a prefix."""
    spec_of = dict(zip(ts.leaf_paths(params), specs_of_leaves(specs, params), strict=True))
    rules = [("", lambda path, leaf: spec_of[path])]
    return ts.plan(params, rules, MESH, min_size=min_size)


def state_specs_of(state: Any, params: Any, specs: Any) -> Any:
    followed = planned(params, specs).follow(state)
    rows = zip(ts.leaf_paths(state), jax.tree.leaves(state), strict=True)
    assert [x.path for x in followed.leaves] == [path for path, x in rows if hasattr(x, "shape")]
    return followed.specs


def specs_of(optimizer: Any, params: Any, specs: Any) -> dict[str, P]:
    state = jax.eval_shape(optimizer.init, params)
    return by_path(state, state_specs_of(state, params, specs))


# ------------------------------------------------------------------ optax


# optax still exports its deprecated optimizers, so they must work.
@pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@tolerated("optax")
def test_every_optimizer_of_optax_gets_the_expected_specs(case: Case, mesh) -> None:
    state = case.state()
    params, specs = PARAMS, PARAM_SPECS
    if isinstance(case.params, optax.LookaheadParams):
        params, specs = case.params, optax.LookaheadParams(specs, specs)
    state_specs = state_specs_of(state, params, specs)
    assert by_path(state, state_specs) == case.expected()
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(state_specs), strict=True):
        NamedSharding(mesh, spec).shard_shape(leaf.shape)


def makes_an_optimizer(function: Any) -> bool:
    """Whether its annotation says so, or calling it with a number or two returns an optimizer."""
    if "GradientTransformation" in str(inspect.signature(function).return_annotation):
        return True
    for args in ((), (0.1,), (0.1, 0.1)):
        try:
            jax.eval_shape(function(*args).init, PARAMS)
        except Warning:
            raise
        except Exception:
            continue
        return True
    return False


@tolerated("optax")
def test_no_optimizer_of_optax_is_missing() -> None:
    exported = {
        name
        for module in (optax, optax.contrib)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name[0] != "_" and makes_an_optimizer(function)
    }
    assert len(exported) > 120
    assert exported - {name.partition(",")[0] for name in CASES} == set()


# ------------------------------------------------------------------ kinds of parameters


def test_static_fields_whose_comparison_raises() -> None:
    class Odd(eqx.Module):
        w: Any
        table: Any = eqx.field(static=True)

    def odd(*shape: int) -> Odd:
        with pytest.warns(UserWarning, match="set as static"):
            return Odd(struct(*shape), (np.arange(3),))

    params = odd(8, 16)
    state = {"mu": odd(8, 16), "v_row": odd(8)}
    state_specs = state_specs_of(state, params, P("data", "fsdp"))
    assert jax.tree.leaves(state_specs) == [P("data", "fsdp"), P("data")]


def made_by(optimizer: Any, params: Any) -> Any:
    return jax.eval_shape(optimizer.init, params)


def box(x: Any) -> linen.Partitioned[Any]:
    return linen.Partitioned(x, names=("embed",))


MATRIX, LISTS = struct(8, 8), [struct(8), struct(8, 6)]
PART = {"dense": {"w": struct(8, 4)}, "x": {"dense": {"w": struct(8, 4)}}}
TRACE = optax.trace(0.9)
D, F = P("data"), P("fsdp")
# A state, the parameters, their specs, and the specs of the state; what is left out is replicated.
STATES: dict[str, tuple[Any, Any, Any, dict[str, P]]] = {
    "a bare array": (
        made_by(optax.sm3(0.1), MATRIX),
        MATRIX,
        P("data", "fsdp"),
        {"0/mu/0": D, "0/mu/1": F, "0/nu": P("data", "fsdp")},
    ),
    "a list, where indices are paths and dims": (
        made_by(optax.sm3(0.1), LISTS),
        LISTS,
        [D, P("fsdp", "data")],
        {"0/mu/0/0": D, "0/mu/1/0": F, "0/mu/1/1": D, "0/nu/0": D, "0/nu/1": P("fsdp", "data")},
    ),
    "None where the parameters have functions": (
        made_by(optax.scale_by_sm3(), [LISTS[0], None, LISTS[1]]),
        [LISTS[0], jax.nn.gelu, LISTS[1]],
        [D, None, P("fsdp", "data")],
        {"mu/0/0": D, "mu/2/0": F, "mu/2/1": D, "nu/0": D, "nu/2": P("fsdp", "data")},
    ),
    "other keys in one branch": (
        {"a": {"y": struct(8)}, "b": struct(8)},
        {"a": {"x": struct(8)}, "b": struct(8)},
        {"a": D, "b": F},
        {"b": F},
    ),
    "of a part of the parameters": (
        made_by(TRACE, PART),
        {"params": PART},
        {"params": {"dense": {"w": D}, "x": {"dense": {"w": F}}}},
        {"trace/dense/w": D, "trace/x/dense/w": F},
    ),
    "empty keys": (
        {"mu": {"": LISTS, "a/b": {}}, "": {"": MATRIX}},
        {"": LISTS, "a/b": {}},
        {"": [D, P("fsdp", "data")], "a/b": {}},
        {"mu//0": D, "mu//1": P("fsdp", "data")},
    ),
    "a single empty key": (
        {"mu": {"": MATRIX}, "": {"": MATRIX}},
        {"": MATRIX},
        {"": D},
        {"mu/": D, "/": D},
    ),
    "boxes": (
        {"mu": {"a": box(MATRIX), "b": MATRIX}, "nu": box({"a": box(MATRIX), "b": MATRIX})},
        {"a": box(MATRIX), "b": MATRIX},
        {"a": D, "b": F},
        {"mu/a": D, "mu/b": F, "nu/a": D, "nu/b": F},
    ),
    "one box": ({"mu": box(MATRIX)}, box(MATRIX), D, {"mu": D}),
    "an empty tree": (made_by(optax.adam(0.1), {}), {}, {}, {}),
    "equal endings with different specs": (
        {"w": MATRIX, "name": "adam", "f": jax.nn.gelu, "none": None, "x": [()]},
        {"a": {"w": MATRIX}, "b": {"w": MATRIX}},
        {"a": {"w": D}, "b": {"w": F}},
        {},
    ),
}


@pytest.mark.parametrize(("state", "params", "specs", "right"), STATES.values(), ids=STATES)
def test_plain_trees(state: Any, params: Any, specs: Any, right: dict[str, P]) -> None:
    found = by_path(state, state_specs_of(state, params, specs))
    assert found == dict.fromkeys(found, P()) | right


def test_a_state_whose_containers_became_dicts_in_a_checkpoint() -> None:
    state = {"0": {"count": struct(), "mu": PARAMS, "v_row": {"attn": {"q": struct(8)}}}, "1": {}}
    params = optax.LookaheadParams(PARAMS, struct(3))  # other containers around them
    specs = optax.LookaheadParams(PARAM_SPECS, P())
    state_specs = by_path(state, state_specs_of(state, params, specs))
    assert state_specs["0/v_row/attn/q"] == P("fsdp")
    assert state_specs["0/count"] == P()
    assert {path[5:]: spec for path, spec in state_specs.items() if "mu" in path} == SPECS


# ------------------------------------------------------------------ extra_axis


EXTRA: dict[str, tuple[Any, P, tuple[int, ...], P]] = {
    "the largest dim": ("fsdp", P(), (8, 16), P(None, "fsdp")),
    "the largest free dim": ("fsdp", P(None, "data"), (8, 16), P("fsdp", "data")),
    "no dim is divisible": ("fsdp", P(), (3, 5), P()),
    "several, one of them used": (("data", "fsdp"), P("fsdp"), (8, 8), P("fsdp", "data")),
    "none": ((), P("fsdp"), (8, 8), P("fsdp")),
}


@pytest.mark.parametrize(("axis", "spec", "shape", "right"), EXTRA.values(), ids=EXTRA)
def test_the_dim_that_gets_the_extra_axis(axis, spec, shape, right) -> None:
    params = {"w": struct(*shape)}
    assert planned(params, spec).follow({"mu": params}, extra_axis=axis).specs["mu"] == {"w": right}


def test_another_mesh_keeps_the_extra_axis() -> None:
    params = {"w": struct(8, 16)}
    plan = ts.plan(params, [("w", P("data"))], MESH, min_size=0).follow(params, extra_axis="fsdp")
    assert plan.specs == {"w": P("data", "fsdp")}
    assert plan.on("data=2,fsdp=16").specs == {"w": P("data", "fsdp")}
    assert plan.on("data=2,fsdp=3").specs == {"w": P("data")}  # 3 divides neither
    with pytest.raises(ts.UnknownAxisError, match="no axis 'fsdp'"):
        plan.on("data=2")


# ------------------------------------------------------------------ memory


def test_an_average_in_host_memory(mesh) -> None:
    params = {"w": np.ones((8, 16), "float32"), "scale": np.float32(1)}
    plan = ts.plan(params, [("w", P("fsdp"))], mesh, min_size=0)
    average = plan.follow({"ema": params, "row": np.ones(3)}, memory="pinned_host")
    memories = {leaf.path: leaf.memory for leaf in average.leaves}
    assert memories == {"ema/scale": None, "ema/w": "pinned_host", "row": "pinned_host"}
    assert average.specs["ema"] == plan.specs
    placed = ts.shard({"ema": params, "row": np.ones(3, "float32")}, average)
    assert placed["ema"]["w"].sharding.memory_kind == "pinned_host"
    assert placed["ema"]["scale"].sharding.memory_kind == "device"
    assert {leaf.path: leaf.memory for leaf in average.on(mesh).leaves} == memories
    further = plan.follow({"ema": params}, extra_axis="data", memory="pinned_host")
    assert str(further.placements["ema"]["w"].spec) == "P('fsdp', 'data')"
    # A copy of what is in host memory is there too.
    copies = average.follow({"mu": {"ema": params}})
    assert [leaf.memory for leaf in copies.leaves] == [None, "pinned_host"]
    with pytest.raises(ts.MeshError, match="places leaves in disk"):
        ts.shard(params, plan.follow(params, memory="disk"))


# ------------------------------------------------------------------ errors


def test_a_bad_extra_axis() -> None:
    plan = planned(PARAMS, PARAM_SPECS)
    with pytest.raises(ts.UnknownAxisError) as raised:
        plan.follow({}, extra_axis="fdsp")
    assert str(raised.value) == (
        "Plan.follow(extra_axis=...): the mesh has no axis 'fdsp'. It has data=2, fsdp=4. Did you"
        " mean 'fsdp'?"
    )
    with pytest.raises(ts.SpecError, match="has a name twice. An axis can split one dim."):
        plan.follow({}, extra_axis=("data", "data"))
