"""A plan with errors can be looked at. Every function that applies plans raises for it."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import checkpoint, interchange, manual, training

MESH = ts.make_mesh("fsdp=8")
TREE = {"model": {"w": np.ones((16, 8), "float32")}, "head": np.ones((8, 9), "float32")}
ARRAYS = {"model/w": TREE["model"]["w"], "head": TREE["head"]}
GOOD = [("w", P("fsdp")), ("head", None)]
RULES = {
    "axis of a spec": [("w", P("fdsp")), (".*", None)],
    "axis of fsdp": [("w", ts.fsdp("fdsp")), (".*", None)],
    "unmatched": [("head", None)],
    "indivisible": [("w", None), ("head", P(None, "fsdp"))],
    "rank": [("w", ts.shard_dim("fsdp", 2)), (".*", None)],
    "axis named twice": [("w", P("fsdp", "fsdp")), (".*", None)],
}


def plan_of(rules: Any, tree: Any = TREE, **options: Any) -> ts.Plan:
    return ts.plan(tree, rules, MESH, min_size=0, **options)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints, and a file of safetensors, of `TREE`."""
    folder = tmp_path_factory.mktemp("files")
    with checkpoint.Checkpoints(folder / "steps") as checkpoints:
        checkpoints.save(0, TREE)
    interchange.save_safetensors(folder / "tree.safetensors", TREE)
    return folder


def in_jit(use: Callable[[Any], Any]) -> Any:
    return jax.jit(use)(TREE)


def by_hand(use: Callable[[Any], Any]) -> Any:
    return jax.shard_map(use, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)(TREE)


def total(tree: Any) -> Any:
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


def restore_latest(plan: ts.Plan, files: Path) -> Any:
    with checkpoint.Checkpoints(files / "steps") as checkpoints:
        return checkpoints.restore_latest(plan)


def keep(state: Any, batch: Any) -> Any:
    return state, 0


APPLY: dict[str, Callable[[ts.Plan, Path], Any]] = {
    "shard": lambda plan, _: ts.shard(TREE, plan),
    "shard to another mesh": lambda plan, _: ts.shard(TREE, plan, ts.make_mesh("fsdp=8")),
    "shard(read=)": lambda plan, _: ts.shard(
        plan.structs, plan, read=lambda path, index: ARRAYS[path][index]
    ),
    "reshard": lambda plan, _: ts.reshard(TREE, plan),
    "from_process_local": lambda plan, _: ts.from_process_local(TREE, plan),
    "make_shard_and_gather_fns": lambda plan, _: ts.make_shard_and_gather_fns(plan),
    "with_sharding_constraint": lambda plan, _: ts.with_sharding_constraint(TREE, plan),
    "with_sharding_constraint in jit": lambda plan, _: in_jit(
        lambda tree: ts.with_sharding_constraint(tree, plan)
    ),
    "unshard": lambda plan, _: ts.unshard(TREE, plan),
    "unshard in jit": lambda plan, _: in_jit(lambda tree: ts.unshard(tree, plan)),
    "unshard over an axis": lambda plan, _: in_jit(lambda tree: ts.unshard(tree, plan, "fsdp")),
    "jit_step": lambda plan, _: ts.jit_step(keep, plan, batch=P("fsdp")),
    "shard_map_step": lambda plan, _: ts.shard_map_step(keep, plan, batch=P("fsdp")),
    "training.value_and_grad": lambda plan, _: training.value_and_grad(total, plan),
    "by_matrix": lambda plan, _: training.by_matrix(optax.sgd(0.1), plan),
    "manual.value_and_grad": lambda plan, _: by_hand(manual.value_and_grad(total, "fsdp", plan)),
    "gather_params": lambda plan, _: by_hand(lambda t: manual.gather_params(t, "fsdp", plan)),
    "sync_gradients": lambda plan, _: by_hand(lambda t: manual.sync_gradients(t, "fsdp", plan)),
    "shard_params": lambda plan, _: by_hand(lambda t: manual.shard_params(t, "fsdp", specs=plan)),
    "restore": lambda plan, files: checkpoint.restore(files / "steps" / "0", plan),
    "restore_latest": restore_latest,
    "load_safetensors": lambda plan, files: interchange.load_safetensors(
        files / "tree.safetensors", like=plan
    ),
    "follow, then shard": lambda plan, _: ts.shard({"ema": TREE}, plan.follow({"ema": TREE})),
    "on another mesh, then shard": lambda plan, _: ts.shard(TREE, plan.on(MESH)),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(APPLY, ["axis of a spec"]), *product(["shard", "follow, then shard"], RULES)],
)
def test_errors_of_a_plan_are_raised_by_what_applies_it(name: str, kind: str, files: Path) -> None:
    plan = plan_of(RULES[kind])  # which says nothing by itself
    with pytest.raises(ts.ShardingRuleError) as of_check:
        plan.check()
    with pytest.raises(ts.ShardingRuleError) as error:
        APPLY[name](plan, files)
    assert type(error.value) is type(of_check.value)
    # Of the plan that follows, the paths are those of the copies.
    assert str(error.value).replace("ema/", "") == str(of_check.value)


@pytest.mark.parametrize("kind", ["unmatched", "indivisible"])
def test_without_strict_what_fits_is_applied_with_one_warning(kind: str, files: Path) -> None:
    plan = plan_of(RULES[kind], strict=False)
    with pytest.raises(ts.ShardingRuleError) as of_check:
        plan.check()
    start = f"The plan is applied as far as it fits. {of_check.value}"
    with pytest.warns(ts.ShardingWarning) as told:
        placed = ts.shard(TREE, plan)
    assert str(told[0].message) == start
    of_this_plan = [apply for name, apply in APPLY.items() if ", then" not in name]
    for apply in of_this_plan[: None if kind == "indivisible" else 1]:
        apply(plan, files)  # a second warning would be an error
    assert jax.tree.map(lambda x: x.sharding.spec, placed) == plan.specs


def test_a_subtree_has_the_errors_of_its_own_leaves() -> None:
    plan = plan_of(RULES["indivisible"])
    assert ts.shard(TREE["model"], plan["model"])["w"].sharding.spec == P()
    with pytest.raises(ts.ShardingRuleError, match="'fsdp'.* splits dim 1 of shape"):
        ts.shard(TREE["head"], plan["head"])


def test_copies_and_their_subtrees_have_the_errors_of_what_they_copy() -> None:
    """Also a copy that fits by itself, since its row has fewer dims."""
    plan = plan_of(RULES["axis of a spec"])
    moment = {"v_row": {"model": {"w": np.ones(16, "float32")}}}
    copies = plan.follow(moment)
    part = copies["v_row"]
    calls = [each.check for each in (part, part["model"], part.on(MESH))]
    for call in (lambda: ts.shard(moment, copies), *calls):
        with pytest.raises(ts.UnknownAxisError, match="model/w: .* no axis 'fdsp'"):
            call()


def test_leaves_that_share_a_path_are_an_error_everywhere() -> None:
    tree = {"a/b": np.ones(8), "a": {"b": np.ones(8)}}
    plan = plan_of([(".*", None)], tree)
    with pytest.raises(ts.ShardingRuleError, match="share this path"):
        ts.shard(tree, plan)
    with pytest.warns(ts.ShardingWarning, match="share this path"):
        ts.shard(tree, plan_of([(".*", None)], tree, strict=False))


DEAD = [("kernel", P("fsdp")), ("count", None), ("w", P("fsdp")), (".*", None)]
STATE = {**TREE, "count": np.int32(0)}


def test_a_rule_that_matches_nothing_warns_once_for_each_plan() -> None:
    plan = plan_of(DEAD, STATE)
    message = "the plan's rule 0 'kernel' matches no leaf. Correct the pattern, or remove the rule."
    with pytest.warns(ts.ShardingWarning) as told:
        ts.shard(STATE, plan)
    assert [str(x.message) for x in told] == [message]
    ts.shard(STATE, plan)
    ts.shard(TREE["model"], plan["model"])
    ts.jit_step(keep, plan, batch=P("fsdp"))(ts.shard(STATE, plan), np.ones((8, 2), "float32"))
    ts.shard({"ema": STATE}, plan.follow({"ema": STATE}))

    other = plan_of(DEAD, STATE)
    with pytest.warns(ts.ShardingWarning, match="rule 0 'kernel' matches no leaf"):
        ts.shard(TREE["model"], other["model"])
    ts.shard(STATE, other)
    with pytest.warns(ts.ShardingWarning, match="rule 0 'kernel' matches no leaf"):
        ts.init_sharded(lambda: jax.tree.map(jnp.asarray, STATE), rules=DEAD, mesh=MESH, min_size=0)


def test_all_rules_that_match_nothing_are_one_warning() -> None:
    message = r"2 rules match no leaf:\n  the plan's rule 0 'a\$'"
    plan = plan_of([("a$", None), ("b", None), (".*", None)])
    for _ in range(2):  # warnings are errors here: it is raised each time
        with pytest.raises(ts.ShardingWarning, match=message):
            ts.shard(TREE, plan)
    # A tree without arrays needs no rule.
    ts.shard({"name": "mlp", "count": np.int32(0)}, plan_of(GOOD, {"name": "mlp", "count": 0}))


def test_nothing_is_said_of_a_plan_that_is_looked_at() -> None:
    plan = plan_of([*DEAD[:1], *RULES["axis of a spec"]])
    assert plan.specs["model"]["w"] == P()
    assert plan.shardings["head"].spec == P()
    assert ts.draw(plan) is None
    assert re.search("no axis 'fdsp'", str(plan.findings[0]))
    assert plan.diff(plan.on("fsdp=16")).bytes >= 0
    with pytest.raises(ts.UnknownAxisError):
        plan.check()
