"""docs/migrate.md: the lines of haliax, and ours. haliax is asked itself."""

from typing import Any

import equinox as eqx
import jax
import pytest
from helpers import assert_same
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from migration import table

import treeshard as ts
from tests.deprecations import tolerated
from treeshard._core.specs import with_entries

with tolerated("haliax"):
    import haliax as hax
    from haliax.partitioning import pspec_for

    CALLS_OF_HALIAX = hasattr(jax.core, "is_constant_dim")

pytestmark = [
    pytest.mark.usefixtures("standard_promotion", "quick_compiles"),
    pytest.mark.skipif(not CALLS_OF_HALIAX, reason="haliax 1.4 calls what JAX 0.12 does not have"),
]

TABLE = table("From haliax and levanter")
row = TABLE.row

Embed, Mlp = hax.make_axes(embed=64, mlp=256)
MAPPING = {"embed": "data", "mlp": "model"}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("data=4,model=2")


def test_every_row_has_a_test() -> None:
    TABLE.check()


def init(key: Any) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": hax.nn.Linear.init(Embed, Mlp, key=up),
        "down": hax.nn.Linear.init(Mlp, Embed, key=down),
    }


def theirs() -> list[P]:
    structs = eqx.filter(
        eqx.filter_eval_shape(init, jax.random.key(0)), lambda x: hasattr(x, "dtype")
    )
    found = jax.tree.leaves(pspec_for(structs, MAPPING), is_leaf=lambda x: isinstance(x, P))
    return [with_entries(spec, tuple(spec)) for spec in found]  # without trailing `None`


@row("pspec_for(model, mapping)")
@tolerated("haliax")
def test_plan(ours, mesh) -> None:
    structs = eqx.filter_eval_shape(init, jax.random.key(0))
    plan = ours(model=structs, mapping=MAPPING, mesh=mesh)
    assert [leaf.given for leaf in plan.leaves] == theirs()
    odd = ours(model=structs, mapping=MAPPING, mesh="data=3,model=2").findings
    assert {finding.code for finding in odd} == {"indivisible"}


@row("hax.named_jit(init, axis_resources=mapping)(key)")
@tolerated("haliax")
def test_init(ours, mesh) -> None:
    key = jax.random.key(0)
    with hax.axis_mapping(MAPPING):
        state, plan = ours(init=init, key=key, mesh=mesh)
        with pytest.raises(ts.ShardingRuleError, match="up/weight: .* not divisible"):
            ours(init=init, key=key, mesh=ts.make_mesh("data=3,model=2", devices=jax.devices()[:6]))
    assert [leaf.given for leaf in plan.leaves] == theirs()
    assert_same(ts.gather(state), jax.jit(init)(key))


@row("hax.shard(model, mapping)")
@tolerated("haliax")
def test_shard(ours, mesh) -> None:
    model = init(jax.random.key(0))
    plan = ts.plan(
        model, [(".*", ts.logical_partitioning(list(MAPPING.items())))], mesh, min_size=0
    )
    placed = ours(model=model, plan=plan)
    assert placed["up"].weight.array.sharding.spec == P("model", "data")
    with jax.set_mesh(mesh):
        expected = hax.shard(model, MAPPING)
    assert placed["up"].weight.array.sharding == expected["up"].weight.array.sharding
