"""docs/migrate.md: the lines of haliax, and ours. haliax is asked itself."""

from typing import Any

import equinox as eqx
import jax
import pytest
from jax.sharding import PartitionSpec as P
from migration import check_init, short, table

from tests.deprecations import tolerated

with tolerated("haliax"):
    import haliax as hax
    from haliax.partitioning import pspec_for

    CALLS_OF_HALIAX = hasattr(jax.core, "is_constant_dim")

pytestmark = [
    pytest.mark.usefixtures("standard_promotion", "quick_compiles"),
    pytest.mark.skipif(not CALLS_OF_HALIAX, reason="haliax 1.4 calls what JAX 0.12 does not have"),
]

row = table("From haliax and levanter", "data=4,model=2")

Embed, Mlp = hax.make_axes(embed=64, mlp=256)
MAPPING = {"embed": "data", "mlp": "model"}
KEY = jax.random.key(0)


def init(key: Any) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": hax.nn.Linear.init(Embed, Mlp, key=up),
        "down": hax.nn.Linear.init(Mlp, Embed, key=down),
    }


def theirs() -> list[P]:
    structs = eqx.filter(eqx.filter_eval_shape(init, KEY), lambda x: hasattr(x, "dtype"))
    return short(jax.tree.leaves(pspec_for(structs, MAPPING)))


@row("pspec_for(model, mapping)", "hax.shard(model, mapping)")
@tolerated("haliax")
def test_plan_and_shard(planned, shard) -> None:
    model = init(KEY)
    plan = planned(model=model, mapping=MAPPING)
    assert [leaf.given for leaf in plan.leaves] == theirs()
    placed = shard(model=model, plan=plan)
    with jax.set_mesh(row.mesh):
        expected = hax.shard(model, MAPPING)
    assert placed["up"].weight.array.sharding == expected["up"].weight.array.sharding
    odd = planned(model=model, mapping=MAPPING, mesh="data=3,model=2").findings
    assert {finding.code for finding in odd} == {"indivisible"}


@row("hax.named_jit(init, axis_resources=mapping)(key)")
@tolerated("haliax")
def test_init(ours) -> None:
    with hax.axis_mapping(MAPPING):
        made = ours(init=init, key=KEY)
    check_init(made, jax.jit(init)(KEY), theirs())
