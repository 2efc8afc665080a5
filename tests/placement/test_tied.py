"""An array at several paths of a tree stays one array, or a warning names both paths."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import assert_same, struct
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.arrays import has_shape, second_handle
from treeshard._planning.plan import Plan
from treeshard.checkpoint import inspect, restore, save, verify
from treeshard.training import jit_step, shard_map_step

VOCAB, WIDTH = 32, 8


@pytest.fixture
def mesh() -> Mesh:
    return ts.make_mesh("fsdp=8")


# ------------------------------------------------------------------ twelve trees


class Block(eqx.Module):
    norm: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP

    def __init__(self, key: Any):
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, jax.nn.gelu, key=key)


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
        self.blocks = [Block(key) for key in keys[1:]]
        self.head = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=keys[2])


def decoder() -> Decoder:
    """A language model whose head is its embedding."""
    model = Decoder(jax.random.key(0))
    return eqx.tree_at(lambda m: m.head.weight, model, model.embed.weight)


def shared_decoder() -> Any:
    ends = [lambda m: m.head.weight], [lambda m: m.embed.weight]
    where, get = (lambda m, f=f: f[0](m) for f in ends)
    return eqx.nn.Shared(Decoder(jax.random.key(0)), where, get)


class Moments(NamedTuple):
    mu: Any
    nu: Any


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCAB, WIDTH)
        return embed.attend(nn.Dense(WIDTH)(embed(tokens)))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = self.embed


def linen() -> Any:
    """The parameters, with an entry for the head as in checkpoints of other libraries."""
    params = Linen().init(jax.random.key(0), jnp.zeros((1, 4), "int32"))["params"]
    return {"model": params, "lm_head": {"weight": params["Embed_0"]["embedding"]}}


def training_state() -> Any:
    model = decoder()
    return {"model": model, "opt": optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))}


def w(dtype: Any = "float32") -> np.ndarray:
    return np.arange(VOCAB * WIDTH).reshape(VOCAB, WIDTH).astype(dtype)


def twice(x: Any) -> Any:
    return {"embed": {"w": x}, "head": {"w": x}, "other": np.ones((16, 4), "float32")}


def moments() -> Any:
    x = w()
    return [(x, w()), Moments(mu=x, nu={"deep": [x]})]


def albert() -> Any:
    """All layers are one layer."""
    block = Block(jax.random.key(0))
    return {"embed": w(), "layers": [block] * 4}


def keys() -> Any:
    return twice(jax.random.split(jax.random.key(0), 8))


def handles() -> Any:
    """Two objects on the same memory."""
    x = jnp.asarray(w())
    return {"a": x, "b": second_handle(x)}


# Each with the number of its arrays, and of its paths to arrays.
TREES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "dict": (lambda: twice(w()), 2, 3),
    "on a device": (lambda: twice(jnp.asarray(w())), 2, 3),
    "bfloat16": (lambda: twice(w(ml_dtypes.bfloat16)), 2, 3),
    "list, tuple and named tuple": (moments, 2, 4),
    "keys": (keys, 2, 3),
    "two handles": (handles, 1, 2),
    "Equinox decoder": (decoder, 13, 14),
    "equinox.nn.Shared": (shared_decoder, 13, 13),
    "shared layers": (albert, 7, 25),
    "Linen": (linen, 3, 4),
    "nnx": (lambda: nnx.state(Tied(nnx.Rngs(0))), 3, 3),
    "training state": (training_state, 42, 43),
}
RULES = [(r"step|count", None), (".*", ts.fsdp("fsdp", min_size=64))]


def arrays_of(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if has_shape(x)]


def groups(tree: Any) -> list[int]:
    """For each array, the index of the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(x), i) for i, x in enumerate(arrays_of(tree))]


def add_one(state: Any, batch: Any) -> Any:
    """Updates each array once, wherever it is."""
    new: dict[int, Any] = {}

    def update(x: Any) -> Any:
        is_number = has_shape(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return new.setdefault(id(x), x + jnp.ones((), x.dtype)) if is_number else x

    return jax.tree.map(update, state), batch.mean()


@pytest.mark.parametrize("name", TREES)
def test_ties_are_kept(name: str, mesh: Mesh, tmp_path: Any) -> None:
    make, count, paths = TREES[name]
    source = make()
    plan = ts.plan(source, RULES, mesh)
    once = [leaf for leaf in plan.leaves if leaf.same_as is None]
    assert (len(once), len(plan.leaves)) == (count, paths)
    state = ts.shard(source, plan)
    expected = groups(state)
    assert len(set(expected)) == count
    held = {id(x): x.addressable_shards[0].data.nbytes for x in arrays_of(state)}
    assert plan.bytes_per_device() == sum(held.values())
    if name != "keys":
        step = jit_step(add_one, plan, batch=P("fsdp"))
        for _ in range(3):
            state, _ = step(state, np.ones((8, 2), "float32"))
            assert groups(state) == expected
    moved = ts.reshard(state, plan.on(ts.make_mesh("data=2,fsdp=4")))
    assert groups(moved) == expected
    gathered = ts.gather(moved)
    assert groups(gathered) == expected
    save(tmp_path / "x", state)
    contents = inspect(tmp_path / "x")
    assert contents.bytes == sum({id(x): x.nbytes for x in arrays_of(gathered)}.values())
    verify(tmp_path / "x")
    for like in (plan, plan.structs, state, gathered):
        restored = restore(tmp_path / "x", like)
        assert groups(restored) == expected
        assert_same(ts.gather(restored), gathered)
    assert len(set(groups(restore(tmp_path / "x")))) == count


def test_init_sharded_makes_a_tied_array_once() -> None:
    model, plan = ts.init_sharded(decoder, rules=RULES, mesh="fsdp=8")
    assert model.embed.weight is model.head.weight
    assert plan.leaves[-1].same_as == "embed/weight"
    step = jit_step(add_one, plan, batch=P("fsdp"))
    model, _ = step(model, np.ones((8, 2), "float32"))
    assert model.embed.weight is model.head.weight
    entry = step.lower(plan.structs, struct(8, 2)).args_info
    assert len(jax.tree.leaves(entry)) == len(plan.leaves)  # one array less, and the batch


# ------------------------------------------------------------------ plans


def test_a_plan_decides_once(mesh: Mesh) -> None:
    rules = [("embed", P("fsdp")), ("head", P(None, "fsdp")), ("other", None)]
    plan = ts.plan(twice(w()), rules, mesh, min_size=0)
    assert str(plan.specs["head"]["w"]) == "P('fsdp',)"
    assert [str(x) for x in plan.findings if x.code == "tied"] == [
        "warning tied: head/w: rule 1 'head': it is the same array as embed/w, whose spec it takes"
        " instead of P(None, 'fsdp'). Let one rule match both paths, or make a copy with"
        " `jnp.copy`."
    ]
    assert "the same array as embed/w" in str(plan)
    assert plan.bytes_per_device() == 4 * (VOCAB * WIDTH // 8 + 64)
    for other in (plan.on(mesh), Plan.from_json(plan.to_json(), like=twice(w()))):
        assert other == plan
        assert other.bytes_per_device() == plan.bytes_per_device()
        assert [x.same_as for x in other.leaves] == [None, "embed/w", None]
    alike = ts.plan(twice(w()), [(".*", P("fsdp"))], mesh, min_size=0)
    assert not [x for x in alike.findings if x.code == "tied"]
    gathers = ts.predict_communication(alike, batch=P("fsdp"))
    assert [x.path for x in gathers if x.kind == "all-gather"] == ["embed/w", "other"]


def test_equal_structs_are_not_one_array(mesh: Mesh) -> None:
    one = struct(8, 4)
    plan = ts.plan({"a": one, "b": one}, [(".*", None)], mesh)
    assert [leaf.same_as for leaf in plan.leaves] == [None, None]


def test_json_with_a_tie_to_nothing(mesh: Mesh) -> None:
    text = ts.plan(twice(w()), RULES, mesh).to_json()
    with pytest.raises(ts.FormatError, match="'same_as' is the path of an earlier leaf"):
        Plan.from_json(text.replace('"same_as": "embed/w"', '"same_as": "other"'))


# ------------------------------------------------------------------ where ties end


def tied(x: Any) -> dict[str, Any]:
    """What repeats besides a large array is not worth a warning."""
    one, function = np.float32(1), len
    rest = {"scale": one, "scale2": one, "f": function, "f2": function, "none": [None, None]}
    return {"embed": {"w": x}, "head": {"w": x}} | rest


HOST = np.ones((8, 4), np.float32)
ONE_SPEC = "To keep them one, give both one spec."
SHARED = "To keep them one, use `equinox.nn.Shared`."
WAYS = {
    "shard": (
        lambda mesh, path: ts.shard({"a": HOST, "b": HOST}, {"a": P(), "b": P("fsdp")}, mesh),
        ONE_SPEC,
    ),
    "reshard": (
        lambda mesh, path: ts.reshard(
            dict.fromkeys("ab", ts.shard(HOST, P(), mesh)), {"a": None, "b": P("fsdp")}, mesh
        ),
        ONE_SPEC,
    ),
    "iter_gather": (lambda mesh, path: list(ts.iter_gather({"a": HOST, "b": HOST})), SHARED),
}


@pytest.mark.parametrize("where", WAYS)
def test_both_paths_are_named(mesh: Mesh, where: str, tmp_path: Any) -> None:
    untie, fix = WAYS[where]
    with pytest.warns(ts.ShardingWarning) as told:
        untie(mesh, tmp_path / "x")
    (one,) = told
    assert str(one.message) == (
        f"{where}: b: it is the same array as a, and becomes an array of its own. {fix}"
    )


def test_arrays_that_share_one_replica_are_two(mesh: Mesh, tmp_path: Any) -> None:
    sharding = jax.NamedSharding(mesh, P())
    first, *others = [jax.device_put(HOST, device) for device in mesh.devices.flat]

    def array(pieces: list[Any]) -> jax.Array:
        return jax.make_array_from_single_device_arrays(HOST.shape, sharding, [first, *pieces])

    state = {"a": array(others), "b": array([x + 1 for x in others])}
    with pytest.raises(ts.CheckpointError, match="b: its replicas on different devices are not"):
        save(tmp_path / "x", state)


def test_the_path_of_a_subtree_is_named(mesh: Mesh) -> None:
    shard_fns, _ = ts.make_shard_and_gather_fns({"model": P("fsdp")}, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard_fns["model"]({"a": HOST, "b": HOST})
    assert model["a"] is model["b"]


def test_what_is_not_moved_stays_as_it_is(mesh: Mesh) -> None:
    passed = ts.shard(tied(HOST), {**dict.fromkeys(tied(HOST)), "embed": None}, mesh)
    assert passed["embed"]["w"] is passed["head"]["w"] is HOST


@pytest.mark.parametrize("make", [jit_step, shard_map_step])
def test_a_step_that_unties_says_so(make: Any, mesh: Mesh) -> None:
    state = ts.shard({"embed": HOST, "head": HOST}, P("fsdp"), mesh)
    plan = ts.plan(state, [(".*", P("fsdp"))], mesh, min_size=0)

    @make(plan=plan, batch=P("fsdp"))
    def step(state: Any, batch: Any) -> Any:
        return {"embed": state["embed"] + 1, "head": state["head"] + 2}, None

    batch = np.ones((8, 2), "float32")
    with pytest.warns(ts.ShardingWarning) as told:
        state, _ = step(state, batch)
    (one,) = told
    assert str(one.message) == (
        f"{make.__name__}: head: it is the same array as embed, and the step returns another array"
        " for it, so they become two. To keep one, return one array at both paths, such as the"
        " update by the sum of both gradients, or use `equinox.nn.Shared`. If two are meant, make"
        " the second with `jnp.copy`."
    )
    state, _ = step(state, batch)  # and no second warning, which would be an error
    np.testing.assert_array_equal(state["embed"], HOST + 2)
    np.testing.assert_array_equal(state["head"], HOST + 4)


# ------------------------------------------------------------------ checkpoints


def test_untied_leaves_are_not_restored_into_one_array(mesh: Mesh, tmp_path: Any) -> None:
    save(tmp_path / "equal", {"a": HOST, "b": HOST.copy()})
    save(tmp_path / "plain", {"a": HOST, "b": HOST.copy()}, fingerprints=False)
    save(tmp_path / "other", {"a": HOST, "b": HOST + 1})
    like = dict.fromkeys("ab", ts.shard(HOST, P("fsdp"), mesh))
    for name in ("equal", "plain"):
        restored = restore(tmp_path / name, like)
        assert restored["a"] is restored["b"]
        np.testing.assert_array_equal(restored["a"], HOST)
    for verified in (True, False):
        with pytest.raises(ts.MismatchError) as error:
            restore(tmp_path / "other", like, verify=verified)
        assert str(error.value) == (
            f"restore: b: `like` has one array for it and a, and {tmp_path / 'other'} has two that"
            " differ. Restore into a tree with two arrays, and decide which to keep."
        )
    two = restore(tmp_path / "other", {"a": struct(8, 4), "b": struct(8, 4)})
    np.testing.assert_array_equal(two["b"], HOST + 1)


def test_a_tied_array_is_restored_as_requested(mesh: Mesh, tmp_path: Any) -> None:
    x = np.arange(32, dtype="float32").reshape(8, 4)
    save(tmp_path / "x", {"a": x, "b": x, "c": x, "d": x})
    like = {
        "a": ts.shard(x, P("fsdp"), mesh),
        "b": ts.shard(x, P(None, "data"), ts.make_mesh("data=4,fsdp=2")),
        "c": x.copy(),
        "d": struct(8, 4, dtype="bfloat16"),
    }
    restored = restore(tmp_path / "x", like, cast="bfloat16")
    for name in "abc":
        np.testing.assert_array_equal(restored[name], x)
    assert restored["a"].sharding == like["a"].sharding
    assert restored["b"].sharding == like["b"].sharding
    assert isinstance(restored["c"], np.ndarray)
    assert restored["d"].dtype == "bfloat16"
    only = restore(tmp_path / "x", {"c": like["b"]}, partial=True)
    np.testing.assert_array_equal(only["c"], x)
