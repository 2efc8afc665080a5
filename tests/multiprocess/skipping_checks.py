"""A process that skips a call, or two threads that call at once: told, never a wrong value.

After that all calls raise; once they start again, they work.
"""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.multiprocess.worker import Context, start_again, without_lines
from treeshard.checkpoint import restore, save
from treeshard.interchange import save_safetensors

ROWS = 12  # which 2, 3 and 4 processes can split
LARGE = (ROWS, ROWS * 2**10)  # too large for a comparison of values


def mesh() -> Mesh:
    """One device of each process."""
    devices = [jax.local_devices(process_index=i)[0] for i in range(jax.process_count())]
    return ts.make_mesh("data=-1", devices=devices)


def full(step: int, shape: tuple[int, ...] = (ROWS,)) -> np.ndarray:
    return np.full(shape, step, np.float32)


def global_of(context: Context, step: int) -> jax.Array:
    part = full(step, (ROWS // context.count,))
    return ts.from_process_local(part, P("data"), mesh())


def assert_all_can_go_on(context: Context) -> None:
    np.testing.assert_array_equal(ts.gather(global_of(context, 1), timeout=20), full(1))
    placed = ts.reshard(ts.shard(full(2, LARGE), P("data"), mesh()), P(None, "data"), mesh())
    np.testing.assert_array_equal(ts.gather(placed, timeout=20), full(2, LARGE))


def told(call: Callable[[], Any]) -> str:
    """What a call says on this process, after which another one says that it is too late."""
    with pytest.raises(ts.ProcessError) as error:
        call()
    with pytest.raises(ts.ProcessError, match="are out of step since .*; start the run again"):
        ts.gather(ts.shard(full(1), P(), mesh()))
    start_again()
    return str(error.value)


def check_a_read_of_another_step_is_told(context: Context) -> None:
    """Process 1 skips the first of two reads, and so reads what is a step later."""

    def reshard(x: Any) -> jax.Array:
        return ts.reshard(x, P(), mesh(), timeout=20)

    local = [global_of(context, step) for step in (2, 3)]
    sharded = [ts.shard(full(step), P("data"), mesh()) for step in (2, 3)]
    moved = [reshard(x) for x in local]
    for (first, second), what, read in (
        (local, "gather", lambda x: ts.gather(x, timeout=20)),
        (local, "reshard", reshard),
        (sharded, "gather", lambda x: ts.gather(x, to=1, timeout=20)),
        (moved, "iter_gather", lambda x: list(ts.iter_gather({"w": x}, timeout=20))),
    ):
        text = told(lambda read=read, x=(first, second)[context.index == 1]: read(x))
        assert text.startswith(f"{what}: the processes do not agree"), (what, text)
        assert "made in " in text, (what, text)
        read(second)


def check_a_read_that_is_skipped_between_batches_is_told(context: Context) -> None:
    """The array is one of the user's own `jit`; `from_process_local` made a batch in each step."""
    twice = jax.jit(lambda v: 2 * v)
    x = twice(global_of(context, 2))
    if context.index == 1:  # skips the read of the first step
        x = twice(global_of(context, 3))
    text = told(lambda: ts.gather(x, timeout=20))
    assert "The first: nothing on process" in text, text
    assert "; batch 2 of from_process_local: the array: float32[" in text, text


def check_a_read_that_is_skipped_before_another_line_is_told(context: Context) -> None:
    """No process has the same part as another, so that no values can be compared."""
    x = jax.jit(lambda v: 2 * v)(global_of(context, 1))

    def read() -> np.ndarray:
        return ts.gather(x, timeout=20)

    def two_branches() -> np.ndarray:
        if context.index:
            return read()
        return read()

    def loop() -> None:
        for step in range(2):
            if not (step == 1 and context.index == 1):
                read()  # process 1 skips the second
            read()

    differ = "gather: the processes make this call at different lines: tests/multiprocess/"
    with pytest.warns(ts.ShardingWarning, match=differ) as seen:
        two_branches()
    assert len(seen) == 1
    assert "wrong if a process skipped a call or made one more" in str(seen[0].message)
    text = told(loop)
    assert text.startswith(differ), text
    assert "Nothing was done. Before, all of them have made it at each of these lines" in text, text


def own_loop() -> tuple[Any, Callable[[Any], Any]]:
    """A state and a step of JAX alone. It has a counter, as nearly every state does."""
    state = {"w": ts.shard(full(0, LARGE), P("data"), mesh()), "step": ts.shard(0, P(), mesh())}
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))
    return state, step


def check_a_call_that_is_skipped_in_a_loop_of_jax_alone_is_told(context: Context) -> None:
    path = context.directory / "skipped.safetensors"
    reads: list[Callable[[Any], Any]] = [
        lambda x: ts.gather(x, timeout=20),
        lambda x: ts.gather(x, to=1, timeout=20),
        lambda x: list(ts.iter_gather(x, timeout=20)),
        lambda x: ts.reshard(x, P(), mesh(), timeout=20),
        lambda x: save_safetensors(path, x, timeout=20),
    ]
    for read in reads:
        state, step = own_loop()

        def two_reads(read: Callable[[Any], Any] = read, state: Any = state, step: Any = step):
            for i in range(2):
                state = step(state)
                if not (i == 0 and context.index == 1):
                    read(state)  # process 1 skips the first, and makes this call a step later
                path.unlink(missing_ok=True)

        text = told(two_reads)
        assert "\n  step (values): CRC-32 " in text, text
        assert not path.exists()


def check_two_branches_of_an_if_stay_allowed(context: Context) -> None:
    """Also where all processes take one of them at times."""
    state, step = own_loop()
    for i in range(6):
        state = step(state)
        for _ in range(2):
            if (i + context.index) % 4 == 0:
                found = ts.gather(state, timeout=20)
            else:
                found = ts.gather(state, timeout=20)
            assert found["step"] == i + 1
        if context.index == 0:
            ts.reshard(state, P(), mesh(), timeout=20)
        else:
            ts.reshard(state, P(), mesh(), timeout=20)


def check_calls_that_look_alike_are_told(context: Context) -> None:
    """Process 0 makes one call more, of another part of the state with the same paths."""
    state = {name: {"w": full(i, LARGE)} for i, name in enumerate(["params", "ema"])}
    plan = ts.plan(state, [("w", P("data"))], mesh(), min_size=0)
    step = ts.jit_step(lambda s, b: ({**s}, b.sum()), plan, batch=P("data"), donate=False)
    after, _ = step(ts.shard(state, plan), global_of(context, 1))
    mine = "params" if context.index else "ema"
    directory = context.directory
    placed = ts.shard(state, plan)
    for read in (
        lambda: ts.gather(after[mine], timeout=20),
        lambda: list(ts.iter_gather(placed[mine], timeout=20)),
        lambda: save(directory / "alike", after[mine], timeout=20),
        lambda: save_safetensors(directory / "alike.safetensors", placed[mine], timeout=20),
    ):
        text = told(read)
        assert "w (values): made in " in text, text
        assert " as leaf ema/w on process 0; made in " in text, text
        assert " as leaf params/w on process" in text, text
    assert not list(directory.glob("alike*"))
    assert_all_can_go_on(context)


def check_a_step_that_one_process_skips_is_told(context: Context) -> None:
    state = {"w": ts.shard(full(0), P("data"), mesh())}
    plan = ts.plan(state, [("w", P("data"))], mesh(), min_size=0)
    step = ts.jit_step(lambda s, b: ({"w": s["w"] + b}, 0), plan, batch=P("data"), donate=False)
    batch = global_of(context, 1)
    state, _ = step(state, batch)
    later = step(state, batch)[0] if context.index else state  # process 0 skips it
    text = told(lambda: save(context.directory / "never", later, timeout=20))
    assert "before this call the processes have called different steps" in text, text
    assert "The first: nothing on process 0; program 1 (check_a_step_that_one" in text, text


def check_other_values_of_a_full_leaf_are_told(context: Context) -> None:
    """At once in the first batch, and later at the next exchange."""
    kept = ts.shard(full(1), P("data"), mesh())
    rate = np.float32(0.1 * (1 + (context.index == 1)))
    text = told(lambda: ts.from_process_local({"rate": rate}, P(), mesh(), timeout=20))
    assert text.startswith("from_process_local: the processes do not agree, and nothing was"), text
    assert "\n  rate (values): CRC-32 " in text, text
    batch = {"rate": np.float32(0.1), "x": full(context.index, (ROWS // context.count,))}
    specs = {"rate": P(), "x": P("data")}
    for later in (np.float32(0.1), rate):
        ts.from_process_local({**batch, "rate": later}, specs, mesh(), timeout=20)
    text = told(lambda: ts.gather(kept, timeout=20))
    assert "made batches of different shapes or small values, and nothing was done." in text
    assert "The first: batch 2 of from_process_local: rate: float32[], x: float32[" in text, text
    plan = ts.plan({"w": full(0)}, [("w", P("data"))], mesh(), min_size=0)
    step = ts.jit_step(lambda s, b: (s, b["rate"]), plan, batch=P(), donate=False)
    state = ts.shard({"w": full(0)}, plan)
    assert "\n  batch/rate (values): CRC-32 " in told(lambda: step(state, {"rate": rate}))


def check_batches_of_other_shapes_are_told(context: Context) -> None:
    """Each shape was seen before by all processes, and another one by each in the last batch."""
    kept = ts.shard({"w": full(1)}, P("data"), mesh())
    path = context.directory / "kept"
    save(path, kept)
    directory = context.directory
    plan = ts.plan({"w": full(0)}, [("w", P("data"))], mesh(), min_size=0)
    step = ts.jit_step(lambda s, b: (s, b["x"].sum()), plan, batch=P("data"), donate=False)
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda _: ts.gather(kept, timeout=20),
        lambda _: save(directory / "mixed", kept, timeout=20),
        lambda _: restore(path, kept, timeout=20),
        lambda _: ts.reshard(kept, P(), mesh(), timeout=20),
        lambda batch: step(kept, batch),
    )
    for call in calls:
        for rows in (1, 2, 1 + (context.index == 1)):
            part = {"x": full(0, (rows, 3))}
            batch = ts.from_process_local(part, P("data"), mesh(), timeout=20)
        text = told(lambda call=call, batch=batch: call(batch))
        assert "batch 3 of from_process_local: x: float32[1,3] on process" in text, text
        assert "batch 3 of from_process_local: x: float32[2,3] on process 1" in text, text
    assert not (directory / "mixed").exists()


def check_other_calls_are_both_named(context: Context) -> None:
    x = global_of(context, 1)
    calls: list[Callable[[], Any]] = [
        lambda: save(context.directory / "other", {"w": x}, timeout=20),
        lambda: ts.reshard(x, P(), mesh(), timeout=20),
    ]
    text = told(calls[context.index != 0])
    assert "save on process 0; reshard on process" in without_lines(text), text
    assert "A process skipped a call, or made one more." in text
    assert not (context.directory / "other").exists()


def check_threads_that_gather_at_once(context: Context) -> None:
    """In another order on each process: every value is right, or the call raises."""
    arrays = {name: jax.jit(lambda v: v * 1)(global_of(context, i)) for i, name in enumerate("ab")}
    values: list[bool] = []
    errors: list[str] = []

    def run(name: str, value: int) -> None:
        for _ in range(4):
            try:
                values.append((ts.gather(arrays[name], timeout=2) == value).all())
            except ts.ProcessError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=run, args=(n, i), name=n) for i, n in enumerate("ab")]
    for thread in threads[:: -1 if context.index else 1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(values)
    known = re.compile("in the thread 'a'|arrive|out of step since gather")
    assert all(map(known.search, errors)), errors
    start_again()
    assert_all_can_go_on(context)


def in_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def steps_of(count: int) -> tuple[Any, list[Any]]:
    """A state, and steps that add one, two and so on, times a factor that they are given."""
    state = {"w": ts.shard(full(0), P("data"), mesh())}
    plan = ts.plan(state, [("w", P("data"))], mesh(), min_size=0)

    def adding(n: int) -> Any:
        return ts.jit_step(lambda s, b: ({"w": s["w"] + n * b}, 0), plan, batch=P(), donate=False)

    return state, list(map(adding, range(1, count + 1)))


def factor(value: float) -> jax.Array:
    return ts.from_process_local(np.float32(value), P(), mesh(), timeout=20)


def check_a_loop_in_a_thread_is_compared(context: Context) -> None:
    """As one in the main thread: other steps, other small values, skipped steps."""
    other = context.index == 1

    def swapped(state: Any, first: Any, second: Any) -> Any:
        order = [first, second, first, second, *([second, first] if other else [first, second])]
        for step in order:
            state, _ = step(state, factor(1))
        return state

    def of_other_values(state: Any, first: Any, second: Any) -> Any:
        for value in (1, 2 + other, 3):
            state, _ = first(state, factor(value))
        return state

    def skipping(state: Any, first: Any, second: Any) -> Any:
        for i in range(3):
            if not (other and i == 1):
                state, _ = first(state, factor(1))
        return state

    for loop, said in {
        swapped: "The first: program 1 (steps_of",
        of_other_values: "The first: program 1 (steps_of",
        skipping: "on processes 0, 2; nothing on process 1.",
    }.items():

        def run(loop: Callable[..., Any] = loop) -> None:
            state, (first, second) = steps_of(2)
            in_thread(lambda: save(context.directory / "t", loop(state, first, second), timeout=20))

        text = told(run)
        assert said in text, text
    assert not (context.directory / "t").exists()


def check_steps_may_move_between_threads(context: Context) -> None:
    """What they were given is compared, whichever thread has made it."""

    def run(second: float) -> Any:
        state, (step,) = steps_of(1)
        state, _ = step(state, factor(1))
        for value in (1, second, 3):
            batch = in_thread(lambda value=value: factor(value))
            state, _ = in_thread(lambda batch=batch, state=state: step(state, batch))
        return ts.gather(state, timeout=20)

    np.testing.assert_array_equal(run(2)["w"], full(7))
    text = told(lambda: run(2 + (context.index == 1)))
    assert "The first: program 2 (steps_of.<locals>" in text, text


def check_a_thread_with_a_loop_of_jax_alone_is_compared(context: Context) -> None:
    """By the batches of treeshard that it makes."""
    twice = jax.jit(lambda v: 2 * v)

    def loop() -> None:
        for step in range(3):
            if not (context.index == 1 and step == 1):
                x = twice(global_of(context, step))
        ts.gather(x, timeout=20)

    text = told(lambda: in_thread(loop))
    assert "The first: batch 3 of from_process_local: the array: float32[4] on processes" in text
    assert text.count("nothing on process 1") == 1


def check_threads_that_make_their_first_batches_in_any_order(context: Context) -> None:
    """A pool of loaders: of several forms, and several threads with one form at once."""
    sizes = [3, 4, 5, 3, 4, 5, 3, 4, 5]
    turn = 3 * context.index
    order = sizes[turn:] + sizes[:turn] if context.index != 2 else sizes[::-1]

    def load(columns: int) -> Any:
        time.sleep(0.01 * context.index)
        part = full(columns, (ROWS // context.count, columns))
        return ts.from_process_local({"loaded": part}, P("data"), mesh(), timeout=20)

    with ThreadPoolExecutor(9) as pool:
        made = list(pool.map(load, order))
    for batch, columns in zip(made, order, strict=True):
        assert batch["loaded"].shape == (ROWS, columns)
    ts.gather(ts.shard(full(1), P("data"), mesh()), timeout=20)
    # In the main thread the order is that of all calls.
    columns = 6 + context.index // 2
    text = told(lambda: load(columns))
    assert "\n  loaded: float32[4,6] as P('data',) on processes 0, 1; float32[4,7] as" in text, text


def check_batches_made_in_the_background_disturb_nothing(context: Context) -> None:
    """Two processes whose threads run at another pace, as loaders of data do."""
    made: list[Any] = []

    def load() -> None:
        for i in range(8):
            time.sleep(0.01 * context.index)
            made.append(global_of(context, i))
            made.append(ts.shard(full(i), P("data"), mesh()))

    thread = threading.Thread(target=load)
    thread.start()
    x = ts.shard(full(5, LARGE), P("data"), mesh())
    for _ in range(8):
        np.testing.assert_array_equal(ts.gather(x, timeout=20), full(5, LARGE))
    thread.join()
    for i, batch in enumerate(made):
        np.testing.assert_array_equal(ts.gather(batch), full(i // 2))
    assert_all_can_go_on(context)
