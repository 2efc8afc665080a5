"""The host memory that is free, in any cgroup; and what reads, saves and gathers raise without."""

import inspect
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from treeshard._core.hosts import host_id
from treeshard._core.memory import available_memory

GIB = 2**30
# What `/proc/self/cgroup` says, the directory of each group, its limit, usage and page cache, and
# what is free.
GROUPS = {
    "none": ("", {}, 8 * GIB),
    "version 2": ("0::/app\n", {"app": (900, 500, 0)}, 400),
    "version 2, the outer limit is lower": (
        "0::/slice/app\n",
        {"slice/app": (900, 100, 0), "slice": (700, 600, 0)},
        100,
    ),
    "version 2, outside the namespace": ("0::/../app\n", {".": (900, 500, 0)}, 400),
    "version 1 is not read": (
        "4:cpu,memory:/docker/1f3\n",
        {".": (900, 100, 0)},
        8 * GIB,
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_memory_that_is_free_is_that_of_the_cgroup(case: str, tmp_path: Path) -> None:
    text, groups, free = GROUPS[case]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {16 * 2**20} kB\nMemAvailable: {6 * 2**20} kB\nSwapFree: {2 * 2**20} kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text(text)
    for name, (limit, used, cached) in groups.items():
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        # Shared memory is in `file`, and is not freed when memory is needed.
        (group / "memory.stat").write_text(
            f"file {cached + 77}\nshmem 77\nactive_file {cached}\ninactive_file 0\n"
        )
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert available_memory(tmp_path) == free


def test_it_is_unknown_without_proc(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


# Two arrays of 64 MiB, with 16 MiB of memory for each call.
LITTLE_MEMORY = """
import json, os, resource, sys
import jax, numpy as np
import treeshard as ts
from treeshard.checkpoint import restore, save, verify

run = sys.argv[1]
state = {name: np.ones((2**14, 2**10), np.float32) for name in "ab"}
placed = jax.device_put(state)
save(run + "/1", state)
save(run + "/small", {"a": state["a"][:8]})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, -1))
calls = {
    "save": lambda: save(run + "/2", state),
    "save from devices": lambda: save(run + "/2", placed),  # from their own memory
    "restore": lambda: restore(run + "/1"),
    "verify": lambda: verify(run + "/1"),
    "gather": lambda: ts.gather(placed),
    "iter_gather": lambda: list(ts.iter_gather(placed)),
}
for name, call in calls.items():
    try:
        call()
    except ts.TreeShardError as error:
        kind = type(error).__name__
        print(json.dumps([name, kind, str(error), getattr(error, "need", None)]), flush=True)
print(json.dumps(sorted(os.listdir(run))))
"""


def test_without_memory_each_call_says_what_it_needs_and_does_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LITTLE_MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *told, left = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert left == ["1", "2", "small"]
    needed = {"restore": "192.0 MiB", "verify": "192.0 MiB"}
    kinds = {"gather": "DoesNotFitError", "iter_gather": "DoesNotFitError"}
    assert {name: kind for name, kind, *_ in told} == {
        name: kinds.get(name, "CheckpointError")
        for name in ("save", "restore", "verify", "gather", "iter_gather")
    }
    for name, _, text, need in told:
        assert f"need {needed.get(name, '128.0 MiB')} of host memory in this process" in text
        assert ("the arrays and their reader need" in text) == (name in ("restore", "verify"))
        assert "MiB are available." in text
        assert need in (None, 2**26, 2**27)


def test_containers_of_one_host_are_not_added_up() -> None:
    """Each sees its own cgroup as `/`, with a limit of its own."""
    # Without the package around it, whose import takes seconds.
    imports = "import os\nfrom contextlib import suppress\nfrom pathlib import Path\n"
    code = imports + inspect.getsource(host_id) + "print(repr(host_id()), flush=True); input()"
    plain = [sys.executable, "-c", code]
    in_container = ["unshare", "--cgroup", "--fork", *plain]
    # They run at one time: the number of a namespace that has ended is used again.
    running = [
        subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True)
        for command in (plain, plain, in_container, in_container)
    ]
    first = [process.stdout.readline() for process in running]
    errors = [process.communicate("\n")[1] for process in running]
    if any("unshare" in error for error in errors):
        pytest.skip("this user may not make namespaces")
    assert [process.returncode for process in running] == [0, 0, 0, 0], errors
    assert first[0] == first[1]
    assert len({*first}) == 3
