"""Two processes save to one address, behind which each has an object store of its own: both raise.

args: an address such as gs://bucket.
"""

import pytest

import treeshard as ts
from tests.multiprocess.unshared_checks import NOT_SEEN, state_at
from tests.multiprocess.worker import Context
from treeshard.checkpoint import Checkpoints, save


def check_a_save(context: Context) -> None:
    with pytest.raises(ts.CheckpointError, match=f"process 1.*{NOT_SEEN}"):
        save(f"{context.args[0]}/x", state_at(1), timeout=1)


def check_a_run(context: Context) -> None:
    error = [ts.ProcessError, ts.CheckpointError][context.index]
    with pytest.raises(error, match=NOT_SEEN):
        Checkpoints(f"{context.args[0]}/run", timeout=1)
