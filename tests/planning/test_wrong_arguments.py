"""Arguments of another kind, or in the wrong order: the message shows the right call."""

import tempfile
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import errors, manual
from treeshard.checkpoint import restore, save
from treeshard.interchange import save_safetensors
from treeshard.training import (
    accumulate_gradients,
    init_sharded,
    jit_step,
    shard_map_step,
    value_and_grad,
)

# Where annotations are checked, that check would come first.
pytestmark = pytest.mark.usefixtures("unchecked")

mesh = ts.make_mesh("fsdp=8")
params = {"w": np.ones((8, 8), "float32")}
specs, rules = {"w": P("fsdp")}, [(".*", P("fsdp"))]
plan = ts.plan(params, rules, mesh, min_size=0)
key, x = np.zeros(2, "uint32"), np.ones((16, 8), "float32")


class Model:
    pass


def identity(state: Any, batch: Any) -> Any:
    return state, ()


def restore_from_file(like: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(f"{folder}/params", params)
        restore(f"{folder}/params", like)


step = jit_step(identity, plan, donate=False)
NOT_A_TREE = "which is not a pytree of arrays. "
CALL_IT = "Call it first, and pass the arrays that it makes: "
SWAPPED_SPECS = (
    "the tree and its specs are swapped: the first argument has specs, and the second has"
)
OPTIMIZER = "the tree is an optimizer, which has functions and no arrays. Pass its state: `optimi"
RULES_AS_SPECS = "the specs are a list of rules. Make a plan: `"
EVERY_SPEC = {
    "unshard(tree, {})": lambda specs: ts.unshard(params, specs),
    "shard(tree, {})": lambda specs: ts.shard(params, specs),
    "reshard(tree, {})": lambda specs: ts.reshard(params, specs),
    "with_sharding_constraint(arr, {})": lambda specs: ts.with_sharding_constraint(params, specs),
    "from_process_local(tree, {})": lambda specs: ts.from_process_local(params, specs),
    "make_shard_and_gather_fns({})": ts.make_shard_and_gather_fns,
    "value_and_grad(loss, {})": lambda specs: value_and_grad(sum, specs),
    "jit_step(fn, plan, batch={})": lambda specs: jit_step(identity, plan, batch=specs),
}
EVERY_FUNCTION = {
    "jit_step(fn, plan)": lambda fn: jit_step(fn, identity),
    "shard_map_step(fn, plan)": lambda fn: shard_map_step(fn, identity),
    "value_and_grad(loss, plan)": lambda fn: value_and_grad(fn, sum),
    "value_and_grad(loss, axis_names, specs)": lambda fn: manual.value_and_grad(fn, "fsdp"),
    "accumulate_gradients(grad_fn, batch, num_minibatches, key)": (
        lambda fn: accumulate_gradients(fn, x, key, 4)
    ),
}
AXIS_NAMES = {
    "value_and_grad(loss, axis_names, specs)": lambda axes: manual.value_and_grad(sum, axes),
    "gather_params(params, axis_name, specs)": lambda axes: manual.gather_params(params, axes),
    "shard_params(params, axis_name, specs=specs)": lambda axes: manual.shard_params(params, axes),
    "sync_gradients(grads, axis_names, specs)": lambda axes: manual.sync_gradients(params, axes),
    "vary(tree, axis_names)": lambda axes: manual.vary(params, axes),
    "unshard(tree, specs, axis, mesh)": lambda axes: ts.unshard(params, plan, axes),
}
optimizer = optax.adam(1e-3)
PATH_FIRST = "the path is a dict. The path comes first: `save"
CALLS = {
    errors.ArgumentError: [
        (lambda: ts.plan(Model, rules, mesh), f"the class Model, {NOT_A_TREE}{CALL_IT}`plan(tree"),
        (lambda: ts.gather(plan), "gather: the tree is a Plan, which is not a pytree of arrays."),
        (lambda: ts.iter_gather(plan), "iter_gather: the tree is a Plan, which is not a pytree"),
        (lambda: ts.gather(optimizer), "gather: the tree is an optimizer, which has functions"),
        (lambda: ts.plan(object(), rules, mesh), f"an object, {NOT_A_TREE}Pass its arrays, or re"),
        (
            lambda: init_sharded(params, key, rules=rules, mesh=mesh),
            "fn is a dict, and not a function that makes the tree. Pa",
        ),
        (
            lambda: init_sharded(Model, rules=rules, mesh=mesh),
            "init_sharded: what fn returns is a Model, which is",
        ),
        (lambda: jit_step(identity, mesh), "jit_step: the plan is a mesh. Make a plan first: `jit"),
        (lambda: jit_step(plan, identity), "the function is a Plan. Call `jit_step(fn, plan)`"),
        (lambda: step(params, x, key), "with 3 arguments. Put a key, or what else it needs, in "),
        (lambda: step(Model, x), f"jit_step: the state is the class Model, {NOT_A_TREE}"),
        (lambda: save(params, "folder"), PATH_FIRST),
        (
            lambda: restore_from_file(specs),
            "has specs and no shapes. Pass a plan: `restore(path,",
        ),
        (
            lambda: restore_from_file(rules),
            "restore: the tree to read is a list of rules. Pass th",
        ),
        (lambda: restore_from_file(mesh), "`restore(path, like, rules=rules, mesh=mesh)`."),
        (
            lambda: plan.follow(optimizer),
            f"Plan.follow: {OPTIMIZER}zer.init(params)`, as in `plan.",
        ),
        (
            lambda: plan.follow(optimizer.init),
            "Call it first, and pass the arrays that it makes: `pl",
        ),
        (lambda: plan.follow(optax.sgd), "`plan.follow(optimizer.init(params))`"),
        (
            lambda: ts.plan(optimizer, rules, mesh),
            f"plan: {OPTIMIZER}zer.init(params)`, as in `plan",
        ),
        (
            lambda: ts.shard(optimizer, P()),
            f"shard: {OPTIMIZER}zer.init(params)`, as in `shard(tree",
        ),
        (
            lambda: step(step(params, x), x),
            "a pair (state, aux), as the step returns it. Write `stat",
        ),
        (
            lambda: step(x, params),
            "the state and the batch are swapped. Call `step(state, batch)`.",
        ),
        (lambda: step.lower(x, params), "the state and the batch are swapped."),
        (
            lambda: step(params, x)[0] and step((params, x), x),
            "Write `state, aux = step(state, batch)",
        ),
        (lambda: ts.unshard(params, "fsdp"), 'or specs: `unshard(tree, specs, "fsdp")`.'),
        (
            lambda: ts.shard(params, "fsdp"),
            "the str 'fsdp'. Pass the plan, `shard(tree, plan)`, or spe",
        ),
        (lambda: ts.shard(params, "fsdp"), "or specs: `shard(tree, P('fsdp'))`."),
        *(
            (lambda call=call, x=x: call(x), f"{text.partition('(')[0]}: the specs are {part}")
            for text, call in EVERY_SPEC.items()
            for x, part in (
                ("fsdp", f"the str 'fsdp'. Pass the plan, `{text.format('plan')}`"),
                (8, f"the int 8. Pass the plan, `{text.format('plan')}`"),
                (mesh, f"a mesh. Pass the plan, `{text.format('plan')}`"),
                (
                    rules,
                    f"a list of rules. Make a plan: `{text.format('treeshard.plan(tree, rul')}"[
                        :-2
                    ],
                ),
            )
        ),
        (lambda: save_safetensors(params, "file"), "`save_safetensors(path, tree)`"),
        *(
            (
                lambda call=call: call(plan),
                f"{text.partition('(')[0]}: the function is a Plan. Call `{text}`.",
            )
            for text, call in EVERY_FUNCTION.items()
        ),
        (
            lambda: jit_step(identity(params, x), plan),
            "the function is a tuple. Call `jit_step(fn, plan)`.",
        ),
        (lambda: ts.plan("model.eqx", rules, mesh), "the str 'model.eqx', which is not a pytree"),
        (lambda: ts.with_sharding_constraint(x, mesh, P("fsdp")), "the specs are a mesh. Pass the"),
        (lambda: step(specs, x), "jit_step: the state has specs and no arrays. Call `step(sta"),
        (lambda: step(plan.structs, x), "jit_step: the state has shapes and no arrays. Call `st"),
        (lambda: jit_step(identity, plan)(specs, x), "jit_step: the state has specs and no arrays"),
        (lambda: jit_step(identity, plan)(params, plan), "the batch has specs and no arrays."),
        (lambda: step(plan.shardings, x), "jit_step: the state has specs and no arrays. Call `st"),
        (lambda: step(params, plan), "jit_step: the batch has specs and no arrays. Call `step(st"),
        (lambda: step(params, P("fsdp")), "jit_step: the batch has specs and no arrays. Call `s"),
    ],
    errors.ShardingRuleError: [
        (lambda: ts.plan(rules, params, mesh), "the rules are a dict, and the list of rules is e"),
        (
            lambda: ts.plan(params, [(P("fsdp"), ".*")], mesh),
            "The pattern comes first: ('.*', P('fsdp',))",
        ),
        (
            lambda: ts.infer_sharding(rules, params, mesh),
            "list of rules is elsewhere. Call `infer_sharding(params, strategy, mesh)`.",
        ),
        (lambda: ts.infer_sharding(params, mesh, rules), "Call `infer_sharding(params, strategy,"),
        (lambda: ts.plan(params, [(".*", ts.fsdp)], mesh), "a tactic such as fsdp('fsdp'), or a"),
        (lambda: ts.plan(params, [(".*", lambda x: P())], mesh), "or a function (path, leaf) -> P"),
        (lambda: ts.plan(params, [("*", None)], mesh), "not a glob: write '.*'."),
        (lambda: ts.plan(params, [("**/w", None)], mesh), "not a glob: write '.*/w'."),
        (lambda: ts.match_partition_rules([("*.w", None)], params), "not a glob: write '.*.w'."),
        (lambda: ts.plan(params, [("(w", None)], mesh), "put a backslash before it."),
        (
            lambda: ts.plan(params, [(None, "norm")], mesh),
            "the action None and the pattern 'norm' are swap",
        ),
        (
            lambda: ts.match_partition_rules(params, rules),
            "Call `match_partition_rules(rules, tree)`.",
        ),
    ],
    TypeError: [
        *(
            (
                lambda call=call, axes=axes: call(axes),
                f"a string or a sequence of strings. Call `{text}`.",
            )
            for text, call in AXIS_NAMES.items()
            for axes in (plan, specs, mesh)
        ),
    ],
    errors.MeshError: [
        (lambda: ts.plan(params, rules, 8), "8 (int). Give a mesh, or its axes and their sizes a"),
        (
            lambda: ts.match_partition_rules(rules, params, 0),
            "the int 0. If it is the smallest size of a leaf that is sharded, write"
            " `match_partition_rules(rules, tree, min_size=0)`.",
        ),
    ],
    errors.SpecError: [
        (
            lambda: ts.plan(params, ts.fsdp("fsdp"), mesh),
            "A tactic is the action of a rule: `plan(",
        ),
        (
            lambda: ts.plan(params, {"w": ts.fsdp("fsdp")}, mesh),
            "a Tactic is neither a spec nor a f",
        ),
        (lambda: ts.shard(specs, params, mesh), SWAPPED_SPECS),
        (lambda: ts.shard(plan, params), SWAPPED_SPECS),
        (lambda: ts.unshard(plan, params), "The tree comes first: `unshard(tree, plan)`."),
        (
            lambda: ts.with_sharding_constraint(plan, params),
            "first: `with_sharding_constraint(arr",
        ),
        (
            lambda: ts.unshard(params, plan.specs),
            "Pass the plan, `unshard(tree, plan)`, or specs and the",
        ),
        (
            lambda: ts.unshard(params, specs),
            "Pass the plan, `unshard(tree, plan)`, or specs and the axis",
        ),
        (
            lambda: ts.unshard(params, plan.shardings),
            "the second argument has specs, and no axis to",
        ),
        (
            lambda: ts.unshard(params, plan, "data"),
            "the plan shards no leaf over 'data', on the",
        ),
        (
            lambda: ts.unshard(params, plan, "fdsp"),
            "Did you mean 'fsdp'? To gather over the plan's",
        ),
        (
            lambda: ts.unshard(params["w"], plan["w"], "data"),
            "on the mesh (fsdp=8). To gather over",
        ),
        (lambda: ts.unshard(specs, params, "fsdp"), "The tree comes first: `shard(tree, specs)`,"),
        (lambda: ts.with_sharding_constraint(specs, params, mesh), SWAPPED_SPECS),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "part"), [(error, *row) for error, rows in CALLS.items() for row in rows]
)
def test_the_message_shows_the_right_call(error, call, part) -> None:
    with pytest.raises(error) as raised:
        call()
    assert part in str(raised.value)
    assert type(raised.value) is error
    assert issubclass(error, ValueError | TypeError)


def test_what_has_no_arrays_is_right() -> None:
    for empty in ({}, None, (), {"name": "mlp", "act": jax.nn.relu}, 3):
        ts.plan(empty, rules, mesh)
        ts.shard(empty, P("fsdp"), mesh)
    step_of_nothing = jit_step(identity, ts.plan({}, rules, mesh), batch=P("fsdp"))
    step_of_nothing({}, x)


def test_axes_that_may_shard_nothing() -> None:
    """Another mesh has one device along an axis; a small model or a norm is not sharded at all."""
    both = {"w": np.ones((8, 8), "float32"), "norm": np.ones(3, "float32")}
    of_both = [("norm", None), ("w", P("fsdp", "tensor"))]
    cases = [
        (ts.plan(both, of_both, "fsdp=8,tensor=1", min_size=0), "tensor"),
        (ts.plan(both, of_both, "data=1,fsdp=8,tensor=1", min_size=0), "data"),
        (ts.plan(both, of_both, "data=4,fsdp=2,tensor=1", min_size=0), ("data", "fsdp")),
        (ts.plan(both, [(".*", None)], "fsdp=8"), "fsdp"),
        (ts.plan(both, [(".*", ts.fsdp("fsdp"))], "fsdp=8"), "fsdp"),
    ]
    for of_plan, axis in cases:
        ts.unshard(both, of_plan, axis)
        ts.unshard(both["norm"], of_plan["norm"], axis)
