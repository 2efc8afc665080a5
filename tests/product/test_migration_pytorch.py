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
from helpers import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import table
from safetensors.numpy import save_file

import treeshard as ts

TABLE = table("From PyTorch: FSDP2 and DTensor")
row = TABLE.row


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("fsdp=4", devices=jax.devices()[:4])


def test_every_row_has_a_test() -> None:
    TABLE.check()


# ------------------------------------------------------------------ placements

X = np.arange(16, dtype=np.float32).reshape(4, 4)
# What each of the ranks of a 2 x 2 mesh holds of X: rows, columns.
FIRST, LAST, ALL = [0, 1], [2, 3], [0, 1, 2, 3]
HELD = {
    "[Shard(0), Replicate()]": [(FIRST, ALL), (FIRST, ALL), (LAST, ALL), (LAST, ALL)],
    "[Replicate(), Shard(1)]": [(ALL, FIRST), (ALL, LAST), (ALL, FIRST), (ALL, LAST)],
    "[Shard(0), Shard(1)]": [(FIRST, FIRST), (FIRST, LAST), (LAST, FIRST), (LAST, LAST)],
    "[Shard(1), Shard(0)]": [(FIRST, FIRST), (LAST, FIRST), (FIRST, LAST), (LAST, LAST)],
    "[Shard(0), Shard(0)]": [([0], ALL), ([1], ALL), ([2], ALL), ([3], ALL)],
}


def check_placement(ours: Any, placements: str) -> None:
    mesh = ts.make_mesh("dp=2,tp=2", devices=jax.devices()[:4])
    placed = ts.shard(X, ours(), mesh)
    parts = {shard.device: np.asarray(shard.data) for shard in placed.addressable_shards}
    for device, (rows, columns) in zip(mesh.devices.flat, HELD[placements], strict=True):
        np.testing.assert_array_equal(parts[device], X[np.ix_(rows, columns)])


@row("[Shard(0), Replicate()]")
def test_shard_replicate(ours) -> None:
    check_placement(ours, "[Shard(0), Replicate()]")


@row("[Replicate(), Shard(1)]")
def test_replicate_shard(ours) -> None:
    check_placement(ours, "[Replicate(), Shard(1)]")


@row("[Shard(0), Shard(1)]")
def test_shard_shard(ours) -> None:
    check_placement(ours, "[Shard(0), Shard(1)]")


@row("[Shard(1), Shard(0)]")
def test_shard_shard_transposed(ours) -> None:
    check_placement(ours, "[Shard(1), Shard(0)]")


@row("[Shard(0), Shard(0)]")
def test_shard_one_dim_twice(ours) -> None:
    check_placement(ours, "[Shard(0), Shard(0)]")


@row("Partial()")
def test_partial(ours) -> None:
    mesh = ts.make_mesh("dp=4", devices=jax.devices()[:4])
    f = jax.shard_map(lambda x: ours(x=x), mesh=mesh, in_specs=P("dp"), out_specs=P())
    assert f(jnp.asarray([1.0, 2.0, 3.0, 4.0])) == 10.0  # as ones * (rank + 1) there
    whole = jax.jit(lambda x: x.sum(0))(ts.shard(X, P("dp"), mesh))
    np.testing.assert_array_equal(whole, X.sum(0))


# ------------------------------------------------------------------ DTensor


@row('init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))')
def test_mesh(ours) -> None:
    assert dict(ours().shape) == {"dp": 2, "tp": 4}
    with pytest.raises(ts.MeshError, match="multiplies to 6, which is not the number of devices"):
        ts.make_mesh("dp=2,tp=3")
    assert ts.make_mesh("dp=2,tp=-1", devices=jax.devices()[:6]).shape["tp"] == 3


@row("distribute_tensor(x, mesh, [Shard(0)])")
def test_distribute(ours) -> None:
    mesh = ts.make_mesh("dp=4", devices=jax.devices()[:4])
    placed = ours(x={"w": np.ones((8, 2), np.float32)}, mesh=mesh)["w"]
    assert [shard.data.shape for shard in placed.addressable_shards] == [(2, 2)] * 4
    for rows, held, padded in [(10, (3, 3, 3, 1), 12), (5, (2, 2, 1, 0), 8)]:
        parts = np.array_split(np.arange(rows), np.arange(1, 4) * -(-rows // 4))
        assert tuple(map(len, parts)) == held  # what is observed there is the rule of `torch.chunk`
        with pytest.raises(ts.SpecError, match=f"{rows} is not divisible by .* Pad it to {padded}"):
            ours(x=np.ones((rows, 2), np.float32), mesh=mesh)


@row("x.redistribute(placements=[Replicate()])")
def test_redistribute(ours, mesh) -> None:
    split = ts.shard(X, P("fsdp"), mesh)
    assert ours(x=split, mesh=mesh).sharding.is_fully_replicated
    with jax.set_mesh(mesh):
        inside = jax.jit(lambda x: ts.with_sharding_constraint(x, P()))(split)
    assert inside.sharding.is_fully_replicated


@row("x.full_tensor()")
def test_full_tensor(ours, mesh) -> None:
    whole = ours(x=ts.shard(X, P("fsdp"), mesh))
    assert type(whole) is np.ndarray
    np.testing.assert_array_equal(whole, X)


@row("x.to_local()")
def test_to_local(ours, mesh) -> None:
    split = ts.shard(X, P("fsdp"), mesh)
    np.testing.assert_array_equal(ours(x=split), X[:1])
    assert len(split.addressable_shards) == 4
    seen: list[Any] = []
    inside = jax.shard_map(
        lambda x: seen.append(x.shape) or x, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp")
    )
    inside(split)
    assert seen[0] == (1, 4)


@row("DTensor.from_local(x, mesh, [Shard(0)])")
def test_from_local(ours) -> None:
    mesh = ts.make_mesh("dp=4", devices=jax.devices()[:4])
    joined = ours(x=X, mesh=mesh)  # one process has all devices
    assert joined.sharding.spec == P("dp")
    np.testing.assert_array_equal(joined, X)


@row("CommDebugMode()")
def test_collectives(ours, mesh) -> None:
    program = jax.jit(lambda params: params["w"], out_shardings=NamedSharding(mesh, P()))
    compiled = program.lower(ts.shard({"w": X}, P("fsdp"), mesh)).compile()
    (found,) = ours(compiled=compiled)
    assert (found.kind, found.bytes, found.axes) == ("all-gather", X.nbytes, ("fsdp",))
    assert found.path == "params/w"


# ------------------------------------------------------------------ FSDP2


def linear(inputs: int, outputs: int) -> Any:
    return eqx.filter_eval_shape(eqx.nn.Linear, inputs, outputs, key=jax.random.key(0))


@row("fully_shard(model, mesh=mesh)")
def test_fully_shard(ours, mesh) -> None:
    # There: all of them by dim 0; the last is split in 1, 1, 1, 0 rows.
    large, square, odd = linear(512, 1024), linear(128, 128), linear(50001, 3)
    plan = ours(model={"large": large, "square": square, "odd": odd}, mesh=mesh)
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
    assert ours(model={"scale": struct()}, mesh=mesh).specs == {"scale": P()}
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    before = model.weight.sharding
    ts.shard(model, ours(model=model, mesh=mesh))
    assert model.weight.sharding == before


@row("fully_shard(model, shard_placement_fn=lambda p: Shard(0))")
def test_dim_0(ours, mesh) -> None:
    model = {"w": struct(8, 512), "b": struct(8), "scale": struct()}
    assert ours(model=model, mesh=mesh).specs == {"w": P("fsdp"), "b": P("fsdp"), "scale": P()}
    plan = ours(model=linear(8, 10), mesh=mesh)  # there: 3, 3, 3, 1 rows
    with pytest.raises(ts.ShardingRuleError, match=r"(?s)weight: .*10 is not divisible.*bias: "):
        plan.check()


@row(
    'fully_shard(model, mesh=init_device_mesh("cuda", (2, 4),'
    ' mesh_dim_names=("replicate", "shard")))'
)
def test_hsdp(ours) -> None:
    mesh = ts.make_mesh("replicate=2,shard=4")
    plan = ours(model={"w": struct(512, 128)}, mesh=mesh)
    assert plan.specs == {"w": P("shard")}
    fn = lambda state, batch: (state, batch.sum())  # noqa: E731
    ts.training.jit_step(fn, plan, batch=P(("replicate", "shard")))
    with pytest.warns(ts.ShardingWarning, match="do the same work"):
        ts.training.jit_step(fn, plan, batch=P("replicate"))


@row("fully_shard(block, reshard_after_forward=True)")
def test_unshard(ours, mesh) -> None:
    specs = {"up": P("fsdp"), "down": P("fsdp")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    def layer(block: Any, x: jax.Array) -> jax.Array:
        whole = ours(block=block, specs=shardings)
        return x + jnp.tanh(x @ whole["up"]) @ whole["down"]

    def gathers(layer: Any) -> int:
        def loss(block: Any, x: jax.Array) -> jax.Array:
            return jnp.mean(layer(block, layer(block, x)) ** 2)

        grad = jax.jit(jax.grad(loss), out_shardings=shardings)
        arrays = {
            name: jax.ShapeDtypeStruct((16, 16), "float32", sharding=sharding)
            for name, sharding in shardings.items()
        }
        batch = jax.ShapeDtypeStruct((8, 16), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        moved = ts.collectives(grad.lower(arrays, batch).compile())
        return sum(one.kind == "all-gather" for one in moved)

    assert gathers(jax.checkpoint(layer)) > gathers(layer) >= 2


def init(key: jax.Array) -> dict[str, Any]:
    params = {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8)}
    return {"params": params, "opt": optax.adam(1e-3).init(params)}


RULES = [("w", ts.fsdp("fsdp", min_size=0)), (".*", None)]


@row('with torch.device("meta"): model = Model()')
def test_init(ours, mesh) -> None:
    key = jax.random.key(0)
    state, plan = ours(init=init, key=key, rules=RULES, mesh=mesh)
    assert plan.specs["params"] == plan.specs["opt"][0].mu == {"w": P("fsdp"), "b": P()}
    np.testing.assert_array_equal(state["params"]["w"], jax.jit(init)(key)["params"]["w"])


@row("optimizer = AdamW(model.parameters())")
def test_optimizer(ours, mesh) -> None:
    state = jax.eval_shape(init, jax.random.key(0))
    plan = ts.plan(state["params"], RULES, mesh, min_size=0)
    found = ours(plan=plan, opt_state=state["opt"]).specs
    assert found[0].mu == found[0].nu == plan.specs
    assert found[0].count == P()


@row("MixedPrecisionPolicy(param_dtype=torch.bfloat16)")
def test_mixed_precision(ours, mesh) -> None:
    specs = {"w": P("fsdp")}
    dtypes: list[Any] = []

    def loss(params: Any, x: jax.Array) -> jax.Array:
        dtypes.append(params["w"].dtype)
        return jnp.mean((x.astype(jnp.bfloat16) @ params["w"]).astype(jnp.float32))

    step = jax.shard_map(
        ours(loss=loss, specs=specs), mesh=mesh, in_specs=(specs, P("fsdp")), out_specs=(P(), specs)
    )
    args = {"w": struct(8, 4)}, struct(16, 8)
    _, grads = jax.eval_shape(step, *args)
    assert (dtypes[0], grads["w"].dtype) == (jnp.bfloat16, jnp.float32)
    lowered = jax.jit(step).lower(*args)
    # What was requested: the CPU compiler widens bfloat16.
    traced = re.sub(r"\n\s+", " ", lowered.as_text())
    moved = re.findall(r"stablehlo\.(all_gather|reduce_scatter).*? -> tensor<[\dx]+(\w+)>", traced)
    assert set(moved) == {("all_gather", "bf16"), ("reduce_scatter", "bf16")}
    assert {x.kind for x in ts.collectives(lowered.compile())} >= {"all-gather", "reduce-scatter"}


W = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
BATCH = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


@row("loss.backward()")
def test_backward(ours, mesh) -> None:
    plan = ts.plan({"w": W}, [("w", P("fsdp"))], mesh, min_size=0)
    step = ts.training.jit_step(
        lambda params, batch: (params, ours(loss=loss, params=params, batch=batch)),
        plan,
        batch=P("fsdp"),
    )
    _, (_, grads) = step(ts.shard({"w": W}, plan), BATCH)
    ranks = [jax.grad(loss)({"w": W}, part)["w"] for part in np.split(BATCH, 4)]
    np.testing.assert_allclose(grads["w"], np.mean(ranks, 0), rtol=1e-5, atol=1e-6)


@row("model.set_requires_gradient_sync(False)")
def test_accumulate(ours, mesh) -> None:
    def grads(w: jax.Array, batch: jax.Array, accumulate: Any) -> Any:
        grad_fn = lambda x, key: (jax.grad(loss)({"w": w}, x)["w"], ())  # noqa: E731
        return accumulate(grad_fn=grad_fn, batch=batch)[0]

    def once_each(grad_fn: Any, batch: Any) -> Any:
        return ts.training.accumulate_gradients(grad_fn, batch, 4)

    args = ts.shard(W, P(), mesh), ts.shard(BATCH, P("fsdp"), mesh)
    reductions: list[int] = []
    with jax.set_mesh(mesh):
        for way in (ours, once_each):
            compiled = jax.jit(lambda w, x, way=way: grads(w, x, way)).lower(*args).compile()
            moved = [x for x in ts.collectives(compiled) if x.kind == "all-reduce"]
            reductions.append(sum(x.count for x in moved))
            expected = jax.grad(loss)({"w": W}, BATCH)["w"]
            np.testing.assert_allclose(compiled(*args), expected, rtol=1e-4, atol=1e-6)
    assert reductions == [1, 4]


@row("clip_grad_norm_(model.parameters(), 1.0)")
def test_clip(ours, mesh) -> None:
    clip = ours()
    grads = ts.shard({"w": W}, P("fsdp"), mesh)

    def clipped(grads: Any) -> Any:
        return clip.update(grads, clip.init(grads))[0]["w"]

    expected = W / np.linalg.norm(W)
    np.testing.assert_allclose(jax.jit(clipped)(grads), expected, rtol=1e-5)
    inside = jax.shard_map(clipped, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    assert np.abs(inside(grads) - expected).max() > 0.01


@row('dcp.save({"model": model.state_dict()}, checkpoint_id=path)')
def test_checkpoint(ours, mesh, tmp_path) -> None:
    ours(path=tmp_path / "state", state=ts.shard({"w": W, "act": jax.nn.relu}, P("fsdp"), mesh))
    wide = ts.make_mesh("data=8")
    plan = ts.plan({"w": W, "act": jax.nn.relu}, [("w", P("data"))], wide, min_size=0)
    found = ts.checkpoint.restore(tmp_path / "state", plan)
    assert found["w"].sharding.spec == P("data")
    np.testing.assert_array_equal(found["w"], W)
    assert found["act"] is jax.nn.relu


@row("model.load_state_dict(load_file(path))")
def test_safetensors(ours, mesh, tmp_path) -> None:
    # As torch.nn.Linear(8, 4) has them: rows are outputs.
    bias = np.arange(4, dtype=np.float32)
    save_file({"fc.weight": W.T.copy(), "fc.bias": bias}, tmp_path / "model.safetensors")
    like = eqx.filter_eval_shape(eqx.nn.Linear, 8, 4, key=jax.random.key(0))
    model = ours(
        path=tmp_path / "model.safetensors",
        like=like,
        rules=[("weight", ts.fsdp("fsdp", min_size=0)), ("bias", None)],
        mesh=mesh,
        rename={"weight": "fc.weight", "bias": "fc.bias"},
    )
    assert model.weight.sharding.spec == P(None, "fsdp")
    np.testing.assert_allclose(model(BATCH[0]), BATCH[0] @ W + bias, rtol=1e-4, atol=1e-5)
