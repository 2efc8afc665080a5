"""Saves trees and restores them on any mesh."""

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx
from helpers import files_in, flip_in
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._disk.leaves import is_none
from treeshard.checkpoint import inspect, restore, save, verify

assert_same = functools.partial(helpers.assert_same, kinds=True)

DTYPES = [
    *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "float32", "complex64"),
    *("bfloat16", "int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"),
    *("float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"),
]
# In numpy's arrays, and as Python has them.
WIDE = [np.array([2**60 + 1, -1]), np.array([np.pi, np.nan, -0.0]), np.float64(1 / 3)]
NUMBERS = [True, 7, -3, 2**64, -(2**100), -(10**5000), 1 / 3, -0.0, 5e-324, 1e-320]
NUMBERS += [float("nan"), float("-inf"), 1 / 3 - 0j, complex(-0.0, float("inf"))]
TEXTS = ["", "Ünï\n\0", 'é"\\ \u2028 ' + chr(0x1F600), b"", bytes(range(256)), None]


def everything() -> dict[str, Any]:
    """A tree with every kind of leaf that training states have."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.MLP(4, 4, 16, 2, activation=jax.nn.gelu, key=keys[0])
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 100), mu_dtype=jnp.bfloat16),
    )
    numbers = np.random.default_rng(0).integers(0, 2, (4, 8))
    return {
        "model": model,
        "opt": optimizer.init(eqx.filter(model, eqx.is_array)),
        "nnx": nnx.split(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))[1],
        "linen": {"kernel": nn.Partitioned(jnp.ones((4, 8)), ("embed", "mlp"))},
        "keys": [keys, jax.random.key(1, impl="rbg"), jax.random.split(keys[2], (2, 2)), keys[:0]],
        "dtypes": {name: jnp.asarray(numbers.astype(np.dtype(name))) for name in DTYPES},
        "numpy": [np.arange(5) << 40, np.ones((2, 3), "f4"), np.array(2.5), *WIDE],
        "odd": [jnp.zeros((0, 4)), np.zeros((2, 0)), jnp.float32(-0.0), jnp.full((3,), jnp.nan)],
        "no quarters": np.zeros((4, 0), ml_dtypes.uint4),
        "python": NUMBERS,
        "texts": TEXTS,
        "static": functools.partial(print, 1),
        "a.b/c d%": jnp.arange(3),
        "": jnp.arange(2),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path, tree = tmp_path_factory.mktemp("saved") / "step_7", everything()
    save(path, tree)
    return path, tree


def test_every_kind_of_leaf_comes_back_bit_for_bit(saved) -> None:
    path, tree = saved
    again = restore(path, tree)
    assert_same(again, tree)
    assert again["model"].activation is tree["model"].activation
    assert again["static"] is tree["static"]


def test_without_like_nested_dicts_of_numpy_arrays_are_restored(saved) -> None:
    path, tree = saved
    host = restore(path)
    paths, leaves = ts.leaf_paths(host, is_leaf=is_none), jax.tree.leaves(host, is_leaf=is_none)
    flat = dict(zip(paths, leaves, strict=True))
    assert set(flat) == {leaf.path for leaf in inspect(path).leaves}
    assert "static" not in flat
    assert not any(callable(x) for x in flat.values())
    assert_same(flat["dtypes/int4"], np.asarray(tree["dtypes"]["int4"]))
    assert_same(flat["numpy/0"], tree["numpy"][0])
    assert [flat[f"texts/{i}"] for i in range(len(TEXTS))] == TEXTS
    assert flat["python/4"] == -(2**100)
    assert_same(flat["keys/0"], tree["keys"][0])


@pytest.fixture(autouse=True)
def small_leaves_are_sharded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIN_SHARDING_SIZE", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, ts.Plan]:
    """An FSDP state, saved, and its plan."""
    mesh = ts.make_mesh("fsdp=8")
    rules = [("norm|bias", None), (".*", ts.fsdp("fsdp", min_size=0))]
    state, plan = ts.training.init_sharded(make_state, jax.random.key(0), rules=rules, mesh=mesh)
    path = tmp_path_factory.mktemp("trained") / "step_1"
    save(path, state)
    return path, state, plan


def make_state(key: jax.Array) -> dict[str, Any]:
    model = eqx.nn.MLP(8, 8, 32, 2, key=key)
    return {
        "model": model,
        "opt": optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array)),
        "key": jax.random.split(key, 8),
        "no keys": jax.random.split(key, 8)[:0],
        "step": jnp.int32(3),
    }


RULES = [
    ("key", P("data")),
    (r"layers/\d/weight", P("tensor", "data")),
    (r"layers/\d/bias", P("tensor")),
    ("count|step", None),
]


def structs(state: Any) -> Any:
    def bare(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x

    return jax.tree.map(bare, state)


MESH = "data=2,tensor=4"


def test_rules_and_plans_shard_the_restored_arrays(trained) -> None:
    path, state, _ = trained
    like, mesh = structs(state), ts.make_mesh(MESH)
    whole = ts.plan(like, [(".*", None)], ts.make_mesh("data=8"))
    found = {
        "rules": restore(path, like, rules=RULES, mesh=mesh),
        "a mesh as text": restore(path, like, rules=RULES, mesh="data=2,tensor=-1"),
        "a plan": restore(path, ts.plan(like, RULES, mesh)),
        "rules beside a plan": restore(path, whole, rules=RULES, mesh=MESH),
    }
    with jax.set_mesh(mesh):
        found["the current mesh"] = restore(path, like, rules=RULES)
    for way, again in found.items():
        assert_same(again, state)
        weight = again["opt"][0].mu.layers[1].weight
        assert weight.sharding == NamedSharding(mesh, P("tensor", "data")), way
        assert again["key"].sharding == NamedSharding(mesh, P("data")), way
        assert again["no keys"].sharding.mesh == mesh, way
    flat = restore(path, rules=RULES, mesh=mesh)
    assert flat["model"]["layers"]["0"]["weight"].sharding.spec == P("tensor", "data")
    assert_same(flat["key"], state["key"])
    with pytest.raises(ts.MeshError, match="3"):
        restore(path, like, rules=RULES, mesh="data=3")


def test_a_resumed_run_has_the_same_losses(trained, tmp_path: Path) -> None:
    path, _, plan = trained
    state = restore(path, plan)
    step = ts.training.jit_step(train, plan, batch=P("fsdp"))
    batches = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    losses = []
    for i, batch in enumerate(batches):
        if i == 2:
            save(tmp_path / "x", state)
        state, loss = step(state, batch)
        losses.append(float(loss))
    again, resumed = restore(tmp_path / "x", plan), []
    for batch in batches[2:]:
        again, loss = step(again, batch)
        resumed.append(float(loss))
    assert resumed == losses[2:]
    assert_same(again, state)


def train(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
    def loss_of(model: Any) -> jax.Array:
        return jnp.mean((jax.vmap(model)(batch) - 1) ** 2)

    params, static = eqx.partition(state["model"], eqx.is_array)
    loss, grads = jax.value_and_grad(lambda p: loss_of(eqx.combine(p, static)))(params)
    with jax.numpy_dtype_promotion("standard"):
        updates, opt = optax.adamw(1e-3).update(grads, state["opt"], params)
    model = eqx.combine(optax.apply_updates(params, updates), static)
    return {**state, "model": model, "opt": opt, "step": state["step"] + 1}, loss


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tree = {
        "layers": [{"weight": jnp.ones((4, 8), "bfloat16"), "bias": jnp.ones(8)} for _ in "01"],
        "ids": np.random.default_rng(0).integers(0, 2**60, 512),  # not compressible
        "step": 7,
    }
    path = tmp_path_factory.mktemp("small") / "step_7"
    save(path, tree)
    return path, tree


def test_all_mismatches_are_listed_at_once(small) -> None:
    path, tree = small
    like = structs(tree)
    layer = {"wieght": like["layers"][0]["weight"], "bias": jax.ShapeDtypeStruct((4,), "float32")}
    like = {**like, "layers": [layer, like["layers"][1]], "step": 7.0, "ids": jnp.zeros(512)}
    with pytest.raises(ts.MismatchError) as told:
        restore(path, like)
    assert str(told.value).splitlines() == [
        "3 leaves have another type than requested:",
        "  ids: saved as int64[512], requested as float32[512]. Only floating-point dtypes"
        " are converted; request int64.",
        "  layers/0/bias: saved as float32[8], requested as float32[4].",
        "  step: saved as a Python int, requested as a Python float.",
        f"layers/0/wieght: not in {path}. Did you mean 'layers/0/weight'?",
        f"layers/0/weight: in {path}, but not requested.",
        "`partial=True` reads the leaves that both have, and keeps the others of `like`.",
    ]
    with pytest.raises(ts.MismatchError) as told:
        restore(path, {**tree, "more": [0] * 30})
    lines = str(told.value).splitlines()
    assert lines[0] == f"30 requested leaves are not in {path}:"
    assert (len(lines), lines[-2]) == (13, "  ... and 20 more")


def test_64_bit_dtypes_are_not_silently_narrowed(small, tmp_path: Path) -> None:
    path, tree = small
    like = {**tree, "ids": jax.ShapeDtypeStruct((512,), "int64")}
    with pytest.raises(ts.MismatchError, match=r"would be int32\[512\] on devices. Turn on 64-bit"):
        restore(path, like)
    x, rules = np.linspace(0, 1, 16).reshape(8, 2), [("w", P("fsdp")), ("", None)]
    save(tmp_path / "x", {"w": x, "none": np.zeros((0, 2))})
    with pytest.raises(ts.MismatchError, match=r"float32\[8,2\] on devices.*`cast='float32'`"):
        restore(tmp_path / "x", rules=rules, mesh="fsdp=8")
    again = restore(tmp_path / "x", cast="float32", rules=rules, mesh="fsdp=8")
    assert again["w"].sharding.spec == P("fsdp")
    assert_same(jax.device_get(again), {"w": x.astype("f4"), "none": np.zeros((0, 2), "f4")})
    with jax.enable_x64(True):
        wide = restore(tmp_path / "x", rules=rules, mesh="fsdp=8")["w"]
        assert_same(jax.device_get(wide), x)


def test_partial_reads_only_the_leaves_that_both_have(small) -> None:
    path, tree = small
    like = {"layers": [{"bias": jnp.zeros(8)}], "new": jnp.zeros(3), "fresh": 5}
    with pytest.warns(ts.ShardingWarning) as told:
        again = restore(path, like, partial=True)
    assert str(told[0].message).splitlines() == [
        "2 leaves keep their values from `like`:",
        f"  fresh: not in {path}.",
        f"  new: not in {path}.",
    ]
    assert_same(again["layers"][0]["bias"], tree["layers"][0]["bias"])
    assert again["new"] is like["new"]
    assert again["fresh"] == 5
    with pytest.raises(ts.MismatchError, match="bias: saved as float32"):
        restore(path, {"layers": [{"bias": jnp.zeros(9)}]}, partial=True)


def test_a_cast_must_be_explicit(small) -> None:
    path, tree = small
    layer = {"weight": jax.ShapeDtypeStruct((4, 8), "float32"), "bias": jnp.ones(8)}
    like = {**tree, "layers": [layer] * 2}
    with pytest.raises(ts.MismatchError, match="`cast='float32'` converts it"):
        restore(path, like)
    rules = [("weight", P(None, "fsdp")), (".*", None)]
    del like["ids"]
    placed = restore(path, like, cast="float32", rules=rules, mesh="fsdp=8", partial=True)
    for i, weight in enumerate(x["weight"] for x in placed["layers"]):
        assert_same(weight, tree["layers"][i]["weight"].astype("float32"))
        assert weight.sharding.spec == P(None, "fsdp")
    found = jax.tree.leaves(restore(path, cast=jnp.float16))
    assert {str(x.dtype) for x in found if hasattr(x, "dtype")} == {"float16", "int64"}
    only = " is not a floating-point dtype. Only floating-point arrays are converted"
    for cast, says in {"int8": f"'int8'{only}", bool: f"'bool'{only}"}.items():
        with pytest.raises(ts.FormatError, match=f"^cast={says}"):
            restore(path, tree, cast=cast)
    with pytest.raises(ts.FormatError, match="^'flaot32' is not a dtype."):
        restore(path, tree, cast="flaot32")


def test_incomplete_shardings_are_errors(small) -> None:
    path, tree = small
    with pytest.raises(ts.ShardingRuleError, match="no rule matches"):
        restore(path, tree, rules=[("bias", None)], mesh=ts.make_mesh("data=8"))
    with pytest.raises(ValueError, match="a mesh was given without rules"):
        restore(path, tree, mesh=ts.make_mesh("data=8"))
    with pytest.raises(ts.NoMeshError):
        restore(path, tree, rules=[(".*", None)])
    abstract = jax.sharding.AbstractMesh((8,), ("data",))
    with pytest.raises(ts.NoMeshError, match="no devices"):
        restore(path, ts.plan(structs(tree), [(".*", None)], abstract))


def deleted() -> jax.Array:
    x = jnp.ones(3) + 1
    x.delete()
    return x


NOT_SUPPORTED = "JAX does not support this dtype. Use `.astype`, or `.tolist()`, first."
BAD_LEAVES: dict[str, tuple[Callable[[], Any], str]] = {
    "days": (lambda: np.datetime64("2020-01-01"), f"datetime64[D][]: {NOT_SUPPORTED}"),
    "gone": (deleted, "float32[3]: the array was deleted"),
    "masked": (lambda: np.ma.masked_array([1, 2], [True, False]), "int64[2]: "),
    "objects": (lambda: np.array([None, {}]), f"object[2]: {NOT_SUPPORTED}"),
    "struct": (lambda: jax.ShapeDtypeStruct((2,), "float32"), "float32[2]: a Shap"),
    "words": (lambda: np.array(["a", "b"]), f"<U1[2]: {NOT_SUPPORTED}"),
}


def refused_tree(tree: Any, error: type[Exception], directory: Path) -> str:
    with pytest.raises(error) as told:
        save(directory / "x", tree)
    assert files_in(directory) == []
    return str(told.value)


def test_leaves_that_cannot_be_saved_are_listed_at_once(tmp_path: Path) -> None:
    tree = {name: make() for name, (make, _) in BAD_LEAVES.items()}
    head, *lines = refused_tree(tree | {"none": None}, ts.TreeShardError, tmp_path).splitlines()
    assert head == f"save: {len(BAD_LEAVES)} leaves cannot be moved:"
    for line, (name, (_, says)) in zip(lines, BAD_LEAVES.items(), strict=True):
        assert line.startswith(f"  {name}: {says}")
    assert refused_tree({"w": deleted()}, ts.DeletedLeafError, tmp_path)
    assert refused_tree({"w": tree["struct"]}, ts.LeafError, tmp_path)
    with pytest.raises(ts.LeafError, match=r"w: float32\[3\]: a tracer has no values"):
        jax.jit(lambda x: save(tmp_path / "x", {"w": x}))(jnp.ones(3))


def test_paths_and_strings_that_cannot_be_saved_are_listed_at_once(tmp_path: Path) -> None:
    shared = {"a/b": None, "a": {"b": 2}, "x/y": 1, "x": {"y": len}}
    says = "save: a/b: shared by ['a']['b'], ['a/b']. Rename a key."
    assert refused_tree(shared, ts.CheckpointError, tmp_path) == says
    strings = {"a": "\ud800", "\udfff": 1, "b": "ok"}
    assert refused_tree(strings, ts.LeafError, tmp_path) == (
        "save: 2 strings cannot be saved:\n"
        "  'a': it is not valid Unicode (surrogates not allowed). Save it as bytes.\n"
        "  '\\udfff': it is not valid Unicode (surrogates not allowed). Save it as bytes."
    )


def test_paths_that_are_taken_or_cannot_be_created(small, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    for what in ("checkpoint", "file", "directory"):
        path = small[0] if what == "checkpoint" else tmp_path / what
        with pytest.raises(ts.CheckpointError) as told:
            save(path, {"x": 1})
        assert str(told.value) == (
            f"There is already a {what} at {path}, and `save` does not overwrite. Remove it first,"
            " or save to another path."
        )
    with pytest.raises(ts.CheckpointError, match=r"file/inner cannot be created: Not a directory"):
        save(tmp_path / "file" / "inner" / "x", {"x": 1})
    with pytest.raises(ts.CheckpointError, match="names with '.orbax-checkpoint-tmp' are reserved"):
        save(tmp_path / "x.orbax-checkpoint-tmp", {"x": 1})
    assert (tmp_path / "file").read_text() == "mine"
    assert files_in(tmp_path) == ["directory", "file"]


def refused(path: Path) -> str:
    """The error of `inspect`, `verify` and `restore` for a path: the same for all three."""
    said = set()
    for read in (inspect, verify, restore):
        with pytest.raises(ts.CheckpointError) as told:
            read(path)
        said.add(str(told.value))
    (text,) = said
    return text


def test_the_error_says_what_is_at_the_path_instead(small, tmp_path: Path) -> None:
    steps = tmp_path / "run"
    for step in (3, 12):
        shutil.copytree(small[0], steps / str(step))
    assert refused(steps) == (
        f"{steps} is a directory of checkpoints, not a checkpoint. The directory has steps 3, 12."
        f" Name one: '{steps}/12'."
    )
    assert refused(steps / "5") == (
        f"There is no checkpoint at {steps}/5. The directory has steps 3, 12."
    )
    assert refused(small[0].with_name("step7")) == (
        f"There is no checkpoint at {small[0].parent}/step7. Did you mean 'step_7'?"
    )
    ocp.save(tmp_path / "orbax", {"x": jnp.ones(3)})
    assert refused(tmp_path / "orbax") == (
        f"{tmp_path}/orbax is a checkpoint that Orbax wrote without treeshard: it has no table of"
        " leaves. Read it with Orbax."
    )
    unfinished = steps / "20.orbax-checkpoint-tmp"
    shutil.copytree(small[0], unfinished)
    assert refused(unfinished) == (
        f"{unfinished} is incomplete: its writer did not finish. The directory has steps 3, 12."
    )


@pytest.fixture
def damaged(small, tmp_path: Path) -> Path:
    """A copy of a checkpoint, for a test to damage."""
    return Path(shutil.copytree(small[0], tmp_path / "damaged"))


def test_a_flipped_bit_is_named(small, damaged: Path) -> None:
    flip_in(damaged, small[1]["ids"].tobytes())
    told = [error_of(lambda: verify(damaged)), error_of(lambda: restore(damaged, small[1]))]
    told += [error_of(lambda: restore(damaged))]
    assert len({*told}) == 1
    assert re.fullmatch(
        rf"{damaged}: ids: it cannot be read: chunk ids/c/0 in state/ocdbt.process_0/d/[0-9a-f]+ is"
        r" damaged \(Digest mismatch, stored digest is 0x[0-9a-f]+ but computed digest is"
        r" 0x[0-9a-f]+\)\.\nRead an earlier checkpoint, or copy this one again from where it is"
        r" intact\.",
        told[0],
    )


def test_a_lost_file_from_which_no_leaf_is_read_is_damage(small, damaged: Path) -> None:
    for name in ("_METADATA", "ocdbt.process_0/manifest.ocdbt"):
        (damaged / "state" / name).unlink()
    assert error_of(lambda: verify(damaged)) == (
        f"{damaged}: 0 leaves and 2 other files are damaged:\n"
        "  state/_METADATA is missing.\n"
        "  state/ocdbt.process_0/manifest.ocdbt is missing.\n"
        "Read an earlier checkpoint, or copy this one again from where it is intact."
    )
    assert_same(restore(damaged, small[1]), small[1])


def test_a_file_that_cannot_be_compared_is_damage(damaged: Path, monkeypatch) -> None:
    """Its leaves could be read, and they may be from another step."""

    def fail(file: Any) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("treeshard.checkpoint._paths.file_facts", fail)
    for read in (verify, restore):
        told = error_of(lambda read=read: read(damaged))
        assert "ids: its file state/" in told
        assert "cannot be read: Input/output error." in told


def error_of(read: Callable[[], Any]) -> str:
    with pytest.raises(ts.DamagedError) as told:
        read()
    return str(told.value)


def test_an_intact_file_of_another_step_is_detected(tmp_path: Path) -> None:
    """The checksum of its chunk is valid, and it begins like the file that was there."""
    saved, other = tmp_path / "1", tmp_path / "2"
    small, large = np.arange(9), np.arange(100_000)
    save(saved, {"large": large, "small": small})
    save(other, {"large": np.where(large < 50_000, large, -large), "small": small})
    [ours, theirs] = (largest_file(path) for path in (saved, other))
    shutil.copy(theirs, ours)
    told = error_of(lambda: restore(saved))
    # What the index takes in the file differs by a few bytes from one save to another.
    how = r"has (other contents than were saved|[\d,]+ bytes, and was saved with [\d,]+)\.\n"
    assert re.match(rf"{saved}: large: its file {ours.relative_to(saved)} {how}", told), told
    assert error_of(lambda: verify(saved)) == told
    assert restore(saved, {"small": small}, partial=True)["small"].tolist() == small.tolist()


def largest_file(path: Path) -> Path:
    return max((x for x in path.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)


def test_the_table_of_another_checkpoint_is_detected_with_equal_arrays(damaged: Path) -> None:
    tree = restore(damaged)
    save(damaged.with_name("other"), {**tree, "step": 8})
    parts = [Path("leaves/table.json"), Path("state/table.crc32")]
    kept = {part: (damaged / part).read_bytes() for part in parts}
    for part in parts:
        shutil.copy(damaged.with_name("other") / part, damaged / part)
        with pytest.raises(ts.DamagedError, match="does not belong to the arrays"):
            restore(damaged)
        (damaged / part).write_bytes(kept[part])
    (damaged / parts[1]).unlink()
    with pytest.raises(ts.DamagedError, match="does not belong to the arrays"):
        inspect(damaged)


def test_a_damaged_or_missing_table_is_detected(damaged: Path) -> None:
    table = damaged / "leaves" / "table.json"
    text = table.read_bytes()
    for data, says in {
        text.replace(b'"value": "7"', b'"value": "8"'): "The table of leaves has the CRC-32 ",
        b"\xff" + text: "the table of leaves is not text: ",
        text[:100]: "The table of leaves is not valid JSON: ",
        b"[" * 100_000: "The table of leaves is not valid JSON: ",
        text.replace(b'"kind"', b'"path"'): "The table of leaves is not valid JSON: the key 'path'",
        b"[]": "The table of leaves has no version or no checksum.",
    }.items():
        table.write_bytes(data)
        assert refused(damaged).startswith(f"{damaged}: {says}")
    table.unlink()
    assert refused(damaged) == (
        f"{damaged}: its table of leaves is missing, so its contents are unknown."
    )


def test_contents_print_as_a_table(small) -> None:
    mesh = ts.make_mesh("data=2,fsdp=4")
    path = small[0].with_name("sharded")
    tree = {**small[1], "layers": ts.shard(small[1]["layers"], P("fsdp"), mesh), "none": None}
    save(path, tree | {"name": "a\nb", "key": jax.random.split(jax.random.key(0), 3)})
    assert str(inspect(path)).splitlines() == [
        "path                  leaf           spec          bytes",
        "ids                   int64[512]                 4.0 KiB",
        "key                   key<fry>[3]                   24 B",
        "layers/{0..1}/bias    float32[8]     P('fsdp',)     64 B",
        "layers/{0..1}/weight  bfloat16[4,8]  P('fsdp',)    128 B",
        r"name                  str 'a\nb'                     3 B",
        "none                  None                           0 B",
        "step                  int 7                          1 B",
        "9 leaves, 4.2 KiB. Saved on data=2, fsdp=4.",
    ]
