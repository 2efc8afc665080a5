"""Programs are compared with their plans, and each difference is explained."""

import os
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers import struct
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_models import LAYERS, compared

import treeshard as ts
from treeshard._core.mesh import abstract_mesh
from treeshard._core.text import human_bytes
from treeshard._trace.roles import TRAINED, Role
from treeshard._trace.uses import Gather
from treeshard.communication._arguments import arguments_of
from treeshard.communication._collectives import Collective, CollectiveReader
from treeshard.communication._comparison import compare_step
from treeshard.communication._forecast import PlannedTransfer, predict_transfers
from treeshard.communication._hlo import HloProgram
from treeshard.communication._matching import Matcher
from treeshard.communication._program import ReadProgram, read_program
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
    found = compared(name, way, ts.make_mesh(axes), scan=scan, remat=remat)
    gathers = [x for x in found.compiled if x.kind == "all-gather"]
    assert all(x.path is not None and x.path.startswith("state/") for x in gathers)
    # Their source is a line of the user, not of treeshard.
    assert all("small_models.py:" in (x.source or "") for x in gathers)
    for row in found.rows:
        if row.kind == "all-gather" or way == "hand":
            assert (row.count, row.bytes) == (row.planned_count, row.planned_bytes), row
    assert found.unplanned == ()
    if way == "hand":
        assert found.by_compiler == ()
        return
    # On CPUs the partitioner all-reduces full gradients.
    scattered = sum(x.total_bytes for x in found.planned if x.kind == "reduce-scatter")
    assert found.by_compiler == (
        f"all-reduces full gradients ({human_bytes(scattered)}) where a reduce-scatter was planned",
    )


@pytest.mark.parametrize("way", ["jit", "hand"])
def test_data_parallel(way: str) -> None:
    found = compared("mlp", way, ts.make_mesh("data=8"), rule=P())
    assert found.unplanned == ()
    [row] = found.rows
    assert (row.kind, row.axes, row.count) == ("all-reduce", ("data",), 3 * LAYERS + 1)
    assert row.bytes == row.planned_bytes
    assert str(found).split("\n") == [
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

    step = jit_step(train, plan, batch=P("data"))
    [difference] = step.communication(plan.structs, struct(64, 128)).unplanned
    assert difference.code == "batch-not-split"
    assert difference.fact.startswith("'fsdp' does not split the batch: devices along it do the")
    assert "`batch=P(('data', 'fsdp'))`" in difference.hint
    assert {x.kind for x in difference.collectives} == {"all-gather", "all-reduce"}


def planned(axes: str, tree: Any, rules: dict[str, Any]) -> ts.Plan:
    return ts.plan(tree, [*rules.items()], ts.make_mesh(axes), min_size=0)


def sgd(loss: Any, differentiate: Any = jax.value_and_grad) -> Any:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = differentiate(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step


def compared_step(step: Any, plan: ts.Plan, x: Any, batch: Any = ROWS) -> ts.Comparison:
    return jit_step(step, plan, batch=batch).communication(plan.structs, x)


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
    assert str(compared).splitlines()[-2:] == [
        "including 1 activation along tensor, 128 B, which a plan does not predict",
        "The CPU compiler all-reduces full gradients (2.0 KiB) where a reduce-scatter was planned."
        " For a TPU or GPU, compile the step on its mesh:"
        ' `make_mesh("fsdp=8", topology="v5e:2x4")`.',
    ]


def test_weights_gathered_along_an_axis_that_keeps_them_split_are_said() -> None:
    plan = planned("fsdp=2,tensor=4", {"w": struct(64, 64)}, {"w": P("fsdp", "tensor")})

    def gathered_along(axes: Any) -> dict[str, Any]:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(x @ ts.unshard(p["w"], P("fsdp", "tensor"), axes)) ** 2)

        compared = compared_step(sgd(loss), plan, struct(64, 64))
        return {x.code: x for x in compared.unplanned}

    further = gathered_along(("fsdp", "tensor"))["sharded-further"]
    assert further.paths == ("w",)
    assert further.fact.startswith("all-gather of a leaf along 'tensor', although the step")
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
    assert "Split a batch for accumulation with `accumulate_gradients`" in other.hint
    assert all("test_comparison.py:" in (x.source or "") for x in other.collectives)


def test_a_backend_that_widens_a_dtype_is_reported() -> None:
    plan = planned("fsdp=8", {"w": struct(16, 16)}, {"w": P("fsdp")})
    grad = value_and_grad(lambda p, x: jnp.sum(x @ p["w"]) ** 2, "fsdp", plan, dtype="bfloat16")

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        loss, grads = grad(state, x.astype("bfloat16"))
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    run = shard_map_step(step, plan, batch=P("fsdp"))
    compared = run.communication(plan.structs, struct(8, 16))
    assert (compared.platform, compared.unplanned) == ("cpu", ())
    assert compared.by_compiler == ("communicates 1.0 KiB in float32 instead of bfloat16",)
    assert str(compared).splitlines()[-2:] == [
        "The CPU compiler communicates 1.0 KiB in float32 instead of bfloat16."
        " For a TPU or GPU, compile the step on its mesh:"
        ' `make_mesh("fsdp=8", topology="v5e:2x4")`.',
        # Of gradients, the step may have cast them.
        "Gradients and updates: 1.0 KiB in float32 instead of bfloat16.",
    ]


def _in_minibatches(loss: Any) -> Any:
    def differentiate(state: Any, x: jax.Array) -> tuple[Any, Any]:
        def grad(x: jax.Array, key: Any) -> tuple[Any, Any]:
            value, grads = ts.training.value_and_grad(loss)(state, x)
            return grads, value

        return accumulate_gradients(grad, x, 2)[::-1]

    return differentiate


@pytest.mark.parametrize(
    ("differentiate", "scattered", "code", "words"),
    [
        (jax.value_and_grad, "", "all-reduce", "On Auto axes the compiler chooses"),
        (
            ts.training.value_and_grad,
            "constraint",
            "all-reduce",
            "On Auto axes the compiler chooses",
        ),
        # This compiler reduces in each trip.
        (_in_minibatches, "constraint", "inside-loop", "Add the gradients of each device"),
    ],
    ids=["jax", "training", "minibatches"],
)
def test_no_step_is_advised_to_do_what_it_does(
    differentiate: Any, scattered: str, code: str, words: str
) -> None:
    plan = planned("fsdp=8", {"w": struct(64, 64)}, {"w": P("fsdp")})
    loss = lambda state, x: jnp.mean((x @ ts.unshard(state["w"])) ** 2)  # noqa: E731
    step = jit_step(sgd(loss, differentiate), plan, batch=P("fsdp"))
    arguments = plan.structs, struct(64, 64)
    roles = step.roles(*arguments)
    assert roles["w"].scattered == scattered
    # No other compiler is here: the program is that of CPUs, read as one of TPUs.
    read = read_program(step.lower(*arguments).compile(), plan.mesh)._replace(platform="tpu")
    compared = compare_step(plan, P("fsdp"), roles, read)
    [difference] = compared.unplanned
    assert difference.code == code
    assert difference.hint.startswith(words)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_no_step_is_advised_to_run_on_the_axes_that_it_runs_on(kind: Any) -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types=kind)
    plan = ts.plan({"w": struct(64, 64)}, [("w", P("fsdp"))], mesh, min_size=0)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        w = ts.unshard(state["w"])
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)

    step = jit_step(sgd(loss, ts.training.value_and_grad), plan, batch=P(("data", "fsdp")))
    arguments = plan.structs, struct(64, 64)
    read = read_program(step.lower(*arguments).compile(), plan.mesh)._replace(platform="tpu")
    compared = compare_step(plan, P(("data", "fsdp")), step.roles(*arguments), read)
    hints = {x.code: x.hint for x in compared.unplanned}
    assert hints.keys() == {"all-reduce", "again"}
    for hint in hints.values():
        assert ("on explicit axes" in hint.lower()) == (kind == "auto")
        assert "axis_names=..." in hint


def test_no_step_whose_gradients_wait_is_advised_to_let_them_wait() -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types="explicit")
    tree = {"w": struct(64, 64), "b": struct(64)}
    plan = ts.plan(tree, [(".*", P("fsdp"))], mesh, min_size=0)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        p = ts.unshard(state)
        return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)

    deferring = partial(ts.training.value_and_grad, axis_names=mesh.axis_names)
    step = jit_step(sgd(loss, deferring), plan, batch=P(mesh.axis_names))
    arguments = plan.structs, struct(64, 64)
    read = read_program(step.lower(*arguments).compile(), mesh)._replace(platform="tpu")
    roles = step.roles(*arguments)
    [difference] = compare_step(plan, P(mesh.axis_names), roles, read).unplanned
    assert (difference.code, difference.paths) == ("all-reduce", ("b",))
    assert difference.hint.startswith("Gradients of the step wait for one sum already")


@pytest.mark.parametrize(
    ("kind", "is_before", "reduced"),
    [("auto", False, []), ("explicit", False, ["w", "b"]), ("explicit", True, ["b"])],
)
def test_gradients_that_no_type_lets_wait_in_a_loop_are_named(
    kind: Any, is_before: bool, reduced: list[str]
) -> None:
    mesh = ts.make_mesh("fsdp=8", axis_types=kind)
    plan = ts.plan({"w": struct(64, 64), "b": struct(64)}, [(".*", P("fsdp"))], mesh, min_size=0)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        p = state if is_before else ts.unshard(state)
        return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        weights = ts.unshard(state) if is_before else state

        def of_part(x: jax.Array, _: Any) -> Any:
            return ts.training.value_and_grad(loss)(weights, x)[::-1]

        grads, value = ts.training.accumulate_gradients(of_part, x, 2, axis_names="fsdp")
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    found = jit_step(step, plan, batch=P("fsdp")).communication(plan.structs, struct(64, 64))
    assert {x.code for x in found.unplanned} <= {"inside-loop"}
    assert [path for x in found.unplanned for path in x.paths] == reduced
    assert all("call `unshard` before the loop" in x.hint for x in found.unplanned)


def test_a_step_that_scatters_by_hand_is_known() -> None:
    plan = planned("fsdp=8", {"layers": struct(3, 64, 64)}, {"layers": P(None, "fsdp")})

    def loss(state: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return x @ gather_params(layer, "fsdp", P("fsdp")), None

        return jnp.mean(jax.lax.scan(body, x, state["layers"])[0] ** 2)

    def by_hand(loss: Any) -> Any:
        return value_and_grad(loss, "fsdp", plan.specs, gather=False)

    step = shard_map_step(sgd(loss, by_hand), plan, batch=P("fsdp"))
    assert step.roles(plan.structs, struct(64, 64))["layers"].scattered == "by hand"


def test_a_planned_transfer_that_the_program_lacks() -> None:
    plan = planned("fsdp=8", {"w": struct(8, 8)}, {"w": P("fsdp")})
    loss = lambda p, x: jnp.mean((x @ ts.unshard(p["w"])) ** 2)  # noqa: E731
    trained = jit_step(sgd(loss), plan, batch=ROWS)
    other = jit_step(lambda s, x: ({"w": s["w"] * 2}, x.sum()), plan, batch=ROWS)
    arguments = plan.structs, struct(8, 8)
    read = read_program(other.lower(*arguments).compile(), plan.mesh)
    compared = compare_step(plan, ROWS, trained.roles(*arguments), read)
    assert [str(x) for x in compared.unplanned] == [
        f"not-moved: w: the planned {transfer} is not in the program. Check that the step uses the"
        " leaf, and call `unshard` where it does."
        for transfer in ("all-gather (weight)", "reduce-scatter (gradient)")
    ]


def test_the_trip_that_a_compiler_peels_off_a_loop_is_of_the_leaf_of_the_loop() -> None:
    """One layer of `up` has as many elements as all of `k`, and one of `norm` as `scale`."""
    tree = {"k": struct(4, 64, 16), "norm": struct(4, 64), "scale": struct(64)}
    tree["up"] = struct(4, 64, 64)
    plan = planned("data=2,fsdp=4", tree, {"norm|scale": None, ".": P(None, "fsdp")})
    gather = Gather(frozenset({"fsdp"}), "float32", 4, 4, 4, False)
    roles = {name: Role(TRAINED) for name in ("norm", "scale")}
    roles |= {name: Role(TRAINED, (gather,)) for name in ("k", "up")}
    rows = P(("data", "fsdp"))
    transfers = predict_transfers(plan, rows, roles)

    def trips(one: PlannedTransfer) -> list[Collective]:
        of = partial(Collective, one.kind, one.dtype, wire_bytes=1, axes=one.axes, rank=2)
        name = f"jit(step)/transpose(jvp())/{'while/body/' if one.count > 1 else ''}dot_general"
        if one.path == "norm":
            return [of(one.bytes // 4, count=count, op_name=name) for count in (1, 3)]
        if one.count == 1:
            return [of(one.bytes, count=1, op_name=name)]
        path = None if one.why == "gradient" else one.path
        return [of(one.bytes, count=count, op_name=name, path=path) for count in (1, 3)]

    compiled = [x for transfer in transfers if transfer.path for x in trips(transfer)]
    by_bytes = sorted(compiled, key=lambda x: -x.bytes)
    for order in (compiled, compiled[::-1], by_bytes, sorted(compiled, key=lambda x: x.count or 0)):
        matcher = Matcher(plan, transfers, {x: x for x in roles}, roles, ("data", "fsdp"), "gpu")
        matcher.match(order)
        assert [*matcher.list_unplanned()] == []


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


# ------------------------------------------------------------------ a loop of one's own


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
JITTED = {
    "the function": lambda step: step,
    "jax.jit": lambda step: jax.jit(step, donate_argnums=0),
    "eqx.filter_jit": lambda step: eqx.filter_jit(step, donate="all"),
    # The batch comes from the host, and the step says how it is sharded.
    "shardings": lambda step: jax.jit(
        step, in_shardings=(fsdp_plan(STATE).shardings, NamedSharding(ts.make_mesh("fsdp=8"), ROWS))
    ),
}


@pytest.mark.parametrize("name", JITTED)
def test_a_step_of_ones_own_is_compared_as_it_is_jitted(name: str) -> None:
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), BATCH)
    batch = batch if name == "shardings" else split(BATCH)
    plan = fsdp_plan(STATE)
    compared = ts.compare_communication(plan, JITTED[name](_own(affine)), plan.structs, batch)
    assert gathered(compared) == [("state/0", "0"), ("state/1", "1")]
    assert [x.kind for x in compared.planned] == ["all-gather", "reduce-scatter"] * 2 + [
        "all-reduce"
    ]
    assert compared.unplanned == ()
    [own] = compared.by_compiler
    assert own.startswith("all-reduces full gradients")


def test_modules_and_several_arguments_of_ones_own_step() -> None:
    model = eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0))
    plan = fsdp_plan((model, {"mu": model, "count": jnp.int32(0)}))  # a scalar, as in Adam
    whole = NamedSharding(ts.make_mesh("fsdp=8"), P())

    @eqx.filter_jit
    def train(model: Any, opt: Any, x: Any) -> Any:
        @eqx.filter_value_and_grad
        def loss(model: Any) -> jax.Array:
            arrays, static = eqx.partition(model, eqx.is_array)
            arrays = jax.lax.with_sharding_constraint(arrays, whole)
            return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

        value, grads = loss(model)
        mu = jax.tree.map(lambda m, g: m if g is None else m + g, opt["mu"], grads)
        return eqx.apply_updates(model, grads), {"mu": mu, "count": opt["count"] + 1}, value

    compared = ts.compare_communication(
        plan, lambda state, x: train(*state, x), plan.structs, split(MATRIX)
    )
    weights = [leaf.path for leaf in plan.leaves if leaf.path.startswith("0/")]
    assert [leaf for _, leaf in gathered(compared)] == sorted(weights)
    assert compared.unplanned == ()


def test_arguments_come_after_the_tokens_of_ordered_callbacks() -> None:
    def step(state: Any, batch: Any) -> Any:
        new, value = _own(affine)(state, batch)
        io_callback(lambda x: None, None, value, ordered=True)
        return new, value

    plan = fsdp_plan(STATE)
    program = jax.jit(step).lower(split(STATE), split(BATCH)).compile()
    assert "token" in program.as_text().partition("ENTRY")[2].partition("ROOT")[0]
    compared = ts.compare_communication(plan, step, plan.structs, split(BATCH))
    assert gathered(compared) == [("state/0", "0"), ("state/1", "1")]


@pytest.mark.parametrize(
    ("plan", "step", "state", "message"),
    [
        pytest.param(
            {"v": MATRIX},
            _own(affine),
            {"w": MATRIX},
            "compare_communication: the state does not match the plan:\n"
            "  w: float32[16,16] in the state, nothing in the plan.\n"
            "  v: nothing in the state, float32[16,16] in the plan.",
            id="another tree",
        ),
        pytest.param(
            {"w": MATRIX},
            _own(affine),
            {"w": VECTOR},
            "  w: float32[16] in the state, float32[16,16] in the plan.",
            id="other shapes",
        ),
        pytest.param(
            STATE,
            _own(affine),
            split(STATE, P()),
            "compare_communication: the step does not take the state as planned:\n"
            "  0: sharded as P() in the program, planned as P('fsdp',).",
            id="other shards",
        ),
        pytest.param(
            STATE,
            lambda state, batch: _own(affine)(state, batch)[::-1],
            split(STATE),
            "compare_communication: the step does not return the new state first. End it with"
            " `return new_state, loss`",
            id="the loss first",
        ),
    ],
)
def test_a_state_that_is_not_the_plans_raises(
    plan: Any, step: Any, state: Any, message: str
) -> None:
    with pytest.raises(ts.SpecError) as error:
        ts.compare_communication(fsdp_plan(plan), step, state, split(BATCH))
    assert message in str(error.value)


def test_what_is_no_step_raises() -> None:
    plan = fsdp_plan(STATE)
    program = jax.jit(_own(affine)).lower(split(STATE), split(BATCH)).compile()
    for each in (program, program.as_text()):
        with pytest.raises(TypeError, match="is a (Compiled|str), not a function. Pass the func"):
            ts.compare_communication(plan, each, plan.structs, split(BATCH))


def test_boxes_have_their_paths_in_the_plan() -> None:
    box = {"w": nn.Partitioned(split(MATRIX), names=("a", None))}
    whole = NamedSharding(ts.make_mesh("fsdp=8"), P())
    apply = lambda box, x: jax.lax.with_sharding_constraint(box["w"].value, whole) @ x  # noqa: E731
    program = jax.jit(apply).lower(box, split(MATRIX, P())).compile()
    assert [x.path for x in ts.collectives(program)] == ["box/w"]


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
    [moved] = CollectiveReader(ReadProgram(graph, arguments, {}, {}, None)).all()
    assert moved.path == "b"
    assert [x.path for x in ts.collectives(text)] == [None]


# ------------------------------------------------------------------ bad input


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
    roles = {"w": Role(TRAINED, (Gather(frozenset({"fsdp"}), "float32", 4, 1, 1, False),))}
    differences = compare_step(plan, ROWS, roles, read_program(program, plan.mesh)).unplanned
    assert [x.code for x in differences] == ["other", "not-moved", "not-moved"]
    assert "op that looks like a collective, with unknown axes" in differences[0].fact
    assert "AllGatherOfTheFuture" in str(differences[0])
