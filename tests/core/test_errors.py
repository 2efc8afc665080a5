"""The classes of errors, and where warnings point."""

import pickle
import re
import subprocess
import sys

import pytest

import treeshard as ts
from treeshard.errors import (
    UnknownAxisInRuleError,
    UnknownAxisInSpecError,
)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ts.NoMeshError, RuntimeError),
        (ts.MeshError, ValueError),
        (ts.UnknownAxisError, (ValueError, KeyError)),
        (ts.SpecError, ValueError),
        (ts.ShardingRuleError, ValueError),
        (ts.DeletedLeafError, RuntimeError),
        (ts.StateError, TypeError),
        (UnknownAxisInRuleError, (ts.ShardingRuleError, ts.UnknownAxisError)),
        (UnknownAxisInSpecError, (ts.SpecError, ts.UnknownAxisError)),
    ],
)
def test_errors_have_their_builtin_bases(error: type, bases: type | tuple[type, ...]) -> None:
    assert issubclass(error, ts.TreeShardError)
    for base in bases if isinstance(bases, tuple) else (bases,):
        assert issubclass(error, base)


def test_tracebacks_say_where_to_import_an_error_from() -> None:
    classes = [getattr(ts.errors, name) for name in dir(ts.errors)]
    assert {kind.__module__ for kind in classes} == {"treeshard.errors"}
    assert all(type(pickle.loads(pickle.dumps(kind("why")))) is kind for kind in classes)


def test_a_warning_points_once_at_the_line_that_called_treeshard(tmp_path) -> None:
    # In a process of its own: the annotation checks of this one put frames in between.
    script = tmp_path / "mine.py"
    script.write_text(
        "import jax, numpy as np, treeshard as ts\n"
        "from jax.sharding import PartitionSpec as P\n"
        "ts.simulate_devices(2)\n"
        "x, mesh = np.zeros((3, 2), 'float32'), ts.make_mesh('data=2')\n"
        "for _ in range(3):\n"
        "    ts.with_sharding_constraint(x, P('data'), mesh)\n"
        "keep = jax.shard_map(\n"
        "    lambda x: ts.manual.shard_params(x, 'data', min_size=0),\n"
        "    mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)\n"
        "jax.eval_shape(keep, np.zeros(3, 'float32'))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"(\S+): ShardingWarning: ", done.stderr)
    assert lines == [f"{script}:6", f"{script}:8"]
