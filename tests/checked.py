"""Checks of gradients and steps for tests that read the report of right and wrong ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard import testing
from treeshard.errors import WrongResultError

BOTH = ("data", "fsdp")
SPREAD = P(BOTH)
OFF, MULTIPLE = "differs by more than rounding", "a multiple of the right result"


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def planned(tree: Any, *rules: Any, mesh: str = "data=2,fsdp=4") -> ts.Plan:
    return ts.plan(tree, [*rules, (".*", None)], ts.make_mesh(mesh), min_size=0)


def mean_square(tree: Any, x: Any) -> jax.Array:
    """A loss in which each leaf has a gradient of its own."""
    return jnp.stack([jnp.mean(jnp.tanh(x @ w) ** 2) for w in tree.values()]).sum()


def report_of(check: Callable[..., testing.Report], *args: Any, **options: Any) -> str:
    try:
        return str(check(*args, **options))
    except WrongResultError as error:
        return str(error)


def report_of_step(
    step: Any,
    state: Any,
    batch: Any,
    plan: ts.Plan,
    *,
    make: Any = ts.jit_step,
    specs: Any = P("data"),  # noqa: B008 (immutable)
    layouts: Any = ("plan",),
    **options: Any,
) -> str:
    run = make(step, plan, batch=specs)
    return report_of(testing.check_step, run, state, batch, layouts=layouts, **options)


def facts(report: str) -> dict[str, str]:
    """What a report says of each leaf that is wrong: facts, and where."""
    found: dict[str, str] = {}
    for text in report.split("\n\n")[2:]:
        leaves, _, fact = text.partition("): ")
        for leaf in leaves.split("; "):
            path = leaf.partition(" P(")[0].strip()
            found[path] = f"{found.get(path, '')}{fact}\n"
    return found
