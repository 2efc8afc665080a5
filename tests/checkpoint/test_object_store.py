"""Checkpoints in an object store, which is a server on this machine that speaks Google's protocol.

`make soak` installs the server and gcsfs.
"""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from helpers import wait_until

from tests.multiprocess import launcher, object_store_checks
from tests.multiprocess.states import differing, like
from treeshard.checkpoint import Checkpoints

pytestmark = pytest.mark.skipif(
    find_spec("gcp_storage_emulator") is None or find_spec("gcsfs") is None,
    reason="needs gcsfs and gcp-storage-emulator: see `make soak`",
)

BUCKET = "gs://runs"
KILLS = 20
WHOLE = [(".*", None)]
SERVER = """
import sys
from gcp_storage_emulator.server import create_server

create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="runs").run()
"""
# Saves one step after the other, and says which are saved.
RUN = """
import sys
import warnings
from tests.multiprocess.states import differing, host_state, like
from treeshard.checkpoint import Checkpoints

WHOLE = [(".*", None)]
warnings.simplefilter("always")
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    step, state = checkpoints.restore_latest(like(), rules=WHOLE, mesh="fsdp=1") or (0, None)
    assert state is None or not differing(state, step)
    while True:
        step += 1
        checkpoints.save(step, host_state(step))
        checkpoints.wait()
        print(step, flush=True)
"""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("object-store")


@pytest.fixture(scope="module")
def env(where: Path) -> Iterator[dict[str, str]]:
    """A store with an empty bucket: what a process needs in its environment to find it."""
    port = launcher.free_port()
    server = launcher.start([sys.executable, "-c", SERVER, str(port)], where / "server.log")
    address = f"http://localhost:{port}"

    def answers() -> bool:
        with suppress(URLError, ConnectionError):
            urlopen(f"{address}/storage/v1/b/runs").close()
            return True
        return False

    try:
        wait_until(answers)
        yield {
            "STORAGE_EMULATOR_HOST": address,  # for gcsfs
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",  # TensorStore then asks nobody for one
        }
    finally:
        launcher.end([server])


@pytest.fixture(scope="module")
def two(where: Path, env: dict[str, str]) -> launcher.Verdicts:
    return launcher.launch(object_store_checks, where / "two", devices=2, args=[BUCKET], env=env)


@pytest.mark.parametrize("check", launcher.checks_of(object_store_checks))
def test_two_processes(check: str, two: launcher.Verdicts) -> None:
    two.assert_passed(check)


def test_a_run_that_is_killed_again_and_again(
    where: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)
    run = f"{BUCKET}/killed"
    saved = removed = 0
    for i in range(KILLS):
        log = where / f"killed-{i}.log"
        process = launcher.start([sys.executable, "-c", RUN, run], log, env)
        while not steps_in(log) and process.poll() is None:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1))
        launcher.end([process])
        assert steps_in(log), log.read_text()
        saved = max(saved, *steps_in(log))
        text = log.read_text()
        if "Checkpoints: removed files of interrupted saves from gs://" in text:
            assert ". A run that is still saving there loses them, too." in text
            removed += 1
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with Checkpoints(run, read_only=True) as checkpoints:
        found = checkpoints.restore_latest(like(), rules=WHOLE, mesh="fsdp=-1")
    step, state = found or (0, {})
    assert step >= saved >= KILLS
    assert removed  # the run was killed while it wrote, and the next one could save the step
    assert not differing(state, step)


def steps_in(log: Path) -> list[int]:
    """The steps that a run says it has saved; a line that has no end may be half a number."""
    lines = log.read_text().splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith("\n") and line.strip().isdecimal()]
