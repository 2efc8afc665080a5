"""All differences between a request and the stored leaves are listed before anything is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeshard as ts
from treeshard._disk.requests import (
    Differences,
    LeafType,
    cast_dtype,
    compare,
    leaf_type,
)


def array(*shape: int, dtype: str = "float32", on_devices: bool = True) -> LeafType:
    return LeafType("array", shape, dtype, on_devices)


def test_equal_leaves_have_no_differences() -> None:
    tree = {"w": jnp.ones(3), "key": jax.random.key(0), "step": 3, "name": "x", "none": None}
    asked = {name: found for name, x in tree.items() if (found := leaf_type(x))}
    stored = {name: x._replace(on_devices=False) for name, x in asked.items()}
    assert compare(stored, asked) == Differences((), (), {})
    Differences((), (), {}).check()


def test_none_may_be_missing() -> None:
    none, one = LeafType("none"), array(3)
    assert compare({"old": none}, {"new": none}) == Differences((), (), {})
    assert compare({"x": none}, {"x": one}).misfits
    assert compare({"x": one}, {"x": none}).misfits


def test_leaf_types() -> None:
    assert leaf_type(np.zeros(3)) == array(3, dtype="float64", on_devices=False)
    assert leaf_type(np.float32(3)) == array(on_devices=False)
    assert leaf_type(jnp.zeros(3)) == leaf_type(jax.ShapeDtypeStruct((3,), "float32")) == array(3)
    key = jax.random.key(0)
    assert leaf_type(key) == leaf_type(jax.eval_shape(lambda: key))
    assert leaf_type(key) == LeafType("key", (), "key<fry>", True)
    assert [leaf_type(x) for x in (3, True, None, len)] == [
        LeafType("int"),
        LeafType("bool"),
        LeafType("none"),
        None,
    ]


def test_all_differences_in_one_error() -> None:
    there = {"layers/0/weight": array(8, 4), "layers/1/bias": array(4), "step": LeafType("int")}
    asked = {"layers/0/wieght": array(8, 4), "layers/1/bias": array(5), "other": LeafType("str")}
    differences = compare(there, {**asked, "step": array(dtype="int32")})
    assert differences.missing == ("layers/0/wieght", "other")
    assert differences.unexpected == ("layers/0/weight",)
    with pytest.raises(ts.MismatchError) as told:
        differences.check()
    assert str(told.value) == (
        "2 leaves have another type than requested:\n"
        "  layers/1/bias: saved as float32[4], requested as float32[5].\n"
        "  step: saved as a Python int, requested as int32[].\n"
        "2 requested leaves are not in the checkpoint:\n"
        "  layers/0/wieght: not in the checkpoint. Did you mean 'layers/0/weight'?\n"
        "  other: not in the checkpoint.\n"
        "layers/0/weight: in the checkpoint, but not requested.\n"
        "`partial=True` reads the leaves that both have, and keeps the others of `like`."
    )


def test_long_lists_are_cut_and_counted() -> None:
    asked = {f"layers/{i}/w": array(4) for i in range(30)}
    with pytest.raises(ts.MismatchError) as told:
        compare({}, asked).check()
    lines = str(told.value).splitlines()
    assert lines[0] == "30 requested leaves are not in the checkpoint:"
    assert (len(lines), lines[-2]) == (13, "  ... and 20 more")


def test_cast_applies_to_floating_point_leaves_only() -> None:
    half, full, integer = array(4, dtype="bfloat16"), array(4), array(4, dtype="int32")
    there = {"a": half, "b": full, "c": integer}
    assert not compare(there, {"a": full, "b": full, "c": integer}, "float32").misfits
    assert not compare(there, {"a": half, "b": full, "c": integer}, "float32").misfits
    assert list(compare(there, {"a": full, "b": half, "c": full}, "float32").misfits) == ["b", "c"]
    assert [x.cast("float32") for x in there.values()] == [full, full, integer]
    assert LeafType("int").cast("float32") == LeafType("int")


def test_cast_dtypes_are_of_floating_point() -> None:
    assert [*map(cast_dtype, ["float32", jnp.bfloat16, np.float16])] == [
        *("float32", "bfloat16", "float16")
    ]
    only = " is not a floating-point dtype. Only floating-point arrays are converted,"
    wrong = {"int32": f"cast='int32'{only}", bool: "cast='bool' is not a floating-point dtype"}
    wrong |= {"complex64": f"cast='complex64'{only}", "flaot32": "'flaot32' is not a dtype."}
    for cast, says in wrong.items():
        with pytest.raises(ts.FormatError, match=f"^{says}"):
            cast_dtype(cast)


def test_64_bit_dtypes_are_not_silently_narrowed() -> None:
    there = {name: array(4, dtype=name) for name in ("int64", "float64", "complex128", "int32")}
    on_host = {name: x._replace(on_devices=False) for name, x in there.items()}
    assert not compare(there, on_host).misfits
    misfits = compare(there, there).misfits
    assert misfits == {
        "int64": "int64[4] would be int32[4] on devices. Turn on 64-bit numbers"
        " (`jax.config.update('jax_enable_x64', True)`), or request a numpy array.",
        "float64": "float64[4] would be float32[4] on devices. Turn on 64-bit numbers"
        " (`jax.config.update('jax_enable_x64', True)`), convert it with `cast='float32'`, or"
        " request a numpy array.",
        "complex128": "complex128[4] would be complex64[4] on devices. Turn on 64-bit numbers"
        " (`jax.config.update('jax_enable_x64', True)`), or request a numpy array.",
    }
    assert not compare(there, {"float64": array(4)}, "float32").misfits
    with jax.enable_x64(True):
        assert not compare(there, there).misfits
