"""Rules in one string: how they are parsed, and the errors for bad ones."""

import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import PartitionSpec as P

import treeshard as ts

MESH = mesh_of(data=2, model=4)
LEAF = np.zeros((8, 8, 8))


@pytest.mark.parametrize(
    ("text", "path", "spec"),
    [
        ("attention|mlp->data,hidden->model", "layers/0/mlp/w", P("data")),
        ("attention|mlp->data,hidden->model", "norm", P()),
        (" w -> data . model ; v->model ", "w", P("data", "model")),
        ("w->_.data", "w", P(None, "data")),
        ("w->None", "w", P()),
        ("w->_.model+data._", "w", P(None, ("model", "data"))),
        (r"layers/\d+/w$->data", "layers/12/w", P("data")),
    ],
)
def test_the_first_pattern_that_matches_gives_the_spec(text, path, spec) -> None:
    for mesh in (None, MESH):
        assert ts.create_pattern_based_partition_spec(text, mesh)(path, LEAF) == spec


def test_called_directly_and_as_the_action_of_a_rule(mesh) -> None:
    by_name = ts.create_pattern_based_partition_spec("attn->data.fsdp,mlp->fsdp", mesh)
    tree = {"attn": np.ones((8, 8)), "mlp": np.ones((8, 8)), "norm": np.ones(8), "step": 3}
    specs = {"attn": P("data", "fsdp"), "mlp": P("fsdp"), "norm": P(), "step": P()}
    assert ts.named_tree_map(by_name, tree) == specs
    assert ts.match_partition_rules([("", by_name)], tree, mesh, min_size=0) == specs
    placed = ts.shard(tree, specs, mesh)
    assert placed["attn"].addressable_shards[0].data.shape == (4, 2)
    by_name = ts.create_pattern_based_partition_spec("w->data", None, P("model"))
    assert (by_name("w", LEAF), by_name("v", LEAF), by_name("w", 3)) == (P("data"), P("model"), P())


HOW = '\nWrite pattern->dims, such as "embed->tensor.fsdp, attention|mlp->fsdp".'


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a->x, b", "'b': it is not a pattern, '->' and dims."),
        ("a->", "'a->': it is not a pattern, '->' and dims."),
        ("a->x+_", "'_' is not a mesh axis."),
        ("a->x y", "'x y' is not a mesh axis."),
        ("a->x.x", "'x' occurs twice. An axis can split only one dim."),
        ("a->x,b(->y", "'b(->y': the pattern does not compile: missing ), unterminated"),
    ],
)
def test_a_malformed_rule_is_named(text, fact) -> None:
    with pytest.raises(ts.ShardingRuleError) as raised:
        ts.create_pattern_based_partition_spec(text)
    assert fact in str(raised.value)
    assert str(raised.value).endswith(HOW)


def test_all_malformed_rules_are_listed() -> None:
    with pytest.raises(ts.ShardingRuleError) as raised:
        ts.create_pattern_based_partition_spec("a,b->x;c->")
    assert str(raised.value).splitlines()[:3] == [
        "'a,b->x;c->': 2 rules are malformed:",
        "  'a': it is not a pattern, '->' and dims.",
        "  'c->': it is not a pattern, '->' and dims.",
    ]


def test_all_axes_that_the_mesh_lacks_are_listed() -> None:
    with pytest.raises(ts.UnknownAxisError) as raised:
        ts.create_pattern_based_partition_spec("a->dta,b->x.model", MESH)
    assert str(raised.value).splitlines() == [
        "2 axes are not in the mesh:",
        "  'a': the mesh has no axis 'dta'. It has data=2, model=4. Did you mean 'data'?",
        "  'b': the mesh has no axis 'x'. It has data=2, model=4.",
    ]
