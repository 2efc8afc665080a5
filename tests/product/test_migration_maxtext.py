"""docs/migrate.md: the lines of Flax and MaxText, and ours. Flax is asked itself."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import check_init, short, table

import treeshard as ts

row = table("From MaxText, and Flax's logical axis rules", "fsdp=4,tensor=2")

# As MaxText's list looks: several rules a name, several axes, what is not sharded said in two ways.
RULES = [
    ("activation_batch", ("data", "fsdp", "fsdp_transpose", "expert")),
    ("activation_embed", ("tensor",)),
    ("activation_norm_length", ("tensor_sequence", "context", "sequence")),
    ("mlp", ("fsdp_transpose", "tensor", "tensor_sequence")),
    ("vocab", ("tensor", "tensor_transpose")),
    ("heads", ("tensor",)),
    ("kv", []),
    ("embed", ("fsdp", "fsdp_transpose", "expert")),
    ("embed", ("fsdp", "expert")),
    ("embed", "fsdp"),
    ("norm", ("tensor", "tensor_transpose")),
    ("layers", None),
]
NAMES = [
    ("embed", "mlp"),
    ("mlp", "embed"),
    ("layers", "embed", "heads", "kv"),
    ("heads", "kv", "embed"),
    ("vocab", "embed"),
    ("activation_batch", "activation_norm_length", "activation_embed"),
    ("activation_batch", None, "unknown"),
    ("norm",),
    ("mlp", "heads", "vocab"),
    (),
]


@row("nn.logical_to_mesh_axes(names, rules)")
def test_names(ours) -> None:
    for names in NAMES:
        old = nn.logical_to_mesh_axes(names, RULES)
        assert ours(names=names, rules=RULES) == P(*[None if e == [] else e for e in old]), names
    assert ours(names=("head", None), rules=ts.PartitionAxis()) == P("tp", None)


def old_without_ones(spec: P, mesh: Any) -> P:
    """MaxText's specs do not name axes of size 1."""

    def kept(entry: Any) -> Any:
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)

    return short(P(*[kept(entry) or None for entry in spec]))


@row("logical_to_mesh_axes(names, mesh, rules)")
def test_names_on_a_mesh(ours) -> None:
    every = ["data", "fsdp", "fsdp_transpose", "sequence", "context", "tensor"]
    every += ["tensor_transpose", "tensor_sequence", "expert"]
    sizes = tuple({"fsdp": 4, "tensor": 2}.get(axis, 1) for axis in every)
    old_mesh = jax.sharding.AbstractMesh(sizes, tuple(every), axis_types=(AxisType.Auto,) * 9)
    for names in NAMES:
        old = old_without_ones(nn.logical_to_mesh_axes(names, RULES), old_mesh)
        assert short(ours(names=names, rules=RULES)) == old, names


@row("mesh = Mesh(create_device_mesh(config), config.mesh_axes)")
def test_mesh(ours) -> None:
    assert dict(ours().shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert dict(ts.make_mesh("fsdp=8", dcn_axes="fsdp=1").shape) == {"fsdp": 8}


SMALL = [("batch", "fsdp"), ("embed", "tensor")]
X = jnp.ones((8, 4))


@row("with nn.logical_axis_rules(rules):")
def test_context(ours) -> None:
    """Of Flax's own constraint the second call runs the program of the first."""
    where = jax.jit(lambda x: ts.with_sharding_constraint(x, ("batch", "embed"), row.mesh))
    with nn.logical_axis_rules([("batch", "tensor")]):
        assert short(where(X).sharding) == P("tensor")
        with ours(rules=SMALL):
            assert short(where(X).sharding) == P("fsdp", "tensor")
        assert short(where(X).sharding) == P("tensor")


@row('nn.with_logical_constraint(x, ("batch", "embed"))')
def test_constraint(ours) -> None:
    with nn.logical_axis_rules(SMALL):
        assert ours(x=X) is nn.with_logical_constraint(X, ("batch", "embed")) is X  # no mesh
        with jax.set_mesh(row.mesh):
            old = jax.jit(lambda x: nn.with_logical_constraint(x, ("batch", "embed")))(X)
            assert short(jax.jit(lambda x: ours(x=x))(X).sharding) == short(old.sharding)
        with jax.set_mesh(ts.make_mesh("fsdp=8")):
            assert short(ours(x=X).sharding) == P("fsdp")
    with jax.set_mesh(row.mesh), pytest.raises(ts.SpecError, match="no rules are in force"):
        ours(x=X)


@row("maybe_shard_with_logical(x, names, mesh, shard_mode)")
def test_constraint_on_explicit_axes(ours) -> None:
    names = ("batch", "embed")
    explicit = ts.make_mesh("fsdp=4,tensor=2", axis_types="explicit")
    with ts.logical_axis_rules(SMALL):
        assert short(ours(x=X, names=names).sharding) == P("fsdp", "tensor")
        with jax.set_mesh(explicit):
            traced = jax.eval_shape(lambda x: ours(x=x, names=names, mesh=explicit), X)
            old = jax.eval_shape(lambda x: jax.sharding.reshard(x, P("fsdp", "tensor")), X)
    assert traced.sharding == old.sharding


def boxed(names: tuple[str, ...], *shape: int) -> Any:
    return nn.LogicallyPartitioned(struct(*shape), names)


ABSTRACT = {
    "embedding": boxed(("vocab", "embed"), 64, 16),
    "layers": {"wi": boxed(("embed", "layers", "mlp"), 16, 3, 32), "scale": boxed(("norm",), 16)},
    "step": struct(),
    "free": struct(4),
}
# Those of RULES whose axes the mesh has, since Flax's function wants them all.
HERE = [("vocab", "tensor"), ("embed", "fsdp"), ("mlp", "tensor"), ("norm", "tensor")]
HERE += [("layers", None)]


def old_shardings(tree: Any) -> Any:
    return nn.logical_to_mesh_sharding(nn.get_partition_spec(tree), row.mesh, HERE)


@row("nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)")
def test_boxes(shardings) -> None:
    rules = [(".*", ts.logical_partitioning(HERE))]
    old = old_shardings(ABSTRACT)
    found = shardings(abstract=ABSTRACT, rules=HERE)
    assert short(found) == short(old)
    assert found["layers"]["wi"] == NamedSharding(row.mesh, P("fsdp", None, "tensor"))
    plan = ts.plan(ABSTRACT, rules, row.mesh, min_size=0)
    assert [leaf.given for leaf in plan.leaves] == jax.tree.leaves(short(old))
    odd = {"a": boxed(("embed",), 7), "b": boxed(("embed",), 9)}
    with pytest.raises(ts.ShardingRuleError, match=r"(?s)a: .*7 is not divisible.*b: "):
        shardings(abstract=odd, rules=HERE)
    typo = {"a": boxed(("emed",), 8)}
    plan = ts.plan(typo, rules, row.mesh, min_size=0)
    assert any("'emed'" in str(x) for x in plan.findings)


@row("jax.jit(init_state, out_shardings=state_mesh_shardings)(rng)")
def test_init(ours) -> None:
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    dense = nn.Dense(8, kernel_init=kernel)

    def init_state(rng: jax.Array) -> Any:
        return dense.init(rng, jnp.ones((2, 16)))["params"]

    rng = jax.random.key(0)
    made = ours(init_state=init_state, rng=rng, rules=HERE)
    old = old_shardings(jax.eval_shape(init_state, rng))
    check_init(made, jax.jit(init_state, out_shardings=old)(rng), old)
    assert isinstance(made[0]["kernel"], nn.LogicallyPartitioned)
    assert short(old["kernel"]) == P("fsdp", "tensor")


@row("add_data_to_sharding(mesh, path, leaf, sharding)")
def test_zero_1(ours) -> None:
    """There it is the first dim that it divides, but for `tensor`'s."""
    params = {"w": struct(128, 512), "v": struct(512, 128), "small": struct(8, 8)}
    opt_state = jax.eval_shape(optax.adam(1e-3).init, params)
    found = ours(
        opt_state=opt_state,
        params=params,
        rules=[("w", P("fsdp")), ("v", P("tensor")), (".*", None)],
        mesh=ts.make_mesh("data=2,fsdp=2,tensor=2"),
    )[0]
    assert found.mu == found.nu
    assert found.mu == {"w": P("fsdp", "data"), "v": P("tensor", "data"), "small": P()}


@row("all_gather_over_fsdp(weights, sharding_info, mesh, rules, shard_mode)")
def test_gather_over_fsdp(ours) -> None:
    mesh = ts.make_mesh("fsdp=2,fsdp_transpose=2,tensor=2")
    specs = {"w": P(("fsdp", "fsdp_transpose"), "tensor"), "v": P("tensor", "fsdp")}
    weights = ts.shard({name: np.ones((8, 8), np.float32) for name in specs}, specs, mesh)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    gathered = ours(weights=weights, specs=shardings)
    assert short(ts.get_partition_spec(gathered)) == {"w": P(None, "tensor"), "v": P("tensor")}


@row("assert_params_sufficiently_sharded(params, mesh, tolerance)")
def test_findings(ours) -> None:
    """As there, a parameter that is split over some axes and not over others is told of too."""
    params = {"w": struct(512, 512), "odd": struct(511, 511), "norm": struct(512)}
    found = ours(params=params, rules=[(".*", ts.fsdp("fsdp"))])
    assert {x.code for x in found} == {"left-whole"}
    odd, in_part = found
    assert (odd.paths, in_part.paths) == (("odd",), ("w",))
    assert "no free dim of shape (511, 511) is divisible by 4" in str(odd)
    assert "not split over the idle 'tensor' (2): 256.0 KiB per device" in str(in_part)


test_restore = row.restores(
    "checkpoint_manager.restore(step, args=restore_args)", P("fsdp", "tensor")
)
