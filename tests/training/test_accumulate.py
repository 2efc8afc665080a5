"""A batch in several passes gives the same gradients and metrics, without more communication."""

import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, on
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.errors import LeafError, SpecError
from treeshard.manual import gather_params, sync_gradients, vary
from treeshard.training import Metrics, accumulate_gradients, print_metrics

RNG = np.random.default_rng(0)
PARAMS = {
    "a": 0.1 * RNG.normal(size=(32, 64)).astype(np.float32),
    "b": 0.1 * RNG.normal(size=(64, 32)).astype(np.float32),
}
SPECS = {"a": P(None, "fsdp"), "b": P("fsdp")}
BATCH = {"x": RNG.normal(size=(64, 32)).astype(np.float32)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - 1) ** 2)


def grad_fn(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    rows = len(batch["x"])
    return grads, Metrics({"loss": (loss * rows, jnp.int32(rows))})


ROWS = np.arange(64, dtype="float32")
EXPECTED = grad_fn(PARAMS, BATCH)


def moved_by(mesh, f, specs, check_vma) -> dict[str, int]:
    """Bytes of each kind of collective of what returns gradients and metrics, which are right."""
    args = ts.shard((PARAMS, BATCH), (specs, P("fsdp")), mesh)
    run = on(mesh, f, (specs, P("fsdp")), (specs, P()), check_vma)
    compiled = run.lower(*args).compile()
    assert_close(compiled(*args), EXPECTED)
    moved: dict[str, int] = {}
    for one in ts.collectives(compiled):
        moved[one.kind] = moved.get(one.kind, 0) + one.total_bytes
    return moved


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_one_gather_and_one_scatter(fsdp_mesh, check_vma) -> None:
    def moved(count):
        def f(params, batch):
            gather = lambda p: gather_params(p, "fsdp", SPECS)  # noqa: E731
            whole, scatter = jax.vjp(gather, vary(params, "fsdp"))
            grads, metrics = accumulate_gradients(lambda b, _: grad_fn(whole, b), batch, count)
            grads = sync_gradients(scatter(grads)[0], "fsdp", SPECS)
            return grads, metrics.reduce("fsdp")

        return moved_by(fsdp_mesh, f, SPECS, check_vma)

    once, four = moved(1), moved(4)
    assert four["reduce-scatter"] == once["reduce-scatter"]
    assert sum(four.values()) <= 1.05 * sum(once.values())


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_full_parameters_are_averaged_once(fsdp_mesh, check_vma) -> None:
    def f(params, batch):
        params = vary(params, "fsdp")
        return accumulate_gradients(lambda b, _: grad_fn(params, b), batch, 4, axis_names="fsdp")

    moved = moved_by(fsdp_mesh, f, P(), check_vma)
    assert moved["all-reduce"] <= sum(x.nbytes for x in PARAMS.values()) + 8
    assert set(moved) == {"all-reduce"}


def test_axes_are_bound_in_the_loss(mesh) -> None:
    """Which is weighted by what all devices have."""
    axes = ("data", "fsdp")

    def loss(w, rows):
        return jnp.mean((w * rows) ** 2) / jax.lax.pmean(jnp.mean(rows), axes)

    def accumulated(rows):
        grads_of = lambda rows, _: (jax.grad(loss)(2.0, rows), ())  # noqa: E731
        return accumulate_gradients(grads_of, rows, 2, axis_names=axes)[0]

    with jax.set_mesh(mesh):
        found = jax.jit(accumulated)(ROWS)
    of_passes = [4 * np.mean(rows**2) / np.mean(rows) for rows in (ROWS[::2], ROWS[1::2])]
    np.testing.assert_allclose(found, np.mean(of_passes), rtol=1e-5)


def accumulated_on(mesh, loss, axes):
    def accumulated(w, rows):
        grads_of = lambda rows, _: (jax.grad(loss)(w, rows), ())  # noqa: E731
        return accumulate_gradients(grads_of, rows, 2, axis_names=axes)[0]

    with jax.set_mesh(mesh):
        rows = ts.shard(BATCH["x"], P(("data", "fsdp")), mesh)
        return jax.jit(accumulated)(ts.shard(PARAMS["a"], P("fsdp"), mesh), rows)


def test_an_error_of_the_loss_is_raised_at_its_first_call(mesh) -> None:
    calls = []

    def loss(w, rows):
        calls.append(rows)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as error:
        accumulated_on(mesh, loss, "data")
    assert len(calls) == 1
    assert error.value.__context__ is None


def test_a_loop_that_closes_over_weights_which_shard_map_cannot_differentiate(mesh) -> None:
    def loss(w, rows):
        layer = lambda x, _: (jnp.tanh(x @ ts.unshard(w, P("fsdp"), "fsdp") @ w.T), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(layer, rows, None, length=3)[0] ** 2)

    expected = jax.grad(loss)(PARAMS["a"], BATCH["x"])
    np.testing.assert_allclose(accumulated_on(mesh, loss, "data"), expected, rtol=1e-4, atol=1e-6)


def test_keys_differ_from_call_to_call(fsdp_mesh) -> None:
    def all_keys(minibatch, key):
        return jnp.zeros(()), jnp.zeros(4).at[0].add(jax.random.uniform(key))

    key = jax.random.key(0)
    _, total = accumulate_gradients(all_keys, jnp.zeros(8), 4, key)
    alone = [jax.random.uniform(k) for k in jax.random.split(key, 4)]
    np.testing.assert_allclose(total[0], sum(alone) / 4, rtol=1e-6)
    with jax.set_mesh(fsdp_mesh):
        _, spread = jax.jit(
            lambda x, k: accumulate_gradients(all_keys, x, 2, k, axis_names="fsdp")
        )(jnp.zeros(32), key)
    alone = [
        jax.random.uniform(k) for ks in jax.random.split(key, 2) for k in jax.random.split(ks, 8)
    ]
    np.testing.assert_allclose(spread[0], sum(alone) / 16, rtol=1e-5)


def test_batches_that_are_not_divisible(fsdp_mesh) -> None:
    def accumulate(batch, count, axis_names=None):
        accumulate_gradients(lambda b, _: (b, b), batch, count, axis_names=axis_names)

    batch = {"x": jnp.zeros((30, 2)), "y": jnp.zeros(30)}
    message = "x: 30 rows are not divisible by 4 minibatches. Use 28 or 32"
    with pytest.raises(ts.SpecError, match=message):
        accumulate(batch, 4)
    with pytest.raises(ts.SpecError, match="num_minibatches is 0, not >= 1"):
        accumulate(batch, 0)
    with pytest.raises(ts.NoMeshError, match="no array of the batch is sharded"):
        accumulate(jnp.zeros(24), 2, "fsdp")
    message = "24 rows are not divisible by 2 minibatches on 8 dev.* 16 or"
    with jax.set_mesh(fsdp_mesh), pytest.raises(ts.SpecError, match=message):
        accumulate(jnp.zeros(24), 2, "fsdp")
    with jax.set_mesh(fsdp_mesh), pytest.raises(ts.UnknownAxisError, match="Did you mean 'fsdp'"):
        accumulate(jnp.zeros(24), 2, "fdsp")


CLASSES = {"weights": np.linspace(0.2, 3, 8, dtype="float32")}


def test_arrays_that_are_no_rows_are_not_cut() -> None:
    calls = []
    batch = {"x": jnp.zeros((64, 2)), "classes": CLASSES, "mask": jnp.ones(16), "y": jnp.zeros(64)}

    def accumulate(batch, count):
        return accumulate_gradients(lambda rows, key: calls.append(rows), batch, count)

    for count in (1, 4):
        with pytest.raises(ts.SpecError) as error:
            accumulate(batch, count)
        for line in ("  classes/weights: float32[8]", "  mask: float32[16]", "  x: float32[64,2]"):
            assert line in str(error.value).splitlines()
        assert str(error.value).endswith(
            "If `classes/weights`, `mask` should not be cut, leave it out of the batch, and let"
            " `grad_fn` close over `batch['classes']['weights']`."
        )
    assert not calls


@pytest.mark.parametrize("axis_names", [None, "fsdp"])
@pytest.mark.parametrize("shape", [(64, 0), (64, 2, 0)])
def test_rows_may_be_empty(fsdp_mesh, shape, axis_names) -> None:
    def grad_of(rows, key):
        assert rows["empty"].shape == (len(rows["x"]), *shape[1:])
        return rows["x"].mean() + rows["empty"].sum(), None

    batch = {"x": ROWS, "empty": np.zeros(shape, "float32")}
    with jax.set_mesh(fsdp_mesh):
        grad, _ = accumulate_gradients(grad_of, batch, 2, axis_names=axis_names)
    assert grad == ROWS.mean()


@pytest.mark.parametrize("axis_names", [None, "fsdp"])
def test_scalars_and_keys_go_to_each_minibatch(fsdp_mesh, axis_names) -> None:
    def seen(batch, _):
        uniform = [jax.random.uniform(batch[name]) for name in ("typed", "raw")]
        own = jax.vmap(jax.random.uniform)(batch["own"])
        scale = batch["scale"] if batch["mode"] == "train" else 0
        return scale * (batch["x"] * own).mean(), uniform

    typed, raw, keys = (
        jax.random.key(1),
        jax.random.PRNGKey(2),
        jax.random.split(jax.random.key(3), 64),
    )
    batch = {"x": ROWS, "typed": typed, "raw": raw, "own": keys, "scale": 2.0, "mode": "train"}

    def accumulated(x, typed, raw, own):
        arrays = {"x": x, "typed": typed, "raw": raw, "own": own}
        return accumulate_gradients(seen, batch | arrays, 4, axis_names=axis_names)

    with jax.set_mesh(fsdp_mesh):
        grad, uniform = jax.jit(accumulated)(ROWS, typed, raw, keys)
    np.testing.assert_allclose(
        grad, 2 * (ROWS * jax.vmap(jax.random.uniform)(keys)).mean(), rtol=1e-5
    )
    assert_close(uniform, [jax.random.uniform(typed), jax.random.uniform(raw)])


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("axis_names", [None, "fsdp"])
@pytest.mark.parametrize(
    ("jit", "by"),
    [(jax.jit, "plan"), (jax.jit, "specs"), (eqx.filter_jit, "plan")],
    ids=["jit", "specs", "filter_jit"],
)
def test_the_mesh_is_found_in_types(kind, axis_names, jit, by) -> None:
    """In one's own `jit`, without `jax.set_mesh`."""
    mesh = ts.make_mesh("fsdp=8", axis_types=kind)
    plan = ts.plan(PARAMS, [(".*", ts.fsdp("fsdp", min_size=0))], mesh)
    sharded_by = {"plan": (plan,), "specs": (plan.specs, "fsdp", mesh)}[by]

    def accumulated(params, batch):
        def of_rows(rows, key):
            return grad_fn(ts.unshard(params, *sharded_by), rows)

        return accumulate_gradients(of_rows, batch, 4, axis_names=axis_names)

    found = jit(accumulated)(ts.shard(PARAMS, plan), ts.shard(BATCH, P("fsdp"), mesh))
    assert_close(found, EXPECTED)
    if axis_names is None:  # the mesh is in the types of gradients alone
        assert_close(jit(accumulated)(ts.shard(PARAMS, plan), BATCH), EXPECTED)


@pytest.mark.parametrize("varied", ["", "data", "fsdp"])
def test_gradients_that_jax_has_summed_are_refused(mesh, varied) -> None:
    axes = ("data", "fsdp")

    def accumulated(params, batch, frozen):
        def of_rows(rows, key):
            grads, metrics = grad_fn(params, rows)
            return {**grads, "frozen": jnp.zeros_like(frozen)}, metrics

        params = vary(params, varied) if varied else params
        return accumulate_gradients(of_rows, batch, 2, axis_names=axes)[0]

    specs = P(), P(axes), P()
    run = jax.shard_map(accumulated, mesh=mesh, in_specs=specs, out_specs=P())
    with pytest.raises(SpecError) as error:
        jax.jit(run)(PARAMS, BATCH, PARAMS["a"])
    over, times = {"": (axes, 8), "data": ("fsdp", 4), "fsdp": ("data", 2)}[varied]
    facts = str(error.value).splitlines()[1:]
    assert [fact.split(":")[0].strip() for fact in facts] == ["a", "b"]
    assert all(f"summed it over {over!r}, and its mean would be {times} times" in x for x in facts)
    assert all(f"Differentiate `treeshard.manual.vary(params, {over!r})`" in x for x in facts)


def metrics_of(rows, key):
    pair = rows.sum(), len(rows)
    metrics = {
        "mean": rows.mean(),
        "pair": pair,
        "nested": [{"metrics": Metrics({"rows": pair}), "none": None}],
        "constant": 1.5,
    }
    return jnp.zeros(()), metrics


def by_hand(mesh, axis_names):
    accumulate = lambda x: accumulate_gradients(metrics_of, x, 2, axis_names=axis_names)  # noqa: E731
    rows = P(("data", "fsdp"))
    return jax.jit(jax.shard_map(accumulate, mesh=mesh, in_specs=rows, out_specs=P()))


def in_a_program(mesh, axis_names):
    def accumulated(x):
        x = ts.with_sharding_constraint(x, P(("data", "fsdp")), mesh)
        return accumulate_gradients(metrics_of, x, 2, axis_names=axis_names)

    return jax.jit(accumulated)


@pytest.mark.parametrize(
    ("way", "kind", "axis_names"),
    [
        (in_a_program, "auto", None),
        (in_a_program, "explicit", ("data", "fsdp")),
        (by_hand, "auto", ("data", "fsdp")),
        (lambda mesh, axis_names: in_a_program(mesh, axis_names).__wrapped__, "auto", "fsdp"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_numbers_come_back_as_means_and_pairs_as_sums(way, kind, axis_names) -> None:
    mesh = ts.make_mesh("data=2,fsdp=4", axis_types=kind)
    with jax.set_mesh(mesh):
        _, metrics = way(mesh, axis_names)(ts.shard(ROWS, P(("data", "fsdp")), mesh))
    assert metrics["mean"] == ROWS.mean()
    assert metrics["pair"] == (ROWS.sum(), 64)
    assert metrics["nested"][0]["metrics"].pairs == {"rows": (ROWS.sum(), 64)}
    assert metrics["constant"] == 1.5


def narrow_metrics_of(rows, key):
    metrics = {
        "mean": rows.mean(),
        "pair": (rows.sum(), jnp.uint8(200)),
        "metrics": Metrics({"any": (jnp.any(rows > 0), jnp.int8(100))}),
    }
    return jnp.zeros(()), metrics


@pytest.mark.parametrize(
    ("kind", "axis_names"),
    [
        ("none", None),
        ("auto", None),
        ("auto", "fsdp"),
        ("by hand", "fsdp"),
        ("explicit", "fsdp"),
    ],
)
@pytest.mark.parametrize("count", [1, 512])
def test_narrow_metrics_are_added_in_32_bits(kind, axis_names, count) -> None:
    def accumulate(rows):
        return accumulate_gradients(narrow_metrics_of, rows, count, axis_names=axis_names)

    rows, parts = jnp.ones(4096, "bfloat16"), 1 if axis_names is None else 8
    if kind != "none":
        mesh = ts.make_mesh("fsdp=8", axis_types="explicit" if kind == "explicit" else "auto")
        rows = ts.shard(rows, P("fsdp"), mesh)
    if kind == "by hand":
        accumulate = jax.shard_map(accumulate, mesh=mesh, in_specs=P("fsdp"), out_specs=P())
    _, metrics = jax.jit(accumulate)(rows)
    calls = count * (1 if kind == "explicit" else parts)
    assert metrics["mean"] == 1
    assert metrics["mean"].dtype == "bfloat16"
    pairs = {"pair": metrics["pair"], **metrics["metrics"].pairs}
    assert pairs == {"pair": (4096, 200 * calls), "any": (calls, 100 * calls)}
    dtypes = {name: (total.dtype, n.dtype) for name, (total, n) in pairs.items()}
    assert dtypes == {"pair": ("float32", "int32"), "any": ("int32", "int32")}


def test_narrow_metrics_of_steps_and_devices_are_added_in_32_bits(fsdp_mesh) -> None:
    one = Metrics({"loss": (jnp.bfloat16(256), jnp.uint8(255)), "hits": (jnp.array(True), 1)})
    ones = Metrics({"loss": (jnp.bfloat16(1), jnp.uint8(1)), "hits": (jnp.array(True), 1)})
    assert (one + ones).pairs == {"loss": (257, 256), "hits": (2, 2)}
    reduce = jax.shard_map(
        lambda _: one.reduce("fsdp"), mesh=fsdp_mesh, in_specs=P("fsdp"), out_specs=P()
    )
    assert reduce(jnp.ones(8)).pairs == {"loss": (2048, 2040), "hits": (8, 8)}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("count", "text"), [(2.0, "the float 2.0"), ("2", "the str '2'"), (None, "a NoneType")]
)
def test_a_number_of_minibatches_that_is_no_integer(count, text) -> None:
    message = f"num_minibatches is {text}, not an integer. Call `accumulate_gradients("
    with pytest.raises(ts.errors.ArgumentError, match=re.escape(message)):
        accumulate_gradients(metrics_of, ROWS, count)
    for integer in (np.int64(2), jnp.int32(2)):
        assert accumulate_gradients(metrics_of, ROWS, integer)[1]["pair"] == (ROWS.sum(), 64)


@pytest.mark.parametrize(
    ("metrics", "facts"),
    [
        ((jnp.float32(1), jnp.int32(2)), "metrics/1: int32[] has no mean"),
        (
            {"a": [jnp.zeros(3, int)], "b": "warm"},
            "  metrics/a/0: int32[3] has no mean.\n  metrics/b: the str 'warm' has no mean",
        ),
    ],
    ids=["pair that is no value", "several"],
)
def test_what_is_neither_a_mean_nor_a_pair_is_an_error(metrics, facts) -> None:
    with pytest.raises(LeafError) as error:
        accumulate_gradients(lambda rows, key: (rows[0], metrics), jnp.zeros(8), 2)
    assert facts in str(error.value)
    assert "`training.Metrics({name: (sum, count)})` to add it up" in str(error.value)


ONE = Metrics({"loss": (jnp.float32(6), jnp.int32(2)), "hits": (jnp.int32(1), jnp.int32(2))})
TWO = Metrics({"loss": (jnp.float32(3), jnp.int32(1)), "hits": (jnp.int32(1), jnp.int32(1))})


def test_sums_and_counts_add_up() -> None:
    both = ONE + TWO
    assert both.means() == {"loss": 3.0, "hits": 2 / 3}
    assert sum([ONE, TWO], None).means() == both.means()  # a first step without metrics
    assert (ONE + None).means() == ONE.means()
    assert math.isnan(Metrics({"x": (jnp.float32(0), jnp.int32(0))}).means()["x"])
    with pytest.raises(ValueError, match=r"metrics \['hits', 'other'\] are on one side only"):
        ONE + Metrics({"loss": ONE.pairs["loss"], "other": ONE.pairs["hits"]})
    with pytest.raises(TypeError):
        ONE + 1


def test_metrics_are_printed(capsys) -> None:
    print_metrics(ONE, "step 1")
    print_metrics({"loss": (3.0, 2)})
    assert capsys.readouterr().out == "step 1\n  loss  3.0000\n  hits  0.5000\n  loss  1.5000\n"
