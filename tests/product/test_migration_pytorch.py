"""docs/migrate.md: the lines of DTensor and FSDP2, and ours.

What PyTorch does was observed on 2.13, with four gloo processes.
"""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import arange, assert_close, struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from migration import check_init, table
from safetensors.numpy import save_file

import treeshard as ts

row = table("From PyTorch: FSDP2 and DTensor", "fsdp=4", devices=4)

X = arange(4, 4)
# What each of the ranks of a 2 x 2 mesh holds of X: rows, columns.
FIRST, LAST, ALL = [0, 1], [2, 3], [0, 1, 2, 3]
HELD = {
    "[Shard(0), Replicate()]": [(FIRST, ALL), (FIRST, ALL), (LAST, ALL), (LAST, ALL)],
    "[Shard(1), Shard(0)]": [(FIRST, FIRST), (LAST, FIRST), (FIRST, LAST), (LAST, LAST)],
    "[Shard(0), Shard(0)]": [([0], ALL), ([1], ALL), ([2], ALL), ([3], ALL)],
}


@row(*HELD)
def test_placements(*ours) -> None:
    mesh = ts.make_mesh("dp=2,tp=2", devices=jax.devices()[:4])
    for spec, held in zip(ours, HELD.values(), strict=True):
        placed = ts.shard(X, spec(), mesh)
        parts = {shard.device: np.asarray(shard.data) for shard in placed.addressable_shards}
        for device, (rows, columns) in zip(mesh.devices.flat, held, strict=True):
            np.testing.assert_array_equal(parts[device], X[np.ix_(rows, columns)])


@row("Partial()")
def test_partial(ours) -> None:
    mesh = ts.make_mesh("dp=4", devices=jax.devices()[:4])
    f = jax.shard_map(lambda x: ours(x=x), mesh=mesh, in_specs=P("dp"), out_specs=P())
    assert f(jnp.asarray([1.0, 2.0, 3.0, 4.0])) == 10.0  # as ones * (rank + 1) there


test_mesh = row.makes_mesh(
    'init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))', dp=2, tp=4
)
test_checkpoint = row.saves(
    'dcp.save({"model": model.state_dict()}, checkpoint_id=path)', P("fsdp")
)


@row(
    "distribute_tensor(x, mesh, [Shard(0)])",
    "DTensor.from_local(x, mesh, [Shard(0)])",
    "x.redistribute(placements=[Replicate()])",
    "x.full_tensor()",
    "x.to_local()",
)
def test_tensors(distribute, from_local, redistribute, full_tensor, to_local) -> None:
    mesh = ts.make_mesh("dp=4", devices=jax.devices()[:4])
    split = distribute(x=X, mesh=mesh)
    joined = from_local(x=X, mesh=mesh)  # one process has all devices
    assert split.sharding == joined.sharding == NamedSharding(mesh, P("dp"))
    np.testing.assert_array_equal(joined, X)
    np.testing.assert_array_equal(to_local(x=split), X[:1])
    assert redistribute(x=split, mesh=mesh).sharding.is_fully_replicated
    whole = full_tensor(x=split)
    assert type(whole) is np.ndarray
    np.testing.assert_array_equal(whole, X)
    with pytest.raises(ts.SpecError, match="10 is not divisible by .* Pad it to 12"):
        distribute(x=np.ones((10, 2), np.float32), mesh=mesh)


@row("CommDebugMode()")
def test_collectives(ours) -> None:
    program = jax.jit(lambda params: params["w"], out_shardings=NamedSharding(row.mesh, P()))
    compiled = program.lower(ts.shard({"w": X}, P("fsdp"), row.mesh)).compile()
    (found,) = ours(compiled=compiled)
    assert (found.kind, found.bytes, found.axes) == ("all-gather", X.nbytes, ("fsdp",))
    assert found.path == "params/w"


def linear(inputs: int, outputs: int) -> Any:
    return eqx.filter_eval_shape(eqx.nn.Linear, inputs, outputs, key=jax.random.key(0))


@row("fully_shard(model, mesh=mesh)")
def test_fully_shard(ours) -> None:
    # There: all of them by dim 0; the last is split in 1, 1, 1, 0 rows.
    large, square, odd = linear(512, 1024), linear(128, 128), linear(50001, 3)
    plan = ours(model={"large": large, "square": square, "odd": odd})
    given = {leaf.path: leaf.given for leaf in plan.leaves}
    assert given == {
        "large/weight": P("fsdp"),
        "large/bias": P(),
        "square/weight": P(None, "fsdp"),
        "square/bias": P(),
        "odd/weight": P(),
        "odd/bias": P(),
    }
    (found,) = plan.findings
    assert (found.code, found.paths) == ("left-whole", ("odd/weight",))


@row("fully_shard(model, shard_placement_fn=lambda p: Shard(0))")
def test_dim_0(ours) -> None:
    model = {"w": struct(8, 512), "b": struct(8), "scale": struct()}
    assert ours(model=model).specs == {"w": P("fsdp"), "b": P("fsdp"), "scale": P()}
    plan = ours(model=linear(8, 10))  # there: 3, 3, 3, 1 rows
    with pytest.raises(ts.ShardingRuleError, match=r"(?s)weight: .*10 is not divisible.*bias: "):
        plan.check()


@row(
    'fully_shard(model, mesh=init_device_mesh("cuda", (2, 4),'
    ' mesh_dim_names=("replicate", "shard")))'
)
def test_hsdp(ours) -> None:
    plan = ours(model={"w": struct(512, 128)}, mesh=ts.make_mesh("replicate=2,shard=4"))
    assert plan.specs == {"w": P("shard")}


@row("fully_shard(block, reshard_after_forward=True)")
def test_unshard(ours) -> None:
    block = ts.shard({"up": X, "down": X}, P("fsdp"), row.mesh)
    specs = {"up": NamedSharding(row.mesh, P("fsdp")), "down": NamedSharding(row.mesh, P("fsdp"))}
    whole = jax.jit(lambda block: ours(block=block, specs=specs))(block)
    assert all(x.sharding.is_fully_replicated for x in whole.values())


def init(key: jax.Array) -> dict[str, Any]:
    params = {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8)}
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


RULES = [("w", ts.fsdp("fsdp", min_size=0)), (".*", None)]
SPECS = {"w": P("fsdp"), "b": P()}


@row('with torch.device("meta"): model = Model()', "optimizer = AdamW(model.parameters())")
def test_init_with_an_optimizer(made_by, followed) -> None:
    key = jax.random.key(0)
    state, plan = made_by(init=init, key=key, rules=RULES)
    moments = {"count": P(), "mu": SPECS, "nu": SPECS}
    check_init((state, plan), jax.jit(init)(key), {"opt": [*moments.values()], "params": SPECS})
    params = ts.plan(state["params"], RULES, row.mesh, min_size=0)
    assert followed(plan=params, opt_state=state["opt"]).specs == plan.specs["opt"]


@row("MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
def test_mixed_precision(ours) -> None:
    specs = {"w": P("fsdp")}
    dtypes: list[Any] = []

    def loss(params: Any, x: jax.Array) -> jax.Array:
        dtypes.append(params["w"].dtype)
        return jnp.mean((x.astype(jnp.bfloat16) @ params["w"]).astype(jnp.float32))

    grad = ours(loss=loss, specs=specs)
    step = jax.shard_map(grad, mesh=row.mesh, in_specs=(specs, P("fsdp")), out_specs=(P(), specs))
    args = {"w": struct(8, 4)}, struct(16, 8)
    _, grads = jax.eval_shape(step, *args)
    assert (dtypes[0], grads["w"].dtype) == (jnp.bfloat16, jnp.float32)
    # What was requested: the CPU compiler widens bfloat16.
    traced = re.sub(r"\n\s+", " ", jax.jit(step).lower(*args).as_text())
    moved = re.findall(r"stablehlo\.(all_gather|reduce_scatter).*? -> tensor<[\dx]+(\w+)>", traced)
    assert set(moved) == {("all_gather", "bf16"), ("reduce_scatter", "bf16")}


W = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


@row("model.set_requires_gradient_sync(False)")
def test_accumulate(ours) -> None:
    def accumulated(w: jax.Array, x: jax.Array) -> jax.Array:
        grad_fn = lambda x, key: (jax.grad(loss)({"w": w}, x)["w"], ())  # noqa: E731
        return ours(grad_fn=grad_fn, batch=x)[0]

    args = ts.shard(W, P(), row.mesh), ts.shard(BATCH, P("fsdp"), row.mesh)
    with jax.set_mesh(row.mesh):
        compiled = jax.jit(accumulated).lower(*args).compile()
        (reduced,) = ts.collectives(compiled)
        assert (reduced.kind, reduced.count) == ("all-reduce", 1)
        assert_close(compiled(*args), jax.grad(loss)({"w": W}, BATCH)["w"])


@row("clip_grad_norm_(model.parameters(), 1.0)")
def test_clip(ours) -> None:
    def clipped(grads: Any) -> Any:
        clip = ours()
        return clip.update(grads, clip.init(grads))[0]["w"]

    grads = ts.shard({"w": W}, P("fsdp"), row.mesh)
    expected = W / np.linalg.norm(W)
    assert_close(jax.jit(clipped)(grads), expected)
    inside = jax.shard_map(clipped, mesh=row.mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    assert np.abs(inside(grads) - expected).max() > 0.01


@row("model.load_state_dict(load_file(path))")
def test_safetensors(ours, tmp_path) -> None:
    # As torch.nn.Linear(8, 4) has them: rows are outputs.
    bias = np.arange(4, dtype=np.float32)
    save_file({"fc.weight": W.T.copy(), "fc.bias": bias}, tmp_path / "model.safetensors")
    model = ours(
        path=tmp_path / "model.safetensors",
        like=linear(8, 4),
        rules=[("weight", ts.fsdp("fsdp", min_size=0)), ("bias", None)],
        rename={"weight": "fc.weight", "bias": "fc.bias"},
    )
    assert model.weight.sharding.spec == P(None, "fsdp")
    np.testing.assert_allclose(model(BATCH[0]), BATCH[0] @ W + bias, rtol=1e-4, atol=1e-5)
