"""The classes of errors, and where warnings point."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard.errors import UnknownAxisInRuleError, UnknownAxisInSpecError


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


PROGRAM = """\
import jax, numpy as np, treeshard as ts
from jax.sharding import PartitionSpec as P
x, mesh = np.zeros((3, 2), 'float32'), ts.make_mesh('data=8')
ts.with_sharding_constraint(x, P('data'), mesh)
keep = jax.shard_map(
    lambda x: ts.manual.shard_params(x, 'data', min_weight_size=0),
    mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
jax.eval_shape(keep, np.zeros(3, 'float32'))
"""


def test_a_warning_points_at_the_line_that_called_treeshard() -> None:
    with pytest.warns(ts.ShardingWarning) as told:
        exec(compile(PROGRAM, "mine.py", "exec"), {"__name__": "mine"})
    assert [(x.filename, x.lineno) for x in told] == [("mine.py", 4), ("mine.py", 6)]


# A library calls treeshard, and the user calls the library.
LIBRARY = """\
import treeshard as ts
def constrain(x, spec, mesh):
    ts.with_sharding_constraint(x, spec, mesh)
"""


@pytest.mark.parametrize(
    ("user", "line"),
    [
        ("mine.py", ("mine.py", 2)),
        # Where all lines are installed, the one that is nearest.
        ("/opt/site-packages/other.py", ("/opt/site-packages/lib.py", 3)),
    ],
)
def test_a_warning_points_at_the_user_of_a_library(user, line) -> None:
    library = {"__name__": "lib"}
    exec(compile(LIBRARY, "/opt/site-packages/lib.py", "exec"), library)
    values = (np.zeros((3, 2), "float32"), P("data"), ts.make_mesh("data=8"))
    program = compile("x = values\nconstrain(*x)", user, "exec")
    names = {**library, "values": values}
    # In a thread of its own no line of this test is above.
    with ThreadPoolExecutor(1) as threads, pytest.warns(ts.ShardingWarning) as told:
        threads.submit(exec, program, names).result()
    assert [(x.filename, x.lineno) for x in told] == [line]
