"""docs/migrate.md: the lines of Flax and MaxText, and ours.

Flax is asked itself. What MaxText does was read in its `utils/sharding.py`, and is written down
here anew.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import struct
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from migration import short, table

import treeshard as ts

TABLE = table("From MaxText, and Flax's logical axis rules")
row = TABLE.row

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


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return ts.make_mesh("fsdp=4,tensor=2")


def test_every_row_has_a_test() -> None:
    TABLE.check()


# ------------------------------------------------------------------ names


@row("nn.logical_to_mesh_axes(names, rules)")
def test_names(ours) -> None:
    for names in NAMES:
        old = nn.logical_to_mesh_axes(names, RULES)
        assert ours(names=names, rules=RULES) == P(*[None if e == [] else e for e in old]), names
    for ask in (nn.logical_to_mesh_axes, ts.logical_to_mesh_spec):
        with pytest.raises(ValueError, match="'mlp'"):
            ask(("mlp", "mlp"), RULES)
    assert ours(names=("mlp", "kv"), rules={"mlp": "tensor", "kv": None}) == P("tensor", None)
    assert ours(names=("head", None), rules=ts.PartitionAxis()) == P("tp", None)


def old_without_ones(spec: P, mesh: Any) -> P:
    """MaxText's specs do not name axes of size 1."""

    def kept(entry: Any) -> Any:
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return tuple(axis for axis in axes if mesh.shape[axis] > 1)

    return short(P(*[kept(entry) or None for entry in spec]))


@row("logical_to_mesh_axes(names, mesh, rules)")
def test_names_on_a_mesh(ours, mesh) -> None:
    every = ["data", "fsdp", "fsdp_transpose", "sequence", "context", "tensor"]
    every += ["tensor_transpose", "tensor_sequence", "expert"]
    sizes = tuple({"fsdp": 4, "tensor": 2}.get(axis, 1) for axis in every)
    old_mesh = jax.sharding.AbstractMesh(sizes, tuple(every), axis_types=(AxisType.Auto,) * 9)
    for names in NAMES:
        old = old_without_ones(nn.logical_to_mesh_axes(names, RULES), old_mesh)
        assert short(ours(names=names, rules=RULES, mesh=mesh)) == old, names


@row("mesh = Mesh(create_device_mesh(config), config.mesh_axes)")
def test_mesh(ours) -> None:
    assert dict(ours().shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert dict(ts.make_mesh("fsdp=8", dcn_axes="fsdp=1").shape) == {"fsdp": 8}
    with pytest.raises(ts.MeshError, match="data=2 does not match how the devices are connected"):
        ts.make_mesh("data=1,fsdp=4", dcn_axes="data=2")


SMALL = [("batch", "fsdp"), ("embed", "tensor")]


@row("with nn.logical_axis_rules(rules):")
def test_context(ours, mesh) -> None:
    names, x = ("batch", "embed"), jnp.ones((8, 4))
    where = jax.jit(lambda x: ts.with_sharding_constraint(x, names, mesh))
    with ours(rules=SMALL):
        assert short(where(x).sharding) == P("fsdp", "tensor")
    with nn.logical_axis_rules([("batch", "tensor")]):
        assert short(where(x).sharding) == P("tensor")
        with ours(rules=SMALL):
            assert short(where(x).sharding) == P("fsdp", "tensor")
    # Flax's own: the second call runs the program of the first.
    old = jax.jit(lambda x: nn.with_logical_constraint(x, names, mesh=mesh))
    with nn.logical_axis_rules(SMALL):
        assert short(old(x).sharding) == P("fsdp", "tensor")
    with nn.logical_axis_rules([("batch", "tensor")]):
        assert short(old(x).sharding) == P("fsdp", "tensor")


@row('nn.with_logical_constraint(x, ("batch", "embed"))')
def test_constraint(ours, mesh) -> None:
    x, names = jnp.ones((8, 4)), ("batch", "embed")
    with nn.logical_axis_rules(SMALL):
        assert ours(x=x) is x  # no mesh
        assert nn.with_logical_constraint(x, names) is x
        with jax.set_mesh(mesh):
            old = jax.jit(lambda x: nn.with_logical_constraint(x, names))
            assert short(jax.jit(lambda x: ours(x=x))(x).sharding) == short(old(x).sharding)
            assert old(jnp.ones((7, 3))).sharding.is_fully_replicated
            with pytest.warns(ts.ShardingWarning, match=r"7 is not divisible"):
                jax.jit(lambda x: ours(x=x))(jnp.ones((7, 3)))
        with jax.set_mesh(ts.make_mesh("fsdp=8")):
            assert short(ours(x=x).sharding) == P("fsdp")
            with pytest.raises(ValueError, match="tensor .*is not found in mesh"):
                jax.jit(lambda x: nn.with_logical_constraint(x, names))(x)
    with jax.set_mesh(mesh):
        assert nn.with_logical_constraint(x, names) is x  # no rules
        with pytest.raises(ts.SpecError, match="no rules are in force"):
            ours(x=x)


@row("maybe_shard_with_logical(x, names, mesh, shard_mode)")
def test_constraint_on_explicit_axes(ours, mesh) -> None:
    x, names = jnp.ones((8, 4)), ("batch", "embed")
    explicit = ts.make_mesh("fsdp=4,tensor=2", axis_types="explicit")
    with ts.logical_axis_rules(SMALL):
        assert short(ours(x=x, names=names, mesh=mesh).sharding) == P("fsdp", "tensor")
        with jax.set_mesh(explicit):
            traced = jax.eval_shape(lambda x: ours(x=x, names=names, mesh=explicit), x)
            old = jax.eval_shape(lambda x: jax.sharding.reshard(x, P("fsdp", "tensor")), x)
    assert traced.sharding == old.sharding
    assert traced.sharding.spec == P("fsdp", "tensor")


# ------------------------------------------------------------------ trees


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


@row("nn.logical_to_mesh_sharding(nn.get_partition_spec(abstract), mesh, rules)")
def test_shardings_of_boxes(ours, mesh) -> None:
    found = ours(abstract=ABSTRACT, rules=HERE, mesh=mesh)
    old = nn.logical_to_mesh_sharding(nn.get_partition_spec(ABSTRACT), mesh, HERE)
    assert short(found) == short(old)
    assert found["layers"]["wi"] == NamedSharding(mesh, P("fsdp", None, "tensor"))
    odd = {"a": boxed(("embed",), 7), "b": boxed(("embed",), 9)}
    with pytest.raises(ts.ShardingRuleError, match=r"(?s)a: .*7 is not divisible.*b: "):
        ours(abstract=odd, rules=HERE, mesh=mesh)
    old = nn.logical_to_mesh_sharding(nn.get_partition_spec(odd), mesh, HERE)
    make = jax.jit(lambda: {"a": jnp.ones(7), "b": jnp.ones(9)}, out_shardings=old)
    with pytest.raises(ValueError, match="should evenly divide"):
        make()


@row("nn.logical_to_mesh_sharding(state_logical_annotations, mesh, rules)")
def test_plan_of_boxes(ours, mesh) -> None:
    plan = ours(abstract=ABSTRACT, rules=HERE, mesh=mesh)
    old = nn.logical_to_mesh_sharding(nn.get_partition_spec(ABSTRACT), mesh, HERE)
    assert [leaf.given for leaf in plan.leaves] == [short(x) for x in jax.tree.leaves(old)]
    tree = {"a": boxed(("embed",), 7), "b": boxed(("emed",), 8)}
    findings = [str(finding) for finding in ours(abstract=tree, rules=HERE, mesh=mesh).findings]
    assert any("indivisible: a" in finding for finding in findings)
    assert any("'emed'" in finding for finding in findings)
    small = ts.plan(ABSTRACT, [(".*", ts.logical_partitioning(HERE))], mesh)
    assert {leaf.given for leaf in small.leaves} == {P()}


@row("jax.jit(init_state, out_shardings=state_mesh_shardings)(rng)")
def test_init(ours, mesh) -> None:
    kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    dense = nn.Dense(8, kernel_init=kernel)

    def init_state(rng: jax.Array) -> Any:
        return dense.init(rng, jnp.ones((2, 16)))["params"]

    rng = jax.random.key(0)
    state, plan = ours(init_state=init_state, rng=rng, rules=HERE, mesh=mesh)
    specs = nn.get_partition_spec(jax.eval_shape(init_state, rng))
    out = nn.logical_to_mesh_sharding(specs, mesh, HERE)
    old = jax.jit(init_state, out_shardings=out)(rng)
    assert jax.tree.structure(state) == jax.tree.structure(old)
    for mine, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(old), strict=True):
        assert mine.sharding.is_equivalent_to(theirs.sharding, mine.ndim)
        np.testing.assert_array_equal(mine, theirs)
    assert isinstance(state["kernel"], nn.LogicallyPartitioned)
    assert plan.leaves[1].given == P("fsdp", "tensor")


# ------------------------------------------------------------------ the rest


def old_add_data(shape: tuple[int, ...], spec: P, sizes: dict[str, int]) -> P:
    """`data` in front of the axes of the first dim whose shards it divides, but for `tensor`'s."""
    for dim, (length, entry) in enumerate(zip(shape, spec, strict=False)):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        shard = length // int(np.prod([sizes[axis] for axis in axes]))
        if shard % sizes["data"] == 0 and "tensor" not in axes:
            return P(*spec[:dim], ("data", *axes), *spec[dim + 1 :])
    return spec


@row("add_data_to_sharding(mesh, path, leaf, sharding)")
def test_zero_1(ours) -> None:
    mesh = ts.make_mesh("data=2,fsdp=2,tensor=2")
    params = {"w": struct(128, 512), "v": struct(512, 128), "whole": struct(256, 256, 4)}
    params |= {"small": struct(8, 8)}
    specs = {"w": P("fsdp", None), "v": P("tensor", None), "whole": P(None, None, None)}
    specs |= {"small": P(None, None)}
    opt_state = jax.eval_shape(optax.adam(1e-3).init, params)
    rules = [("", lambda path, leaf: specs[path])]
    found = ours(opt_state=opt_state, params=params, rules=rules, mesh=mesh)[0]
    assert found.mu == found.nu
    assert found.mu == {
        "w": P("fsdp", "data"),
        "v": P("tensor", "data"),
        "whole": P(None, "data"),
        "small": P(),
    }
    old = {name: old_add_data(x.shape, specs[name], mesh.shape) for name, x in params.items()}
    assert short(old) == {
        "w": P(("data", "fsdp")),
        "v": P("tensor", "data"),
        "whole": P("data"),
        "small": P("data"),
    }


@row("all_gather_over_fsdp(weights, sharding_info, mesh, rules, shard_mode)")
def test_gather_over_fsdp(ours) -> None:
    mesh = ts.make_mesh("fsdp=2,fsdp_transpose=2,tensor=2")
    specs = {"w": P(("fsdp", "fsdp_transpose"), "tensor"), "v": P("tensor", "fsdp")}
    weights = ts.shard({name: np.ones((8, 8), np.float32) for name in specs}, specs, mesh)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    gathered = ours(weights=weights, specs=shardings)
    assert short(ts.get_partition_spec(gathered)) == {"w": P(None, "tensor"), "v": P("tensor")}


@row("assert_params_sufficiently_sharded(params, mesh, tolerance)")
def test_findings(ours, mesh) -> None:
    params = {"w": struct(512, 512), "odd": struct(511, 511), "norm": struct(512)}
    rules = [(".*", ts.fsdp(("fsdp", "tensor")))]
    (found,) = ours(params=params, rules=rules, mesh=mesh)
    assert (found.code, found.paths) == ("left-whole", ("odd",))
    assert "no free dim of shape (511, 511) is divisible by 8" in str(found)
    # As there, a parameter that is split over some axes and not over others is told of too.
    in_part = ours(params=params, rules=[(".*", ts.fsdp("fsdp"))], mesh=mesh)
    assert [(found.code, found.paths) for found in in_part] == [
        ("left-whole", ("odd",)),
        ("left-whole", ("w",)),
    ]
    assert "not split over the idle 'tensor' (2): 256.0 KiB per device" in str(in_part[1])


@row("checkpoint_manager.restore(step, args=restore_args)")
def test_restore(ours, mesh, tmp_path) -> None:
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    ts.checkpoint.save(tmp_path / "state", {"w": x})
    rules = [("w", P("fsdp", "tensor"))]
    plan = ts.plan({"w": struct(8, 2)}, rules, mesh, min_size=0)
    found = ours(path=tmp_path / "state", plan=plan)
    assert found["w"].sharding == NamedSharding(mesh, P("fsdp", "tensor"))
    np.testing.assert_array_equal(found["w"], x)
    plan = ts.plan({"w": struct(8, 2, dtype="bfloat16")}, rules, mesh, min_size=0)
    with pytest.raises(ts.MismatchError, match="saved as float32.*, requested as bfloat16"):
        ours(path=tmp_path / "state", plan=plan)
