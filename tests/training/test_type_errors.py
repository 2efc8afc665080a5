"""JAX's errors about types on Explicit axes: the message, and that what it offers is right."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from files import DOCS
from jax import lax
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.training import value_and_grad
from treeshard.training._type_errors import ON_PAGE, PAGE, SUGGESTIONS, sharding_type_errors

ROWS = ("data", "fsdp")
BATCH = {
    "x": ((16, 8), P(ROWS)),
    "h": ((16, 32), P(ROWS, "tensor")),
    "ids": ((16,), P(ROWS)),
    "q": ((16, 4, 8, 8), P(ROWS, None, "tensor")),
    "k": ((16, 4, 8, 8), P(ROWS)),
}
WEIGHTS = {
    "table": ((48, 24), P("fsdp")),
    "w": ((8, 64), P(None, "fsdp")),
    "down": ((32, 24), P("tensor")),
    "b": ((8,), P("fsdp")),
    "kernel": ((8, 8, 3), P("fsdp")),
    "layers": ((4, 8, 8), P("fsdp")),
    "a": ((12, 12), P("fsdp")),
    "c": ((12, 12), P(None, "fsdp")),
}


class Row(NamedTuple):
    """An operation that JAX cannot type on Explicit axes, and what to write in its place."""

    fails: str  # an example
    says: str  # a part of JAX's message
    write: str  # the example, written so that JAX can type it


def rows_of_page() -> list[Row]:
    """The table of the page that messages link to."""
    page = DOCS["docs/reference/explicit-axes.md"]
    table = page.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0]
    rows: list[Row] = []
    for line in table.strip().splitlines()[2:]:
        fails, says, write = (cell.strip() for cell in line.strip("| ").split(" | "))
        said = {"": rows[-1].says if rows else "", "anything else": ""}
        rows.append(Row(fails.strip("`"), said.get(says, says), write.strip("`")))
    return rows


TABLE = rows_of_page()
# Of the rows above what a message offers; of all others, the lines differ from case to case.
OFFERED = {
    "table[ids]": ("a lookup", "Write `ts.lookup(table, ids)` instead of `table[ids]`."),
    "x @ w": ("a product", "Write `x @ ts.unshard(w)` instead of `x @ w`."),
    'jnp.einsum("td,sd->ts", x, x)': ("a product", "Write `x @ ts.unshard(w)` instead of `x @ w`."),
    "h @ down": (
        "a product along a split dim",
        "Write `ts.matmul(h, down)` instead of `h @ down`.",
    ),
    "x + b": ("an elementwise operation", "Write `x + ts.unshard(b)` instead of `x + b`."),
}
# What newer releases alone say.
SINCE = {
    "lhs batch dimensions and rhs batch dimensions": (0, 11, 1),
    "Incompatible types for matmul arguments": (0, 10, 2),
    "Explicit sharding inference for": (0, 10, 1),
}
LINEAR = jax.custom_derivatives.linear_call
NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "linear": LINEAR, "np": np, "ts": ts, "P": P}

pytestmark = pytest.mark.usefixtures("quick_compiles", "loose_promotion")


@pytest.fixture
def loose_promotion() -> Any:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def values(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([*name.encode(), *shape])
        if name == "ids":
            return rng.integers(0, 24, shape, "int32")
        return rng.standard_normal(shape).astype("float32")

    return {name: drawn(name, shape) for name, (shape, _) in arrays.items()}


def loss_and_result(line: Any, arrays: dict[str, Any]) -> Any:
    """A loss that depends on every element, and what a line returns."""
    result = eval(line, {**NAMES, **arrays})
    leaves = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((jnp.mean(jnp.sin(x)) for x in leaves), jnp.float32(0)), result


def on_one_device(lines: Any) -> Any:
    """Their results and gradients."""
    ids = {"ids": values(BATCH)["ids"]}
    floats = {k: v for k, v in values({**BATCH, **WEIGHTS}).items() if k != "ids"}

    def of_all(floats: Any) -> Any:
        found = []
        for line in lines:
            loss = lambda floats, line=line: loss_and_result(line, floats | ids)  # noqa: E731
            found.append(jax.grad(loss, has_aux=True)(floats)[::-1])
        return found

    with jax.set_mesh(ts.make_mesh("data=1,fsdp=1,tensor=1", devices=jax.devices()[:1])):
        return jax.jit(of_all)(floats)


def in_a_step(lines: Any, kind: Any) -> Any:
    """Of each line its result, the types of that, the gradients by JAX, and those of weights by
    treeshard."""
    mesh = ts.make_mesh("data=2,fsdp=2,tensor=2", axis_types=kind)
    rules = [(f"^{name}$", spec) for name, (_, spec) in WEIGHTS.items()]
    plan = ts.plan(values(WEIGHTS), rules, mesh, min_size=0)
    types: list[Any] = []

    def of_line(line: Any, weights: Any, batch: Any) -> Any:
        ids = {"ids": batch.pop("ids")}

        def loss(weights: Any, batch: Any) -> Any:
            return loss_and_result(line, {**weights, **batch, **ids})

        by_jax, result = jax.grad(loss, (0, 1), has_aux=True)(weights, batch)
        types.append(list(map(jax.typeof, jax.tree.leaves(result))))
        ours = value_and_grad(lambda w: loss(w, batch)[0])(weights)[1]
        return result, {**by_jax[0], **by_jax[1]}, ours

    def step(weights: Any, batch: Any) -> Any:
        types.clear()
        batch = {k: ts.with_sharding_constraint(x, BATCH[k][1]) for k, x in batch.items()}
        return weights, [of_line(line, weights, {**batch}) for line in lines]

    run = ts.jit_step(step, plan, batch=P(ROWS), donate=False)
    found = run(ts.shard(values(WEIGHTS), plan), values(BATCH))[1]
    return zip(found, types, strict=True)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Of each line that fails its result and gradients on one device."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = on_one_device([row.fails for row in TABLE])
    return {row.fails: each for row, each in zip(TABLE, found, strict=True)}


# Each in a step of its own: if one weight of a step cannot wait for its sum, none does.
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.fails)
def test_a_line_that_fails_is_answered_with_one_that_is_right(
    row: Row, alone: Any, tmp_path: Path
) -> None:
    assert_right([row.write], [row.fails], "explicit", alone)
    if jax.__version_info__ < SINCE.get(row.says, ()):
        assert_right([row.fails], [row.fails], "explicit", alone)
        return
    first, *others = message_of_line(row.fails, tmp_path)
    if not row.says:
        assert others == []  # as the operations below
        return
    operation, *offered = OFFERED.get(row.fails, ("an operation",))
    assert first.endswith(
        f"JAX cannot tell how the result of {operation} is split over the Explicit axes data=2,"
        " fsdp=2, tensor=2."
    )
    assert others[0].startswith("JAX says: ")
    assert row.says in "\n".join(others)
    assert others[-1].endswith(PAGE)
    assert [line for line in others if line.startswith("Write ")] == offered


def message_of_line(line: str, folder: Path) -> list[str]:
    """The lines of the message for a line of code, without that line."""
    file = folder / "model.py"
    file.write_text(line)
    with pytest.raises(ts.errors.ShardingTypeError) as raised:
        in_a_step([compile(line, file, "eval")], "explicit")
    first, source, *others = str(raised.value).splitlines()
    assert first.startswith(f"{file}:1: ")
    assert source == f"  {line}"
    return [first, *others]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("jnp.cumsum(x, 0)", "unsharded over the axis being reduced"),
        ("jax.ops.segment_sum(x, np.arange(16) // 4, 4)", "Incompatible types for broadcasting"),
        ("jnp.zeros((16, 8)).at[:].set(x)", "Incompatible types for broadcasting"),
        ("a[:, None] @ c[:, :, None]", "Incompatible types for matmul arguments"),
        ("lax.top_k(h, 2)", "unsharded over the axis along which to compute"),
        ("lax.ragged_dot(x, layers, np.array([4, 4, 4, 4]))", "Explicit sharding inference for"),
        ("jnp.tile(x, (2, 1))", "cannot be sharded on dimension 0"),
        ("jax.vjp(jnp.sin, a)[1](jnp.ones((12, 12)))[0]", "argument to VJP function"),
        ("jax.custom_gradient(lambda a: (a, lambda t: t.T))(a)", "Custom VJP bwd rule"),
        # In the backward pass.
        ("linear(lambda r, a: a, lambda r, t: t.T, (), a)", "Expected cotangent type"),
    ],
)
def test_of_an_operation_without_a_row_the_message_is_that_of_jax(
    line: str, says: str, tmp_path: Path
) -> None:
    if jax.__version_info__ < SINCE.get(says, ()):
        pytest.skip("this release says something else")
    first, *others = message_of_line(line, tmp_path)
    assert says in first
    assert others == []


# Operations with the messages of suggestions, and what these would make of them.
@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("jnp.take_along_axis(h, ids[:, None], 1)", "ts.lookup(h, ids[:, None])"),
        ("c[:, ids % 8]", "ts.lookup(c, (slice(None), ids % 8))"),
        ("table[ids, ids]", "ts.lookup(table, (ids, ids))"),
        ("(lambda t, i: t[i])(table, (ids, ids))", "ts.lookup(table, (ids, ids))"),
        ('jnp.einsum("bh,bh->b", h, h)', "ts.matmul(h, h)"),
        ("h[:, :, None] @ h[:, None]", "h[:, :, None] @ ts.unshard(h)[:, None]"),
        ("h[:, :, None] + h[:, None]", "h[:, :, None] + ts.unshard(h)[:, None]"),
    ],
)
def test_no_line_is_offered_that_would_fail_or_be_wrong(
    line: str, wrong: str, tmp_path: Path
) -> None:
    others = message_of_line(line, tmp_path)
    assert [x for x in others if "Write" in x] == []
    alone = dict(zip([line], on_one_device([line]), strict=True))
    with pytest.raises((TypeError, ValueError, AssertionError)):
        assert_right([wrong], [line], "explicit", alone)


def test_what_to_write_is_right_on_auto_axes_too(alone: Any) -> None:
    rows = [row for row in TABLE if "out_sharding" not in row.write]
    assert_right([row.write for row in rows], [row.fails for row in rows], "auto", alone)


def test_what_a_message_offers_is_in_the_table() -> None:
    rows = {(row.fails, row.says, row.write) for row in TABLE}
    assert rows.issuperset((x.fails, x.says, x.write) for x in SUGGESTIONS)
    assert {row.says for row in TABLE} == {*ON_PAGE, ""}


def assert_right(lines: list[str], originals: list[str], kind: str, alone: Any) -> None:
    """Whether lines give in a step what other lines give on one device."""
    found = zip(lines, originals, in_a_step(lines, kind), strict=True)
    for line, original, ((got, by_jax, ours), types) in found:
        result, gradients = alone[original]
        jax.tree.map(partial(same, line), got, result)
        for name, gradient in gradients.items():
            same(line, by_jax[name], gradient)
        assert ours.keys() == WEIGHTS.keys()
        for name, gradient in ours.items():
            same(line, gradient, gradients[name])
        assert types
        for type_ in types if kind == "explicit" else ():  # the rows of a batch stay split
            assert 16 not in type_.shape[:1] or type_.sharding.spec[0] == ROWS


def same(line: str, got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5, err_msg=line)


# ------------------------------------------------------------------ what a message says


class Model(eqx.Module):
    embed: Any
    layers: list[Any]

    def __call__(self, ids: Any) -> Any:
        x = jax.vmap(self.embed)(ids)
        for layer in self.layers:
            x = x @ layer["weight"]
        return x


def model() -> Model:
    layers = [{"weight": np.ones((8, 8), "float32")} for _ in range(2)]
    return Model(eqx.nn.Embedding(16, 8, key=jax.random.key(0)), layers)


def plan_of_model(kinds: Any = None) -> ts.Plan:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=kinds)
    return ts.plan(model(), [("embed", P("fsdp")), (".*", P(None, "fsdp"))], mesh, min_size=0)


def raised_in_a_step(of: Any, batch: Any, kinds: Any = None) -> Exception:
    plan = plan_of_model(kinds)
    step = ts.jit_step(lambda s, x: (s, of(s, x)), plan, batch=P(ROWS))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        step(ts.shard(model(), plan), batch)
    return raised.value


def message(loss: Any, batch: Any, kinds: Any = None) -> str:
    error = raised_in_a_step(value_and_grad(loss), batch, kinds)
    assert isinstance(error, ts.errors.ShardingTypeError)
    assert type(error.__cause__).__module__.startswith("jax")
    return str(error)


IDS = np.arange(16, dtype="int32")
X = np.ones((16, 8), "float32")


def test_a_message_has_the_line_the_types_what_to_write_and_a_link() -> None:
    first, *lines = message(lambda model, ids: model(ids).mean(), IDS).splitlines()
    assert first.startswith(f"{__file__}:")
    assert first.endswith("the result of a lookup is split over the Explicit axes data=2, fsdp=4.")
    assert lines[0] == "  x = jax.vmap(self.embed)(ids)"
    assert lines[1].startswith("JAX says: Use `.at[...].get(out_sharding=)`")
    assert "float32[16@fsdp,8]" in lines[1]
    assert lines[2:] == [
        "Write `ts.lookup(table, ids)` instead of `table[ids]`.",
        f"Operations that fail, and what to write instead: {PAGE}",
    ]


def add_in_place(model: Any, x: Any) -> Any:
    row = model.layers[0]["weight"][:1]
    x += row
    return x.mean()


def test_a_statement_that_adds_in_place() -> None:
    lines = message(add_in_place, X).splitlines()
    assert lines[1] == "  x += row"
    assert "f32[1,8@fsdp]" in lines[2]
    assert "Write `x + ts.unshard(b)` instead of `x + b`." in lines


@jax.custom_gradient
def with_rule(w: Any) -> Any:
    def backward(g: Any) -> Any:
        return g + g.T

    return w * 2, backward


def test_in_a_backward_pass_the_line_is_that_of_the_rule_or_of_the_operation() -> None:
    rule = message(lambda model, x: with_rule(model.layers[0]["weight"]).mean(), X)
    assert rule.splitlines()[1] == "  return g + g.T"
    operation = str(raised_in_a_step(value_and_grad(loss_of_wrong_type), X))
    assert operation.splitlines()[1] == "  w = LINEAR(lambda _, w: w, lambda _, g: g.T, (), w)"


def loss_of_wrong_type(model: Any, x: Any) -> Any:
    w = model.layers[0]["weight"]
    w = LINEAR(lambda _, w: w, lambda _, g: g.T, (), w)
    return w.mean()


def test_on_a_mesh_with_auto_axes_no_gather_is_offered_of_what_is_no_leaf() -> None:
    kinds = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)
    first, *lines = message(add_in_place, X, kinds).splitlines()
    assert first.endswith("an operation is split over the Explicit axes fsdp=4.")
    assert lines[0] == "  x += row"
    assert not any(line.startswith("Write") for line in lines)

    def gathers(model: Any, x: Any) -> Any:
        return (x + ts.unshard(model.layers[0]["weight"][:1])).mean()

    assert isinstance(raised_in_a_step(value_and_grad(gathers), X, kinds), ts.errors.SpecError)


def adds_a_table(gather: Any) -> Any:
    """A loss that adds a matrix; JAX has no type for its gradient to wait."""
    return lambda model, x: (x + gather(model.layers[0]["weight"])).mean()


def masks_a_table(gather: Any) -> Any:
    return lambda model, x: jnp.where(x > 0, gather(model.layers[0]["weight"]), 0).mean()


def test_no_gather_is_offered_of_what_is_added_while_gradients_wait() -> None:
    x = np.ones((8, 8), "float32")

    def in_one_pass(loss: Any) -> Exception:
        return raised_in_a_step(value_and_grad(loss, axis_names=ROWS), x)

    def in_minibatches(loss: Any) -> Exception:
        def step(model: Any, x: Any) -> Any:
            def grad_fn(x: Any, key: Any) -> Any:
                return jax.grad(loss)(model, x), {}

            return ts.training.accumulate_gradients(grad_fn, x, 1, axis_names=ROWS)

        return raised_in_a_step(step, x)

    for raised in in_one_pass, in_minibatches:
        error = raised(adds_a_table(lambda table: table))
        assert isinstance(error, ts.errors.ShardingTypeError)
        assert "add operation with inputs" in str(error)
        assert "Write" not in str(error)
        for uses in adds_a_table, masks_a_table:
            wrong = raised(uses(ts.unshard))
            assert isinstance(wrong, ts.errors.ShardingTypeError)
            assert "Without `axis_names` the numbers are the same." in str(wrong)


def test_without_a_plan_no_gather_is_offered() -> None:
    w = np.ones((8, 8), "float32")
    with jax.set_mesh(jax.make_mesh((8,), ("fsdp",))):
        w, x = jax.device_put((w, X), (P(None, "fsdp"), P("fsdp")))
        with pytest.raises(ts.errors.ShardingTypeError) as raised:
            jax.jit(value_and_grad(lambda w, x: (x @ w).mean(), P(None, "fsdp")))(w, x)
    assert "Write" not in str(raised.value)


def test_in_a_check_of_gradients() -> None:
    loss = lambda model, ids: (model(ids) ** 2).mean()  # noqa: E731
    with pytest.raises(ts.errors.ShardingTypeError, match=r"ts\.lookup\(table, ids\)"):
        ts.testing.check_gradients(loss, model(), IDS, plan=plan_of_model(), batch_specs=P(ROWS))


def test_code_whose_source_is_elsewhere() -> None:
    names: dict[str, Any] = {}
    exec("def loss(model, x): return (x @ model.layers[0]['weight']).mean()", names)
    assert "Write `x @ ts.unshard(w)` instead of `x @ w`" in message(names["loss"], X)


def test_an_error_that_is_not_about_types_is_raised_as_it_is() -> None:
    def loss(model: Any, x: Any) -> Any:
        raise error

    error = TypeError("mine")
    assert raised_in_a_step(loss, X) is error


def loop(start: Any) -> Any:
    return lambda model, x: lax.fori_loop(0, 2, lambda i, s: s + x, start)[0].mean()


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, x: (x @ np.ones((3, 3), "float32")).mean(),
        loop(np.ones((1, 8), "float32")),
        loop(np.ones((16, 8), "int32")),
        lambda model, x: jnp.broadcast_to(x, (16, 9)).mean(),
        lambda model, x: jnp.broadcast_to(x, (8,)).mean(),
        lambda model, x: (jnp.stack([x, x]) @ np.ones((3, 8, 8), "float32")).mean(),
    ],
    ids=["product", "carry", "dtypes of a carry", "broadcast", "ranks", "batch dims of a product"],
)
def test_shapes_and_dtypes_that_differ_are_not_about_types(loss: Any) -> None:
    error = raised_in_a_step(loss, X)
    assert isinstance(error, (TypeError, ValueError))
    assert not isinstance(error, ts.errors.ShardingTypeError)


def test_a_mesh_with_other_axes_is_not_about_types() -> None:
    other = jax.make_mesh((8,), ("model",))

    def loss(model: Any, x: Any) -> Any:
        with jax.sharding.use_abstract_mesh(other.abstract_mesh):
            return jnp.sin(x).mean()

    error = raised_in_a_step(loss, X)
    assert "should match the aval mesh" in str(error)
    assert not isinstance(error, ts.errors.ShardingTypeError)


def test_a_message_without_two_types_is_left_to_jax() -> None:
    """Another release may word it otherwise: what it says must not be lost."""
    error = ValueError("Incompatible types for add: they differ")
    mesh = ts.make_mesh("fsdp=8", axis_types="explicit")
    with pytest.raises(ValueError, match="they differ") as told, sharding_type_errors(mesh):
        raise error
    assert told.value is error
