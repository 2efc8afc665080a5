"""`unshard(tree)` inside a step finds the specs of the tree in the step's plan."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, struct
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._planning.plan_in_force import current_plan
from treeshard.manual import value_and_grad

HSDP = "data=2,fsdp=4"
BY_FSDP = [(".*", ts.fsdp("fsdp", min_size=0))]


def ask(plan: Any, of: Any, f: Any = ts.unshard) -> Any:
    """What `f(of(state))` returns in a step: the jaxpr's constraints show the specs."""
    seen = []

    def run(state: Any, x: Any) -> Any:
        seen.append(f(of(state)))
        return state, 0

    ts.jit_step(run, plan).lower(plan.structs, struct(16))
    return seen[0]


MLP = {"down": struct(64, 16), "up": struct(16, 64)}
STACK = {"w": struct(4, 16, 32), "norm": struct(4, 16)}


def plan_of(tree: Any, rules: Any) -> ts.Plan:
    return ts.plan(tree, rules, ts.make_mesh(HSDP), min_size=0)


def specs_found(tree: Any, of: Any, rules: Any) -> Any:
    """The specs that the plan in force has for `of(state)`."""
    return ask(plan_of(tree, rules), of, lambda x: current_plan().specs_of(x))


def test_a_subtree_has_its_specs() -> None:
    tree = {"params": {"a": MLP, "b": {"up": struct(16, 64)}}, "step": struct(dtype="int32")}
    rules = [("a/up", P(None, "fsdp")), ("b/up", P("fsdp")), (".*", P("fsdp"))]
    found = specs_found(tree, lambda s: s["params"]["a"], rules)
    assert found == {"down": P("fsdp"), "up": P(None, "fsdp")}
    assert specs_found(tree, lambda s: s["params"], rules)["b"] == {"up": P("fsdp")}

    # Parameters come before optimizer state that is sharded differently.
    tree = {"model": MLP, "opt": {"mu": MLP}}
    found = specs_found(tree, lambda s: s["model"], [("opt", P("fsdp")), (".*", None)])
    assert found == {"down": P(), "up": P()}


def test_a_slice_of_stacked_layers_has_the_specs_of_one_layer() -> None:
    rules = [("w", P(None, None, "fsdp")), ("norm", None)]
    one = lambda s: jax.tree.map(lambda x: x[0], s)  # noqa: E731
    assert specs_found(STACK, one, rules) == {"norm": P(), "w": P(None, "fsdp")}
    with pytest.raises(ts.SpecError, match=r"unshard: w: P\('fsdp',\) shards dim 0, on which"):
        ask(plan_of(STACK, [("w", P("fsdp")), (".*", None)]), one)


def test_modules_with_static_leaves_are_found_whole_and_as_arrays() -> None:
    model = eqx.filter_eval_shape(eqx.nn.MLP, 16, 16, 64, 1, key=jax.random.key(0))
    state = {"model": model, "opt": eqx.filter(model, eqx.is_array_like)}
    specs = specs_found(state, lambda s: s["model"].layers[0], BY_FSDP)
    assert specs.weight == P("fsdp")
    specs = specs_found(state, lambda s: eqx.filter(s["model"], eqx.is_array), BY_FSDP)
    assert specs.layers[1].weight == P(None, "fsdp")


def test_several_subtrees_with_equal_specs_are_one_answer_and_others_an_error() -> None:
    tree = {"a": MLP, "b": MLP}
    assert specs_found(tree, lambda s: s["b"], [(".*", P("fsdp"))])["up"] == P("fsdp")
    message = (
        r"several subtrees .* a/down, a/up as .*; b/down, b/up as .* Pass the plan of the one that"
        r" you mean, such as `unshard\(tree, plan\[\"a\"\]\)`"
    )
    plan = plan_of(tree, [("a/up", None), (".*", P("fsdp"))])
    with pytest.raises(ts.SpecError, match=message):
        ask(plan, lambda s: jax.tree.map(lambda x: 2 * x, s["b"]))
    ask(plan, lambda s: s["b"])  # the arrays that the step has received are known


def test_a_tree_that_the_plan_lacks_is_an_error_with_the_way_out() -> None:
    plan = plan_of(MLP, [(".*", P("fsdp"))])
    lacking = r"the plan has no subtree of this structure with leaves of shape \(16, 32\)\. Pass "
    with pytest.raises(ts.SpecError, match=f"unshard: {lacking}its specs: `unshard"):
        ask(plan, lambda s: s["up"][:, :32])

    gradient = value_and_grad(lambda p, x: jnp.mean(x) * p.sum(), ("data", "fsdp"))
    step = ts.shard_map_step(lambda s, x: (s, gradient(s["up"][:1], x)[0]), plan)
    message = "value_and_grad: the plan has no subtree .* Pass its specs: `value_and_grad"
    with pytest.raises(ts.SpecError, match=message):
        step.lower(plan.structs, struct(16))


def test_the_axes_of_the_batch_are_gathered_and_those_of_tensor_parallelism_stay() -> None:
    tree = {"up": struct(16, 64)}
    plan = ts.plan(tree, [("up", P("fsdp", "tensor"))], ts.make_mesh("fsdp=4,tensor=2"), min_size=0)

    def lowered(**options: Any) -> str:
        use = lambda s, x: (s, ts.unshard(s["up"], **options))  # noqa: E731
        step = ts.jit_step(use, plan, batch=P("fsdp"))
        return step.lower(plan.structs, struct(16)).as_text()

    assert '[{"fsdp"}, {"tensor"}]' in lowered()  # its own specs first
    assert '[{}, {"tensor"}]' in lowered()
    assert "[{}, {}]" in lowered(axis=("fsdp", "tensor"))


@pytest.mark.parametrize("gather", [True, False])
def test_full_arrays_and_shards_inside_shard_map(gather: bool) -> None:
    w = np.arange(128, dtype="float32").reshape(8, 16) / 100
    x = np.linspace(-1, 1, 256, dtype="float32").reshape(16, 16)
    state = {"params": {"w": w}}
    plan = plan_of(state, [("w", P("fsdp"))])

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x @ ts.unshard(p)["w"].T) ** 2)

    def step(state: Any, x: Any) -> Any:
        gradient = value_and_grad(loss, plan.mesh.axis_names, gather=gather)
        value, grads = gradient(state["params"], x)
        return {"params": grads}, value

    run = ts.shard_map_step(step, plan, donate=False)
    grads, value = run(ts.shard(state, plan), x)
    assert_close((value, grads["params"]), jax.value_and_grad(loss)({"w": w}, x))


def test_without_a_plan_or_a_mesh_nothing_is_gathered() -> None:
    tree = {"w": jnp.ones((8, 16))}
    assert ts.unshard(tree) is tree
    init = lambda: ts.unshard({"w": jnp.ones((8, 16))})  # noqa: E731
    ts.init_sharded(init, rules=BY_FSDP, mesh=ts.make_mesh(HSDP))  # no warning, which is an error
    with (
        jax.set_mesh(ts.make_mesh(HSDP)),
        pytest.warns(ts.ShardingWarning, match="unshard has no effect: no plan is"),
    ):
        jax.jit(ts.unshard)(tree)
    with jax.set_mesh(ts.make_mesh(HSDP)), pytest.raises(ts.SpecError, match="no axis to gather"):
        ts.unshard(tree, P("fsdp"))


def test_another_plan_compiles_a_jitted_layer_again() -> None:
    @jax.jit
    def layer(w: Any, x: Any) -> Any:
        return x @ ts.unshard(w)

    mesh = ts.make_mesh("a=2,b=4")
    for axis in ("a", "b"):
        plan = ts.plan({"w": struct(16, 16)}, [("w", P(axis))], mesh, min_size=0)
        step = ts.jit_step(lambda s, x: (s, layer(s["w"], x)), plan, batch=P(("a", "b")))
        assert f'[{{"{axis}"}}, {{}}]' in step.lower(plan.structs, struct(16, 16)).as_text()
