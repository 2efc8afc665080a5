"""Programs are compared with their plans, and each difference is explained."""

import os
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from helpers import struct
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_models import LAYERS, compiled

import treeshard as ts
from treeshard._core.mesh import abstract_mesh
from treeshard.communication import _comparison as comparison
from treeshard.communication._arguments import arguments_of
from treeshard.communication._collectives import CollectiveReader
from treeshard.communication._hlo import HloProgram
from treeshard.communication._program import ReadProgram
from treeshard.manual import gather_params, value_and_grad
from treeshard.training import accumulate_gradients, jit_step, shard_map_step

KIB = 1024
ROWS = P("fsdp")

# ------------------------------------------------------------------ against compiled

EXACT = [
    ("mlp", "hand", "data=2,fsdp=4", True, True),
    ("mlp", "jit", "pod=2,data=2,fsdp=2", True, True),
    ("transformer", "hand", "data=2,fsdp=4", True, False),
    ("transformer", "jit", "fsdp=8", False, False),
    ("conv", "hand", "data=4,fsdp=2", False, False),
]
if os.environ.get("TREESHARD_SOAK"):  # `make soak`
    EXACT = [
        (name, *way[:1], axes, *way[1:])
        for name in ("mlp", "transformer", "conv")
        for axes in ("fsdp=8", "data=2,fsdp=4", "data=4,fsdp=2", "pod=2,data=2,fsdp=2")
        for way in (
            ("hand", False, False),
            ("hand", True, False),
            ("hand", True, True),
            ("jit", False, False),
            ("jit", True, True),
        )
    ]


@pytest.mark.parametrize(("name", "way", "axes", "scan", "remat"), EXACT)
def test_the_compiled_program_moves_what_is_planned(
    name: str, way: str, axes: str, scan: bool, remat: bool
) -> None:
    plan, program = compiled(name, way, ts.make_mesh(axes), scan=scan, remat=remat)
    compared = ts.compare_communication(
        plan, program, scan="layers" if scan else False, remat="layers" if remat else False
    )
    gathers = [x for x in compared.compiled if x.kind == "all-gather"]
    assert all(x.path is not None and x.path.startswith("state/") for x in gathers)
    # Their source is a line of the user, not of treeshard.
    assert all("small_models.py:" in (x.source or "") for x in gathers)
    for row in compared.rows:
        if row.kind == "all-gather" or way == "hand":
            assert (row.count, row.bytes) == (row.planned_count, row.planned_bytes), row
    assert compared.unplanned == ()
    if way == "hand":
        assert compared.by_compiler == ()
        return
    # On CPUs the partitioner all-reduces full gradients.
    [difference] = compared.by_compiler
    assert difference.code == "all-reduce"
    scattered = sum(x.total_bytes for x in compared.planned if x.kind == "reduce-scatter")
    assert sum(x.total_bytes or 0 for x in difference.collectives) == scattered


@pytest.mark.parametrize("way", ["jit", "hand"])
def test_data_parallel(way: str) -> None:
    plan, program = compiled("mlp", way, ts.make_mesh("data=8"), rule=P())
    compared = ts.compare_communication(plan, program)
    assert compared.unplanned == ()
    [row] = compared.rows
    assert (row.kind, row.axes, row.count) == ("all-reduce", ("data",), 3 * LAYERS + 1)
    assert row.bytes == row.planned_bytes == sum(leaf.bytes for leaf in plan.leaves)
    assert str(compared).split("\n") == [
        "kind        axes         planned  compiled",
        "all-reduce  data  10 x, 12.9 KiB  10 x, 12.9 KiB",
        "plus 1 scalar, such as the loss",
    ]


# ------------------------------------------------------------------ unplanned


def test_sums_of_weights_that_are_gathered_for_nothing_belong_to_their_gathers() -> None:
    """Each trip of the scan reduces a layer of its own: adding them up first is no way out."""
    plan = ts.plan(
        {"w": struct(4, 128, 128)}, [("w", P(None, "fsdp"))], ts.make_mesh("data=2,fsdp=4")
    )

    def loss(state: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ ts.unshard(w, P("fsdp"), "fsdp")), None

        return jnp.mean(jax.lax.scan(layer, x, state["w"])[0] ** 2)

    def train(state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    with pytest.warns(ts.ShardingWarning, match="the batch is not split over it"):
        step = jit_step(train, plan, batch=P("data"))
    [difference] = step.communication(plan.structs, struct(64, 128)).unplanned
    assert difference.code == "batch-not-split"
    assert "weights are gathered along 'fsdp', 256.0 KiB," in difference.fact
    assert {x.kind for x in difference.collectives} == {"all-gather", "all-reduce"}


def test_a_scan_without_unshard_moves_activations() -> None:
    plan, program = compiled("mlp", "no hints", ts.make_mesh("fsdp=8"), scan=True)
    compared = ts.compare_communication(plan, program, scan="layers")
    moved = next(x for x in compared.unplanned if x.code == "activation")
    assert "of computed values" in moved.fact
    assert "`unshard(layer, layer_specs(specs), axis)`" in moved.hint


def planned(axes: str, tree: Any, rules: dict[str, Any]) -> ts.Plan:
    return ts.plan(tree, [*rules.items()], ts.make_mesh(axes), min_size=0)


def sgd(loss: Any, differentiate: Any = jax.value_and_grad) -> Any:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = differentiate(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step


def compared_step(step: Any, plan: ts.Plan, x: Any, batch: Any = ROWS) -> ts.Comparison:
    program = jit_step(step, plan, batch=batch).lower(plan.structs, x).compile()
    return ts.compare_communication(plan, program)


def test_activations_of_tensor_parallelism_are_listed_apart() -> None:
    tree = {"up": struct(16, 32), "down": struct(32, 16)}
    rules = {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")}
    plan = planned("fsdp=4,tensor=2", tree, rules)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        p = ts.unshard(p, plan.specs, "fsdp")
        h = ts.with_sharding_constraint(jnp.tanh(x @ p["up"]), P("fsdp", "tensor"))
        return jnp.mean(ts.with_sharding_constraint(h @ p["down"], P("fsdp")) ** 2)

    compared = compared_step(sgd(loss), plan, struct(8, 16))
    gathers = [(x.path, x.bytes) for x in compared.compiled if x.kind == "all-gather"]
    assert sorted(gathers, key=str) == [("state/down", KIB), ("state/up", KIB)]
    assert compared.unplanned == ()
    assert compared.activations
    assert {x.axes for x in compared.activations} == {("tensor",)}
    assert not any(x.path for x in compared.activations)
    note, own = compared.reasons
    assert note == "including 1 activation along tensor, 128 B, of which a plan says nothing"
    assert own.startswith("The CPU compiler all-reduces full gradients")
    assert f"{note}\n{own}" in str(compared)


def test_a_moment_sharded_unlike_its_parameter_is_gathered() -> None:
    # The moment is sharded on another dim than its parameter.
    state = {"model": {"w": struct(16, 16)}, "opt": {"mu": {"w": struct(16, 16)}}}
    plan = planned("fsdp=8", state, {"opt": P(None, "fsdp"), ".*": P("fsdp")})

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(p: Any) -> jax.Array:
            return jnp.mean((x @ ts.unshard(p["w"], P("fsdp"), "fsdp")) ** 2)

        value, grads = jax.value_and_grad(loss)(state["model"])
        mu = ts.with_sharding_constraint(state["opt"]["mu"]["w"], P()) * 0.9 + grads["w"]
        return {"model": {"w": state["model"]["w"] - mu}, "opt": {"mu": {"w": mu}}}, value

    compared = compared_step(step, plan, struct(8, 16))
    differences = {x.code: x for x in compared.unplanned}
    assert differences["sharded-further"].paths == ("opt/mu/w",)
    assert "optimizer state with `Plan.follow`" in differences["sharded-further"].hint


def test_weights_gathered_along_an_axis_that_keeps_them_split_are_said() -> None:
    plan = planned("fsdp=2,tensor=4", {"w": struct(64, 64)}, {"w": P("fsdp", "tensor")})

    def gathered_along(axes: Any) -> dict[str, Any]:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(x @ ts.unshard(p["w"], P("fsdp", "tensor"), axes)) ** 2)

        compared = compared_step(sgd(loss), plan, struct(64, 64))
        return {x.code: x for x in compared.unplanned}

    further = gathered_along(("fsdp", "tensor"))["sharded-further"]
    assert further.paths == ("w",)
    assert "weights are gathered along 'tensor' too, along which the plan keeps" in further.fact
    assert "`with_sharding_constraint(x, P('fsdp', ..., 'tensor'))`" in further.hint
    assert "sharded-further" not in gathered_along("fsdp")


def test_a_replicated_bias_that_is_reduced_in_parts_is_as_planned() -> None:
    tree = {
        "up": {"w": struct(16, 64), "b": struct(64)},
        "down": {"w": struct(64, 16), "b": struct(16)},
    }
    rules = {"up/w": P("fsdp", "tensor"), "down/w": P("tensor", "fsdp"), "b": None}
    plan = planned("fsdp=2,tensor=4", tree, rules)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        p = ts.unshard(p, plan.specs, "fsdp")
        h = jnp.tanh(x @ p["up"]["w"] + p["up"]["b"][None])
        h = ts.with_sharding_constraint(h, P("fsdp", "tensor"))
        y = ts.with_sharding_constraint(h @ p["down"]["w"] + p["down"]["b"][None], P("fsdp"))
        return jnp.mean(y**2)

    compared = compared_step(sgd(loss), plan, struct(8, 16))
    # Each device has the gradient of a quarter of the bias: it reduces that over `fsdp` alone.
    in_parts = [x for x in compared.compiled if (x.axes, x.bytes) == (("fsdp",), 64)]
    assert {x.kind for x in in_parts} == {"all-reduce"}
    assert compared.unplanned == ()


def test_a_batch_reshaped_across_devices_for_accumulation() -> None:
    plan = planned("data=2,fsdp=4", {"w": struct(16, 32)}, {"w": P("fsdp")})

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def one(total: Any, x: jax.Array) -> tuple[Any, None]:
            def loss(p: Any) -> jax.Array:
                return jnp.mean((x @ ts.unshard(p, plan.specs, "fsdp")["w"]) ** 2)

            return jax.tree.map(jnp.add, total, jax.grad(loss)(state)), None

        minibatches = x.reshape(4, 8, 16)
        grads, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, state), minibatches)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), x.sum()

    compared = compared_step(step, plan, struct(32, 16), P(("data", "fsdp")))
    other = {x.code: x for x in compared.unplanned}["other"]
    assert "To split a batch for accumulation, use `accumulate_gradients`" in other.hint
    assert all("test_comparison.py:" in (x.source or "") for x in other.collectives)


def test_a_forgotten_activation_constraint() -> None:
    tree = {"up": struct(16, 64), "down": struct(64, 16)}
    plan = planned("fsdp=8", tree, {"up": P(None, "fsdp"), "down": P("fsdp")})

    def codes(constrain: Any, gather: Any = lambda p: p) -> dict[str, Any]:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            p = gather(p)
            h = constrain(jnp.tanh(x @ p["up"]))
            return jnp.mean(constrain(h @ p["down"]) ** 2)

        compared = compared_step(sgd(loss), plan, struct(16, 16))
        return {one.code: one for one in compared.unplanned}

    # Without constraints, the partitioner keeps the weights sharded and moves activations.
    forgotten = codes(lambda h: h)
    assert "of computed values" in forgotten["activation"].fact
    assert "test_comparison.py:" in str(forgotten["activation"])
    assert "not-moved" in forgotten
    assert not codes(lambda h: ts.with_sharding_constraint(h, P("fsdp")))
    assert not codes(lambda h: h, ts.unshard)


def test_a_backend_that_widens_a_dtype_is_reported() -> None:
    plan = planned("fsdp=8", {"w": struct(16, 16)}, {"w": P("fsdp")})
    grad = value_and_grad(lambda p, x: jnp.sum(x @ p["w"]) ** 2, "fsdp", plan, dtype="bfloat16")

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = grad(state, x.astype("bfloat16"))
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    run = shard_map_step(step, plan, batch=P("fsdp"))
    program = run.compile(plan.structs, struct(8, 16)).compiled
    assert ts.compare_communication(plan, program).unplanned == ()
    compared = ts.compare_communication(plan, program, dtype="bfloat16")
    assert (compared.platform, compared.unplanned) == ("cpu", ())
    assert [(x.code, x.paths) for x in compared.by_compiler] == [("wider", ("w",))] * 2
    assert str(compared).splitlines()[-1] == (
        "The CPU compiler moves 16-bit floats as float32. Compilers for TPUs and GPUs need not."
    )
    # A text may be of a program for another platform.
    compared = ts.compare_communication(plan, program.as_text(), batch=P("fsdp"), dtype="bfloat16")
    assert (compared.platform, compared.by_compiler) == (None, ())
    assert str(compared.unplanned[0]).startswith(
        "other: w: all-gather in a wider dtype than the planned bfloat16. If the program is for"
        " CPUs, this is the compiler's own. Cast the weights before the gather:"
    )


def _in_minibatches(loss: Any) -> Any:
    def differentiate(state: Any, x: jax.Array) -> tuple[Any, Any]:
        def grad(x: jax.Array, key: Any) -> tuple[Any, Any]:
            value, grads = ts.training.value_and_grad(loss)(state, x)
            return grads, value

        return accumulate_gradients(grad, x, 2)[::-1]

    return differentiate


@pytest.mark.parametrize(
    ("differentiate", "is_scattered", "code", "words"),
    [
        (jax.value_and_grad, False, "all-reduce", "Use `training.value_and_grad`, which"),
        (ts.training.value_and_grad, True, "all-reduce", "The step scatters them already"),
        # This compiler reduces in each trip.
        (_in_minibatches, True, "inside-loop", "Add the gradients of each device"),
    ],
    ids=["jax", "training", "minibatches"],
)
def test_no_step_is_advised_to_do_what_it_does(
    differentiate: Any,
    is_scattered: bool,
    code: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned("fsdp=8", {"w": struct(64, 64)}, {"w": P("fsdp")})
    loss = lambda state, x: jnp.mean((x @ ts.unshard(state["w"])) ** 2)  # noqa: E731
    step = jit_step(sgd(loss, differentiate), plan, batch=P("fsdp"))
    arguments = plan.structs, struct(64, 64)
    assert step.roles(*arguments)["w"].is_scattered == is_scattered
    own = {x.code: x.hint for x in step.communication(*arguments).by_compiler}
    assert code != "all-reduce" or own[code].startswith(words)
    # No other compiler is here: the program is that of CPUs, read as one of TPUs.
    monkeypatch.setattr(comparison, "platform_of", lambda _: "tpu")
    hints = {x.code: x.hint for x in step.communication(*arguments).unplanned}
    assert hints[code].startswith(words)


def test_a_step_that_scatters_by_hand_is_known() -> None:
    plan = planned("fsdp=8", {"layers": struct(3, 64, 64)}, {"layers": P(None, "fsdp")})

    def loss(state: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return x @ gather_params(layer, "fsdp", P("fsdp")), None

        return jnp.mean(jax.lax.scan(body, x, state["layers"])[0] ** 2)

    def by_hand(loss: Any) -> Any:
        return value_and_grad(loss, "fsdp", plan.specs, gather=False)

    step = shard_map_step(sgd(loss, by_hand), plan, batch=P("fsdp"))
    assert step.roles(plan.structs, struct(64, 64))["layers"].is_scattered


def test_a_planned_transfer_that_the_program_lacks() -> None:
    plan = planned("fsdp=8", {"w": struct(8, 8)}, {"w": P("fsdp")})
    compared = compared_step(lambda s, x: ({"w": s["w"] * 2}, x.sum()), plan, struct(8))
    assert [str(x) for x in compared.unplanned] == [
        f"not-moved: w: the planned {transfer} is not in the program. Check that the step uses the"
        " leaf, and that the plan is of this step. If computed values are moved instead, call"
        " `unshard` where the weight is used."
        for transfer in ("all-gather (weight)", "reduce-scatter (gradient)")
    ]


# ------------------------------------------------------------------ arguments

MATRIX, VECTOR = struct(16, 16), struct(16)


class Layer(NamedTuple):
    w: Any
    b: Any


def fsdp_plan(tree: Any) -> ts.Plan:
    return ts.plan(tree, [(".*", ROWS)], ts.make_mesh("fsdp=8"), min_size=0)


def split(tree: Any, spec: P = ROWS) -> Any:
    sharding = NamedSharding(ts.make_mesh("fsdp=8"), spec)
    return jax.tree.map(lambda x: x.update(sharding=sharding if x.shape else None), tree)


def affine(p: Any, batch: Any) -> jax.Array:
    (w, b), (x, y) = jax.tree.leaves(p), jax.tree.leaves(batch)
    return jnp.mean((x @ w + b[None] - y) ** 2)


def product(p: Any, batch: Any) -> jax.Array:
    (u, v), (x, y) = jax.tree.leaves(p), jax.tree.leaves(batch)
    return jnp.mean((x @ u @ v - y) ** 2)


def gathered(compared: ts.Comparison) -> list[tuple[str | None, str | None]]:
    """The argument and the leaf of each all-gather."""
    pairs = zip(compared.compiled, compared.leaves, strict=True)
    return sorted((x.path or "", leaf or "") for x, leaf in pairs if x.kind == "all-gather")


STATES = {
    "a tuple": ((MATRIX, VECTOR), (MATRIX, MATRIX), affine, ["0", "1"]),
    "a list of equal arrays": ([MATRIX, MATRIX], [MATRIX, MATRIX], product, ["0", "1"]),
    "a named tuple": (Layer(MATRIX, VECTOR), Layer(MATRIX, MATRIX), affine, ["w", "b"]),
    "trees in a tuple": (({"w": MATRIX}, {"w": VECTOR}), (MATRIX, MATRIX), affine, ["0/w", "1/w"]),
    "a dict with the keys of the batch": (
        {"a": MATRIX, "b": MATRIX},
        {"a": MATRIX, "b": MATRIX},
        product,
        ["a", "b"],
    ),
    "an array": (MATRIX, MATRIX, lambda w, x: jnp.mean((x @ w) ** 2), [""]),
    "arrays that it does not use": (
        (VECTOR, MATRIX, VECTOR),
        (MATRIX, MATRIX, MATRIX),
        lambda p, batch: jnp.mean((batch[2] @ p[1]) ** 2),
        ["1"],
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_the_arrays_of_a_state_are_known_by_position(name: str) -> None:
    state, batch, loss, used = STATES[name]
    plan = fsdp_plan(state)
    train = sgd(lambda p, batch: loss(ts.unshard(p), batch))
    step = jit_step(train, plan, batch=ROWS, donate=False)
    compared = step.communication(plan.structs, batch)
    paths = [(f"state/{path}".rstrip("/"), path) for path in used]
    assert (gathered(compared), compared.unplanned) == (sorted(paths), ())


def _own(loss: Any) -> Any:
    """A step without treeshard."""
    whole = NamedSharding(ts.make_mesh("fsdp=8"), P())

    def step(state: Any, batch: Any) -> Any:
        def whole_loss(p: Any) -> jax.Array:
            return loss(jax.lax.with_sharding_constraint(p, whole), batch)

        value, grads = jax.value_and_grad(whole_loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step


STATE, BATCH = (MATRIX, VECTOR), (MATRIX, MATRIX)
OWN_LOOPS = {
    "the batch first": lambda: jax.jit(lambda b, s: _own(affine)(s, b)).lower(
        split(BATCH), split(STATE)
    ),
    "keywords": lambda: jax.jit(lambda *, b, s: _own(affine)(s, b)).lower(
        b=split(BATCH), s=split(STATE)
    ),
    "static and donated ones": lambda: jax.jit(
        lambda n, s, b, more: _own(affine)(s, b), static_argnums=0, donate_argnums=1
    ).lower(3, split(STATE), split(BATCH), split(VECTOR)),
    "any number": lambda: jax.jit(lambda *x: _own(affine)(*x[::-1])).lower(
        split(BATCH), split(STATE)
    ),
}


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_plan_finds_its_arguments_in_a_loop_of_ones_own(name: str) -> None:
    program = OWN_LOOPS[name]().compile()
    argument = "x/1" if name == "any number" else "s"
    for each in (program, program.as_text()):
        compared = ts.compare_communication(fsdp_plan(STATE), each, batch=P("fsdp"))
        assert gathered(compared) == [(f"{argument}/0", "0"), (f"{argument}/1", "1")]
        assert {x.code for x in (*compared.unplanned, *compared.by_compiler)} == {"all-reduce"}


def test_arguments_come_after_the_tokens_of_ordered_callbacks() -> None:
    def step(state: Any, batch: Any) -> Any:
        new, value = _own(affine)(state, batch)
        io_callback(lambda x: None, None, value, ordered=True)
        return new, value

    program = jax.jit(step).lower(split(STATE), split(BATCH)).compile()
    assert "token" in program.as_text().partition("ENTRY")[2].partition("ROOT")[0]
    compared = ts.compare_communication(fsdp_plan(STATE), program)
    assert gathered(compared) == [("state/0", "0"), ("state/1", "1")]


def test_arguments_that_are_alike_are_not_guessed() -> None:
    state, batch = split((MATRIX, MATRIX)), split((MATRIX, MATRIX))
    program = jax.jit(_own(product)).lower(state, batch).compile()
    for each in (program, program.as_text()):
        with pytest.raises(ts.SpecError) as error:
            ts.compare_communication(fsdp_plan(state), each, batch=P("fsdp"))
        assert str(error.value) == (
            "compare_communication: the plan may be of 'state' or of 'batch': these arguments of"
            " the program have the same paths, shapes, dtypes and specs. Plan more of them, so that"
            " only one fits: `ts.plan({'state': ...}, rules, mesh)`."
        )
        compared = ts.compare_communication(fsdp_plan({"state": state}), each, batch=P("fsdp"))
        assert gathered(compared) == [("state/0", "state/0"), ("state/1", "state/1")]
    # Of other shards they are not alike.
    other = split(batch, P())
    compared = ts.compare_communication(
        fsdp_plan(state), jax.jit(_own(product)).lower(state, other).compile(), batch=P()
    )
    assert gathered(compared) == [("state/0", "0"), ("state/1", "1")]


def test_moments_are_neither_their_weights_nor_a_batch() -> None:
    params = {"b": VECTOR, "w": MATRIX}
    moments = ({"count": struct(), "mu": params, "nu": params},)

    def train(params: Any, opt: Any, x: Any) -> Any:
        new, value = _own(affine)({"w": params["w"], "x": params["b"]}, (x, x))
        mu = jax.tree.map(jnp.add, opt[0]["mu"], params)
        return new, ({**opt[0], "mu": mu},), value

    arguments = split(params, P("fsdp")), split(moments, P("fsdp")), split(struct(32, 16), P())
    program = jax.jit(train).lower(*arguments).compile()
    compared = ts.compare_communication(fsdp_plan(params), program)
    assert gathered(compared) == [("params/b", "b"), ("params/w", "w")]
    assert [x.code for x in compared.unplanned] == ["batch-not-split"]  # which is the batch alone
    whole = fsdp_plan({"opt": moments, "params": params})
    assert gathered(ts.compare_communication(whole, program)) == [
        ("params/b", "params/b"),
        ("params/w", "params/w"),
    ]


@pytest.mark.parametrize("donate", ["none", "all-except-first"])
def test_a_loop_of_equinox_is_read_by_the_order_of_its_arrays(donate: Any) -> None:
    model = eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    mesh = ts.make_mesh("fsdp=8")
    arrays, static = eqx.partition(model, eqx.is_array)
    model = eqx.combine(jax.device_put(arrays, NamedSharding(mesh, ROWS)), static)
    x = jax.device_put(jnp.ones((32, 16)), NamedSharding(mesh, ROWS))

    @eqx.filter_jit(donate=donate)
    def run(first: Any, *rest: Any) -> jax.Array:
        model, x = (first, rest[-1]) if donate == "none" else (rest[0], first)
        arrays, static = eqx.partition(model, eqx.is_array)
        arrays = jax.lax.with_sharding_constraint(arrays, NamedSharding(mesh, P()))
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    # In the first place the model is the plan's, and its average is not.
    lowered = run.lower(model, model, x) if donate == "none" else run.lower(x, model)
    compared = ts.compare_communication(fsdp_plan(model), lowered.compile())
    leaves = [leaf for _, leaf in gathered(compared)]
    assert sorted(leaves) == sorted(leaf.path for leaf in fsdp_plan(model).leaves)


def test_boxes_have_their_paths_in_the_plan() -> None:
    box = {"w": nn.Partitioned(split(MATRIX), names=("a", None))}
    whole = NamedSharding(ts.make_mesh("fsdp=8"), P())
    apply = lambda box, x: jax.lax.with_sharding_constraint(box["w"].value, whole) @ x  # noqa: E731
    program = jax.jit(apply).lower(box, split(MATRIX, P())).compile()
    assert gathered(ts.compare_communication(fsdp_plan(box), program)) == [("box/w", "w")]


def test_the_leaves_of_one_argument_are_listed() -> None:
    program = jax.jit(_own(affine)).lower(split(STATE), split(BATCH)).compile()
    for leaf in ("state/0", "state"):
        assert {x.path for x in ts.collectives(program, leaf=leaf)} <= {"state/0", "state/1"}
        assert ts.collectives(program, leaf=leaf)
    with pytest.raises(ts.SpecError, match=r"^collectives: the arguments 'batch' and 'state' have"):
        ts.collectives(program, leaf="0")


def test_a_tuple_of_arguments_is_named_by_position() -> None:
    """TPUs take more than 2,000 arguments as one tuple, without names."""
    text = """HloModule m, num_partitions=8

ENTRY %main (all: (f32[2], f32[2])) -> f32[16] {
  %all = (f32[2]{0}, f32[2]{0}) parameter(0)
  %b = f32[2]{0} get-tuple-element(%all), index=1
  ROOT %y = f32[16]{0} all-gather(%b), channel_id=1, replica_groups=[1,8]<=[8],\
 use_global_device_ids=true
}
"""
    graph = HloProgram(text)
    lowered = jax.jit(lambda a, unused, b: a + b).lower(*split((VECTOR, VECTOR, VECTOR)))
    arguments = arguments_of(lowered.compile(), graph)
    assert [(x.path, x.number) for x in arguments] == [("a", 0), ("unused", None), ("b", 1)]
    [moved] = CollectiveReader(ReadProgram(graph, arguments, {}, {}, {})).all()
    assert moved.path == "b"
    assert [x.path for x in ts.collectives(text)] == [None]


# ------------------------------------------------------------------ bad input


@pytest.fixture(scope="module")
def doubled(fsdp_mesh: jax.sharding.Mesh) -> jax.stages.Compiled:
    whole = NamedSharding(fsdp_mesh, P())
    w = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(fsdp_mesh, P("fsdp")))
    return jax.jit(lambda state: state["w"] * 2, out_shardings=whole).lower({"w": w}).compile()


def _program_of(lines: str) -> str:
    return (
        "HloModule m, num_partitions=8\n\nENTRY %main (w: f32[1,8], x: f32[8]) -> f32[8] {\n"
        "  %w = f32[1,8]{1,0} parameter(0), metadata={op_name=\"state[\\'w\\']\"}\n"
        f"  {lines}\n}}\n"
    )


def test_an_op_that_cannot_be_read_is_reported() -> None:
    program = _program_of(
        'ROOT %y = f32[8,8]{1,0} custom-call(%w), custom_call_target="AllGatherOfTheFuture"'
    )
    plan = ts.plan({"w": struct(8, 8)}, [("w", P("fsdp"))], abstract_mesh("fsdp=8"), min_size=0)
    differences = ts.compare_communication(plan, program, batch=P("fsdp")).unplanned
    assert [x.code for x in differences] == ["other", "not-moved", "not-moved"]
    assert "op that looks like a collective, with unknown axes" in differences[0].fact
    assert "AllGatherOfTheFuture" in str(differences[0])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"v": struct(8, 8)},
            "compare_communication: the program has none of the plan's parameters, such as 'v'. Its"
            " arguments: state/w.",
        ),
        (
            {"w": struct(16, 8)},
            "w: 32 bytes per device in the program, 64 in the plan.\n"
            "Compile the step for this plan.",
        ),
    ],
    ids=["another tree", "other shapes"],
)
def test_a_plan_of_another_tree_raises(
    tree: Any, message: str, doubled: Any, fsdp_mesh: jax.sharding.Mesh
) -> None:
    plan = ts.plan(tree, [(".*", P("fsdp"))], fsdp_mesh, min_size=0)
    with pytest.raises(ts.SpecError) as error:
        ts.compare_communication(plan, doubled)
    assert str(error.value) == message


def test_a_program_without_the_sharding_of_its_batch_raises() -> None:
    program = _program_of('ROOT %x = f32[8]{0} parameter(1), metadata={op_name="x"}')
    plan = ts.plan({"w": struct(8, 8)}, [("w", P("fsdp"))], abstract_mesh("fsdp=8"), min_size=0)
    with pytest.raises(ts.SpecError, match="does not say how its argument .x. is sharded. Pass"):
        ts.compare_communication(plan, program)
    assert len(ts.compare_communication(plan, program, batch=P("fsdp")).unplanned) == 2


def test_the_batch_is_read_from_a_program_whose_text_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, program = compiled("mlp", "hand", ts.make_mesh("data=2,fsdp=4"))
    from_text = ts.compare_communication(plan, program)
    # As XLA leaves it from JAX 0.11 on.
    monkeypatch.setattr(comparison, "axes_of_sharding", lambda *_: None)
    assert ts.compare_communication(plan, program) == from_text
