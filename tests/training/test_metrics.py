"""Sums and counts can be added over steps and devices."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from treeshard.training import Metrics, print_metrics

ONE = Metrics({"loss": (jnp.float32(6), jnp.int32(2)), "hits": (jnp.int32(1), jnp.int32(2))})
TWO = Metrics({"loss": (jnp.float32(3), jnp.int32(1)), "hits": (jnp.int32(1), jnp.int32(1))})


def test_sums_and_counts_add_up() -> None:
    both = ONE + TWO
    assert both.means() == {"loss": 3.0, "hits": 2 / 3}
    assert sum([ONE, TWO], None).means() == both.means()  # a first step without metrics
    assert (ONE + None).means() == ONE.means()
    assert math.isnan(Metrics({"x": (jnp.float32(0), jnp.int32(0))}).means()["x"])


def test_different_names_raise() -> None:
    with pytest.raises(ValueError, match=r"metrics \['hits', 'other'\] are on one side only"):
        ONE + Metrics({"loss": ONE.pairs["loss"], "other": ONE.pairs["hits"]})
    with pytest.raises(TypeError):
        ONE + 1


def test_a_pytree_through_jit_and_scan() -> None:
    assert len(jax.tree.leaves(ONE)) == 4
    doubled = jax.jit(lambda m: m + m)(ONE)
    assert doubled.pairs["loss"][0] == 12
    summed, _ = jax.lax.scan(lambda m, _: (m + ONE, None), ONE, None, length=2)
    assert summed.means() == ONE.means()


def test_reduced_over_devices(mesh) -> None:
    def f(x):
        return Metrics({"mean": (x.sum(), x.size), "rows": (1, 1)}).reduce(("data", "fsdp"))

    x = np.arange(16, dtype=np.float32)
    out = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P()))(x)
    assert out.means()["mean"] == x.mean()
    assert out.pairs["rows"][1] == 8


def test_printed(capsys) -> None:
    print_metrics(ONE, "step 1")
    print_metrics({"loss": (3.0, 2)})
    assert capsys.readouterr().out == "step 1\n  loss  3.0000\n  hits  0.5000\n  loss  1.5000\n"
