"""Gradients along an axis that covers all dims of a torus, which is made up here: CPUs have none.

What compilers for TPUs make of it is in `tests/targets/test_torus.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.gradient_programs import CASES, mesh_of_kind, state, step_of
from treeshard import manual, training
from treeshard._trace.uses import is_last_step
from treeshard.communication import Collective, collectives
from treeshard.communication._collectives import with_steps_joined

WIDTH, ROWS = 64, 32


@pytest.fixture(autouse=True)
def _torus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes of 8 devices cover a torus of 4x2, and those of 4 one of 2x2."""
    dims = {8: (4, 2), 4: (2, 2)}

    def made_up(mesh: Mesh, axis: str) -> tuple[int, ...]:
        return dims.get(mesh.shape[axis], ()) if axis == "fsdp" else ()

    monkeypatch.setattr("treeshard._core.torus.torus_dims", made_up)


def parts(compiled: Any) -> set[tuple[str, tuple[int, int] | None]]:
    """The kinds of collectives along a part of an axis, and which part."""
    return {(x.kind, x.part) for x in collectives(compiled) if x.within}


OF_8 = {("reduce-scatter", part) for part in ((4, 2), (2, 1))}
OF_4 = {("reduce-scatter", part) for part in ((2, 2), (2, 1))}


def one_device(loss: Callable[..., Any], params: Any, *args: Any) -> Any:
    return jax.value_and_grad(loss)(params, *args)


def assert_close(found: Any, expected: Any) -> None:
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected
    )


# ------------------------------------------------------------------ numbers and programs


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fsdp", OF_8),
        ("hsdp", OF_4),
        ("fsdp x tp", OF_4),
        ("vmap", OF_4),
        ("fsdp in passes", OF_8),
        ("hsdp in passes", OF_4),
    ],
)
def test_numbers_are_those_of_one_device(name: str, expected: Any, kind: str) -> None:
    case = CASES[name]
    step, plan, x = step_of(case, mesh_of_kind(case.axes, kind), WIDTH)
    grads, value = step(ts.shard(state(WIDTH), plan), x)
    weights = jax.tree.map(jnp.asarray, state(WIDTH))
    assert_close((value, grads), one_device(case.loss, weights, x))
    if (name, kind) == ("fsdp x tp", "auto"):
        expected = set()  # the compiler would gather along `tensor` too
    found = parts(step.compile(plan.structs, x).compiled)
    assert {part for part in found if part[0] != "all-reduce"} == expected


def test_layers_that_are_gathered_early_too() -> None:
    mesh = ts.make_mesh("fsdp=8")
    plan = ts.plan(state(WIDTH), [("w", P(None, "fsdp"))], mesh, min_size=0)
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype("float32")

    @ts.jit_step(plan=plan, donate=False)
    def step(params: Any, x: Any) -> Any:
        value, grads = training.value_and_grad(prefetched)(params, x)
        return grads, value

    grads, value = step(ts.shard(state(WIDTH), plan), x)
    plain = lambda params, x: CASES["fsdp"].loss(params, x)  # noqa: E731
    assert_close((value, grads), one_device(plain, jax.tree.map(jnp.asarray, state(WIDTH)), x))
    assert parts(step.compile(plan.structs, x).compiled) == OF_8


@pytest.mark.parametrize("check", [False, True])
def test_by_hand_too(check: bool) -> None:
    mesh = ts.make_mesh("fsdp=8")
    specs, w = {"w": P(None, "fsdp")}, jax.tree.map(jnp.asarray, state(WIDTH))
    x = np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype("float32")

    def loss(params: Any, x: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)

    step = jax.jit(
        jax.shard_map(
            manual.value_and_grad(loss, "fsdp", specs),
            mesh=mesh,
            in_specs=(specs, P("fsdp")),
            out_specs=(P(), specs),
            check_vma=check,
        )
    )
    with jax.set_mesh(mesh):
        args = (ts.shard(w, specs), jax.device_put(x, P("fsdp")))
        assert_close(step(*args), one_device(loss, w, x))
        assert parts(step.lower(*args).compile()) == OF_8
        # Gradients of gradients go the other way.
        twice = jax.shard_map(
            lambda w: jax.grad(lambda w: jnp.sum(jax.grad(lambda w: _cubes(w))(w) ** 2))(w),
            mesh=mesh,
            in_specs=P("fsdp"),
            out_specs=P("fsdp"),
            check_vma=check,
        )
        shards = jnp.arange(16.0)
        found = jax.jit(twice)(jax.device_put(shards, P("fsdp")))
        expected = jax.grad(lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(w**3))(w) ** 2))(shards)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_small_gathers_go_over_one_dim_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treeshard._core.torus._MANY_DEVICES", 8)
    mesh = ts.make_mesh("fsdp=8")
    plan = ts.plan({"w": np.ones((24, 64), "float32")}, [("w", P("fsdp"))], mesh, min_size=0)
    x = np.random.default_rng(1).standard_normal((ROWS, 24)).astype("float32")

    @ts.jit_step(plan=plan, donate=False)
    def step(params: Any, x: Any) -> Any:
        value, grads = training.value_and_grad(mean)(params, x)
        return grads, value

    params = {"w": jax.random.normal(jax.random.key(1), (24, 64))}
    grads, value = step(ts.shard(params, plan), x)
    assert_close((value, grads), one_device(mean, params, x))
    compiled = step.compile(plan.structs, x)
    assert parts(compiled.compiled) == OF_8 | {("all-gather", part) for _, part in OF_8}
    compared = compiled.communication()
    assert compared.unplanned == ()
    assert {x.axes for x in compared.compiled if x.rank} == {("fsdp",)}
    assert all(row.bytes == row.planned_bytes for row in compared.rows)


def _cubes(shard: Any) -> Any:
    return jnp.sum(manual.gather_array_with_mean_grads(shard, 0, "fsdp") ** 3)


def test_what_accumulates_over_the_axis_scatters_dim_by_dim() -> None:
    case = CASES["fsdp in passes"]._replace(passes=("fsdp",))
    step, plan, x = step_of(case, ts.make_mesh("fsdp=8"), WIDTH)
    grads, value = step(ts.shard(state(WIDTH), plan), x)
    assert_close((value, grads), one_device(case.loss, jax.tree.map(jnp.asarray, state(WIDTH)), x))
    found = parts(step.compile(plan.structs, x).compiled)
    assert {("reduce-scatter", (4, 2)), ("reduce-scatter", (2, 1))} <= found


def test_a_step_by_dims_is_as_planned() -> None:
    case = CASES["fsdp"]
    step, plan, x = step_of(case, ts.make_mesh("fsdp=8"), WIDTH)
    compared = step.communication(plan.structs, x)
    assert compared.unplanned == ()
    assert compared.by_compiler == ()
    assert all(row.count == row.planned_count for row in compared.rows)
    assert {row.axes for row in compared.rows} == {("fsdp",)}
    assert {role.name for role in step.roles(plan.structs, x).values()} == {"trained"}


# ------------------------------------------------------------------ losses that are no means


def _hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ ts.unshard(params)["w"])


def weighted(params: Any, x: Any) -> Any:
    weights = (x[:, 0] > 0).astype("float32")
    return jnp.sum(_hidden(params, x).mean(1) * weights) / jnp.sum(weights)


def normalised(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    return jnp.mean(((h - h.mean(0)) / (h.std(0) + 1)) ** 4)


def contrastive(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(h @ h.T)))


def summed(params: Any, x: Any) -> Any:
    return jnp.sum(_hidden(params, x) ** 2)


def of_the_mean(params: Any, x: Any) -> Any:
    return jnp.exp(jnp.mean(_hidden(params, x)))


def sorted_rows(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.sort(_hidden(params, x), axis=0) * jnp.linspace(0, 1, len(x))[:, None])


def with_noise(params: Any, x: Any) -> Any:
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return jnp.mean(_hidden(params, x + noise) ** 2)


def decayed(params: Any, x: Any) -> Any:
    return jnp.mean(_hidden(params, x) ** 2) + jnp.sum(params["w"] ** 2)


def neighbours(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    return jnp.mean(h * h[::-1])


def first_rows(params: Any, x: Any) -> Any:
    return jnp.mean(_hidden(params, x)[:4] ** 2)


def halves(params: Any, x: Any) -> Any:
    first, second = jnp.split(_hidden(params, x), 2)
    return jnp.mean(first * second)


def every_other(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    first = jax.lax.slice_in_dim(h, 0, len(x) // 2)
    return jnp.mean(first * jax.lax.slice_in_dim(h, 1, len(x), 2))


def looked_up(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    one_of_two = (x[:, :1] > 0).astype("int32")
    dims = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
    return jnp.mean(h * jax.lax.gather(h, one_of_two, dims, (1, WIDTH)))


def frequencies(params: Any, x: Any) -> Any:
    """By an operation of which nothing is known."""
    return jnp.mean(jnp.abs(jnp.fft.fft(_hidden(params, x), axis=0)))


def overwritten(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    first_of_pairs = h.reshape(len(x) // 2, 2, -1)[:, 0]
    return jnp.mean(jax.lax.dynamic_update_slice(2 * h, first_of_pairs, (0, 0)) ** 2 * h)


def far_pairs(params: Any, x: Any) -> Any:
    h = _hidden(params, x).reshape(2, len(x) // 2, -1)
    return jnp.mean(h[0] * h[1])


def doubled(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    pairs = jnp.concatenate([h, 2 * h]).reshape(len(x), 2, -1)
    return jnp.mean(pairs[:, 0] * pairs[:, 1])


def shifted(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    return jnp.mean(h * jax.lax.pad(h, 0.0, ((1, -1, 0), (0, 0, 0))))


def smoothed_over_rows(params: Any, x: Any) -> Any:
    h = _hidden(params, x)
    return jnp.mean(jax.lax.reduce_window(h, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME") ** 2)


def convolved_over_rows(params: Any, x: Any) -> Any:
    h = _hidden(params, x).T[None]
    kernel = jnp.ones((WIDTH, WIDTH, 3)) / WIDTH
    return jnp.mean(jax.lax.conv_general_dilated(h, kernel, (1,), "SAME") ** 2)


def rounded(params: Any, x: Any) -> Any:
    total = jnp.sum(_hidden(params, x) ** 2)
    return jnp.mean(_hidden(params, x)) + (total / len(x)).astype("int32").astype("float32")


def pooled(params: Any, x: Any) -> Any:
    h = _hidden(params, x).reshape(len(x), 8, 8, 1)
    h = jax.lax.conv_general_dilated(h, jnp.ones((3, 3, 1, 2)), (1, 1), "SAME",
                                     dimension_numbers=("NHWC", "HWIO", "NHWC"))  # fmt: skip
    return jnp.mean(
        jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    )


def near_pairs(params: Any, x: Any) -> Any:
    h = _hidden(params, x).reshape(len(x) // 2, 2, -1)
    return jnp.mean(h[:, 0] * h[:, 1])


def mean(params: Any, x: Any) -> Any:
    return jnp.mean(_hidden(params, x) ** 2)


def of_each_row(params: Any, x: Any) -> Any:
    w = ts.unshard(params)["w"]
    masked = jnp.where(x > 0, x, 0.0)

    def of_row(row: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), row, None, length=2)
        return jax.nn.logsumexp(h) / jnp.sum(jnp.abs(row))

    return jnp.average(jax.vmap(of_row)(masked + 1)) + 0.5 * jnp.mean(w**2)


def prefetched(params: Any, x: Any) -> Any:
    layer = lambda x, w: jnp.tanh(x @ w["w"])  # noqa: E731
    return jnp.mean(training.scan_layers(layer, x, params) ** 2)


def label_smoothed(params: Any, x: Any) -> Any:
    labels = jnp.argmax(x, axis=-1)
    logits = _hidden(params, x)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -picked.sum() / len(x)


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        *((loss, True) for loss in (mean, of_each_row, label_smoothed, near_pairs, pooled)),
        *((loss, False) for loss in (halves, far_pairs, doubled, shifted, rounded)),
        *((loss, False) for loss in (smoothed_over_rows, convolved_over_rows)),
        *((loss, False) for loss in (every_other, looked_up, overwritten, frequencies)),
        *((loss, False) for loss in (weighted, normalised, contrastive, summed, of_the_mean)),
        *((loss, False) for loss in (sorted_rows, with_noise, decayed, neighbours, first_rows)),
    ],
)
def test_a_loss_that_is_no_mean_over_rows_is_left_to_the_compiler(
    loss: Callable[..., Any], is_mean: bool
) -> None:
    mesh = ts.make_mesh("fsdp=8")
    params = {"w": jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 8}
    plan = ts.plan(params, [("w", P("fsdp"))], mesh, min_size=0)
    x = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype("float32")

    @ts.jit_step(plan=plan, donate=False)
    def step(params: Any, x: Any) -> Any:
        value, grads = training.value_and_grad(loss)(params, x)
        return grads, value

    with jax.numpy_rank_promotion("allow"):
        grads, value = step(ts.shard(params, plan), x)
        assert_close((value, grads), one_device(loss, params, x))
        found = parts(step.compile(plan.structs, x).compiled)
        assert bool(found & OF_8) == is_mean


def test_what_a_loss_gets_otherwise_is_left_to_the_compiler() -> None:
    """Weights of classes, which are not rows; large arrays from outside, which would be gathered
    before it; and weights that are passed on."""
    mesh = ts.make_mesh("fsdp=8")
    w = jax.random.normal(jax.random.key(1), (512, WIDTH)) / 8
    params = {"frozen": w, "w": w}
    plan = ts.plan(params, [("w|frozen", P("fsdp"))], mesh, min_size=0)
    x = np.random.default_rng(2).standard_normal((ROWS, 512)).astype("float32")
    classes = jnp.linspace(0.5, 1.5, WIDTH)

    def per_class(w: Any, x: Any, classes: Any) -> Any:
        return jnp.mean((x @ ts.unshard(w, P("fsdp"), "fsdp")) ** 2 * classes[None])

    @ts.jit_step(plan=plan, donate=False)
    def step(state: Any, x: Any) -> Any:
        def adapted(w: Any, x: Any) -> Any:
            full = ts.unshard({"frozen": state["frozen"], "w": w})
            return jnp.mean((x @ (full["frozen"] + full["w"])) ** 2)

        def beside(w: Any, x: Any) -> Any:
            return jnp.mean((x @ (state["frozen"] + ts.unshard(w, P("fsdp"), "fsdp"))) ** 2)

        return state, (
            training.value_and_grad(per_class, P("fsdp"))(state["w"], x, classes),
            training.value_and_grad(adapted, P("fsdp"))(state["w"], x),
            training.value_and_grad(beside, P("fsdp"))(state["w"], x),
        )

    _, (first, second, third) = step(ts.shard(params, plan), x)
    assert_close(first, one_device(lambda w: jnp.mean((x @ w) ** 2 * classes[None]), w))
    for each in (second, third):
        assert_close(each, one_device(lambda v: jnp.mean((x @ (w + v)) ** 2), w))
    assert not parts(step.compile(plan.structs, x).compiled)


@pytest.mark.parametrize("is_mean", [True, False])
def test_aux_is_that_of_the_whole_batch(is_mean: bool) -> None:
    mesh = ts.make_mesh("fsdp=8")
    params = {"w": jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 8}
    plan = ts.plan(params, [("w", P("fsdp"))], mesh, min_size=0)
    x = np.random.default_rng(2).standard_normal((ROWS, WIDTH)).astype("float32")

    def loss(params: Any, x: Any) -> Any:
        h = _hidden(params, x)
        norm = jnp.mean(h**2) if is_mean else jnp.sum(h**2)
        totals = training.Metrics({"norm": (jnp.sum(h**2), jnp.int32(h.size))})
        return jnp.mean(h), {"rows": h.sum(1), "norm": norm, "totals": totals}

    @ts.jit_step(plan=plan, donate=False)
    def step(params: Any, x: Any) -> Any:
        return params, training.value_and_grad(loss, has_aux=True)(params, x)

    _, found = step(ts.shard(params, plan), x)
    assert_close(found, jax.value_and_grad(loss, has_aux=True)(params, x))
    assert bool(parts(step.compile(plan.structs, x).compiled)) == is_mean


# ------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("groups", "is_last"),
    [
        (None, True),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], True),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], True),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], False),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], False),
    ],
)
def test_the_last_step_of_a_gather_is_between_the_farthest(groups: Any, is_last: bool) -> None:
    assert is_last_step(groups) == is_last


def scatter(size: int, part: tuple[int, int]) -> Collective:
    return Collective("reduce-scatter", "float32", size, 0, None, 1, within=("fsdp",), part=part)


@pytest.mark.parametrize(
    ("steps", "are_one"),
    [
        ([(1024, (16, 16)), (64, (16, 1))], True),
        ([(1024, (4, 16)), (256, (4, 4)), (64, (4, 1))], False),  # of 64 devices
        ([(1024, (4, 64)), (256, (16, 4)), (16, (4, 1))], True),
        ([(1024, (16, 16))], False),
        ([(1024, (16, 16)), (32, (16, 1))], False),
        ([(64, (16, 1)), (64, (16, 1))], False),
    ],
)
def test_steps_that_leave_something_are_not_one(steps: Any, are_one: bool) -> None:
    moved = [scatter(*each) for each in steps]
    joined = with_steps_joined(moved, {"fsdp": 256})
    if are_one:
        [whole] = joined
        assert (whole.axes, whole.bytes, whole.within) == (("fsdp",), 1024, None)
        assert whole.wire_bytes == 1024 * 255 // 256
    else:
        assert joined == moved
