"""Errors of types on Explicit axes end in a line to paste, which trains like one device."""

from pathlib import Path
from typing import Any

import chex
import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.training.untyped_programs import PARAMS, PROGRAMS

SOURCE = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import treeshard as ts


def loss(p, x, ids):
    out = {expression}
    floats = [a for a in jax.tree.leaves(out) if jnp.issubdtype(a.dtype, jnp.floating)]
    return sum(jnp.sum(a**2) for a in floats) + jnp.sum(p["b"] ** 2)
"""
ROWS = P(("data", "fsdp"))


@pytest.fixture(scope="module", autouse=True)
def broadcasting() -> Any:
    """Allows biases to be added to rows."""
    with jax.numpy_rank_promotion("allow"):
        yield


def params() -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(0)
    return {k: drawn.standard_normal(shape).astype("float32") for k, shape in PARAMS.items()}


def batch() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).standard_normal((16, 8)).astype("float32")
    return x, np.arange(16, dtype="int32")[::-1].copy()


RULES = [("^(w|e|b|k)$", P("fsdp")), ("^wc$", P(None, "fsdp")), (".*", None)]


def trained(source: str, file: Path, mesh: Any) -> Any:
    """The gradients of a source's `loss`, after they were used for a step."""
    file.write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    plan = ts.plan(params(), RULES, mesh, min_size=0)

    def step(p: Any, data: Any) -> Any:
        value, grads = ts.training.value_and_grad(names["loss"])(p, *data)
        return jax.tree.map(lambda a, g: a - 0.01 * g, p, grads), value

    run = ts.jit_step(step, plan, batch=ROWS)
    state, value = run(ts.shard(params(), plan), batch())
    return ts.gather(state), float(value)


def proposals(message: str) -> list[str]:
    lines = [x.strip() for x in message.split("Write one of these", 1)[1].splitlines()[1:]]
    return [line.rpartition("  # ")[0] for line in lines if "  # " in line]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_proposal_trains_and_equals_one_device(name: str, tmp_path: Path) -> None:
    source = SOURCE.format(expression=PROGRAMS[name])
    explicit = jax.make_mesh((2, 4), ("data", "fsdp"))
    if name in TYPED_SINCE_0_12 and jax.__version_info__ >= (0, 12):
        pytest.skip("this version of JAX types it")
    with pytest.raises(ts.errors.ShardingTypeError) as raised:
        trained(source, tmp_path / "wrong.py", explicit)
    print(raised.value)
    first = proposals(str(raised.value))[0]
    mended = source.replace(f"out = {PROGRAMS[name]}", first)
    assert mended != source
    alone = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1], axis_types=AUTO)
    expected = trained(source, tmp_path / "alone.py", alone)
    chex.assert_trees_all_close(
        trained(mended, tmp_path / "mended.py", explicit), expected, rtol=1e-4, atol=1e-5
    )


TYPED_SINCE_0_12 = {"sort with a gradient"}
AUTO = (jax.sharding.AxisType.Auto,) * 2


# ------------------------------------------------------------------ what a message says


class Layer(eqx.Module):
    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.weight + self.bias


def model() -> dict[str, Any]:
    one = Layer(np.ones((8, 8), "float32"), np.ones((1, 8), "float32"))
    return {"layers": [one, one], "embed": np.ones((16, 8), "float32")}


COLUMNS = [("embed", P("fsdp")), (".*", P(None, "fsdp"))]


def message(loss: Any, kind: Any = None, rows: P = ROWS, differentiate: Any = None) -> str:
    """What a step says about a loss that JAX cannot type."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=kind)
    plan = ts.plan(model(), COLUMNS, mesh, min_size=0)
    way = differentiate or ts.training.value_and_grad
    step = ts.jit_step(lambda s, x: (s, way(loss)(s, x)[0]), plan, batch=rows)
    with pytest.raises(ts.errors.ShardingTypeError) as raised:
        step(ts.shard(model(), plan), np.ones((16, 8), "float32"))
    assert raised.value.__cause__ is not None  # JAX's own
    return str(raised.value)


def test_a_message_has_the_line_the_leaves_with_rules_and_what_a_way_moves() -> None:
    def loss(params: Any, x: Any) -> Any:
        for layer in params["layers"]:
            x = x @ layer.weight
        return x.mean()

    first, *lines = message(loss).splitlines()
    assert first.startswith(__file__)
    assert first.endswith(
        ": JAX cannot tell how the result of `x @ layer.weight` is split over data=2, fsdp=4, whose"
        " axes are Explicit."
    )
    assert lines[:4] == [
        "  x: float32[16@(data,fsdp),8]",
        "  layer.weight: float32[8,8@fsdp], the leaf layers/{0..1}/weight, by rule 1 '.*'",
        "Write one of these; each was traced here, with its gradient:",
        "  x = x @ ts.unshard(layer.weight)  # moves 256 B: all-gather",
    ]
    assert lines[-1].startswith("JAX says: dot_general")


def test_of_a_line_in_a_package_it_has_the_line_that_called_it() -> None:
    state = {"linear": eqx.nn.Linear(8, 8, key=jax.random.key(0))}
    plan = ts.plan(state, [(".*", ts.fsdp("fsdp"))], jax.make_mesh((8,), ("fsdp",)), min_size=0)

    def loss(params: Any, x: Any) -> Any:
        return jax.vmap(params["linear"])(x).mean()

    step = ts.jit_step(lambda s, x: (s, loss(s, x)), plan)
    with pytest.raises(ts.errors.ShardingTypeError) as raised:
        step(ts.shard(state, plan), np.ones((16, 8), "float32"))
    assert proposals(str(raised.value))[0] == (
        'return jax.vmap(ts.unshard(params["linear"]))(x).mean()'
    )


def test_a_mapped_line_is_traced_as_it_is_mapped() -> None:
    def loss(params: Any, x: Any) -> Any:
        w = params["layers"][0].weight
        return jax.vmap(lambda row: row @ w)(x).mean()

    text = message(loss)
    assert "the result of `row @ w` is split" in text
    assert "  row: float32[8]" in text, text
    assert "row @ ts.unshard(w)" in proposals(text)[0]


def test_a_statement_that_adds_in_place() -> None:
    def loss(params: Any, x: Any) -> Any:
        x += params["layers"][0].bias
        return x.mean()

    assert proposals(message(loss))[0] == "x = x + ts.unshard(params['layers'][0].bias)"


def test_an_expression_of_several_lines() -> None:
    def loss(params: Any, x: Any) -> Any:
        out = jax.numpy.einsum(
            "bi,io->bo",
            x,
            params["layers"][0].weight,
        )
        return out.mean()

    assert 'ts.unshard(params["layers"][0].weight),\n        )  # moves 256 B' in message(loss)


def test_a_mesh_whose_last_axis_is_explicit() -> None:
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    text = message(lambda p, x: p["layers"][0](x).mean(), kinds)
    assert "  x: float32[16@fsdp,8]" in text
    assert proposals(text)[0] == "return x @ ts.unshard(self.weight) + self.bias"


def test_in_a_jit_of_ones_own() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    plan = ts.plan(model(), COLUMNS, mesh, min_size=0)
    run = jax.jit(ts.training.value_and_grad(lambda p, x: p["layers"][0](x).mean(), plan))
    x = ts.shard(np.ones((16, 8), "float32"), ROWS, mesh)
    with jax.set_mesh(mesh), pytest.raises(ts.errors.ShardingTypeError) as raised:
        run(ts.shard(model(), plan), x)
    assert "self.weight: float32[8,8@fsdp], the leaf layers/{0..1}/weight" in str(raised.value)
    assert proposals(str(raised.value))


def test_in_a_check_of_gradients() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    plan = ts.plan(model(), COLUMNS, mesh, min_size=0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 8)).astype("float32")
    loss = lambda p, x: (p["layers"][0](x) ** 2).mean()  # noqa: E731
    with pytest.raises(ts.errors.ShardingTypeError, match=r"x @ ts\.unshard\(self\.weight\)"):
        ts.testing.check_gradients(loss, model(), x, plan=plan, batch_specs=ROWS)


@pytest.mark.parametrize("error", [KeyError("mine"), TypeError("mine"), ValueError("mine")])
def test_an_error_that_is_not_about_types_is_raised_as_it_is(error: Exception) -> None:
    traces: list[str] = []

    def loss(params: Any, x: Any) -> Any:
        traces.append("")
        raise error

    plan = ts.plan(model(), COLUMNS, jax.make_mesh((2, 4), ("data", "fsdp")), min_size=0)
    step = ts.jit_step(lambda s, x: (s, loss(s, x)), plan)
    with pytest.raises(type(error)) as raised:
        step(ts.shard(model(), plan), np.ones((16, 8), "float32"))
    assert raised.value is error
    assert len(traces) == 2  # with weights that wait, and without


def test_shapes_that_do_not_fit_are_not_about_types() -> None:
    plan = ts.plan(model(), COLUMNS, jax.make_mesh((2, 4), ("data", "fsdp")), min_size=0)
    step = ts.jit_step(lambda s, x: (s, x @ np.ones((3, 3), "float32")), plan)
    with pytest.raises(TypeError, match="contracting") as raised:
        step(ts.shard(model(), plan), np.ones((16, 8), "float32"))
    assert not isinstance(raised.value, ts.errors.ShardingTypeError)


def test_what_no_way_types_says_so(tmp_path: Path) -> None:
    """A function whose source is elsewhere closes over what would have to change."""

    def both(params: Any) -> Any:
        return lambda: params["layers"][0].weight, lambda: params["embed"][:8]

    def loss(params: Any, x: Any) -> Any:
        here, there = both(params)
        return jax.lax.cond(x.sum() > 0, here, there).mean()

    assert "No other way to write it that was traced here has a type." in message(loss)
