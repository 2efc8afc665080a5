"""A step as text, edits of it that change what it means or costs, and edits that do not."""

import importlib.util
from pathlib import Path
from typing import Any

STEP = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import treeshard as ts

RULES = [("up", P(None, "fsdp")), (".*", ts.fsdp("fsdp", min_size=0))]


def make(mesh):
    params = {"up": (64, 256), "down": (256, 64)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in params.items()}
    plan = ts.plan(params, RULES, mesh, min_size=0)

    def forward(params, x):
        up = ts.unshard(params["up"].astype("bfloat16"))
        hidden = jax.nn.relu(x.astype("bfloat16") @ up)
        return hidden @ ts.unshard(params["down"].astype("bfloat16"))

    def loss(params, x):
        return jnp.mean(forward(params, x).astype("float32") ** 2)

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(params, x):
        value, grads = ts.training.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step, plan.structs, jax.ShapeDtypeStruct((64, 64), "float32")


def other(mesh):
    return {"step": make(mesh)}
"""

# What each edit replaces, and by what.
REGRESSIONS = {
    "a constraint lost": (
        'ts.unshard(params["up"].astype("bfloat16"))',
        'params["up"].astype("bfloat16")',
    ),
    "a rule changed": ('("up", P(None, "fsdp"))', '("up", P("fsdp"))'),
    "a rule that replicates": ('("up", P(None, "fsdp"))', '("up", None)'),
    "a dtype widened": ("bfloat16", "float32"),
    "one more gather": (
        "return jnp.mean(",
        'return jnp.max(ts.unshard(params["up"])) + jnp.mean(',
    ),
    "a state that is not trained": ("w - 0.1 * g", "w"),
}
HARMLESS = {
    "nothing": ("", ""),
    "a blank line": ("\n    def forward", "\n\n\n    # What it computes.\n    def forward"),
    "a variable renamed": ("hidden", "activations"),
    "a function renamed": ("forward(", "apply("),
    "two lines of one": (
        'jax.nn.relu(x.astype("bfloat16") @ up)',
        'x.astype("bfloat16") @ up\n        hidden = jax.nn.relu(hidden)',
    ),
}


def edited(edit: tuple[str, str]) -> str:
    """The text of the step after an edit."""
    assert edit[0] in STEP
    return STEP.replace(*edit) if edit[0] else STEP


def load(text: str, folder: Path) -> Any:
    """The module of a text."""
    file = folder / "steps.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("gated_steps_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
