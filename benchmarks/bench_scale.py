"""What calls cost by the number of processes: python -m benchmarks.bench_scale

2, 8 and 32 real processes, of one simulated device each, call each function twice: the first time
compiles. Counted are the calls of the coordination service, what a process receives from it, and
the programs that are compiled. For 1,024 and 16,384, one process plays them all in turn, against a
real service: it sends what each would send, and receives what each would receive.

Two cores run all processes, so that seconds are theirs together, and no forecast of a cluster.
"""

import json
import logging
import os
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import treeshard as ts
from benchmarks._harness import Row, options, report
from tests.multiprocess.launcher import free_port
from treeshard._core import meetings
from treeshard.checkpoint import Checkpoints, restore, save
from treeshard.interchange import save_safetensors

REAL = (2, 8, 32)
PLAYED = (1024, 16384)
SECONDS = 600.0  # for all real processes of one number
SAVES = 40


class Cost(NamedTuple):
    """What one call costs one process."""

    messages: int
    received: int  # bytes, from the service
    programs: int
    seconds: float


# ------------------------------------------------------------------ counting


class CountingClient:
    """A client of the service that counts its calls, and the bytes that they return."""

    def __init__(self, client: Any, counts: Counter[str]) -> None:
        self._client, self._counts = client, counts

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._client, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._counts["messages"] += 1
            if isinstance(result, list):
                self._counts["received"] += sum(len(key) + len(value) for key, value in result)
            elif isinstance(result, bytes | str):
                self._counts["received"] += len(result)
            return result

        return counted


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts what this process asks the service."""
    counts, real = Counter[str](), meetings.coordination_client
    meetings.coordination_client = lambda: CountingClient(real(), counts)  # type: ignore[assignment]
    try:
        yield counts
    finally:
        meetings.coordination_client = real


compiles: list[str] = []


def listen(name: str, _seconds: float, **_: object) -> None:
    if name == "/jax/core/compile/backend_compile_duration":
        compiles.append(name)


# ------------------------------------------------------------------ real processes


def calls(count: int, directory: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each public call that waits for the other processes, or that might."""
    mesh = ts.make_mesh(f"fsdp={count}")
    other = ts.make_mesh(f"data={count}", devices=jax.devices()[::-1])
    host = {f"{i}": np.full((2 * count, 16), i, "float32") for i in range(10)}
    placed = ts.shard(host, P("fsdp"), mesh, timeout=SECONDS)
    rows = np.ones((2, 4), "float32")
    yield "shard", lambda: ts.shard(host, P("fsdp"), mesh, timeout=SECONDS)
    yield (
        "from_process_local",
        lambda: ts.from_process_local(rows, P("fsdp"), mesh, timeout=SECONDS),
    )
    yield "gather", lambda: ts.gather(placed, timeout=SECONDS)
    yield "gather to process 0", lambda: ts.gather(placed, to=0, timeout=SECONDS)
    yield "iter_gather", lambda: list(ts.iter_gather(placed, timeout=SECONDS))
    yield "reshard", lambda: ts.reshard(placed, P("data"), other, timeout=SECONDS)
    numbers = iter(range(1000))
    yield "save", lambda: save(directory / f"{next(numbers)}", placed, timeout=SECONDS)
    yield "restore", lambda: restore(directory / "0", placed, timeout=SECONDS)
    files = iter(range(1000))
    path = directory / "model"
    yield (
        "save_safetensors",
        lambda: save_safetensors(f"{path}-{next(files)}.safetensors", placed, timeout=SECONDS),
    )
    yield from steps(mesh)


def steps(mesh: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    rules = [("w", P("fsdp")), (".*", None)]
    state, plan = ts.init_sharded(
        lambda: {"w": np.zeros((2 * mesh.size, 4), "float32"), "b": np.zeros(4, "float32")},
        rules=rules,
        mesh=mesh,
        min_size=0,
    )
    batch = ts.from_process_local(np.ones((2, 4), "float32"), P("fsdp"), mesh, timeout=SECONDS)

    def train_step(state: Any, batch: Any) -> Any:
        loss = ((batch @ state["w"][:4].T) ** 2).mean()
        return jax.tree.map(lambda x: x + loss, state), loss

    step = ts.jit_step(train_step, plan, batch=P("fsdp"), donate=False)
    yield "a step of jit_step", lambda: step(state, batch)


def measure(count: int, directory: Path) -> dict[str, list[Any]]:
    """The costs of the first and the second time of each call, as this process sees them."""
    found: dict[str, list[Any]] = {}
    jax.monitoring.register_event_duration_secs_listener(listen)
    with counting() as counts:
        for name, call in calls(count, directory):
            for turn in range(2):
                meetings.exchange(f"{name} {turn}", b"", timeout=SECONDS)
                counts.clear()
                before, begin = len(compiles), time.perf_counter()
                jax.block_until_ready(call())
                seconds = time.perf_counter() - begin
                costs = counts["messages"], counts["received"], len(compiles) - before, seconds
                found.setdefault(name, []).append(costs)
        client = meetings._process.client()
        with Checkpoints(directory / "run", keep=1) as checkpoints:
            x = {"w": np.ones(8)}
            for i in range(SAVES if count < 32 else 4):
                checkpoints.save(i, x)
                checkpoints.wait()
        meetings.exchange("the end", b"", timeout=SECONDS)
        time.sleep(1 + count / 8)  # until all have read it
        found["keys left"] = [len(client.key_value_dir_get_bytes(meetings._process.names))]
    return found


def run_as(index: int, count: int, port: int, directory: Path, out: int) -> None:
    """One of the processes: writes what it has measured to `out`."""
    logging.disable(logging.CRITICAL)
    ts.simulate_devices(1)
    jax.distributed.initialize(
        f"localhost:{port}",
        count,
        index,
        initialization_timeout=int(SECONDS),
        heartbeat_timeout_seconds=300,
    )
    text = json.dumps(measure(count, directory))
    with os.fdopen(out, "w") as file:
        file.write(text)


def in_processes(count: int) -> list[dict[str, list[Any]]]:
    """What each of some processes has measured. They are forked before a backend starts, since
    each import of JAX would take seconds."""
    port, ends = free_port(), []
    with tempfile.TemporaryDirectory() as directory:
        for index in range(count):
            receiving, sending = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(receiving)
                status = 1
                try:
                    run_as(index, count, port, Path(directory), sending)
                    status = 0
                finally:
                    os._exit(status)
            os.close(sending)
            ends.append((pid, receiving))
        texts = [_read_all(receiving) for _, receiving in ends]
        for pid, _ in ends:
            os.waitpid(pid, 0)
    return [json.loads(text) for text in texts]


def _read_all(descriptor: int) -> str:
    parts: list[bytes] = []
    until = time.monotonic() + SECONDS
    while select.select([descriptor], [], [], until - time.monotonic())[0]:
        part = os.read(descriptor, 2**16)
        if not part:
            os.close(descriptor)
            return b"".join(parts).decode()
        parts.append(part)
    raise TimeoutError("a process did not end")


# ------------------------------------------------------------------ played processes


def play_a_meeting(count: int) -> tuple[int, int, int]:
    """What the first process receives at a meeting, the most that another one does, and all."""
    received: dict[int, int] = {}

    class Played(meetings._Process):
        """One of the processes after the other."""

        index = 0
        count = 0

    played = Played(f"treeshard-{count}/")
    played.count = count
    before, meetings._process = meetings._process, played
    try:
        with counting() as counts:
            call = meetings._Call("save", version=ts.__version__)
            meeting = meetings._Meeting("treeshard/played/0", tuple(range(count)), call, SECONDS)
            payload = b'+{"": "0123456789abcdef"}'  # of an agreement
            for played.index in range(1, count):
                meeting.send(payload)
                meeting.come()
            played.index = 0
            meeting.send(payload)
            counts.clear()
            meeting.wait(lambda _: b"")
            meeting.forget()
            received[0] = counts["received"]
            for played.index in range(1, count):
                counts.clear()
                meeting.get("answer", SECONDS)
                meeting.forget()
                received[played.index] = counts["received"]
            left = played.client().key_value_dir_get_bytes("treeshard/played")
            assert not left
    finally:
        meetings._process = before
    return received[0], max(list(received.values())[1:]), sum(received.values())


# ------------------------------------------------------------------ the table


def rows() -> list[Row]:
    table: list[Row] = []
    for count in REAL:
        found = in_processes(count)
        for name in found[0]:
            if name == "keys left":
                continue
            turns = [[Cost(*one[name][turn]) for one in found] for turn in range(2)]
            table += _rows_of(name, count, *turns)
        left = found[0]["keys left"][0]
        table.append(Row(f"keys left after saves, {count} processes", left, "0"))
    jax.distributed.initialize(f"localhost:{free_port()}", 1, 0)
    for count in PLAYED:
        first, other, total = play_a_meeting(count)
        of = f"a meeting of {count:,} processes, received"
        table += [
            Row(f"{of} by the first, bytes for each", first / count, "< 128"),
            Row(f"{of} by another, bytes", other, "< 1024"),
            Row(f"{of} by all, MiB", total / 2**20, "< 64"),
        ]
    return table


def _rows_of(name: str, count: int, first: list[Cost], again: list[Cost]) -> Iterator[Row]:
    of = f"{name}, {count} processes"
    most: Mapping[str, float] = {
        "messages": max(x.messages for x in again),
        "bytes received by the first": again[0].received,
        "by another": max(x.received for x in again[1:]),
        "seconds, first time": max(x.seconds for x in first),
        "seconds, again": max(x.seconds for x in again),
    }
    reach = "<= 4" if "gather" in name or name == "reshard" else ""
    yield Row(f"{of}: programs, first time", max(x.programs for x in first), reach, most)


def main() -> None:
    options()
    report("What calls cost by the number of processes", rows())


if __name__ == "__main__":
    sys.exit(main())
