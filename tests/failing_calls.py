"""Runs saves and reads in which the Nth file call fails, for every N, as SQLite tests itself.

A library in C, which is loaded before libc, sees each file call below one folder, of Python and of
TensorStore alike. It fails the Nth one: with an error, or a write that writes half, or it kills the
process, or the disk ends, after which no call changes a file. It runs in a process of its own:

    python -m tests.failing_calls FOLDER STRIDE WAY ...

FOLDER has the library and gets the files. Of each operation, every STRIDE-th call fails in each
way. It prints JSON: the number of cases, and what was wrong in some.
"""

import errno
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import treeshard as ts
from treeshard import checkpoint, interchange

SOURCE = Path(__file__).with_suffix(".c")
LIBRARY, CONTROL, BELOW = "failing_calls.so", "control", "files"
# An errno, or as the library names it.
WAYS = {
    **{name: getattr(errno, name) for name in ("EIO", "ENOSPC", "EINTR")},
    **{"half": -1, "dead disk": -2, "kill": -3},
}
MOST = 20  # wrong cases, after which it ends

Report = dict[str, Any]


def run(folder: Path, stride: int, ways: Sequence[str]) -> Report:
    """Compiles the library, and runs all operations. Needs a C compiler, and Linux."""
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(folder / LIBRARY), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    (folder / BELOW).mkdir()
    (folder / CONTROL).write_bytes(bytes(mmap.PAGESIZE))
    settings = {
        "LD_PRELOAD": str(folder / LIBRARY),
        "FAILING_BELOW": str(folder / BELOW),
        "FAILING_CONTROL": str(folder / CONTROL),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "tests.failing_calls", str(folder), str(stride), *ways]
    ended = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


class Control:
    """What the library fails, and what it has seen."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._map = mmap.mmap(opened.fileno(), 0)

    def start(self, number: int, way: str) -> None:
        self._map[:128] = struct.pack("lllll88x", number, WAYS[way], 0, 0, 0)

    def stop(self) -> tuple[bool, str]:
        """Lets all calls succeed. Returns whether one has failed, and which."""
        *_, fired, _, call = struct.unpack("lllll88s", self._map[:128])
        self._map[:128] = bytes(128)
        return bool(fired), call.partition(b"\0")[0].decode()


# ------------------------------------------------------------------ the operations

Saved = dict[str, int]  # names of what is saved, each with the number of its state


class Case:
    """A folder with what was saved before, and what an operation has done there since."""

    def __init__(self, root: Path, saved: Saved) -> None:
        self.root = root
        self.saved = dict(saved)  # what is there
        self.maybe: dict[str, list[int | None]] = {}  # what is also allowed; `None`: it is absent
        self.tell: Callable[[Any], None] = lambda _: None  # in a process that may be killed

    def begin(self, name: str, number: int | None) -> None:
        self.tell(("begin", name, number))
        self.maybe[name] = [number]

    def done(self, name: str, number: int | None) -> None:
        """The call has returned: from now on, nothing else is allowed."""
        self.tell(("done", name, number))
        self.maybe.pop(name, None)
        if number is None:
            self.saved.pop(name, None)
        else:
            self.saved[name] = number

    def allowed(self, name: str) -> list[int | None]:
        return [self.saved.get(name), *self.maybe.get(name, [])]


def state(number: int) -> dict[str, Any]:
    draw = np.random.default_rng(number)
    return {
        "w": draw.normal(size=(16, 8)).astype(np.float32),
        "b": draw.integers(0, 99, 7).astype(np.int32),
        "step": number,
    }


def arrays(number: int) -> dict[str, Any]:
    return {name: x for name, x in state(number).items() if name != "step"}


def numbered(found: dict[str, Any]) -> int:
    """The number of a state; it fails for anything but a state, bit for bit."""
    numbers = [n for n in range(1, 10) if found["b"].tobytes() == state(n)["b"].tobytes()]
    assert len(numbers) == 1, f"mixed or damaged: {found}"
    expected = state(numbers[0])
    assert {*found} in ({*expected}, {"w", "b"})
    for name, x in found.items():
        assert np.asarray(x).tobytes() == np.asarray(expected[name]).tobytes(), name
    return numbers[0]


def save_alone(case: Case) -> None:
    case.begin("alone", 5)
    checkpoint.save(case.root / "alone", state(5))
    case.done("alone", 5)


def replace(case: Case) -> None:
    with checkpoint.Checkpoints(case.root / "run", background=False) as checkpoints:
        case.begin("run/2", 5)
        checkpoints.save(2, state(5))
        case.done("run/2", 5)


def keep(case: Case) -> None:
    with checkpoint.Checkpoints(case.root / "run", keep=2) as checkpoints:
        for step in (4, 5, 6):
            case.begin(f"run/{step}", step)
            for old in range(1, step - 1):
                case.begin(f"run/{old}", None)
            checkpoints.save(step, state(step))
            checkpoints.wait()
            case.done(f"run/{step}", step)


def remove_after(case: Case) -> None:
    with checkpoint.Checkpoints(case.root / "run") as checkpoints:
        case.begin("run/2", None)
        case.begin("run/3", None)
        assert checkpoints.remove_after(1) == (2, 3)
        case.done("run/2", None)
        case.done("run/3", None)


def restore(case: Case) -> None:
    assert numbered(checkpoint.restore(case.root / "run/2", state(0))) == 2


def restore_latest(case: Case) -> None:
    with checkpoint.Checkpoints(case.root / "run", read_only=True) as checkpoints:
        found = checkpoints.restore_latest(state(0))
        assert found is not None, "restore_latest finds no step"
        assert (found[0], numbered(found[1])) == (3, 3)


def look(case: Case) -> None:
    with checkpoint.Checkpoints(case.root / "run", read_only=True) as checkpoints:
        assert checkpoints.steps() == (1, 2, 3)
        assert checkpoints.latest == 3
    assert len(checkpoint.inspect(case.root / "run/2").leaves) == 3


def verify(case: Case) -> None:
    checkpoint.verify(case.root / "run/2")


def save_file(case: Case) -> None:
    case.begin("one.safetensors", 5)
    interchange.save_safetensors(case.root / "one.safetensors", arrays(5))
    case.done("one.safetensors", 5)


def save_folder(case: Case) -> None:
    case.begin("model", 5)
    interchange.save_safetensors(case.root / "model", arrays(5), max_file_size=100)
    case.done("model", 5)


def load_folder(case: Case) -> None:
    assert numbered(interchange.load_safetensors(case.root / "model")) == 1


READS = [restore, restore_latest, look, verify, load_folder]
FILES = [save_file, save_folder]
OPERATIONS: list[Callable[[Case], None]] = [
    *(save_alone, replace, keep, remove_after),
    *FILES,
    *READS,
]


def template(root: Path) -> Saved:
    """What is there before each operation."""
    for step in (1, 2, 3):
        checkpoint.save(root / "run" / str(step), state(step))
    interchange.save_safetensors(root / "one.safetensors", arrays(1))
    interchange.save_safetensors(root / "model", arrays(1), max_file_size=100)
    return {"run/1": 1, "run/2": 2, "run/3": 3, "one.safetensors": 1, "model": 1}


# ------------------------------------------------------------------ what must hold afterwards


def check(operation: Callable[[Case], None], case: Case, error: Exception | None) -> None:
    """Everything that was acknowledged is whole, nothing else is listed, and a save works."""
    unchanged = error is not None and "before is unchanged" in str(error)
    names = {name for name in ("one.safetensors", "model", "alone") if (case.root / name).exists()}
    with checkpoint.Checkpoints(case.root / "run", read_only=True) as checkpoints:
        names |= {f"run/{step}" for step in checkpoints.steps()}
    for name in {*names, *case.saved, *case.maybe}:
        if is_file(name) != (operation in FILES):
            assert (name in names) == (name in case.saved), name
            continue
        found = read(case, name) if name in names else None
        allowed = case.allowed(name)
        assert found in allowed, f"{name} is {found}, not one of {allowed}: {error}"
        if unchanged and case.maybe.get(name) != [None]:
            assert found == case.saved.get(name), f"{name} is {found}, and it says: {error}"
    if operation in FILES:
        check_files(case)
    else:
        check_steps(case)


def is_file(name: str) -> bool:
    return name in ("model", "one.safetensors")


def read(case: Case, name: str) -> int:
    """The number of the state that is saved at a name; it fails unless it is whole."""
    path = case.root / name
    if is_file(name):
        return numbered(interchange.load_safetensors(path))
    return numbered(checkpoint.restore(path, state(0)))


def check_steps(case: Case) -> None:
    """A step that is saved next is whole, and nothing is left of what failed."""
    if not (case.root / "alone").exists():
        checkpoint.save(case.root / "alone", state(8))
        assert read(case, "alone") == 8
    with checkpoint.Checkpoints(case.root / "run", background=False) as checkpoints:
        checkpoints.save(8, state(8))
        steps = checkpoints.steps()
    assert steps[-1] == 8
    assert read(case, "run/8") == 8
    assert names_in(case.root / "run") == {str(step) for step in steps}
    left = names_in(case.root) - {".alone.treeshard-lock"}  # as after a kill, and not locked
    assert left == {"run", "alone", "one.safetensors", "model"}


def check_files(case: Case) -> None:
    """Files that are saved next are whole, and nothing is left of what failed."""
    for name, most in (("one.safetensors", None), ("model", 100)):
        interchange.save_safetensors(case.root / name, arrays(8), max_file_size=most)
        assert read(case, name) == 8
    assert names_in(case.root) == {"run", "one.safetensors", "model"}
    assert len(names_in(case.root / "model")) == 3  # two files and their index


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def files_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# ------------------------------------------------------------------ every call


def operate(name: str, root: Path, saved: Saved, tell: Any) -> None:
    """What a process does that may be killed: it tells what it begins, and what is done."""
    warnings.simplefilter("ignore")
    case = Case(root, saved)
    case.tell = tell.send
    globals()[name](case)


class Killable:
    """Starts processes that have imported everything, and no threads yet."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__spec__.name])

    def run(self, operation: Callable[[Case], None], case: Case) -> None:
        """Runs an operation, whose process may be killed; the case has what it has told."""
        hear, tell = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=operate, args=(operation.__name__, case.root, case.saved, tell)
        )
        process.start()
        tell.close()
        with suppress(EOFError):
            while True:
                what, *of = hear.recv()
                getattr(case, what)(*of)
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), process.exitcode


class Wrong(NamedTuple):
    operation: str
    way: str
    number: int
    call: str
    what: str


def main(folder: Path, stride: int, ways: Sequence[str]) -> Report:
    control = Control(folder / CONTROL)
    before, root = folder / "before", folder / BELOW / "case"
    saved = template(before)
    wrong: list[Wrong] = []
    killable = Killable()
    counts: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    in_threads: list[str] = []
    threading.excepthook = lambda args: in_threads.append(repr(args.exc_value))
    sys.unraisablehook = lambda args: in_threads.append(f"{args.object}: {args.exc_value!r}")
    for i, operation in enumerate(OPERATIONS):
        name = operation.__name__
        if name not in os.environ.get("FAILING_ONLY", name).split():
            continue
        shutil.rmtree(root, ignore_errors=True)
        for j, way in enumerate(ways):
            fired, number = True, 1 + (7 * i + 11 * j) % min(stride, 20)
            while fired and len(wrong) < MOST:
                if operation not in READS:
                    shutil.rmtree(root, ignore_errors=True)
                if not root.exists():
                    shutil.copytree(before, root)
                case, error, call = Case(root, saved), None, ""
                try:
                    control.start(number, way)
                    try:
                        if way == "kill":
                            killable.run(operation, case)
                        else:
                            operation(case)
                    except ts.TreeShardError as raised:
                        error = raised
                    finally:
                        fired, call = control.stop()
                    if operation not in READS:
                        check(operation, case, error)
                    assert not in_threads, in_threads
                except Exception:
                    what = traceback.format_exc()[-2500:]
                    wrong.append(Wrong(name, way, number, call, what))
                in_threads.clear()
                if fired:
                    counts[name] += 1
                    killed = "killed" if way == "kill" else "no error"
                    outcomes[type(error).__name__ if error else killed] += 1
                number += stride
        if operation in READS:
            assert files_in(root) == files_in(before), f"{name} has changed a file"
    return {"counts": counts, "outcomes": outcomes, "wrong": [x._asdict() for x in wrong]}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    report = main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    print(json.dumps(report))
