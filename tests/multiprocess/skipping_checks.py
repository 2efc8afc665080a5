"""A process that skips a call, or two threads that call at once: told, never a wrong value.

After that all calls raise; once they start again, they work.
"""

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
OTHER = 1  # the process that does something else


def mesh() -> Mesh:
    """One device of each process."""
    devices = [jax.local_devices(process_index=i)[0] for i in range(jax.process_count())]
    return ts.make_mesh("data=-1", devices=devices)


def full(step: int, shape: tuple[int, ...] = (ROWS,)) -> np.ndarray:
    return np.full(shape, step, np.float32)


def sharded(tree: Any) -> Any:
    return ts.shard(tree, P("data"), mesh())


def local(tree: Any, *axes: str) -> Any:
    return ts.from_process_local(tree, P(*axes), mesh())


def global_of(context: Context, step: int) -> jax.Array:
    return local(full(step, (ROWS // context.count,)), "data")


def step_of(function: Callable[..., Any], state: Any, *batch: str) -> Any:
    plan = ts.plan(state, [("w", P("data"))], mesh(), min_size=0)
    return ts.jit_step(function, plan, batch=P(*batch), donate=False)


def replicated(tree: Any) -> Any:
    return ts.reshard(tree, P(), mesh())


def iterated(tree: Any) -> Any:
    return list(ts.iter_gather(tree))


def assert_all_can_go_on(context: Context) -> None:
    np.testing.assert_array_equal(ts.gather(global_of(context, 1)), full(1))
    placed = ts.reshard(sharded(full(2, LARGE)), P(None, "data"), mesh())
    np.testing.assert_array_equal(ts.gather(placed), full(2, LARGE))


def told(call: Callable[..., Any], *args: Any) -> str:
    """What a call says on this process, after which another one says that it is too late."""
    with pytest.raises(ts.ProcessError) as error:
        call(*args)
    with pytest.raises(ts.ProcessError, match="are out of step since .*. Start the run again"):
        ts.gather(ts.shard(full(1), P(), mesh()))
    start_again()
    return str(error.value)


def in_thread(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *args).result()


# ------------------------------------------------------------------ calls that look alike


def check_a_read_of_another_step_or_leaf_is_told(context: Context) -> None:
    """One process skips the first of two reads, or makes a read more: it has a later array."""
    steps = [global_of(context, 2), global_of(context, 3)]
    placed = [sharded(full(2)), sharded(full(3))]
    moved = [replicated(x) for x in steps]
    host = {name: {"w": full(i, LARGE)} for i, name in enumerate(["params", "ema"])}
    state = sharded(host)
    after, _ = step_of(lambda s, b: ({**s}, b.sum()), host, "data")(state, global_of(context, 1))
    params = [state["ema"], state["params"]]
    of_step = [after["ema"], after["params"]]
    directory, alike = context.directory, context.directory / "alike"
    for what, read, (first, second) in (
        ("gather", ts.gather, steps),
        ("reshard", replicated, steps),
        ("gather", partial(ts.gather, to=1), placed),
        ("iter_gather", iterated, moved),
        ("gather", ts.gather, of_step),
        ("iter_gather", iterated, params),
        ("save", partial(save, alike), of_step),
        ("save_safetensors", partial(save_safetensors, f"{alike}.safetensors"), params),
    ):
        text = told(read, second if context.index == OTHER else first)
        assert text.startswith(f"{what}: the call differs between"), (what, text)
        leaves = r"made in .* as leaf ema/w on processes 0, 2; made in .* as leaf params/w on"
        arrays = r"made in [^;]* on processes 0, 2; made in [^;]* on process 1"
        assert re.search(leaves if isinstance(first, dict) else arrays, text), (what, text)
        assert not list(directory.glob("alike*"))
    for read, second in ((ts.gather, steps[1]), (replicated, steps[1]), (iterated, moved[1])):
        read(second)
    assert_all_can_go_on(context)


def check_a_read_that_is_skipped_between_batches_is_told(context: Context) -> None:
    """The array is one of the user's own `jit`; `from_process_local` made a batch in each step."""
    twice = jax.jit(lambda v: 2 * v)
    x = twice(global_of(context, 2))
    if context.index == OTHER:  # skips the read of the first step
        x = twice(global_of(context, 3))
    text = told(ts.gather, x)
    assert "The first: nothing on process" in text, text
    assert "; batch 2 of from_process_local: the array: float32[" in text, text


def check_a_read_that_is_skipped_before_another_line_is_told(context: Context) -> None:
    """No process has the same part as another, so that no values can be compared."""
    x = jax.jit(lambda v: 2 * v)(global_of(context, 1))

    def two_branches() -> np.ndarray:
        if context.index:
            return ts.gather(x)
        return ts.gather(x)

    def loop() -> None:
        for step in range(2):
            if not (step == 1 and context.index == OTHER):
                ts.gather(x)
            ts.gather(x)

    differ = "gather: the processes make this call at different lines: tests/multiprocess/"
    with pytest.warns(ts.ShardingWarning, match=differ) as seen:
        two_branches()
    assert len(seen) == 1
    assert "wrong if a process skipped a call or made one more" in str(seen[0].message)
    text = told(loop)
    assert text.startswith(differ), text
    assert "because earlier all processes made it together at each of these lines." in text, text


def own_loop() -> tuple[Any, Callable[[Any], Any]]:
    """A state and a step of JAX alone. It has a counter, as nearly every state does."""
    state = {"w": sharded(full(0, LARGE)), "step": ts.shard(0, P(), mesh())}
    return state, jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))


def check_a_call_that_is_skipped_in_a_loop_of_jax_alone_is_told(context: Context) -> None:
    path = context.directory / "skipped.safetensors"

    def two_reads(read: Callable[[Any], Any]) -> None:
        state, step = own_loop()
        for i in range(2):
            state = step(state)
            if not (i == 0 and context.index == OTHER):
                read(state)  # which one process makes a step later
            path.unlink(missing_ok=True)

    to_one = partial(ts.gather, to=1)
    for read in (ts.gather, to_one, iterated, replicated, partial(save_safetensors, path)):
        text = told(two_reads, read)
        assert "\n  step (values): CRC-32 " in text, text
        assert not path.exists()


def check_two_branches_of_an_if_stay_allowed(context: Context) -> None:
    """Also where all processes take one of them at times."""
    state, step = own_loop()
    for i in range(6):
        state = step(state)
        for _ in range(2):
            if (i + context.index) % 4 == 0:  # noqa: SIM108 (the lines are the point)
                found = ts.gather(state)
            else:
                found = ts.gather(state)
            assert found["step"] == i + 1
        if context.index == 0:
            replicated(state)
        else:
            replicated(state)


def check_other_calls_are_both_named(context: Context) -> None:
    x = global_of(context, 1)
    other = context.directory / "other"
    calls: list[Callable[[], Any]] = [lambda: save(other, {"w": x}), lambda: replicated(x)]
    text = told(calls[context.index != 0])
    assert "save on process 0; reshard on process" in without_lines(text), text
    assert "A process skipped a call, or made one more." in text
    assert not other.exists()


# ------------------------------------------------------------------ steps and batches


def check_a_step_that_one_process_skips_is_told(context: Context) -> None:
    step = step_of(lambda s, b: ({"w": s["w"] + b}, 0), {"w": full(0)}, "data")
    batch = global_of(context, 1)
    state, _ = step({"w": sharded(full(0))}, batch)
    later = step(state, batch)[0] if context.index else state  # process 0 skips it
    text = told(save, context.directory / "never", later)
    assert "because before it the processes called different steps" in text, text
    assert "The first: nothing on process 0; program 1 (check_a_step_that_one" in text, text


def check_other_values_of_a_full_leaf_are_told(context: Context) -> None:
    """At once in the first batch, and later at the next exchange."""
    kept = sharded(full(1))
    rate = np.float32(0.1 * (1 + (context.index == OTHER)))
    text = told(local, {"rate": rate})
    assert text.startswith("from_process_local: the call differs between processes and was"), text
    assert "\n  rate (values): CRC-32 " in text, text
    batch = {"rate": np.float32(0.1), "x": full(context.index, (ROWS // context.count,))}
    for later in (np.float32(0.1), rate):
        ts.from_process_local(batch | {"rate": later}, {"rate": P(), "x": P("data")}, mesh())
    text = told(ts.gather, kept)
    assert "made batches of different shapes or small values." in text
    assert "The first: batch 2 of from_process_local: rate: float32[], x: float32[" in text, text
    step = step_of(lambda s, b: (s, b["rate"]), {"w": full(0)})
    text = told(step, {"w": sharded(full(0))}, {"rate": rate})
    assert "\n  batch/rate (values): CRC-32 " in text


def check_batches_of_other_shapes_are_told(context: Context) -> None:
    """Each shape was seen before by all processes, and another one by each in the last batch."""
    kept = sharded({"w": full(1)})
    path, mixed = context.directory / "kept", context.directory / "mixed"
    save(path, kept)
    step = step_of(lambda s, b: (s, b["x"].sum()), {"w": full(0)}, "data")
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda _: ts.gather(kept),
        lambda _: save(mixed, kept),
        lambda _: restore(path, kept),
        lambda _: replicated(kept),
        lambda batch: step(kept, batch),
    )
    for call in calls:
        for rows in (1, 2, 1 + (context.index == OTHER)):
            batch = local({"x": full(0, (rows, 3))}, "data")
        text = told(call, batch)
        assert "batch 3 of from_process_local: x: float32[1,3] on process" in text, text
        assert "batch 3 of from_process_local: x: float32[2,3] on process 1" in text, text
    assert not mixed.exists()


# ------------------------------------------------------------------ threads


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


def steps_of(count: int) -> tuple[Any, list[Any]]:
    """A state, and steps that add one, two and so on, times a factor that they are given."""

    def adding(n: int) -> Any:
        return step_of(lambda s, b: ({"w": s["w"] + n * b}, 0), {"w": full(0)})

    return {"w": sharded(full(0))}, list(map(adding, range(1, count + 1)))


def factor(value: float) -> jax.Array:
    return local(np.float32(value))


def check_a_loop_in_a_thread_is_compared(context: Context) -> None:
    """As one in the main thread: other steps, other small values, skipped steps; and a loop of JAX
    alone by the batches of treeshard that it makes."""
    other = context.index == OTHER
    twice = jax.jit(lambda v: 2 * v)

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

    def of_jax_alone(state: Any, first: Any, second: Any) -> Any:
        for i in range(3):
            if not (other and i == 1):
                state = {"w": twice(global_of(context, i))}
        return state

    for loop, said in {
        swapped: "The first: program 1 (steps_of",
        of_other_values: "The first: program 1 (steps_of",
        skipping: "on processes 0, 2; nothing on process 1.",
        of_jax_alone: "The first: batch 3 of from_process_local: the array: float32[4] on"
        " processes 0, 2; nothing on process 1.",
    }.items():

        def save_last(loop: Callable[..., Any] = loop) -> None:
            state, steps = steps_of(2)
            save(context.directory / "t", loop(state, *steps))

        text = told(in_thread, save_last)
        assert said in text, text
    assert not (context.directory / "t").exists()


def check_steps_may_move_between_threads(context: Context) -> None:
    """What they were given is compared, whichever thread has made it."""

    def run(second: float) -> Any:
        state, (step,) = steps_of(1)
        state, _ = step(state, factor(1))
        for value in (1, second, 3):
            state, _ = in_thread(step, state, in_thread(factor, value))
        return ts.gather(state)

    np.testing.assert_array_equal(run(2)["w"], full(7))
    text = told(run, 2 + (context.index == OTHER))
    assert "The first: program 2 (steps_of.<locals>" in text, text


def check_threads_that_make_their_first_batches_in_any_order(context: Context) -> None:
    """A pool of loaders: of several forms, and several threads with one form at once."""
    sizes = [3, 4, 5, 3, 4, 5, 3, 4, 5]
    turn = 3 * context.index
    order = sizes[turn:] + sizes[:turn] if context.index != 2 else sizes[::-1]

    def load(columns: int) -> Any:
        time.sleep(0.01 * context.index)
        return local({"loaded": full(columns, (ROWS // context.count, columns))}, "data")

    with ThreadPoolExecutor(9) as pool:
        made = list(pool.map(load, order))
    for batch, columns in zip(made, order, strict=True):
        assert batch["loaded"].shape == (ROWS, columns)
    ts.gather(sharded(full(1)))
    # In the main thread the order is that of all calls.
    text = told(load, 6 + context.index // 2)
    assert "\n  loaded: float32[4,6] as P('data',) on processes 0, 1; float32[4,7] as" in text, text


def check_batches_made_in_the_background_disturb_nothing(context: Context) -> None:
    """Processes whose threads run at another pace, as loaders of data do."""
    made: list[Any] = []

    def load() -> None:
        for i in range(8):
            time.sleep(0.01 * context.index)
            made.append(global_of(context, i))
            made.append(sharded(full(i)))

    thread = threading.Thread(target=load)
    thread.start()
    x = sharded(full(5, LARGE))
    for _ in range(8):
        np.testing.assert_array_equal(ts.gather(x), full(5, LARGE))
    thread.join()
    for i, batch in enumerate(made):
        np.testing.assert_array_equal(ts.gather(batch), full(i // 2))
    assert_all_can_go_on(context)
