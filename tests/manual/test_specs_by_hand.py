"""Code by hand never takes a shard for the full weight: it finds the specs, or raises.

Raw gradients are compared with those of one device.
"""

import gc
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, on
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual, testing
from treeshard._core import origins
from treeshard.errors import WrongResultError
from treeshard.training import accumulate_gradients

pytestmark = pytest.mark.usefixtures("quick_compiles")
checks = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
MESH = ts.make_mesh("data=2,fsdp=4")
AXES = ("data", "fsdp")
Way = Callable[..., Any]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32") / 4


X = normal(9, 32, 16)
PARAMS = {"v": normal(0, 16, 16), "w": normal(1, 16, 8), "b": normal(2, 16)}
SPECS = {"v": P(None, "fsdp"), "w": P(None, "fsdp"), "b": P()}


def loss(p: Any, x: Any) -> Any:
    # Of columns of the weights it would be a number too.
    return jnp.mean((jnp.tanh(x @ p["v"] + p["b"][None]) @ p["w"]) ** 2)


def without_w(p: Any, x: Any) -> Any:
    """The loss, which gathers `v` only: the rows of `w` fit."""
    return loss({**p, "v": ts.unshard(p["v"])}, x)


def plan_of(tree: Any, *rules: Any, mesh: Any = MESH) -> ts.Plan:
    return ts.plan(tree, [*rules, (".*", None)], mesh, min_size=0)


PLAN = plan_of(PARAMS, ("v|w", P(None, "fsdp")))


def change(way: Way, params: Any = PARAMS, plan: ts.Plan = PLAN, x: Any = X) -> Any:
    """The loss, and what a step by hand subtracts from its parameters: their gradients."""

    def step(params: Any, x: Any) -> Any:
        value, grads = way(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    run = ts.shard_map_step(step, plan, batch=P(AXES), donate=False)
    new, value = run(ts.shard(params, plan), x)
    return value, jax.tree.map(lambda old, new: old - new, params, ts.gather(new))


def check_gradients(way: Way, loss: Way, params: Any = PARAMS, plan: ts.Plan = PLAN) -> None:
    found = jax.tree.leaves(change(way, params, plan))
    wanted = jax.tree.leaves(jax.value_and_grad(loss)(params, X))
    assert_close(found, wanted, 1e-4)


def by_grad(loss: Way, specs: Any = None, sync: Way | None = None) -> Way:
    """`jax.value_and_grad` of a loss that gathers, then `sync_gradients`."""
    sync = sync or partial(manual.sync_gradients, axis_names=AXES, specs=specs)

    def way(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(manual.vary(params, AXES), x)
        return lax.pmean(value, AXES), sync(grads)

    return way


def with_gather(gather: Way) -> Way:
    return lambda p, x: loss(gather(p), x)


by_unshard, by_gather = with_gather(ts.unshard), with_gather(manual.gather_params)
WAYS: dict[str, Way] = {
    "value_and_grad": manual.value_and_grad(loss, AXES),
    "its loss gathers": manual.value_and_grad(by_gather, AXES, gather=False),
    "its loss unshards": manual.value_and_grad(by_unshard, AXES, gather=False),
    "of gathered": lambda p, x: (
        lambda value, g: (value, manual.shard_params(g, AXES, specs=PLAN))
    )(*manual.value_and_grad(loss, AXES)(ts.unshard(p), x)),
    "unshard, sync": by_grad(by_unshard),
    "gather_params, sync": by_grad(by_gather),
    "module": by_grad(manual.shard_module_params(loss, AXES, remat=True)),
    "remat": by_grad(jax.checkpoint(by_gather)),
    "jit": by_grad(jax.jit(by_gather)),
    "leaf by leaf": by_grad(
        with_gather(lambda p: {name: ts.unshard(x) for name, x in p.items()}),
        sync=lambda g: {name: manual.sync_gradients(x, AXES) for name, x in g.items()},
    ),
    "restructured": by_grad(
        with_gather(lambda p: dict(zip(p, ts.unshard(tuple(p.values())), strict=True)))
    ),
    "minibatches": lambda p, x: (
        manual.value_and_grad(loss, AXES)(p, x)[0],
        accumulate_gradients(
            lambda rows, _: (manual.value_and_grad(loss, AXES)(p, rows)[1], ()), x, 2
        )[0],
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_plan_of_the_step_says_how_parameters_are_sharded(name: str) -> None:
    check_gradients(WAYS[name], loss)


def test_what_is_no_part_of_the_plan_is_averaged_and_gaps_are_none() -> None:
    params = {**PARAMS, "ids": np.arange(16, dtype="int32")}
    plan = plan_of(params, ("v|w|ids", P("fsdp")))

    def step(params: Any, x: Any) -> Any:
        f = lambda p: loss(manual.gather_params({**params, **p}), x)  # noqa: E731
        trained = {name: params[name] for name in PARAMS}
        grads = jax.grad(f)(manual.vary(trained, AXES))
        grads = manual.sync_gradients({**grads, "ids": None}, AXES)
        assert grads["ids"] is None
        new = {name: params[name] - grads[name] for name in PARAMS}
        return {**params, **new}, manual.sync_gradients({"rows": jnp.mean(x)}, AXES)["rows"]

    run = ts.shard_map_step(step, plan, batch=P(AXES), donate=False)
    new, mean = run(ts.shard(params, plan), X)
    grads = {name: params[name] - ts.gather(new)[name] for name in PARAMS}
    assert_close((mean, grads), (np.mean(X), jax.grad(loss)(PARAMS, X)), 1e-4)


# ------------------------------------------------------------------ several leaves of one shape

# Shards of one shape, in another order.
LAYERS = {"layers": [{"w": normal(3, 16, 16)}, {"w": normal(4, 16, 16)}]}
TURNED = plan_of(LAYERS, ("layers/0", P(AXES)), ("layers/1", P(("fsdp", "data"))))


def through(params: Any, x: Any, gather: Way = lambda layer, _: layer) -> Any:
    for number, layer in enumerate(params["layers"]):
        x = jnp.tanh(x @ gather(layer, number)["w"])
    return jnp.mean(x**2)


each = partial(through, gather=lambda layer, _: ts.unshard(layer))
named = partial(through, gather=lambda layer, i: ts.unshard(layer, TURNED["layers"][i]))
OF_LAYERS = {
    "value_and_grad": manual.value_and_grad(through, AXES),
    "each, gather=False": manual.value_and_grad(each, AXES, gather=False),
    "each, jax.grad": by_grad(each),
    "named, remat": by_grad(jax.checkpoint(named)),
}


@pytest.mark.parametrize("name", OF_LAYERS)
def test_arrays_that_the_step_received_are_known_by_identity(name: str) -> None:
    check_gradients(OF_LAYERS[name], through, LAYERS, TURNED)


def test_a_part_of_the_plan_is_known_by_identity_and_not_the_first_that_fits() -> None:
    """Optimizer state, and a leaf below the key of another one."""
    state = {"a": {"w": normal(3, 16, 16)}, "b": {"kernel": normal(4, 16, 16)}}
    state = {"params": state, "ema": jax.tree.map(np.copy, state)}
    plan = plan_of(state, ("params/a|ema/b", P(AXES)), (".*", P(("fsdp", "data"))))

    def step(state: Any, x: Any) -> Any:
        full = {
            "as w": ts.unshard({"w": state["params"]["b"]["kernel"]}),
            "ema": manual.gather_params(state["ema"], AXES),
        }
        return state, lax.pmean(full, AXES)

    run = ts.shard_map_step(step, plan, batch=P(AXES), donate=False)
    _, full = run(ts.shard(state, plan), X)
    assert_close(full, {"as w": {"w": state["params"]["b"]["kernel"]}, "ema": state["ema"]})


AMBIGUOUS = {
    "unshard": (
        by_grad(jax.checkpoint(each), TURNED),
        'unshard(tree, plan["layers"][0])',
    ),
    "gather_params": (
        by_grad(
            jax.checkpoint(partial(through, gather=lambda x, _: manual.gather_params(x, AXES)))
        ),
        'gather_params(params, axis_name, plan["layers"][0])',
    ),
    "sync_gradients": (
        by_grad(
            each, sync=lambda g: {"layers": [manual.sync_gradients(x, AXES) for x in g["layers"]]}
        ),
        'sync_gradients(grads, axis_names, plan["layers"][0])',
    ),
    "value_and_grad": (
        lambda p, x: manual.value_and_grad(lambda q, x: jnp.sum(q["w"]), AXES)(
            jax.tree.map(lambda x: x * 2, p["layers"][0]), x
        ),
        'value_and_grad(loss, axis_names, plan["layers"][0])',
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_tree_that_may_be_several_parts_is_an_error_with_the_line_to_write(name: str) -> None:
    way, line = AMBIGUOUS[name]
    message = (
        f"{name}: the plan has several subtrees of this structure with leaves of shape (2, 16), and"
        " they are sharded differently: layers/0/w as [P(('data', 'fsdp'),)]; layers/1/w as"
        f" [P(('fsdp', 'data'),)]. Pass the plan of the one that you mean, such as `{line}`."
    )
    with pytest.raises(ts.SpecError, match=re.escape(message)):
        change(way, LAYERS, TURNED)


# ------------------------------------------------------------------ boxes and modules


class Model(nnx.Module):
    def __init__(self) -> None:
        self.up = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(32, 8, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


GRAPH, STATE = nnx.split(Model())


def of_nnx(state: Any, x: Any) -> Any:
    return jnp.mean(nnx.merge(GRAPH, state)(x) ** 2)


def of_linen(params: Any, x: Any) -> Any:
    kernel = jax.tree.leaves(params["kernel"])[0]  # with a box, or without
    return jnp.mean(jnp.tanh(x @ kernel + params["bias"][None]) ** 2)


def in_box(*names: str | None) -> Any:
    return {"kernel": nn.Partitioned(normal(5, 16, 8), names), "bias": normal(6, 8)}


MLP = eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0))
ARRAYS, STATIC = eqx.partition(MLP, eqx.is_array)


def of_equinox(arrays: Any, x: Any) -> Any:
    return jnp.mean(jax.vmap(eqx.combine(arrays, STATIC))(x) ** 2)


BOXES = {
    "nnx.Param": (of_nnx, STATE),
    "no names": (of_linen, in_box(None, None)),
    "logical names": (of_linen, in_box("embed", "mlp")),
    "names of axes": (of_linen, in_box(None, "fsdp")),
    "equinox": (of_equinox, ARRAYS),
}


@pytest.mark.parametrize("way", ["value_and_grad", "gather_params", "unshard"])
@pytest.mark.parametrize("name", BOXES)
def test_boxes_without_names_are_sharded_as_the_plan_says(name: str, way: str) -> None:
    loss, params = BOXES[name]
    gather = ts.unshard if way == "unshard" else manual.gather_params
    gathered = by_grad(jax.checkpoint(lambda p, x: loss(gather(p), x)))
    run = manual.value_and_grad(loss, AXES) if way == "value_and_grad" else gathered
    plan = plan_of(params, ("kernel|weight", P(None, "fsdp")))
    check_gradients(run, loss, params, plan)


def test_boxes_that_name_other_axes_than_the_plan() -> None:
    """The plan has sharded what the step has received; of other arrays it cannot be known."""
    params = in_box("data", None)
    plan = plan_of(params, ("kernel", P(None, "fsdp")))
    check_gradients(manual.value_and_grad(of_linen, AXES), of_linen, params, plan)
    gathers = by_grad(jax.checkpoint(lambda p, x: of_linen(manual.gather_params(p), x)))
    message = (
        "gather_params: boxes and the plan of the step differ:\n  kernel: P('data',) in its box,"
        " and P(None, 'fsdp') in the plan.\n"
        "Pass the specs: `gather_params(params, axis_name, specs)`."
    )
    with pytest.raises(ts.SpecError, match=re.escape(message)):
        change(gathers, params, plan)


# ------------------------------------------------------------------ a shard_map of one's own


def alone(way: Way, check_vma: bool, specs: Any = SPECS) -> Any:
    run = on(MESH, way, (specs, P(AXES)), (P(), specs), check_vma)
    return run(PARAMS, X)


OWN: dict[str, Way] = {
    "plan": lambda p: ts.unshard(p, PLAN),
    "parts of it": lambda p: {name: ts.unshard(x, PLAN[name]) for name, x in p.items()},
    "specs": lambda p: ts.unshard(p, SPECS, "fsdp"),
    "shardings": lambda p: ts.unshard(p, PLAN.shardings, "fsdp"),
}


@checks
def test_unshard_gathers_over_manual_axes(check_vma: bool) -> None:
    ways = {name: by_grad(with_gather(gather), SPECS) for name, gather in OWN.items()}
    every = lambda p, x: {name: way(p, x) for name, way in ways.items()}  # noqa: E731
    out = dict.fromkeys(OWN, (P(), SPECS))
    found = on(MESH, every, (SPECS, P(AXES)), out, check_vma)(PARAMS, X)
    assert_close(found, dict.fromkeys(OWN, jax.value_and_grad(loss)(PARAMS, X)))


@checks
def test_some_axes_are_by_hand_and_others_the_compilers(check_vma: bool) -> None:
    mesh = ts.make_mesh("data=2,fsdp=2,tensor=2")
    plan = plan_of(PARAMS, ("v|w", P("tensor", "fsdp")), mesh=mesh)
    unsharding = by_grad(lambda p, x: loss(ts.unshard(p, plan), x), SPECS)
    both = (unsharding, manual.value_and_grad(loss, AXES, SPECS))
    f = jax.shard_map(
        lambda p, x: [way(p, x) for way in both],
        mesh=mesh,
        in_specs=(SPECS, P(AXES)),
        out_specs=[(P(), SPECS)] * 2,
        axis_names={*AXES},
        check_vma=check_vma,
    )
    wanted = jax.value_and_grad(loss)(PARAMS, X)
    assert_close(jax.jit(f)(ts.shard(PARAMS, plan), X), [wanted, wanted])


@checks
def test_full_arrays_are_not_gathered(check_vma: bool) -> None:
    whole = dict.fromkeys(PARAMS, P())
    wanted = jax.value_and_grad(loss)(PARAMS, X)
    unsharded = by_grad(with_gather(OWN["plan"]), P())
    for way in (unsharded, manual.value_and_grad(loss, AXES)):
        assert_close(alone(way, check_vma, whole), wanted)


def test_unshard_by_hand_of_what_does_not_fit() -> None:
    cases = [
        (lambda p: ts.unshard(p, P(AXES), "data"), "unshard: 3 leaves cannot be gathered:"),
        (lambda p: ts.unshard(p["b"], P(None, "fsdp"), "fsdp"), "Drop the last entry."),
    ]
    for gather, message in cases:
        with pytest.raises(ts.SpecError, match=message):
            alone(lambda p, x, gather=gather: (jnp.zeros(()), gather(p)), check_vma=False)


UNKNOWN = {
    "value_and_grad": (
        manual.value_and_grad(loss, AXES),
        "value_and_grad: no specs say how these leaves are sharded, and they differ between devices"
        ":\n  v: float32[16,4] differs along ['fsdp'].\n  w: float32[16,2] differs along ['fsdp']."
        "\nPass the specs of the `shard_map`: `value_and_grad(loss, axis_names, specs)`. If each",
    ),
    "gather_params": (
        by_grad(lambda p, x: loss(manual.gather_params(p, AXES), x), SPECS),
        "gather_params: no specs say how these leaves are sharded",
    ),
    "sync_gradients": (
        by_grad(lambda p, x: loss(manual.gather_params(p, AXES, SPECS), x)),
        "sync_gradients: gradients of shards would be averaged:\n  v: each device has its shard"
        " along ['fsdp'], not summands.\n",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_shards_without_specs_are_an_error_where_it_can_be_known(name: str) -> None:
    way, message = UNKNOWN[name]
    with pytest.raises(ts.SpecError, match=re.escape(message)):
        alone(way, check_vma=True)


@checks
def test_the_gradient_function_for_jit_refuses_shards(check_vma: bool) -> None:
    message = r"value_and_grad: this runs once per device, inside `jax\.shard_map`, on shards"
    with pytest.raises(ts.SpecError, match=message):
        alone(ts.training.value_and_grad(by_unshard, PLAN), check_vma)


# ------------------------------------------------------------------ what nobody gathers


@pytest.mark.parametrize("name", ["value_and_grad", "jax.grad"])
def test_a_weight_that_is_used_as_a_shard_is_an_error(name: str) -> None:
    way = manual.value_and_grad(without_w, AXES, gather=False)
    way = by_grad(without_w) if name == "jax.grad" else way
    message = (
        "shard_map_step: shards are used as if they were full weights: the step never gathers\n"
        "  w: P(None, 'fsdp') splits it over ['fsdp'].\nCall `treeshard.unshard(params)`"
    )
    with pytest.raises(ts.SpecError, match=re.escape(message)):
        change(way)


def test_another_step_of_the_plan_is_traced_anew_and_raises_too() -> None:
    inner = jax.jit(manual.value_and_grad(without_w, AXES, gather=False))
    for _ in range(2):
        with pytest.raises(ts.SpecError, match="the step never gathers\n  w:"):
            change(lambda p, x: inner(p, x))


def test_an_array_that_is_equal_on_all_devices_is_no_shard() -> None:
    """Also if the plan does not have it."""

    def scaled(p: Any, x: Any) -> Any:
        found = ts.unshard({"scale": jnp.full(3, 2.0), "weights": p})
        return loss(found["weights"], x) * found["scale"].mean()

    check_gradients(by_grad(scaled), lambda p, x: 2 * loss(p, x))


def test_an_unused_leaf_may_have_empty_shards() -> None:
    state = {"w": normal(1, 8, 8), "empty": np.zeros((0, 4), "float32")}
    plan = ts.plan(state, [(".*", ts.fsdp("fsdp", min_size=0))], MESH)  # shards of shape (0, 1)
    of_w = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        value, grads = manual.value_and_grad(of_w, AXES)(state, x)
        return grads, value

    x = normal(2, 16, 8)
    new, _ = ts.training.shard_map_step(step, plan)(ts.shard(state, plan), x)
    assert new["empty"].shape == (0, 4)
    assert_close(new["w"], jax.grad(of_w)(state, x)["w"])


def test_check_step_finds_what_these_errors_find(monkeypatch) -> None:
    from treeshard.training import _accumulation, _program

    def step(way: Way) -> Any:
        def step(params: Any, x: Any) -> Any:
            value, grads = way(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    monkeypatch.setattr(_program.Program, "_check_gathered", lambda *_: None)
    monkeypatch.setattr(_accumulation, "_explain_not_own", lambda *_: "")
    summed = lambda p, x: (  # noqa: E731
        lax.pmean(loss(p, x), AXES),
        accumulate_gradients(lambda b, _: (jax.grad(loss)(p, b), ()), x, 2, axis_names=AXES)[0],
    )
    of_shards = manual.value_and_grad(without_w, AXES, gather=False)
    for way, plan in ((of_shards, PLAN), (summed, plan_of(PARAMS))):
        run = ts.shard_map_step(step(way), plan, batch=P(AXES), donate=False)
        with pytest.raises(WrongResultError, match="results are wrong"):
            testing.check_step(run, ts.shard(PARAMS, plan), X)


def test_rows_that_are_sent_to_split_weights_need_no_gather() -> None:
    """As to experts: each device has one, and every device sends it a part of its rows."""
    experts = {"w": normal(7, 8, 16, 16)}
    plan = plan_of(experts, ("w", P(AXES)))

    def through_own(p: Any, x: Any) -> Any:
        sent = lax.all_to_all(x.reshape(8, -1, 16), AXES, 0, 0)
        rows = jnp.einsum("erd,edf->erf", sent.reshape(1, -1, 16), p["w"])
        return jnp.mean(jnp.tanh(rows) ** 2)

    def way(p: Any, x: Any) -> Any:
        value, grads = manual.value_and_grad(through_own, AXES, gather=False)(p, x)
        return value, jax.tree.map(lambda g: g / 8, grads)  # other devices' losses are in it

    def on_one_device(p: Any, x: Any) -> Any:
        rows = x.reshape(8, 8, -1, 16).swapaxes(0, 1).reshape(8, -1, 16)
        return jnp.mean(jnp.tanh(rows @ p["w"]) ** 2)

    x = normal(8, 128, 16)
    wanted = jax.value_and_grad(on_one_device)(experts, x)
    assert_close(change(way, experts, plan, x), wanted, 1e-4)


# ------------------------------------------------------------------ gradients over minibatches


def accumulated(grad: Way) -> Way:
    def way(p: Any, x: Any) -> Any:
        grad_fn = lambda rows, _: (grad(p, rows), ())  # noqa: E731
        return jnp.zeros(()), accumulate_gradients(grad_fn, x, 2, axis_names=AXES)[0]

    return way


WHOLE = dict.fromkeys(PARAMS, P())


@checks
def test_gradients_of_each_device_are_averaged_over_axis_names(check_vma: bool) -> None:
    wanted = jax.grad(loss)(PARAMS, X)
    own = lambda p, x: jax.grad(loss)(manual.vary(p, AXES), x)  # noqa: E731
    reduced = lambda p, x: manual.value_and_grad(loss, AXES)(p, x)[1]  # noqa: E731
    for grad in (own, reduced):
        assert_close(alone(accumulated(grad), check_vma, WHOLE)[1], wanted)


@checks
def test_gradients_of_shards_are_no_summands(check_vma: bool) -> None:
    grad = lambda p, x: manual.value_and_grad(loss, AXES, SPECS)(p, x)[1]  # noqa: E731
    message = r"w: each device has its shard of it along \['fsdp'\]\. Leave these axes out"
    with pytest.raises(ts.SpecError, match=message):
        alone(accumulated(grad), check_vma)


def test_nothing_is_kept_of_a_trace() -> None:
    before = set(origins._NOTES)  # of failed traces, which pytest keeps
    change(WAYS["value_and_grad"])
    gc.collect()
    assert set(origins._NOTES) <= before
