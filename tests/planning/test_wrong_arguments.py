"""Arguments of another kind, or in the wrong order: the message shows the right call."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import treeshard as ts
from treeshard import errors

NOT_A_TREE = "which is not a pytree of arrays. "
CALL_IT = "Call it first, and pass the arrays that it makes: "
SWAPPED_SPECS = (
    "the tree and its specs are swapped: the first argument has specs, and the second has"
)
PATH_FIRST = "the path is a dict. The path comes first: `save"
MESSAGES = {
    "plan a class": ("ArgumentError", f"the class Model, {NOT_A_TREE}{CALL_IT}`plan(tree, rules,"),
    "plan a function": ("ArgumentError", f"the function init, {NOT_A_TREE}{CALL_IT}`plan(tree, "),
    "plan an object": ("ArgumentError", f"an object, {NOT_A_TREE}Pass its arrays, or register its"),
    "plan, swapped": ("ShardingRuleError", "the rules are a dict, and the list of rules is elsewh"),
    "plan, mesh before rules": (
        "ShardingRuleError",
        "the rules are a mesh, and the list of rules ",
    ),
    "plan, number as mesh": ("MeshError", "8 (int). Give a mesh, or its axes and their sizes as"),
    "plan, dict as mesh": ("MeshError", "the mesh is {'fsdp': 8} (dict). Give a mesh, or its axes"),
    "rule, swapped": ("ShardingRuleError", "The pattern comes first: ('.*', P('fsdp',))"),
    "rule, swapped None": ("ShardingRuleError", "the action None and the pattern 'norm' are swap"),
    "match, swapped": ("ShardingRuleError", "Call `match_partition_rules(rules, tree)`."),
    "match a class": ("ArgumentError", "`match_partition_rules(rules, tree)`"),
    "init of params": ("ArgumentError", "fn is a dict, and not a function that makes the tree. Pa"),
    "init makes an object": ("ArgumentError", "init_sharded: what fn returns is a Model, which is"),
    "step, mesh as plan": ("ArgumentError", "jit_step: the plan is a mesh. Plan the state first: "),
    "step, specs as plan": ("ArgumentError", "`shard_map_step(fn, plan(state, rules, mesh))`"),
    "step, swapped": ("ArgumentError", "the function is a Plan. Call `jit_step(fn, plan)`"),
    "step with a key": ("ArgumentError", "with 3 arguments. Put a key, or what else it needs, in "),
    "step of a class": ("ArgumentError", f"jit_step: the state is the class Model, {NOT_A_TREE}"),
    "shard, swapped": ("SpecError", SWAPPED_SPECS),
    "shard, plan first": ("SpecError", SWAPPED_SPECS),
    "shard a function": ("ArgumentError", f"shard: the tree is the function init, {NOT_A_TREE}"),
    "reshard, swapped": ("SpecError", SWAPPED_SPECS),
    "unshard, swapped": ("SpecError", "The tree comes first: `shard(tree, specs)`, `unshard(tree,"),
    "constraint, swapped": ("SpecError", SWAPPED_SPECS),
    "save, swapped": ("ArgumentError", PATH_FIRST),
    "restore, swapped": ("ArgumentError", PATH_FIRST),
    "safetensors, swapped": ("ArgumentError", "`save_safetensors(path, tree)`"),
}


@pytest.fixture(scope="module")
def raised() -> dict[str, list[str]]:
    """The class and the message of the error of each call, in a process of its own."""
    script = Path(__file__).with_name("wrong_arguments.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", MESSAGES)
def test_the_message_shows_the_right_call(call, raised) -> None:
    name, part = MESSAGES[call]
    assert raised[call][0] == name, raised[call]
    assert part in raised[call][1]
    assert issubclass(getattr(errors, name), ts.TreeShardError)
    assert issubclass(getattr(errors, name), ValueError | TypeError)


def test_every_call_is_compared(raised) -> None:
    assert set(raised) == set(MESSAGES)
