import inspect
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from helpers import mesh_of, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._optimizers import CASES, SPECS, Case, nested, structs
from tests.deprecations import tolerated
from treeshard._core.spec_trees import specs_of_leaves
from treeshard._planning.mirrors import kept_dims

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
    return planned(params, specs).follow(state).specs


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


def test_a_state_on_devices_is_sharded_as_its_specs(mesh) -> None:
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=4)
    params = {"w": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}
    state = jax.tree.map(np.asarray, optimizer.init(params))
    specs = state_specs_of(state, params, {"w": P("data", "fsdp"), "b": P("fsdp")})
    placed = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    moments = placed[0]
    arrays = moments.v["b"], moments.v_row["w"], moments.v_col["w"], moments.v["w"]
    shapes = [x.addressable_shards[0].data.shape for x in arrays]
    assert shapes == [(2,), (4,), (2,), (1,)]


# ------------------------------------------------------------------ kinds of parameters


class Attention(eqx.Module):
    q: eqx.nn.Linear
    act: Any
    scale: float


def attention() -> Attention:
    return eqx.filter_eval_shape(
        lambda: Attention(eqx.nn.Linear(8, 16, key=jax.random.key(0)), jax.nn.gelu, 0.5)
    )


ATTENTION_SPECS = {"q/weight": P("data", "fsdp"), "q/bias": P("data")}


def test_equinox_modules_with_functions_among_their_leaves() -> None:
    model = attention()
    specs = ts.match_partition_rules(
        [("weight", P("data", "fsdp")), ("bias", P("data"))], model, min_size=0
    )
    state = jax.eval_shape(optax.adam(0.1).init, eqx.filter(model, eqx.is_array_like))
    state = eqx.tree_at(lambda s: (s[0].mu, s[0].nu), state, (model, model))
    state_specs = by_path(state, state_specs_of(state, model, specs))
    assert state_specs["0/mu/q/weight"] == P("data", "fsdp")
    assert state_specs["0/nu/q/bias"] == P("data")
    assert state_specs["0/mu/act"] == state_specs["0/mu/scale"] == state_specs["0/count"] == P()


@pytest.mark.parametrize("by", ["the arrays", "the whole module"])
@pytest.mark.parametrize("optimizer", ["adam", "sm3"])
def test_equinox_modules_of_which_only_arrays_are_optimized(by, optimizer) -> None:
    model = attention()
    arrays, _ = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    state = jax.eval_shape(getattr(optax, optimizer)(0.1).init, arrays)
    params = arrays if by == "the arrays" else model
    specs = jax.tree.map(lambda x: P(*["data", "fsdp"][: getattr(x, "ndim", 0)]), params)
    state_specs = by_path(state, state_specs_of(state, params, specs))
    assert state_specs["0/nu/q/weight"] == P("data", "fsdp")
    if optimizer == "sm3":
        assert state_specs["0/mu/q/weight/0"] == P("data")
        assert state_specs["0/mu/q/weight/1"] == P("fsdp")


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


def test_nnx_states_and_optimizers() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.q = nnx.Linear(8, 16, rngs=rngs)

    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    specs = ts.match_partition_rules(
        [("kernel", P("data", "fsdp")), ("bias", P("fsdp"))], params, min_size=0
    )
    state_specs = specs_of(optax.adam(0.1), params, specs)
    assert state_specs["0/mu/q/kernel"] == P("data", "fsdp")
    assert state_specs["0/nu/q/bias"] == P("fsdp")
    own = nnx.eval_shape(lambda: nnx.Optimizer(Model(nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param))
    state = nnx.state(own)
    state_specs = by_path(state, state_specs_of(state, params, specs))
    kernels = {path: spec for path, spec in state_specs.items() if path.endswith("kernel")}
    assert len(kernels) == 2
    assert set(kernels.values()) == {P("data", "fsdp")}


def test_haiku_dicts_with_slashes_in_keys() -> None:
    params = {"net/~/linear": {"w": struct(8, 16)}, "net/~/linear_1": {"w": struct(16, 8)}}
    specs = {"net/~/linear": {"w": P("data")}, "net/~/linear_1": {"w": P("fsdp")}}
    some = {"net/~/linear": True, "net/~/linear_1": False}
    for optimizer in (optax.adam(0.1), optax.masked(optax.adam(0.1), some)):
        state_specs = specs_of(optimizer, params, specs)
        assert {s for p, s in state_specs.items() if p.endswith("linear/w")} == {P("data")}


def made_by(optimizer: Any, params: Any) -> Any:
    return jax.eval_shape(optimizer.init, params)


MATRIX, LISTS = struct(8, 8), [struct(8), struct(8, 6)]
PART = {"dense": {"w": struct(8, 4)}, "x": {"dense": {"w": struct(8, 4)}}}
FIELDS = {"mu": {"w": struct(3)}, "w": MATRIX, "z": {"a": struct(2), "b": struct(2)}}
MASK = {"mu": {"w": True}, "w": True, "z": False}
FACTORED = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
FACTORED_1 = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
TRACE = optax.trace(0.9)
BRANCHES = {"a": {"w": MATRIX, "v": struct(8, 4)}, "b": struct(8)}
D, F = P("data"), P("fsdp")
# A state, the parameters, their specs, and the specs of the state; what is left out is replicated.
STATES: dict[str, tuple[Any, Any, Any, dict[str, P]]] = {
    "a bare array": (
        made_by(optax.sm3(0.1), MATRIX),
        MATRIX,
        P("data", "fsdp"),
        {"0/mu/0": D, "0/mu/1": F, "0/nu": P("data", "fsdp")},
    ),
    "a bare array, factored": (
        made_by(FACTORED, MATRIX),
        MATRIX,
        P("data", "fsdp"),
        {"v_row": D, "v_col": F},
    ),
    "a list, where indices are paths and dims": (
        made_by(optax.sm3(0.1), LISTS),
        LISTS,
        [D, P("fsdp", "data")],
        {"0/mu/0/0": D, "0/mu/1/0": F, "0/mu/1/1": D, "0/nu/0": D, "0/nu/1": P("fsdp", "data")},
    ),
    "a tuple of the length of a chain": (
        made_by(optax.chain(TRACE, TRACE), (struct(8), struct(8))),
        (struct(8), struct(8)),
        (D, F),
        {f"{i}/trace/{j}": spec for i in (0, 1) for j, spec in enumerate((D, F))},
    ),
    "a parameter called like a field": (
        made_by(optax.masked(optax.adam(0.1), MASK), FIELDS),
        FIELDS,
        {"mu": {"w": P()}, "w": P("fsdp", "data"), "z": P()},
        {"inner_state/0/mu/w": P("fsdp", "data"), "inner_state/0/nu/w": P("fsdp", "data")},
    ),
    "dims of length 1": (
        made_by(FACTORED_1, {"w": struct(1, 8)}),
        {"w": struct(1, 8)},
        P(None, "fsdp"),
        {"v_col/w": F},
    ),
    "one spec for a subtree, and None": (
        made_by(TRACE, BRANCHES),
        BRANCHES,
        {"a": D, "b": None},
        {"trace/a/v": D, "trace/a/w": D},
    ),
    "None where the parameters have functions": (
        made_by(optax.scale_by_sm3(), [LISTS[0], None, LISTS[1]]),
        [LISTS[0], jax.nn.gelu, LISTS[1]],
        [D, None, P("fsdp", "data")],
        {"mu/0/0": D, "mu/2/0": F, "mu/2/1": D, "nu/0": D, "nu/2": P("fsdp", "data")},
    ),
    "other keys": (
        {"x": {"c": struct(8), "d": struct(8)}, "y": (struct(8), struct(8))},
        {"a": struct(8), "b": struct(8)},
        D,
        {},
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
    "equal endings with different specs": (
        {"w": MATRIX},
        {"a": {"w": MATRIX}, "b": {"w": MATRIX}},
        {"a": {"w": D}, "b": {"w": F}},
        {},
    ),
    "equal endings with equal specs": (
        {"w": MATRIX},
        {"a": {"w": MATRIX}, "b": {"w": MATRIX}},
        {"a": {"w": D}, "b": {"w": D}},
        {"w": D},
    ),
    "leaves that are no arrays": (
        {"w": MATRIX, "name": "adam", "f": jax.nn.gelu, "n": 3, "none": None, "x": [()]},
        {"w": MATRIX},
        D,
        {"w": D},
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


# ------------------------------------------------------------------ shapes

SHAPES = {
    "the same": ((4, 8), (4, 8), "", (0, 1)),
    "a row": ((8,), (8, 16), "v_row", (0,)),
    "a column": ((16,), (8, 16), "v_col", (1,)),
    "the row of a tall struct drops the longest dim": ((8,), (16, 8), "v_row", (1,)),
    "the row of a square": ((8,), (8, 8), "v_row", (0,)),
    "the column of a square": ((8,), (8, 8), "v_col", (1,)),
    "a square without a name": ((8,), (8, 8), "mu", (None,)),
    "the column of a stack of squares": ((3, 8), (3, 8, 8), "v_col", (0, 2)),
    "the row of a stack of squares": ((3, 8), (3, 8, 8), "v_row", (0, 1)),
    "a stack of squares without a name": ((3, 8), (3, 8, 8), "mu", (0, None)),
    "a name that the shape contradicts": ((8,), (8, 16), "v_col", (0,)),
    "two dims dropped": ((8,), (4, 8, 16), "", (1,)),
    "a history": ((5, 4, 8), (4, 8), "", (None, 0, 1)),
    "a reduction that keeps dims": ((4, 1), (4, 8), "", (0, None)),
    "a projection": ((2, 8), (4, 8), "", (None, 1)),
    "a projector of the other side": ((8, 2), (4, 8), "", (1, None)),
    "transposed": ((8, 4), (4, 8), "", (1, 0)),
    "transposed, in part": ((4, 16, 8), (4, 8, 16), "", (0, 2, 1)),
    "a new dim as long as an old one": ((8, 8), (4, 8), "", (None, 1)),
    "a placeholder": ((1,), (4, 8), "v_row", None),
    "no dim matches": ((3, 5), (4, 8), "", None),
    "more dims, and none matches": ((8, 4, 5), (4, 8), "", None),
}


@pytest.mark.parametrize(("shape", "full", "field", "dims"), SHAPES.values(), ids=SHAPES)
def test_kept_dims(shape, full, field, dims) -> None:
    assert kept_dims(shape, full, field) == dims


# ------------------------------------------------------------------ extra_axis


EXTRA: dict[str, tuple[Any, P, tuple[int, ...], P]] = {
    "the largest dim": ("fsdp", P(), (8, 16), P(None, "fsdp")),
    "the largest free dim": ("fsdp", P(None, "data"), (8, 16), P("fsdp", "data")),
    "of equal dims the last": ("fsdp", P(), (8, 8), P(None, "fsdp")),
    "a divisible dim": ("fsdp", P(), (8, 18), P("fsdp")),
    "no dim is divisible": ("fsdp", P(), (3, 5), P()),
    "no dim is free": ("fsdp", P("data"), (8,), P("data")),
    "an axis that is used": ("fsdp", P("fsdp"), (8, 8), P("fsdp")),
    "several": (("data", "fsdp"), P(), (8, 16), P(None, ("data", "fsdp"))),
    "several, one of them used": (("data", "fsdp"), P("fsdp"), (8, 8), P("fsdp", "data")),
    "none": ((), P("fsdp"), (8, 8), P("fsdp")),
}


@pytest.mark.parametrize(("axis", "spec", "shape", "right"), EXTRA.values(), ids=EXTRA)
def test_the_dim_that_gets_the_extra_axis(axis, spec, shape, right) -> None:
    params = {"w": struct(*shape)}
    assert planned(params, spec).follow({"mu": params}, extra_axis=axis).specs["mu"] == {"w": right}


def test_small_leaves_get_no_extra_axis() -> None:
    params = {"large": struct(128, 128), "small": struct(8, 8)}
    state = jax.eval_shape(optax.adam(0.1).init, params)
    further = planned(params, P(), min_size=65).follow(state, extra_axis="data").specs[0]
    assert further.mu == {"large": P(None, "data"), "small": P()}
    assert further.count == P()
    further = planned(params, P(), min_size=64).follow(state, extra_axis="data").specs[0]
    assert further.mu["small"] == P(None, "data")


def test_leaves_without_a_parameter_get_the_extra_axis_too() -> None:
    state = {"row": struct(648), "odd": struct(649), "name": "x"}
    further = planned(PARAMS, PARAM_SPECS).follow(state, extra_axis="fsdp")
    assert further.specs == {"row": P("fsdp"), "odd": P(), "name": P()}


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
    for other in (average.on(mesh), average.padded()):
        assert {leaf.path: leaf.memory for leaf in other.leaves} == memories
    further = plan.follow({"ema": params}, extra_axis="data", memory="pinned_host")
    assert str(further.placements["ema"]["w"].spec) == "P('fsdp', 'data')"
    # A copy of what is in host memory is there too.
    copies = average.follow({"mu": {"ema": params}})
    assert [leaf.memory for leaf in copies.leaves] == [None, "pinned_host"]
    with pytest.raises(ts.MeshError, match="places leaves in disk"):
        ts.shard(params, plan.follow(params, memory="disk"))


# ------------------------------------------------------------------ errors


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("axis", "error", "message"),
    [
        pytest.param(
            "fdsp",
            ts.UnknownAxisError,
            "Plan.follow(extra_axis=...): the mesh has no axis 'fdsp'. It has data=2, fsdp=4. Did"
            " you mean 'fsdp'?",
            id="unknown",
        ),
        pytest.param(
            ("data", "data"),
            ts.SpecError,
            "('data', 'data') has a name twice. An axis can split one dim.",
            id="twice",
        ),
        pytest.param(3, TypeError, "3 is int; axis names are a string", id="not-a-name"),
    ],
)
def test_a_bad_extra_axis(axis, error, message) -> None:
    with pytest.raises(error) as raised:
        planned(PARAMS, PARAM_SPECS).follow({}, extra_axis=axis)
    assert message in str(raised.value)
