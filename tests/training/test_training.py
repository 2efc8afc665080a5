"""States are initialised sharded and stepped with one compile, with the values of one device."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, assert_same, struct
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.manual import value_and_grad
from treeshard.training import init_sharded, jit_step, shard_map_step

pytestmark = pytest.mark.usefixtures("standard_promotion")

RULES = [("norm|bias", None), (".*", ts.fsdp("fsdp", min_size=64))]
OPTIMIZER = optax.adamw(1e-2)


class State(eqx.Module):
    model: eqx.nn.MLP
    opt_state: Any
    step: jax.Array
    key: jax.Array


def init(key, optimizer=OPTIMIZER):
    model_key, key = jax.random.split(key)
    model = eqx.nn.MLP(16, 8, 32, 2, key=model_key)
    return State(model, optimizer.init(eqx.filter(model, eqx.is_array)), jnp.int32(0), key)


def loss_fn(model, batch):
    predicted = jax.vmap(model)(batch["x"])
    return jnp.mean((predicted - batch["y"]) ** 2) * batch.get("scale", 1.0)


def train_step(state, batch, optimizer=OPTIMIZER, differentiate=None):
    differentiate = differentiate or eqx.filter_value_and_grad(loss_fn)
    loss, grads = differentiate(state.model, batch)
    updates, opt_state = optimizer.update(
        grads, state.opt_state, eqx.filter(state.model, eqx.is_array)
    )
    model = eqx.apply_updates(state.model, updates)
    return State(model, opt_state, state.step + 1, jax.random.split(state.key)[0]), loss


def make_batch(seed=0, size=32):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(size, 16)).astype(np.float32),
        "y": rng.normal(size=(size, 8)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def initialised(fsdp_mesh):
    return init_sharded(init, jax.random.key(0), rules=RULES, mesh=fsdp_mesh)


@pytest.fixture(scope="module")
def step(initialised):
    return jit_step(train_step, initialised[1], batch=P("fsdp"), donate=False)


def assert_as_planned(state, plan) -> None:
    leaves = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    for x, leaf in zip(leaves, plan.leaves, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(plan.mesh, leaf.given), x.ndim)
        assert not jax.typeof(x).weak_type


def test_initialised_as_planned_and_stepped_with_one_compile(
    initialised, fsdp_mesh, compiles
) -> None:
    state, plan = initialised
    assert plan.mesh == fsdp_mesh
    assert state.model.layers[1].weight.sharding.spec == P(None, "fsdp")
    assert state.opt_state[0].mu.layers[1].weight.sharding.spec == P(None, "fsdp")
    assert state.model.layers[1].bias.sharding.is_fully_replicated
    assert state.model.activation is jax.nn.relu
    assert_as_planned(state, plan)
    step = jit_step(train_step, plan, batch=P("fsdp"), donate=False)
    state, _ = step(state, make_batch(0))
    compiles.clear()
    with jax.set_mesh(fsdp_mesh):
        state, _ = step(state, make_batch(1))
    state, _ = step(state, make_batch(2))
    assert compiles == []
    assert int(state.step) == 3
    assert_as_planned(state, plan)


@pytest.mark.usefixtures("full_compiles")  # optimizations are what might change bits
def test_no_device_ever_holds_the_whole_tree_whose_bits_are_those_of_one_device(fsdp_mesh) -> None:
    def big(key):
        return {"w": jax.random.normal(key, (512, 1024)), "u": jax.random.uniform(key, (64, 64))}

    key, rules = jax.random.key(0), [(".*", ts.fsdp("fsdp"))]
    whole = (512 * 1024 + 64 * 64) * 4
    shardings = ts.plan(jax.eval_shape(big, key), rules, fsdp_mesh, min_size=0).shardings
    # What init_sharded compiles: the same function with the plan's out_shardings.
    memory = jax.jit(big, out_shardings=shardings).lower(key).compile().memory_analysis()
    assert memory.output_size_in_bytes <= whole / 8 + 64
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 0.6 * whole
    tree, _ = init_sharded(big, key, rules=rules, mesh=fsdp_mesh, min_size=0)
    assert {piece.data.nbytes for piece in tree["w"].addressable_shards} == {512 * 1024 * 4 // 8}
    assert_same(tree, jax.jit(big)(key))


def test_static_and_array_arguments_and_the_mesh_inside(fsdp_mesh) -> None:
    def make(width, names, x, *, rules=None):
        assert ts.get_incontext_mesh().shape == fsdp_mesh.shape
        constrained = ts.with_sharding_constraint(jnp.outer(x, jnp.ones(width)), P("fsdp"))
        return {"x": constrained, "names": names, "numpy": np.ones(16, np.float32)}

    x = np.arange(8, dtype=np.float32)
    rules = [("^x", None), ("numpy", P("fsdp"))]
    tree, plan = init_sharded(make, 16, "abc", x, rules=rules, mesh=fsdp_mesh, min_size=0)
    assert tree["names"] == "abc"
    assert tree["x"].sharding.is_fully_replicated
    assert tree["numpy"].sharding.spec == P("fsdp")
    np.testing.assert_array_equal(tree["x"], np.outer(x, np.ones(16)))
    assert [leaf.path for leaf in plan.leaves] == ["numpy", "x"]


def test_misfits_raise_before_anything_is_allocated(fsdp_mesh, compiles) -> None:
    def make():
        return {"a": jnp.ones((9, 2)), "b": jnp.ones(16), "c": jnp.ones(3)}

    rules = [("a", P("fsdp")), ("b", P("fdsp"))]
    compiles.clear()
    with pytest.raises(ts.ShardingRuleError, match=r"a: (.|\n)*b: (.|\n)*c: "):
        init_sharded(make, rules=rules, mesh=fsdp_mesh, min_size=0)
    assert compiles == []
    with pytest.warns(ts.ShardingWarning, match=r"as it fits. (.|\n)*a: (.|\n)*b: (.|\n)*c: "):
        tree, _ = init_sharded(make, rules=rules, mesh=fsdp_mesh, min_size=0, strict=False)
    assert all(x.sharding.is_fully_replicated for x in tree.values())


@pytest.mark.usefixtures("unchecked")
def test_an_abstract_mesh_cannot_hold_arrays(initialised) -> None:
    abstract = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    with pytest.raises(ts.MeshError, match="init_sharded: the mesh .fsdp=8. is an AbstractMesh"):
        init_sharded(init, jax.random.key(0), rules=RULES, mesh=abstract)
    plan = ts.plan(initialised[0], RULES, abstract)
    with pytest.raises(ts.MeshError, match="jit_step: the mesh"):
        jit_step(train_step, plan, batch=P("fsdp"))


def sgd_step(state: Any, batch: Any, differentiate: Any = None) -> Any:
    return train_step(state, batch, optax.sgd(0.1), differentiate)


def by_hand(plan: ts.Plan, batch: Any) -> Any:
    grad = value_and_grad(loss_fn, plan.mesh.axis_names, plan.specs.model)

    def step(state: Any, batch: Any) -> Any:
        assert state.model.layers[1].weight.shape == (32, 32 // plan.mesh.shape["fsdp"])
        return sgd_step(state, batch, grad)

    return shard_map_step(step, plan, batch=batch, donate=False)


@pytest.mark.usefixtures("quick_compiles")
def test_steps_by_jit_and_by_hand_equal_one_device(mesh, compiles) -> None:
    def start(key: Any) -> Any:
        return init(key, optax.sgd(0.1))

    placed, plan = init_sharded(start, jax.random.key(1), rules=RULES, mesh=mesh)
    rows = P(mesh.axis_names)
    steps = [jit_step(sgd_step, plan, batch=rows, donate=False), by_hand(plan, rows)]
    states = [placed, placed]
    alone, on_one_device = eqx.filter_jit(start)(jax.random.key(1)), eqx.filter_jit(sgd_step)
    for i in range(3):
        compiles.clear()
        alone, expected = on_one_device(alone, make_batch(i))
        for way, step in enumerate(steps):
            states[way], loss = step(states[way], make_batch(i))
            np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert compiles == []  # after the first step
    for state in states:
        assert_close(eqx.filter(state.model, eqx.is_array), eqx.filter(alone.model, eqx.is_array))
        assert int(state.step) == 3
        assert_as_planned(state, plan)


def test_batches_of_every_kind(initialised, step, fsdp_mesh) -> None:
    state, _ = initialised
    batch = make_batch()
    _, expected = step(state, batch)
    on_one_device = jax.tree.map(jnp.asarray, batch)
    placed = ts.shard(batch, P("fsdp"), fsdp_mesh)
    for other in (on_one_device, placed):
        np.testing.assert_array_equal(step(state, other)[1], expected)
    for scale in (1.0, np.float32(1), jnp.float32(1)):
        np.testing.assert_array_equal(step(state, {**batch, "scale": scale})[1], expected)


def test_batches_that_do_not_fit_their_specs(initialised, step) -> None:
    with pytest.raises(ts.SpecError) as error:
        step(initialised[0], make_batch(size=12))
    for part in ("x: ", "y: ", "(12, 16)", "12 is not divisible", "fsdp=8", "Pad it to 16"):
        assert part in str(error.value)
    specs = {"x": P("fsdp"), "y": P()}
    by_name = jit_step(train_step, initialised[1], batch=specs, donate=False)
    by_name(initialised[0], make_batch())
    with pytest.raises(ts.SpecError, match="the batch specs lack 'z'"):
        by_name(initialised[0], {**make_batch(), "z": 0})
    with pytest.raises(ts.UnknownAxisError, match="batch: the mesh has no axis 'fdsp'.*Did you"):
        jit_step(train_step, initialised[1], batch=P("fdsp"))


@pytest.mark.parametrize(
    ("shape", "spec", "batch"),
    [
        ("data=2,fsdp=4", P("fsdp"), P(("data", "fsdp"))),
        ("data=2,tensor=4", P("tensor"), P("data")),
        ("dp=2,fsdp=2,mp=2", P("fsdp", "mp"), P(("dp", "fsdp"))),
        ("dcn_data=2,ici_fsdp=4", P(), P(("dcn_data", "ici_fsdp"))),
        ("fsdp=2,tensor=4", ts.fsdp(("fsdp", "tensor")), P(("fsdp", "tensor"))),
        ("devices=8", ts.fsdp("devices"), P("devices")),
        ("tensor=8", P(), P()),
        ("data=2,shard=4", P("shard"), P("data")),
        ("data=2,fsdp=2,sp=2", P(("fsdp", "sp")), P(("data", "fsdp"))),
    ],
)
def test_the_axes_that_split_the_batch_by_default(shape, spec, batch) -> None:
    plan = ts.plan({"w": struct(16, 16)}, [("w", spec)], ts.make_mesh(shape), min_size=0)
    assert jit_step(lambda state, batch: (state, 0), plan).batch_specs == batch


def test_as_a_decorator(initialised) -> None:
    @jit_step(plan=initialised[1])
    def my_step(state, batch):
        """Steps."""
        return state, batch

    assert (my_step.__name__, my_step.__doc__) == ("my_step", "Steps.")
    assert my_step.plan is initialised[1]
    with pytest.raises(ts.StateError, match="jit_step needs the plan of the state"):
        jit_step(train_step, batch=P("fsdp"))


@pytest.mark.usefixtures("quick_compiles")
def test_inside_another_jit(initialised, step, fsdp_mesh) -> None:
    state, plan = initialised
    params, static = eqx.partition(state, eqx.is_array)

    def two_losses(params, batch):
        state, first = step(eqx.combine(params, static), batch)
        return first, step(state, batch)[1]

    batch = ts.shard(make_batch(), P("fsdp"), fsdp_mesh)
    middle, first = step(state, batch)
    expected = [first, step(middle, batch)[1]]
    np.testing.assert_allclose(jax.jit(two_losses)(params, batch), expected, rtol=1e-5)
    step = jit_step(train_step, plan, batch=P("fsdp"), donate=False)
    step.compile(plan.structs, batch)  # which cannot be called there
    again = jax.jit(lambda *args: two_losses(*args))
    np.testing.assert_allclose(again(params, batch), expected, rtol=1e-5)


def test_static_leaves_may_differ_between_calls(fsdp_mesh) -> None:
    state = {"w": jnp.ones(8), "rate": 0.5}
    plan = ts.plan(state, [("w", P("fsdp"))], fsdp_mesh, min_size=0)
    step = jit_step(lambda s, b: ({**s, "w": s["w"] - s["rate"]}, None), plan, donate=False)
    placed = ts.shard(state, plan)
    for rate in (0.5, 0.25, 0.5):
        new, _ = step({**placed, "rate": rate}, {})
        np.testing.assert_array_equal(new["w"], np.full(8, 1 - rate))
        assert new["rate"] == rate


class Elementwise:
    """Compares itself as an array does."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, True])

    __hash__ = None  # type: ignore[assignment]


class Symbolic(Elementwise):
    """Compares itself by an expression, which is true."""

    def __eq__(self, other: object) -> Any:
        return "self == other"


CONSTANTS = {
    "strings": (lambda: np.array(["a", "b"]), lambda: np.array(["a", "c"]), True),
    "more strings": (lambda: np.array(["a", "a"]), lambda: np.array(["a"]), True),
    "long strings": (
        lambda: np.array(["a" * 99], np.dtypes.StringDType()),
        lambda: np.array(["a" * 98 + "b"], np.dtypes.StringDType()),
        True,
    ),
    "no strings": (lambda: np.array([], str), lambda: np.array(["a"]), True),
    "a string": (lambda: np.str_("a"), lambda: np.str_("b"), True),
    "dates": (
        lambda: np.array(["2020", "NaT"], "M8[s]"),
        lambda: np.array(["NaT"] * 2, "M8[D]"),
        True,
    ),
    "objects": (
        lambda: np.array([None, float("nan"), np.ones(2)], object),
        lambda: np.array([None, float("nan"), np.zeros(2)], object),
        True,
    ),
    "types of objects": (lambda: np.array([1], object), lambda: np.array([True], object), True),
    "signs of zeros": (lambda: 1 - 1.0, lambda: -0.0, True),
    "signs of complex zeros": (lambda: complex(0, 0), lambda: complex(0, -0.0), True),
    "nan": (lambda: float("nan"), lambda: 1.0, True),
    "== of elements": (Elementwise, Elementwise, False),
    "== that is no bool": (Symbolic, Symbolic, False),
}


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (where, name)
        for name, (make, *_) in CONSTANTS.items()
        for where in ("state", "batch")
        # Numbers in a batch are arguments of the program.
        if where == "state" or type(make()) not in (float, complex)
    ],
)
def test_equal_constants_share_a_program_and_others_do_not(where, name, fsdp_mesh) -> None:
    make, other, can_be_equal = CONSTANTS[name]
    state, traced = {"w": jnp.ones(8)}, []
    plan = ts.plan(state, [("w", P("fsdp"))], fsdp_mesh, min_size=0)

    def fn(s, b):
        traced.append((s | b)["constant"])
        return s, b["x"].sum()

    step, placed = jit_step(fn, plan, donate=False), ts.shard(state, plan)

    def call(constant):
        s, b = dict(placed), {"x": np.ones(8, np.float32)}
        (s if where == "state" else b)["constant"] = constant
        step(s, b)

    for constant in (make(), make(), make()):
        call(constant)
    assert len(traced) == (1 if can_be_equal else 3)
    call(different := other())
    assert traced[-1] is different
    call(different)
    assert len(traced) == (2 if can_be_equal else 4)


def test_the_sign_of_a_zero_reaches_the_program(fsdp_mesh) -> None:
    state = {"w": jnp.ones(8), "z": 0.0}
    plan = ts.plan(state, [("w", P("fsdp"))], fsdp_mesh, min_size=0)
    step = jit_step(lambda s, b: ({**s, "w": jnp.copysign(s["w"], s["z"])}, b), plan, donate=False)
    placed = ts.shard(state, plan)
    for z, sign in ((0.0, 1), (-0.0, -1)):
        np.testing.assert_array_equal(step({**placed, "z": z}, {})[0]["w"], np.full(8, sign))


CHANGES = {
    "a python counter": (
        lambda s: {**s, "count": s["count"] + 1},
        r"count: the step turns the int 0 into the int 1.*`jnp\.int32\(0\)`",
    ),
    "a function": (lambda s: {**s, "act": jnp.cos}, "act: .*Keep it out of the state"),
    "an array that becomes a number": (
        lambda s: {**s, "w": 1.0},
        r"w: leaves the step as the float 1.0, but the plan has float32\[8\]",
    ),
    "a dtype": (
        lambda s: {**s, "w": s["w"].astype(jnp.bfloat16)},
        r"w: leaves the step as bfloat16\[8\], but the plan has float32\[8\]",
    ),
    "a shape": (lambda s: {**s, "w": s["w"][:4]}, r"w: leaves the step as float32\[4\]"),
    "a leaf less": (lambda s: {"w": s["w"]}, "count: the returned state lacks it"),
    "a leaf more": (lambda s: {**s, "new": 0}, "new: the step adds it to the state"),
    "another container": (lambda s: {**s, "pair": tuple(s["pair"])}, "a container"),
}


@pytest.mark.parametrize("case", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_step_must_not_change(case, fsdp_mesh) -> None:
    change, message = case
    state = {"w": jnp.ones(8), "count": 0, "act": jnp.sin, "pair": [1, 2]}
    plan = ts.plan(state, [("w", P("fsdp"))], fsdp_mesh, min_size=0)
    placed = ts.shard(state, plan)
    with pytest.raises(ts.StateError, match=message):
        jit_step(lambda s, b: (change(s), None), plan)(placed, {})
    assert not placed["w"].is_deleted()


def test_a_step_must_return_the_state_and_aux_in_this_order(fsdp_mesh) -> None:
    state = {"w": jnp.ones(8), "count": 0}
    plan = ts.plan(state, [(".*", P("fsdp"))], fsdp_mesh, min_size=0)
    with pytest.raises(ts.StateError, match="must return .state, aux., not dict"):
        jit_step(lambda s, b: s, plan)(ts.shard(state, plan), {})
    with pytest.raises(ts.StateError, match=r"^The step returns \(aux, state\): its second"):
        jit_step(lambda s, b: (b.sum(), s), plan)(ts.shard(state, plan), jnp.ones(8))


def test_a_batch_of_one_row_has_a_spec_that_it_can_be_stepped_with(fsdp_mesh) -> None:
    state = {"w": jnp.ones(8)}
    plan = ts.plan(state, [("w", P("fsdp"))], fsdp_mesh, min_size=0)

    def loop(s, b):
        return s, b.sum()

    with pytest.raises(ts.SpecError, match=r"1 is not divisible by 8(.|\n)*`batch=P\(\)`"):
        jit_step(loop, plan)(ts.shard(state, plan), jnp.ones((1, 3)))
    with pytest.raises(ts.SpecError, match="3 is not divisible by 8") as caught:
        jit_step(loop, plan)(ts.shard(state, plan), jnp.ones((3, 1)))
    assert "batch=P()" not in str(caught.value)
    step = jit_step(loop, plan, batch=P())
    assert step(ts.shard(state, plan), jnp.ones((1, 3)))[1] == 3


def test_a_state_that_does_not_match_the_plan(initialised, step, fsdp_mesh) -> None:
    state = initialised[0]
    with pytest.raises(ts.SpecError, match="The state does not match the plan") as error:
        step({"model": state.model}, make_batch())
    assert "opt_state/0/count: the state has no such array." in str(error.value)
    wide = eqx.tree_at(lambda s: s.model.layers[0].bias, state, jnp.zeros(64))
    with pytest.raises(ts.StateError, match=r"model/layers/0/bias: enters the step as float32\[64"):
        step(wide, make_batch())
    whole = jax.device_put(state.model.layers[1].weight, NamedSharding(fsdp_mesh, P()))
    moved = eqx.tree_at(lambda s: s.model.layers[1].weight, state, whole)
    with pytest.raises(ts.SpecError, match="model/layers/1/weight: sharded as Named") as error:
        step(moved, make_batch())
    assert "planned as P(None, 'fsdp')" in str(error.value)
    assert "`treeshard.shard(state, plan)`" in str(error.value)


def test_results_that_differ_from_device_to_device(mesh) -> None:
    state = {"w": jnp.zeros(8), "b": jnp.zeros(())}
    plan = ts.plan(state, [("w", P("fsdp")), ("b", None)], mesh, min_size=0)
    step = shard_map_step(
        lambda s, b: ({"w": s["w"] + b.sum(), "b": s["b"] + b.sum()}, {"loss": b.sum()}),
        plan,
        batch=P(("data", "fsdp")),
    )
    with pytest.raises(ts.StateError) as error:
        step(ts.shard(state, plan), np.ones(8, np.float32))
    for part in (
        "3 results differ between devices",
        "w: the result differs along 'data', but the plan shards it as P('fsdp',). Average its",
        "b: the result differs along 'data', 'fsdp', but the plan shards it as P()",
        "aux/loss: it differs along 'data', 'fsdp'. Reduce it: `Metrics.reduce`",
    ):
        assert part in str(error.value)
