"""Inside shard_map, raw gradients equal those of one device, with and without check_vma."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same, on, sent
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import manual

MESHES = {
    "1x8": ts.make_mesh("data=1,fsdp=8"),
    "2x4": ts.make_mesh("data=2,fsdp=4"),
    "4x2": ts.make_mesh("data=4,fsdp=2"),
}
BOTH = ("data", "fsdp")
# Most of the time goes to XLA, and code that runs once need not be fast.
pytestmark = pytest.mark.usefixtures("quick_compiles")
checks = pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ------------------------------------------------------------------ the model


PARAMS = {"w": normal(0, 8, 16) / 3, "b": normal(1, 16), "v": normal(2, 16, 8) / 3, "s": normal(3)}
BATCH = {"x": normal(4, 16, 8), "y": normal(5, 16, 8), "mask": jnp.arange(16.0) % 3 + 1}


def errors(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    return jnp.square(params["s"] * hidden @ params["v"] - batch["y"]).sum(-1)


def decay(params: Any) -> jax.Array:
    return 0.1 * sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))


def local(params: Any, batch: Any) -> jax.Array:
    """The mean over a batch. Nonlinear in the parameters, so that wrong factors cannot cancel."""
    return jnp.mean(errors(params, batch)) + decay(params)


def weighted(params: Any, batch: Any, total: Callable[[Any], Any] = lambda x: x) -> jax.Array:
    """A mean whose denominator differs from device to device."""
    above = total(jnp.sum(batch["mask"] * errors(params, batch)))
    return above / total(jnp.sum(batch["mask"])) + decay(params)


REFERENCE = jax.jit(jax.value_and_grad(local))(PARAMS, BATCH)
WEIGHTED = jax.jit(jax.value_and_grad(weighted))(PARAMS, BATCH)


# A leaf on two dims, one on two axes that are turned, one averaged over the other axis.
DIMS = {"w": P("data", "fsdp"), "b": P("data"), "v": P(("fsdp", "data")), "s": P()}
SHARDED = {"w": P(None, "fsdp"), "b": P(), "v": P("fsdp"), "s": P()}
LAYOUTS = {
    "two dims on 4x2": ("4x2", DIMS, P(BOTH)),
    "batch on one axis": ("2x4", SHARDED, P("data")),
}


def ways(specs: Any) -> dict[str, Callable[..., Any]]:
    """All ways to compute the gradient of the mean loss."""
    once = partial(manual.value_and_grad, axis_names=BOTH, specs=specs)

    def gathered(params: Any, batch: Any) -> jax.Array:
        return local(manual.gather_params(params, BOTH, specs), batch)

    def reduced(params: Any, batch: Any) -> jax.Array:
        return manual.vary(lax.pmean(gathered(params, batch), BOTH), BOTH)

    def by_hand(params: Any, batch: Any, f: Any) -> Any:
        value, grads = jax.value_and_grad(f)(params, batch)
        return lax.pmean(value, BOTH), manual.sync_gradients(grads, BOTH, specs)

    wrapped = manual.shard_module_params(local, BOTH, specs=specs, remat=True)
    return {
        "gather, sync": partial(by_hand, f=gathered),
        "reduced, varied": partial(by_hand, f=reduced),
        "shard_module_params": partial(by_hand, f=wrapped),
        "local": once(local),
        "local, gathers itself": once(gathered, gather=False),
        "pmean": once(lambda p, b: lax.pmean(local(p, b), BOTH)),
    }


@checks
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_device(name: str, check_vma: bool) -> None:
    mesh, specs, rows = LAYOUTS[name]
    once = partial(manual.value_and_grad, axis_names=BOTH, specs=specs)
    total = partial(lax.psum, axis_name=BOTH)
    every = ways(specs)

    def step(params: Any, batch: Any) -> Any:
        found = {way: f(params, batch) for way, f in every.items()}
        found["psum"] = once(lambda p, b: total(local(p, b)))(params, batch)
        # JAX does not sum over an axis that the batch is not split over.
        batch = manual.vary(batch, BOTH)
        found["psum / psum"] = once(partial(weighted, total=total))(params, batch)
        return found

    out = dict.fromkeys([*every, "psum", "psum / psum"], (P(), specs))
    found = on(MESHES[mesh], step, (specs, rows), out, check_vma)(PARAMS, BATCH)
    devices = 8
    for way in every:
        assert_close(found[way], REFERENCE)
    assert_close(found["psum"], jax.tree.map(lambda x: devices * x, REFERENCE))
    assert_close(found["psum / psum"], WEIGHTED)


# ------------------------------------------------------------------ transformations

STACK = {"w": normal(6, 3, 8, 8) / 3, "b": normal(7, 3, 8)}
STACKED = {"w": P(None, None, "fsdp"), "b": P()}


def through_layers(stack: Any, x: Any, gather: Callable[[Any], Any] = lambda layer: layer) -> Any:
    @jax.checkpoint
    def layer(x: Any, weights: Any) -> Any:
        weights = gather(weights)
        return jnp.tanh(x @ weights["w"] + weights["b"][None]) + x, None

    return jnp.mean(jnp.square(lax.scan(layer, x, stack)[0]))


@checks
def test_layers_gathered_one_by_one_in_a_scan_are_averaged_once(check_vma: bool) -> None:
    gather = partial(manual.gather_params, axis_name=BOTH, specs=ts.layer_specs(STACKED))
    mean = partial(through_layers, gather=gather)
    grad = manual.value_and_grad(mean, BOTH, STACKED, gather=False)
    run = on(MESHES["2x4"], grad, (STACKED, P(BOTH)), (P(), STACKED), check_vma)
    wanted = jax.jit(jax.value_and_grad(through_layers))(STACK, BATCH["x"])
    assert_close(run(STACK, BATCH["x"]), wanted)
    program = run.lower(STACK, BATCH["x"]).compile().as_text()
    reduced = [shape for kind, shape in sent(program) if kind == "all-reduce"]
    # The loss, the shards of w over the axis that does not shard it, and b.
    assert sorted(reduced) == ["f32[3,8,2]", "f32[3,8]", "f32[]"]


@pytest.mark.parametrize(("remat", "times"), [(False, 1), (True, 2)])
def test_remat_gathers_again(remat: bool, times: int) -> None:
    loss = manual.shard_module_params(local, "fsdp", specs=SHARDED, remat=remat)
    run = on(MESHES["1x8"], jax.grad(loss), (SHARDED, P("fsdp")), SHARDED)
    assert str(run.trace(PARAMS, BATCH).jaxpr).count("all_gather[") == 2 * times


@checks
def test_second_order(check_vma: bool) -> None:
    """The gradient of the loss after a step of descent, as in meta-learning."""

    def after_a_step(grad: Any, loss: Any, params: Any, batch: Any) -> jax.Array:
        new = jax.tree.map(lambda x, g: x - 0.1 * g, params, grad(params, batch)[1])
        return loss(new, batch)

    def gathered(params: Any, batch: Any) -> jax.Array:
        return local(manual.gather_params(params, BOTH, SHARDED), batch)

    after = partial(after_a_step, manual.value_and_grad(local, BOTH, SHARDED), gathered)
    grad = manual.value_and_grad(after, BOTH, SHARDED, gather=False)
    run = on(MESHES["2x4"], grad, (SHARDED, P(BOTH)), (P(), SHARDED), check_vma)
    alone = partial(after_a_step, jax.value_and_grad(local), local)
    assert_close(run(PARAMS, BATCH), jax.jit(jax.value_and_grad(alone))(PARAMS, BATCH), 2e-5)


def test_explicit_mesh() -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types="explicit")
    grad = manual.value_and_grad(local, BOTH, SHARDED)
    run = on(mesh, grad, (SHARDED, P(BOTH)), (P(), SHARDED))
    with jax.set_mesh(mesh):
        found = run(ts.shard(PARAMS, SHARDED, mesh), ts.shard(BATCH, P(BOTH), mesh))
    assert_close(found, REFERENCE)


# ------------------------------------------------------------------ what is sent


def test_both_modes_send_the_same_and_nothing_else() -> None:
    grad = manual.value_and_grad(local, "fsdp", SHARDED)
    programs = [
        on(MESHES["1x8"], grad, (SHARDED, P("fsdp")), (P(), SHARDED), check_vma)
        .lower(PARAMS, BATCH)
        .compile()
        .as_text()
        for check_vma in (True, False)
    ]
    wanted = [
        ("all-gather", "f32[16,8]"),
        ("all-gather", "f32[8,16]"),
        ("all-reduce", "f32[16]"),  # the gradient of b
        ("all-reduce", "f32[]"),  # that of s
        ("all-reduce", "f32[]"),  # the loss
        ("reduce-scatter", "f32[2,8]"),
        ("reduce-scatter", "f32[8,2]"),
    ]
    assert [sent(program) for program in programs] == [wanted, wanted]


def test_what_has_no_mean_or_is_one_already_is_not_averaged() -> None:
    ids = np.zeros(8, jax.dtypes.float0)  # the gradient of integers

    def step(x: Any) -> Any:
        mean = manual.sync_gradients({"w": x, "ids": ids}, BOTH)
        assert mean["ids"] is ids
        assert manual.sync_gradients(mean, BOTH)["w"] is mean["w"]
        return mean["w"]

    f = jax.shard_map(step, mesh=MESHES["2x4"], in_specs=P(BOTH), out_specs=P())
    assert jax.eval_shape(f, jnp.ones(8)).shape == (1,)


def test_bfloat16_is_sent_and_float32_kept() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(whole: Any, batch: Any) -> jax.Array:
            assert {x.dtype for x in jax.tree.leaves(whole)} == {jnp.dtype(jnp.bfloat16)}
            return local(jax.tree.map(lambda x: x.astype(jnp.float32), whole), batch)

        return manual.value_and_grad(loss, BOTH, SHARDED, dtype=jnp.bfloat16)(params, batch)

    run = on(MESHES["2x4"], step, (SHARDED, P(BOTH)), (P(), SHARDED))
    text = str(run.trace(PARAMS, BATCH).jaxpr)
    assert set(re.findall(r":(\w+)\[[\d,]*\]\S* = all_gather", text)) == {"bf16"}
    assert set(re.findall(r":(\w+)\[[\d,]*\]\S* = reduce_scatter", text)) == {"bf16"}
    assert set(re.findall(r":(\w+)\[[\d,]*\]\S* = psum", text)) == {"f32"}
    found = run(PARAMS, BATCH)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert_close(found, REFERENCE, 0.05)


# ------------------------------------------------------------------ keys


def test_keys_differ_along_the_axes_and_only_there() -> None:
    def masks(key: jax.Array) -> Any:
        along = manual.fold_rng_over_axis(key, "data")
        both = manual.fold_rng_over_axis(key, BOTH)
        assert manual.fold_rng_over_axis(key, ()) is key
        return jax.random.bits(along, (1, 1, 4)), jax.random.bits(both, (1, 1, 4))

    key = jax.random.key(3)
    along, both = on(MESHES["2x4"], masks, P(), P("data", "fsdp"), check_vma=False)(key)
    # The order in which P(BOTH) lays shards.
    for i, row in enumerate(np.asarray(both).reshape(8, 4)):
        np.testing.assert_array_equal(row, jax.random.bits(jax.random.fold_in(key, i), (4,)))
    np.testing.assert_array_equal(along, np.broadcast_to(along[:, :1], along.shape))
    assert not np.array_equal(along[0], along[1])


# ------------------------------------------------------------------ keeping a shard


def shapes_and_specs(f: Callable[[Any], Any], tree: Any, mesh: str = "2x4") -> Any:
    """The shapes and specs of `f(tree)` for a replicated tree, without compiling anything."""
    made = jax.eval_shape(
        jax.shard_map(f, mesh=MESHES[mesh], in_specs=P(), out_specs=P(), check_vma=False), tree
    )
    shapes = jax.tree.map(lambda x: x.shape, made)
    return shapes, manual.partition_specs(made)


def test_the_largest_dim_of_large_leaves_is_sharded() -> None:
    specs = {
        (16, 64): P(None, "fsdp"),
        (16, 16): P(None, "fsdp"),  # the last among equals
        (16, 18): P("fsdp", None),  # the one that is divisible
        (4, 16): P(None, "fsdp"),
        (60,): P(),
    }
    tree = {str(shape): jnp.zeros(shape) for shape in specs}
    keep = partial(manual.shard_params, axis_name="fsdp", min_weight_size=64)
    assert shapes_and_specs(keep, tree)[1] == {str(shape): spec for shape, spec in specs.items()}
    keep = partial(manual.shard_params, axis_name=BOTH, min_weight_size=256)
    _, specs = shapes_and_specs(keep, [jnp.zeros((12, 24)), jnp.zeros((8, 24))])
    assert specs == [P(None, BOTH), P()]


def test_axes_come_one_after_another() -> None:
    def keep(x: Any) -> Any:
        tensor = manual.shard_params(x, "data", min_weight_size=0)
        return manual.shard_params(tensor, "fsdp", min_weight_size=64)

    # The size of the full array counts for `min_weight_size`, also after it is sharded.
    shapes, specs = shapes_and_specs(keep, {"w": jnp.zeros((8, 8)), "v": jnp.zeros((4, 8))})
    assert specs == {"w": P("fsdp", "data"), "v": P(None, "data")}
    assert jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)) == [(4, 4), (2, 4)]


def test_what_cannot_be_sharded_stays_with_one_warning() -> None:
    tree = {
        "done": manual.Partitioned(jnp.zeros((4, 8)), ("fsdp", None)),
        "odd": jnp.zeros((3, 5)),
        "full": manual.Partitioned(jnp.zeros(8), ("data",)),
        "fine": jnp.zeros(8),
        "act": jax.nn.relu,
    }

    def keep(arrays: Any) -> Any:
        kept = manual.shard_params({**tree, "fine": arrays}, "fsdp", min_weight_size=0)
        assert kept["done"] is tree["done"]
        assert kept["act"] is jax.nn.relu
        return kept["fine"]

    with pytest.warns(ts.ShardingWarning) as seen:
        shapes_and_specs(keep, jnp.zeros(8))
    assert [str(warning.message) for warning in seen] == [
        "shard_params: these leaves stay as they are:\n"
        "  done: it is sharded as P('fsdp', None) already.\n"
        "  full: no free dim of shape (16,) is divisible by 4.\n"
        "  odd: no free dim of shape (3, 5) is divisible by 4."
    ]


def test_what_varies_over_the_axis_is_sharded_already() -> None:
    def keep(x: Any) -> Any:
        part = manual.shard_params(x, "fsdp", specs=P("fsdp"))
        assert manual.shard_params(part, "fsdp", specs=P("fsdp")) is part
        return part

    f = jax.shard_map(keep, mesh=MESHES["2x4"], in_specs=P(), out_specs=P("fsdp"))
    with pytest.warns(ts.ShardingWarning, match="the array: it varies over the axes of"):
        assert jax.eval_shape(f, jnp.zeros(8)).shape == (8,)


SHUFFLED = {
    "both dims": ("float32", P("data", None, "fsdp")),
    "tuple": ("bfloat16", P(None, BOTH)),
    "turned tuple": ("int32", P(("fsdp", "data"))),
    "one axis": ("bool", P("fsdp")),
    "whole": ("float32", P()),
}


@pytest.mark.parametrize(
    ("axes", "check_vma"), [(BOTH, True), (("fsdp", "data"), False)], ids=["checked", "unchecked"]
)
def test_shard_then_gather_is_the_identity(axes: Any, check_vma: bool) -> None:
    values = np.random.default_rng(0).integers(0, 100, (8, 16, 8))
    tree = {name: jnp.asarray(values, dtype) for name, (dtype, _) in SHUFFLED.items()}
    specs = {name: spec for name, (_, spec) in SHUFFLED.items()}

    def there_and_back(tree: Any) -> Any:
        parts = manual.shard_params(tree, axes, specs=specs)
        boxed = manual.shard_params(tree, axes, min_weight_size=16)
        backs = manual.gather_params(parts, axes, specs), manual.gather_params(boxed, axes)
        return parts, jax.tree.map(lambda x: x[None], backs)

    out = (specs, (P(BOTH), P(BOTH)))
    parts, backs = on(MESHES["2x4"], there_and_back, P(), out, check_vma)(tree)
    assert_same(parts, tree)
    for back in backs:
        assert_same(back, {name: jnp.stack([x] * 8) for name, x in tree.items()})


# ------------------------------------------------------------------ leaves of other kinds


def test_leaves_that_have_no_gradient() -> None:
    params = {
        "w": normal(0, 8, 4),
        "ids": jnp.arange(8),
        "keys": jax.random.split(jax.random.key(0), 8),
        "host": np.ones(4, np.float32),
    }
    specs = {"w": P("fsdp"), "ids": P("fsdp"), "keys": P("fsdp"), "host": P()}
    static = {"act": jnp.tanh, "none": None, "rate": 0.5}

    def loss(params: Any, x: Any) -> Any:
        assert {name: params[name] for name in static} == static
        noise = jax.random.normal(params["keys"][3], (4,))
        rows = params["w"][params["ids"]] * noise[None]
        value = jnp.mean(params["act"](x @ rows) * params["rate"]) + params["host"].sum()
        return value, params["ids"]

    def step(arrays: Any, x: Any) -> Any:
        beside = {**specs, "act": P(), "none": None, "rate": P()}
        grad = manual.value_and_grad(loss, "fsdp", beside, has_aux=True)
        (_, ids), grads = grad({**arrays, **static}, x)
        assert {grads.pop(name) for name in (*static, "ids", "keys")} == {None}
        return grads, lax.pmax(ids, "fsdp")

    out = ({"w": P("fsdp"), "host": P()}, P())
    run = on(MESHES["1x8"], step, (specs, P("fsdp")), out)
    grads, ids = run(params, BATCH["x"])
    alone = jax.grad(lambda some: loss({**params, **static, **some}, BATCH["x"])[0])
    assert_close(grads, alone({"w": params["w"], "host": jnp.ones(4)}))
    np.testing.assert_array_equal(ids, jnp.arange(8))


def test_specs_may_be_a_plan_or_shardings_or_none() -> None:
    rules = [("a", P("fsdp")), ("b", None)]
    tree = {"a": jnp.ones((32, 8)), "b": jnp.ones(8)}
    plan = ts.plan(tree, rules, MESHES["2x4"], min_size=0)

    def step(part: Any) -> Any:
        for specs in (plan, plan.shardings, plan.specs, {"a": P("fsdp"), "b": None}):
            whole = manual.gather_params(part, "fsdp", specs)
            assert whole["a"].shape == tree["a"].shape
            assert manual.shard_params(tree, "fsdp", specs=specs)["a"].shape == part["a"].shape
        assert whole["b"] is part["b"]
        assert manual.sync_gradients(part, "fsdp", specs)["b"] is part["b"]
        assert manual.shard_params(whole, "fsdp", specs={"a": None, "b": None})["a"] is whole["a"]
        return part

    inside(step, tree)


# ------------------------------------------------------------------ boxes and modules


def test_a_full_array_has_no_box() -> None:
    def gather(x: Any) -> Any:
        left = manual.gather_params(manual.Partitioned(x, ("data", "fsdp")), "fsdp")
        assert (left.names, left.value.shape) == (("data", None), (8, 16))
        everything = manual.gather_params(manual.Partitioned(x, ("data", "fsdp")))
        assert everything.shape == (16, 16)
        return left.unbox()

    f = jax.shard_map(gather, mesh=MESHES["2x4"], in_specs=P("data", "fsdp"), out_specs=P(BOTH))
    jax.eval_shape(f, jnp.zeros((16, 16)))


def test_a_box_is_a_node_like_flaxs() -> None:
    box = manual.Partitioned(jnp.ones((2, 4)), ("fsdp", None))
    assert ts.leaf_paths({"w": box}) == ["w"]
    assert box.replace_boxed(3).names == box.names
    assert jax.tree.map(lambda x: x * 2, box).unbox().sum() == 16
    assert repr(jax.tree.map(jnp.shape, box)) == "Partitioned((2, 4), names=('fsdp', None))"


@checks
def test_equinox_modules_gather_themselves(check_vma: bool) -> None:
    """A module with activations that are not arrays, and a function of one."""
    model = eqx.nn.MLP(8, 8, 16, 1, activation=jnp.tanh, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)
    specs = ts.match_partition_rules(
        [(".*weight", P("fsdp")), (".*", None)], model, MESHES["2x4"], min_size=0
    )

    def apply(model: Any, x: Any) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(model)(x)).sum(-1))

    def step(arrays: Any, x: Any) -> Any:
        model = eqx.combine(arrays, static)
        at_once = manual.value_and_grad(apply, BOTH, specs)(model, x)[1]
        wrapped = manual.shard_module_params(model, BOTH, specs=specs, remat=True)
        assert ts.leaf_paths(wrapped)[0].startswith("module/layers/0/")
        by_itself = eqx.filter_grad(apply)(wrapped, x)
        by_itself = manual.sync_gradients(by_itself.module, BOTH, specs)
        return eqx.filter(at_once, eqx.is_array), by_itself

    where = jax.tree.map(lambda x, spec: spec if eqx.is_array(x) else None, model, specs)
    run = on(MESHES["2x4"], step, (where, P(BOTH)), (where, where), check_vma)
    wanted = eqx.filter(eqx.filter_grad(apply)(model, BATCH["x"]), eqx.is_array)
    for found in run(arrays, BATCH["x"]):
        assert_close(found, wanted)


@checks
def test_instances_of_a_wrapped_class_are_shards_that_gather_themselves(check_vma: bool) -> None:
    key, mesh = jax.random.key(0), MESHES["2x4"]
    kind = manual.shard_module_params(eqx.nn.Linear, "fsdp", min_weight_size=16)

    def apply(layer: Any, x: Any) -> jax.Array:
        return jnp.mean(jnp.square(jax.vmap(layer)(x)).sum(-1))

    def step(x: Any) -> Any:
        layer = kind(8, 16, key=key)
        grads = eqx.filter_grad(apply)(manual.vary(layer, BOTH), manual.vary(x, BOTH))
        grads = manual.sync_gradients(grads, BOTH)
        return [(x.module.weight.value, x.module.bias.value) for x in (layer, grads)]

    out = [(P("fsdp"), P("fsdp"))] * 2
    (weight, bias), grads = on(mesh, step, P(BOTH), out, check_vma)(BATCH["x"])
    plain = eqx.nn.Linear(8, 16, key=key)
    assert_same((weight, bias), (plain.weight, plain.bias))
    wanted = eqx.filter_grad(apply)(plain, BATCH["x"])
    assert_close(grads, (wanted.weight, wanted.bias))


# ------------------------------------------------------------------ bad input


def inside(f: Callable[[Any], Any], tree: Any) -> None:
    """Calls `f` inside shard_map with a tree of shards of `P("fsdp")`, on 2 x 4 devices."""
    specs = P("fsdp")
    jax.eval_shape(jax.shard_map(f, mesh=MESHES["2x4"], in_specs=(specs,), out_specs=specs), tree)


X = jnp.ones((16, 8))
BAD: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "rank of a box": (
        lambda t: manual.gather_params(manual.Partitioned(t, ("data", None, "fsdp")), "fsdp"),
        X,
        "Drop the last entry.\nFor one layer of a stack, use the specs that"
        " `treeshard.layer_specs` returns.",
    ),
    "axis of a spec": (
        lambda t: manual.gather_params(t, "fsdp", P("fdsp")),
        X,
        "the array: float32[4,8] as P('fdsp',) on the mesh (data=2, fsdp=4): the mesh has no axis"
        " 'fdsp'. It has data=2, fsdp=4. Did you mean 'fsdp'?",
    ),
    "indivisible": (
        lambda t: manual.shard_params(t, "data", specs={"a": P(None, "data"), "b": P("data")}),
        {"a": X[:, :3], "b": X[:12]},
        "shard_params: these leaves cannot be sharded:\n  a: P(None, 'data') splits"
        " dim 1 of shape (4, 3) into 2 parts, and 3 is not divisible by 2. Pad it to 4",
    ),
    "an inner axis that stays": (
        lambda t: manual.gather_params(t, "data", P(BOTH)),
        X,
        "gather_params: the array: P(('data', 'fsdp'),) splits dim 0 by ('data',"
        " 'fsdp'), the outermost axis first. Only the innermost axes can be split or gathered"
        " alone. Name all axes, or write ('data',) last.",
    ),
    "integers": (
        lambda t: manual.sync_gradients(t, "fsdp"),
        {"a": X.astype(int), "b": X, "c": X.astype(int)},
        "sync_gradients: these leaves are not gradients:\n  a: int32[4, 8] has neither a mean nor a"
        " gradient.\n  c: int32[4, 8] has neither a mean nor a gradient. Remove them from the tree,"
        " or use `value_and_grad`",
    ),
    "no such dim": (
        lambda t: manual.gather_array_with_mean_grads(t, 2, "fsdp"),
        X,
        "gather_array_with_mean_grads: dim 2 is out of range for shape (4, 8).",
    ),
    "an axis that is not bound": (
        lambda t: manual.sync_gradients(t, ("data", "fdsp")),
        X,
        "sync_gradients: the axis 'fdsp' is not bound here. The bound axes are ['data', 'fsdp']."
        " Did you mean 'fsdp'? Axes are bound inside `jax.shard_map`; outside, ",
    ),
    "a loss over an axis that is not named": (
        lambda t: manual.value_and_grad(lambda w: jnp.mean(t * w), "data")(jnp.ones(()))[1],
        X,
        "the loss also varies over ['fsdp'], but axis_names is ('data',). Its gradients would",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, tree, message = BAD[name]
    kind = ts.UnknownAxisError if "axis 'fdsp'" in message else ts.TreeShardError
    with pytest.raises(kind, match=re.escape(message)):
        inside(call, tree)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("specs", [P("fsdp"), {"a": P("fsdp")}, None], ids=["spec", "tree", "none"])
def test_specs_in_the_place_of_the_threshold(specs: Any) -> None:
    kind = type(specs).__name__
    why = f"min_weight_size is {kind}, but it is a number of elements. Pass specs by name: "
    message = f"shard_params: {why}`shard_params(params, axis_name, specs=specs)`."
    with pytest.raises(TypeError, match=re.escape(message)):
        inside(lambda t: manual.shard_params(t, "fsdp", specs), {"a": X})
    message = f"shard_module_params: {why}`shard_module_params(target, axis_name, specs=specs)`."
    with pytest.raises(TypeError, match=re.escape(message)):
        manual.shard_module_params(jnp.sum, "fsdp", specs)


OUTSIDE = {
    "shard_params": "`treeshard.shard` places full trees.",
    "gather_params": "`treeshard.unshard` gathers under `jax.jit`",
    "sync_gradients": "under `jax.jit`, gradients need no averaging.",
    "vary": "arrays do not vary, and `vary` is not needed.",
    "fold_rng_over_axis": "use one key for the full batch.",
    "enter_parallel": "under `jax.jit`, specs on the weights are enough.",
    "leave_parallel": "under `jax.jit`, specs on the weights are enough.",
}


def test_called_outside_shard_map() -> None:
    for name, instead in OUTSIDE.items():
        said = f"{name}: .*bound here.*inside `jax.shard_map`; outside, {instead}"
        with pytest.raises(ts.UnknownAxisError, match=said):
            getattr(manual, name)(X, "fsdp")
    with pytest.raises(ts.UnknownAxisError, match="`jax.value_and_grad` under `jax.jit` is enough"):
        manual.value_and_grad(jnp.sum, "fsdp")(X)
    with pytest.raises(ts.UnknownAxisError, match="no axis is bound here.*`treeshard.unshard`"):
        manual.gather_params(X)
