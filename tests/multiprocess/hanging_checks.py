"""Arguments and versions that differ between processes are told at once."""

import time
from unittest import mock

import jax.numpy as jnp
import pytest

import treeshard as ts
from tests.multiprocess.worker import Context, start_again
from treeshard import ProcessError
from treeshard._core import meetings
from treeshard._core.meetings import exchange
from treeshard.checkpoint import Checkpoints


def check_checkpoints_compares_its_arguments(context: Context) -> None:
    with pytest.raises(ProcessError) as told:
        Checkpoints(context.directory / "other", keep=2 + context.index, every=10, timeout=20)
    assert "keep: 2 on process 0; 3 on process 1" in str(told.value)
    start_again()
    with pytest.raises(ProcessError, match="every: 1 on process 0; 2 on process 1"):
        Checkpoints(context.directory / "other", every=1 + context.index, timeout=20)
    start_again()
    with Checkpoints(context.directory / "other", keep=2, timeout=20) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})


def check_other_versions_are_told_at_once(context: Context) -> None:
    """Even if the other version calls its meetings by other names."""
    everyone = list(range(context.count))
    other = meetings._sequence(everyone, "of other versions")
    if context.index == 1:
        other._name += "-of-9.9"
    # As before the first meeting.
    exchange("about to meet anew", b"", timeout=20)
    key = f"treeshard-version/{context.index}"
    meetings._client().key_value_delete(key)
    exchange("about to meet anew", b"", timeout=20)
    version = ts.__version__ if context.index == 0 else "9.9"
    with mock.patch.object(ts, "__version__", version), pytest.raises(ProcessError) as told:
        exchange("save /runs/7", b"", timeout=20, lane="of other versions")
    assert str(told.value) == (
        "save /runs/7: the processes have different versions of treeshard:"
        f" {ts.__version__} on process 0; 9.9 on process 1. Nothing was done. Install one version"
        " on all of them."
    )
    wait_for_all(context, "told")
    meetings._client().key_value_set(key, ts.__version__, allow_overwrite=True)
    wait_for_all(context, "going-on")
    start_again()
    exchange("going on", b"", timeout=20)


def wait_for_all(context: Context, mark: str) -> None:
    (context.directory / f"{mark}-{context.index}").touch()
    while not all((context.directory / f"{mark}-{i}").exists() for i in range(context.count)):
        time.sleep(0.01)
