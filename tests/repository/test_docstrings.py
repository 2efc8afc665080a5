"""Every public name has a docstring whose example runs."""

import doctest
import inspect
import tempfile
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from surface import public_names, surface

import treeshard as ts

# What functions return, shown with these functions.
NO_EXAMPLE = {"Adjustment", "Finding", "LeafChange", "Plan", "PlanDiff", "PlannedLeaf"}
NO_EXAMPLE |= {"Chip", "Contents", "Layout", "Problem", "Report", "SavedLeaf", "Step"}


PUBLIC = {
    name: thing
    for name, thing in surface().items()
    if callable(thing) and not (isinstance(thing, type) and issubclass(thing, Exception))
}
PUBLIC |= {module.__name__: module for module in (ts.checkpoint, ts.communication)}


# What examples may take for granted.
MODULES = (ts.compat, ts.communication, ts.checkpoint, ts.interchange, ts.testing, ts.training)
LIBRARIES = {"eqx": eqx, "jax": jax, "jnp": jnp, "nn": nn, "np": np, "optax": optax, "ts": ts}
SHARDING = {"AbstractMesh": AbstractMesh, "AxisType": AxisType, "NamedSharding": NamedSharding}


def names() -> dict[str, Any]:
    found = {name: getattr(ts, name) for name in public_names(ts)} | LIBRARIES | SHARDING
    for module in (*MODULES, ts.manual):
        found |= vars(module)
    return found | {"P": P, "mesh": ts.make_mesh("data=2,fsdp=4"), "tempfile": tempfile}


OF_MODULES = {name.rpartition(".")[0] for name in PUBLIC}


@pytest.mark.parametrize("module", sorted(OF_MODULES))
def test_the_examples_run(module: str) -> None:
    names_of_it = [name for name in PUBLIC if name.rpartition(".")[0] == module]
    wrong = {name: text for name in names_of_it if (text := what_is_wrong(name))}
    assert not wrong, "\n\n".join(f"{name}: {text}" for name, text in wrong.items())


def what_is_wrong(name: str) -> str:
    """What the example of a name prints that its docstring does not say."""
    text = inspect.getdoc(PUBLIC[name])
    if not text:
        return "no docstring"
    examples = doctest.DocTestParser().get_doctest(text, names(), name, None, 0)
    if not examples.examples and name.split(".")[-1] not in NO_EXAMPLE:
        return "no example"
    said: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        doctest.DocTestRunner(optionflags=flags).run(examples, out=said.append)
    return "".join(said)


def test_a_wrong_example_is_seen() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner().run(wrong, out=lambda _: None).failed == 1
