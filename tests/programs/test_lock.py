"""Locks of steps: what a pull request may change unseen is a red test, other edits are not."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import treeshard as ts
from treeshard import testing
from treeshard.communication import Collective
from treeshard.programs import _lock

STEP = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import treeshard as ts

RULES = [("up", P(None, "fsdp")), (".*", ts.fsdp("fsdp", min_size=0))]


def make():
    params = {"up": (64, 256), "down": (256, 64)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in params.items()}
    plan = ts.plan(params, RULES, ts.make_mesh("data=2,fsdp=4"), min_size=0)

    def loss(params, x):
        # The mean of all rows.
        up = ts.unshard(params["up"].astype("bfloat16"))
        hidden = jax.nn.relu(x.astype("bfloat16") @ up)
        y = hidden @ ts.unshard(params["down"].astype("bfloat16"))
        return jnp.mean(y.astype("float32") ** 2)

    @ts.jit_step(plan=plan, batch=P(("data", "fsdp")))
    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        grads = ts.with_sharding_constraint(grads, plan)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step, plan.structs, jax.ShapeDtypeStruct((64, 64), "float32")
"""
ASSERTED = """
import sys
import jax
import treeshard as ts
ts.simulate_devices(8)
jax.config.update("jax_disable_most_optimizations", True)  # as `quick_compiles`
import steps
ts.testing.assert_step(*steps.make(), sys.argv[1], update=True)
"""
DOWN = 'ts.unshard(params["down"].astype("bfloat16"))'
# What each edit replaces, by what, and a line of the diff.
REGRESSIONS = {
    "a changed rule": (
        ("""("up", P(None, "fsdp"))""", """("up", P("fsdp"))"""),
        """-  "up": "float32[64,256] P(None, 'fsdp'), trained, gathered\"""",
    ),
    "a lost unshard": (
        (DOWN, 'params["down"].astype("bfloat16")'),
        """+  "all-to-all over fsdp: computed values""",
    ),
    "a wider dtype": (
        ('"bfloat16"', '"float32"'),
        """+  "all-gather over fsdp: state/up": 65536""",
    ),
}
HARMLESS = [
    ("hidden", "activations"),
    ("step(params, x)", "step(params, x, /)"),
    ("        # The mean of all rows.\n", ""),
    ('astype("float32") ** 2)', 'astype("float32") ** 2) + 1.0'),
]

pytestmark = pytest.mark.usefixtures("quick_compiles")


def make(folder: Path, *edits: tuple[str, str]) -> Any:
    """The step after some edits, with its state and batch."""
    text = STEP
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    file = folder / "steps.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("steps_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make()


@pytest.fixture(scope="module")
def locked(tmp_path_factory) -> Path:
    """The lock of the step, which another process has written."""
    folder = tmp_path_factory.mktemp("locked")
    (folder / "steps.py").write_text(STEP)
    file = folder / "locks" / "step.json"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", ASSERTED, str(file)]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    assert os.listdir(file.parent) == ["step.json"]
    return file


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_is_a_line_of_the_diff(name, locked, tmp_path) -> None:
    edit, line = REGRESSIONS[name]
    with pytest.raises(ts.errors.UnexpectedShardingError) as caught:
        testing.assert_step(*make(tmp_path, edit), locked)
    message = str(caught.value)
    assert message.startswith(f"The step differs from the one stored in {locked}:\n--- {locked}\n")
    assert line in message
    assert message.endswith("\nIf this is intended, call `assert_step` with `update=True` once.")


def test_names_comments_and_the_value_of_the_loss_may_change(locked, tmp_path) -> None:
    testing.assert_step(*make(tmp_path, *HARMLESS), str(locked))


def test_two_processes_give_the_same_text(locked, tmp_path) -> None:
    file = tmp_path / "step.json"
    arguments = make(tmp_path)
    with pytest.raises(AssertionError, match=r"step.json does not exist. .* `update=True` once"):
        testing.assert_step(*arguments, file)
    testing.assert_step(*arguments, file, update=True)
    assert file.read_text() == locked.read_text()
    record = json.loads(file.read_text())
    assert record["mesh"] == "data=2, fsdp=4 on cpu"
    assert record["leaves"]["down"] == "float32[256,64] P('fsdp',), trained, gathered"
    assert record["batch"] == ["float32[64,64] P(('data', 'fsdp'),)"]
    # 64 x 256 weights of 4 bytes, of which each device stores a quarter; 8 of 64 rows.
    weights, rows = 2 * 64 * 256 * 4 // 4, 8 * 64 * 4
    assert record["memory"]["arguments"] == weights + rows


def test_bytes_are_summed_by_kind_axes_and_leaf_and_unknown_ones_are_null() -> None:
    gather = Collective("all-gather", "float32", 4096, 3584, ("fsdp",), 3, "state/w")
    unknown = Collective("all-gather", "float32", 4096, 3584, ("fsdp",), None, "state/w")
    elsewhere = Collective("all-reduce", "float32", 4, 7, None, 1)
    assert _lock._sum_moved([gather, gather, elsewhere]) == {
        "all-gather over fsdp: state/w": 2 * 3 * 4096,
        "all-reduce over unknown: computed values": 4,
    }
    assert _lock._sum_moved([gather, unknown]) == {"all-gather over fsdp: state/w": None}


def test_a_file_that_another_program_formatted_is_compared(tmp_path) -> None:
    file = tmp_path / "step.json"
    file.write_text('{"b":1,\n\n"a":null}')
    assert _lock.diff_of_locks(file, _lock._text({"a": None, "b": 1})) == ""
    diff = _lock.diff_of_locks(file, _lock._text({"a": 0, "b": 1.0})).splitlines()
    assert {'- "a": null,', '+ "a": 0,', '- "b": 1', '+ "b": 1.0'} <= {*diff}
    file.write_text("<<<<<<< main\n")
    with pytest.raises(ts.errors.FormatError, match=r"step.json: not valid JSON: .* `update=True`"):
        _lock.diff_of_locks(file, "")
