"""Meetings in any order of their messages, with delays, interrupts and kills at every call.

300 seeds here, and 10,000 in `make soak`. A seed that fails prints the order in which its calls of
the service came: run that seed alone with `-k "[SEED]"`.
"""

import os
import random
from collections import Counter

import pytest

from tests.core.simulated_service import Here, Process, World
from treeshard import ProcessError
from treeshard._core import meetings
from treeshard._core.meetings import breaking_if_left
from treeshard._core.processes import all_or_none, require_agreement

SEEDS = 10_000 if os.environ.get("TREESHARD_SOAK") else 300
BATCH = 50  # seeds in one test
FAULTS = [
    "delay",
    "interrupt before",
    "interrupt after",
    "exit before",
    "exit after",
    "kill before",
    "kill after",
]
TIMEOUT = 10.0
CALLS = 4
# A meeting, and another one in which differences are compared.
LONGEST = TIMEOUT + 2 * meetings._SECONDS_TO_ANSWER


class Run:
    """What each process does, and what has come of it."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.count = draw.choice([2, 2, 3, 3, 4, 5, 8, 16] + [64] * (seed % 10 == 0))
        self.skips = draw.choice([None, None, None, (draw.randrange(self.count), 2)])
        self.raises = draw.choice([None, None, (draw.randrange(self.count), 1)])
        self.differs = draw.choice([None, None, None, (draw.randrange(self.count), 1)])
        faults = draw.choices(FAULTS, k=draw.choice([0, 1, 1, 2, 3]))
        self.world = World(seed, self.count, faults)
        self.told: dict[tuple[int, int], bytes] = {}  # the answer, by call and process
        self.first: dict[int, str] = {}  # what a process names as the first failure
        self.errors: list[tuple[float, str]] = []  # with their seconds
        self.hit = set[tuple[int, int]]()  # calls that were not delayed, but left

    def __call__(self, process: Process) -> None:
        for number in range(CALLS):
            if self.skips != (process.index, number):
                try:
                    self.call(process, number)
                except (ProcessError, ZeroDivisionError) as error:
                    self.errors.append((self.world.clock, str(error)))
                except (KeyboardInterrupt, SystemExit):
                    pass  # as somebody who catches it, and goes on
        if process.broken:
            self.check_names_the_first_failure(process)

    def call(self, process: Process, number: int) -> None:
        began, slept, faults = self.world.clock, process.slept, len(process.faults)
        was_broken = process.broken
        try:
            with breaking_if_left():
                with require_agreement(f"call {number}", timeout=TIMEOUT) as facts:
                    facts["x"] = str(self.differs == (process.index, number))
                process.client().before("the user's code", "")
                with all_or_none(f"call {number}", phase="end", timeout=TIMEOUT) as messages:
                    if self.raises == (process.index, number):
                        raise ZeroDivisionError
                    messages.own = f"{process.index} in {number}, ".encode()
            self.told[number, process.index] = messages.answer
            assert not was_broken
        finally:
            took = self.world.clock - began - (process.slept - slept)
            assert took <= 2 * LONGEST, (number, process.index, took)
            if any(fault != "delay" for fault, _ in process.faults[faults:]):
                self.hit.add((number, process.index))

    def check_names_the_first_failure(self, process: Process) -> None:
        began = self.world.clock
        with pytest.raises(ProcessError) as told, all_or_none("after it", timeout=TIMEOUT):
            pass
        assert self.world.clock == began
        start = "after it: the call was cancelled. The processes are out of step since "
        assert str(told.value).startswith(start)
        self.first[process.index] = str(told.value)

    def check(self) -> None:
        happened = [fault for process in self.world.processes for fault in process.faults]
        for (number, i), answer in self.told.items():
            whole = "".join(f"{j} in {number}, " for j in range(self.count)).encode()
            assert answer == whole, (number, i, answer)
            # Once one process returns, all do that are there.
            for j in range(self.count):
                assert {(number, j)} & {*self.told, *self.hit}, (number, i, j)
        for seconds, text in self.errors:
            assert seconds >= meetings._SECONDS_TO_ANSWER or " did not arrive " not in text
        if self.skips is None and [fault.split()[0] for fault, _ in happened] in (
            [],
            ["interrupt"],
            ["exit"],
        ):
            assert self.world.clock == 0  # all are told at once
        if not happened and self.skips is None:
            bad = {who[1] for who in (self.raises, self.differs) if who}
            # Whose facts differ is out of step from then on.
            last = self.differs[1] if self.differs else CALLS
            for number in range(CALLS):
                told = [i for i in range(self.count) if (number, i) in self.told]
                assert len(told) == (0 if number in bad or number >= last else self.count)
            if not bad:
                assert not self.world.keys, self.world.keys
        # Whoever is interrupted while it says so names what it knows.
        if not any(call.endswith(("_set_bytes", "_try_get_bytes")) for _, call in happened):
            assert len(set(self.first.values())) <= 1, self.first


@pytest.mark.parametrize("start", range(0, SEEDS, BATCH))
def test_no_mixture_no_hang_and_the_first_failure_is_named(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meetings, "_process", Here())
    seen = Counter[str]()
    for seed in range(start, start + BATCH):
        run = Run(seed)
        try:
            run.world.run(run)
            run.check()
        except BaseException:
            print(f"seed {seed}, {run.count} processes:", *run.world.log, sep="\n")
            raise
        seen.update(fault for process in run.world.processes for fault, _ in process.faults)
    assert len(seen) > 3  # kinds of faults


@pytest.mark.parametrize("count", [2, 64, 512])
def test_what_a_process_receives_does_not_grow_with_their_number(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process receives what each says, and the others one answer."""
    monkeypatch.setattr(meetings, "_process", Here())

    def agree(_: Process) -> None:
        with require_agreement("save", timeout=TIMEOUT) as facts:
            facts["the path"] = "/runs/7"

    world = World(0, count, [])
    world.run(agree)
    first, *others = (sum(process.received) for process in world.processes)
    assert first < 128 * count
    assert max(others) < 16
    assert not world.keys


@pytest.mark.parametrize("count", [2, 64])
def test_one_of_those_that_waited_reads_who_is_absent(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process, which would have read it, and another one."""
    monkeypatch.setattr(meetings, "_process", Here())
    errors: list[str] = []

    def go_on_without_two(process: Process) -> None:
        if process.index not in (0, 9):
            with pytest.raises(ProcessError) as told, all_or_none("save", timeout=TIMEOUT):
                pass
            errors.append(str(told.value))

    world = World(0, count, [])
    world.run(go_on_without_two)
    absent = "process 0 of 2" if count == 2 else "processes 0, 9 of 64"
    start = f"save: {absent} did not arrive within 10 s. The call was cancelled. Every process must"
    assert [error[: len(start)] for error in errors] == [start] * (count - 2 + (count == 2))
    assert world.clock == TIMEOUT
    reads = [line for line in world.log if "key_value_dir_get_bytes" in line]
    assert len(reads) == 1
