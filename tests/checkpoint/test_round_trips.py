"""A checkpoint that its writer made, its reader reads: shapes, dtypes, byte orders and meshes."""

import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.checkpoint import _array_store, restore, save, verify

# The first dim may be anything, as that of an embedding; the others are small.
FIRST = st.sampled_from([0, 1, 2, 3, 7, 8, 13, 64, 8191, 2**16, 100_003])
OTHERS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8]), max_size=3)
HUGE = st.tuples(st.sampled_from([2**31, 2**40]), st.just(0), st.integers(0, 3))
SHAPES = st.one_of(
    st.just(()), st.builds(lambda first, others: (first, *others), FIRST, OTHERS), HUGE
)
OF_NUMPY = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]
OF_NUMPY += ["complex64", "complex128", "uint64"]
OTHER = ["bfloat16", "int4", "uint2", "float8_e4m3fn", "float4_e2m1fn"]
DTYPES = st.one_of(
    st.builds(lambda order, name: np.dtype(name).newbyteorder(order), st.sampled_from("<>"),
              st.sampled_from(OF_NUMPY)),
    st.sampled_from([np.dtype(getattr(ml_dtypes, name)) for name in OTHER]),
)  # fmt: skip


@st.composite
def leaves(draw: Any) -> tuple[np.ndarray, Any]:
    """The values of a leaf, and the leaf: a numpy array or a view; or its mesh and spec."""
    shape, dtype, seed = draw(SHAPES), draw(DTYPES), draw(st.integers(0, 9))
    most = 2 if dtype.kind in "Vb" else 100  # the small dtypes of ml_dtypes hold 0 and 1
    values = np.random.default_rng(seed).integers(0, most, shape).astype(dtype)
    kind = draw(st.sampled_from(["mesh", "numpy", "transposed", "reversed"]))
    if kind == "transposed":
        return values, values.T.copy(order="C").T
    if kind == "reversed" and shape:
        return values, values[..., ::-1].copy()[..., ::-1]
    fits_devices = dtype.isnative and jax.dtypes.canonicalize_dtype(dtype) == dtype
    if kind != "mesh" or not fits_devices:
        return values, values
    axes = draw(st.sampled_from(["fsdp=8", "data=2,fsdp=4"]))
    left, spec = {"fsdp": 8} if axes == "fsdp=8" else {"data": 2, "fsdp": 4}, []
    for length in shape:  # JAX shards evenly only
        fitting = [axis for axis, size in left.items() if length % size == 0]
        spec.append(draw(st.sampled_from([None, *fitting])))
        left.pop(spec[-1] or "", None)
    return values, (axes, P(*spec))


def placed(values: np.ndarray, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    axes, spec = leaf
    return jax.device_put(values, NamedSharding(ts.make_mesh(axes), spec))


def assert_is(found: Any, values: np.ndarray, like: Any) -> None:
    assert (found.shape, found.dtype) == (like.shape, like.dtype)
    assert isinstance(found, np.ndarray) == isinstance(like, np.ndarray)
    same_order = np.asarray(found).astype(values.dtype)
    assert same_order.tobytes() == values.tobytes()


BIG_ENDIAN = [np.arange(6, dtype=">f4").reshape(2, 3), np.zeros((0, 3), ">i8")]


@given(drawn=st.lists(leaves(), min_size=1, max_size=4))
@example(drawn=[(x, x) for x in BIG_ENDIAN])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_tree_comes_back_into_itself(drawn: list[tuple[np.ndarray, Any]]) -> None:
    tree = {f"{i}": placed(values, leaf) for i, (values, leaf) in enumerate(drawn)}
    with tempfile.TemporaryDirectory() as directory:
        save(f"{directory}/x", tree)
        verify(f"{directory}/x")
        again, flat = restore(f"{directory}/x", tree), restore(f"{directory}/x")
    for i, (values, _) in enumerate(drawn):
        assert_is(again[f"{i}"], values, tree[f"{i}"])
        assert_is(flat[f"{i}"], values, values.astype(values.dtype.newbyteorder("=")))


def test_one_array_at_two_paths_is_two_in_a_checkpoint(mesh, tmp_path: Path) -> None:
    w = np.arange(64, dtype=np.float32).reshape(16, 4)
    tree = dict.fromkeys(("embed", "head"), ts.shard(w, P("fsdp"), mesh))
    save(tmp_path / "x", tree)
    again = restore(tmp_path / "x", tree)
    assert again["embed"] is not again["head"]
    jax.jit(lambda x: -x, donate_argnums=0)(again["embed"])
    np.testing.assert_array_equal(again["head"], w)


def test_a_numpy_leaf_that_changes_during_a_save_is_restored(tmp_path: Path, monkeypatch) -> None:
    """As the workers of a data loader change it: what is written fits its checksum."""
    values = np.arange(2**19, dtype=np.int32)
    tree, commit, commits = {"w": values.copy()}, _array_store._start_commit, []

    def change_and_commit(transaction: Any, writes: Any) -> list[Any]:
        commits.append(transaction)
        if len(commits) == 2:  # the first one has the descriptions
            tree["w"][...] = -1
        return commit(transaction, writes)

    monkeypatch.setattr(_array_store, "_start_commit", change_and_commit)
    save(tmp_path / "x", tree)
    assert tree["w"][0] == -1
    np.testing.assert_array_equal(restore(tmp_path / "x", tree)["w"], values)
