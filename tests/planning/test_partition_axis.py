"""PartitionAxis: its fields, the derived ones, and the specs that its names resolve to."""

from dataclasses import fields, replace
from typing import Any

import jax
import pytest
from helpers import mesh_of
from jax.sharding import PartitionSpec as P

from treeshard import PartitionAxis, ShardingRuleError, ShardingWarning, SpecError, make_mesh
from treeshard._core.specs import axes_of

U = P.UNCONSTRAINED
MESH = mesh_of(fsdp=2, tp=4)
TRAINING = ("batch", "query_sequence", "head", "attention_dim")
GENERATION = {"mode": "generation"}

DEFAULTS = {
    "data_parallel_axis": "dp",
    "fully_sharded_data_parallel_axis": "fsdp",
    "tensor_parallel_axis": "tp",
    "sequence_parallel_axis": "sp",
    "expert_parallel_axis": "ep",
    "batch_axis": ("fsdp", "dp"),
    "sequence_axis": "sp",
    "query_sequence_axis": "sp",
    "head_axis": "tp",
    "key_sequence_axis": "sp",
    "hidden_state_axis": "tp",
    "mlp_intermediate_axis": "tp",
    "vocab_axis": "tp",
    "expert_axis": "ep",
    "expert_gate_axis": None,
    "attention_dim_axis": None,
    "bias_head_sequence_axis": None,
    "bias_key_sequence_axis": None,
    "generation_batch_axis": None,
    "generation_query_sequence_axis": None,
    "generation_head_axis": "tp",
    "generation_key_sequence_axis": "sp",
    "generation_attention_dim_axis": None,
}


def as_dict(axes: PartitionAxis) -> dict[str, object]:
    return {field.name: getattr(axes, field.name) for field in fields(axes)}


def test_fields_that_are_given_are_not_derived() -> None:
    assert as_dict(PartitionAxis()) == DEFAULTS
    for name in list(DEFAULTS)[5:]:  # from the first ones others are derived
        assert as_dict(PartitionAxis(**{name: "x"})) == {**DEFAULTS, name: "x"}
    axes = PartitionAxis(tensor_parallel_axis="model", vocab_axis=None, head_axis=["a", "b"])
    assert (axes.vocab_axis, axes.head_axis) == (None, ("a", "b"))
    again = replace(PartitionAxis(), tensor_parallel_axis="model", head_axis=...)
    assert (again.head_axis, again.vocab_axis) == ("model", "tp")
    assert jax.jit(lambda a, x: x * len(a.batch_axis))(again, 3) == 6  # a static argument


def test_derived_fields_follow_the_mesh_axes() -> None:
    renamed = {"dp": "replica", "fsdp": "data", "tp": "model", "sp": "seq", "ep": "expert"}
    axes = PartitionAxis(*renamed.values())
    for name, value in DEFAULTS.items():
        expected = tuple(renamed[axis] for axis in axes_of(value))
        assert axes_of(getattr(axes, name)) == expected, name
    assert PartitionAxis("data", "data").batch_axis == "data"


# The names, and what they resolve to, in training and without a mesh unless a row says else.
RESOLVED: dict[str, tuple[Any, P, dict[str, Any]]] = {
    "full names": (("batch_axis", "head_axis"), P(("fsdp", "dp"), "tp"), {}),
    "unconstrained": ((U, "head"), P(U, "tp"), {}),
    "of a tuple, the rest": (("fully_sharded_data_parallel", "batch"), P("fsdp", "dp"), {}),
    "several in one, one taken": (("head", ("expert", "vocab")), P("tp", "ep"), {}),
    "generation": (TRAINING, P(None, None, "tp", None), GENERATION),
    "by its generation name": (("generation_key_sequence",), P("sp"), {}),
    "absent axes": (("batch", "sequence", "head"), P("fsdp", None, "tp"), {"mesh": MESH}),
}


@pytest.mark.parametrize(("names", "spec", "options"), RESOLVED.values(), ids=RESOLVED)
def test_resolve(names: Any, spec: P, options: Any) -> None:
    assert PartitionAxis().resolve(*names, **options) == spec


def test_all_unknown_names_are_listed_with_the_known_ones() -> None:
    with pytest.raises(SpecError) as error:
        PartitionAxis().resolve("bacth", "head", "heads_axis")
    message = str(error.value)
    assert "'bacth' is not a logical name of PartitionAxis. Did you mean 'batch'?" in message
    assert "'heads_axis' is not a logical name of PartitionAxis. Did you mean 'head'?" in message
    assert "PartitionAxis has data_parallel, " in message
    assert "generation_attention_dim." in message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", [3, ("batch", None), ("batch", "batch")])
def test_a_name_of_a_wrong_type(name) -> None:
    with pytest.raises(SpecError, match="is not a logical name. Give a str, None, or a tuple"):
        PartitionAxis().resolve("head", name)
    with pytest.raises(SpecError, match="'generate' is neither .* Did you mean 'generation'?"):
        PartitionAxis().resolve("batch", mode="generate")


@pytest.mark.usefixtures("unchecked")
def test_all_bad_fields_are_listed() -> None:
    with pytest.raises(ShardingRuleError) as error:
        PartitionAxis(
            data_parallel_axis=None,
            vocab_axis=3,
            batch_axis=("a", "a"),
        )
    several = "give a mesh axis, a tuple of them, or None."
    assert str(error.value).splitlines() == [
        "3 fields are not mesh axes:",
        "  PartitionAxis(data_parallel_axis=None): give a mesh axis.",
        f"  PartitionAxis(batch_axis=('a', 'a')): {several}",
        f"  PartitionAxis(vocab_axis=3): {several}",
    ]


@pytest.mark.parametrize(
    ("mesh", "mode", "expected"),
    [
        ("data=2,fsdp=2,tensor=2", "train", P(("fsdp", "data"), None, "tensor", None)),
        ("replica=2,fsdp=2,sequence=2", "train", P(("fsdp", "replica"), "sequence", None, None)),
        ("data=2,fsdp=2,tensor=2", "generation", P(None, None, "tensor", None)),
    ],
)
def test_the_names_of_a_mesh(mesh: str, mode, expected) -> None:
    assert PartitionAxis.for_mesh(mesh).resolve(*TRAINING, mode=mode, mesh=mesh) == expected


def test_an_axis_that_no_field_names_is_told() -> None:
    message = "no field names 'data', 'tensor' of the mesh .data=2, fsdp=2, tensor=2., so nothing"
    with pytest.warns(ShardingWarning, match=message):
        assert PartitionAxis().resolve("batch", mesh="data=2,fsdp=2,tensor=2") == P("fsdp")
    with jax.set_mesh(make_mesh("data=2,fsdp=4")), pytest.warns(ShardingWarning, match="'data'"):
        PartitionAxis().resolve("batch")
    PartitionAxis().resolve("batch", mesh="data=1,fsdp=8")  # an axis of one device
