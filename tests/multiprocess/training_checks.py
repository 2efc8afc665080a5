"""Training on several processes: the same initial state and the same losses as on one device."""

from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from tests.helpers import assert_same
from tests.multiprocess.worker import Context, error_of, start_again
from treeshard._core import meetings, processes
from treeshard.training import init_sharded, jit_step

RULES = [("b", None), (".*", ts.fsdp("fsdp", min_size=0))]
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def init(key):
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (16, 64)) / 4,
        "b": jnp.zeros(64),
        "down": jax.random.normal(down, (64, 16)) / 8,
    }
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


def train_step(state, batch):
    def loss_fn(p):
        return jnp.mean((jnp.tanh(batch @ p["up"] + p["b"]) @ p["down"] - batch) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}, loss


@cache
def initialised():
    mesh = ts.make_mesh("data=2,fsdp=-1")
    return init_sharded(init, jax.random.key(0), rules=RULES, mesh=mesh)


def batches():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((16, 16), dtype="float32") for _ in range(6)]


def mine_of(context: Context, batch: Any) -> Any:
    """The rows of this process."""
    rows = len(batch) // context.count
    return batch[rows * context.index : rows * (context.index + 1)]


def check_the_initial_state_is_that_of_one_device(context: Context) -> None:
    state, plan = initialised()
    assert not state["params"]["up"].is_fully_addressable
    assert ts.diff_shardings(state, plan) == ()
    assert_same(ts.gather(state), jax.device_get(jax.jit(init)(jax.random.key(0))))


def check_the_losses_are_those_of_one_device(context: Context) -> None:
    state, plan = initialised()
    alone = jax.jit(init)(jax.random.key(0))
    specs = P(("data", "fsdp"))
    step = jit_step(train_step, plan, batch=specs, donate=False)
    for i, batch in enumerate(batches()):
        # All processes pass the full batch, or each passes its own rows.
        own = ts.from_process_local(mine_of(context, batch), specs, plan.mesh)
        state, loss = step(state, batch if i % 2 else own)
        alone, expected = jax.jit(train_step)(alone, batch)
        np.testing.assert_allclose(loss, expected, atol=2e-6)


@contextmanager
def counted():
    """Counts the exchanges of this process."""
    with mock.patch.object(processes, "exchange", wraps=processes.exchange) as exchange:
        yield lambda: exchange.call_count


def forms(context: Context):
    """Batches as processes may pass them: full, or global from the rows of each."""
    specs, mesh = P(("data", "fsdp")), initialised()[1].mesh
    full = batches()[0]
    global_ = ts.from_process_local(mine_of(context, full), specs, mesh)
    return {"full": full, "global": global_, "global, other specs": ts.shard(full, P("data"), mesh)}


def check_processes_exchange_something_only_before_the_first_step(context: Context) -> None:
    state, plan = initialised()
    step = jit_step(train_step, plan, donate=False)
    given = forms(context)
    for name, batch in given.items():
        with counted() as exchanges:
            _, loss = step(state, batch)
            # A global batch that is in place has been agreed on when it was made.
            expected = 0 if name == "global" else 1
            assert exchanges() == expected, name
    # A form is known whatever came in between, and on whichever side its arrays are.
    with counted() as exchanges:
        for batch in (*given.values(), jnp.asarray(given["full"])):
            assert step(state, batch)[1] == loss
        assert exchanges() == 0


def check_batches_of_different_forms_raise_on_all(context: Context) -> None:
    state, plan = initialised()
    step = jit_step(train_step, plan, donate=False)
    given = forms(context)
    full = given["full"]
    text = error_of(lambda: step(state, full[: 8 if context.index else 16]))
    assert text.startswith("jit_step: the call differs between processes and was cancelled."), text
    same = "as P(('data', 'fsdp'),) on process"
    assert f"batch: float32[16,16] {same} 0; float32[8,16] {same} 1" in text, text
    text = error_of(lambda: step(state, given["global, other specs" if context.index else "full"]))
    assert f"{same} 0; float32[16,16] as P(('data', 'fsdp'),) from " in text, text
    kind = ts.ProcessError if context.index else ts.SpecError
    text = error_of(lambda: step(state, {"a": full} if context.index else full[:15]), kind)
    assert "15 is not divisible" in text, text
    assert np.isfinite(step(state, full)[1])


def check_a_deleted_batch_raises_on_its_process_alone(context: Context) -> None:
    state, plan = initialised()
    step = jit_step(train_step, plan, donate=False)
    batch = forms(context)["global"]
    _, loss = step(state, batch)
    deleted = ts.shard(batches()[0], P(("data", "fsdp")), plan.mesh)
    if context.index:
        deleted.delete()
        with pytest.raises(ts.DeletedLeafError):
            step(state, deleted)
    assert step(state, batch)[1] == loss


def check_a_new_form_on_one_process_names_the_absent(context: Context) -> None:
    state, plan = initialised()
    step = jit_step(train_step, plan, donate=False)
    batch = forms(context)["full"]
    _, loss = step(state, batch)
    if context.index:
        with mock.patch.object(meetings, "TIMEOUT", 1.0), pytest.raises(ts.ProcessError) as told:
            step(state, batch[:8])
        assert "jit_step: process 0 of 2 did not " in str(told.value)
        meetings._process.broken = ""  # so that it can join the program below
    # Process 0 waits in the program for process 1, which joins it now.
    assert step(state, batch)[1] == loss
    if not context.index:  # comes too late to what process 1 gave up
        with pytest.raises(ts.ProcessError, match="jit_step"):
            step(state, batch[:8])


def check_other_values_of_small_arrays_are_told(context: Context) -> None:
    """Of numbers, numpy arrays, arrays on own devices and keys alike."""
    key, other = map(jax.random.key, (0, 1))
    forms = [(2.0, 3.0), (np.float32(2), np.float32(3)), (jnp.ones(3), jnp.zeros(3)), (key, other)]
    plan = ts.plan({"w": np.ones(8, np.float32)}, [(".*", P())], ts.make_mesh("fsdp=8"))
    for usual, different in forms:
        step = jit_step(lambda state, _: (state, None), plan, batch=P())
        state = ts.shard({"w": np.ones(8, np.float32)}, plan)
        for value in (usual, usual, different if context.index else usual):
            state, _ = step(state, value)
        assert "the processes called different" in error_of(lambda state=state: ts.gather(state))


def check_batches_of_known_shapes_that_differ_give_no_numbers(context: Context) -> None:
    """In the last step each process has seen all shapes before, and its arrays are in place."""
    state, plan = initialised()
    step = jit_step(train_step, plan, donate=False)
    full, specs = batches()[0], P(("data", "fsdp"))

    def part(rows: int, dtype: str = "float32") -> jax.Array:
        return ts.from_process_local(full[:rows].astype(dtype), specs, plan.mesh)

    rows = [8 // context.count * n for n in (1, 2, 4)]
    losses = {n: step(state, part(n))[1] for n in rows}
    with counted() as exchanges:
        for n in (rows[2], rows[2], rows[0], rows[0]):
            assert step(state, part(n))[1] == losses[n]
        assert exchanges() == 1  # where the shape changes
    step(state, part(rows[1]))

    if context.index:  # alone
        with mock.patch.object(meetings, "TIMEOUT", 1.0), pytest.raises(ts.ProcessError) as told:
            step(state, part(rows[0]))
        assert "jit_step: process 0 of 2 did not arrive within 1 s." in str(told.value)
        assert "timeout=" not in str(told.value)  # a step has no such argument
        meetings._process.broken = ""  # so that it can join the program of process 0
    loss = step(state, part(rows[1]))[1]
    assert loss == losses[rows[1]]  # and not of the rows of process 0 alone
    start_again()
    for n in (*rows, rows[1]):  # all known again
        step(state, part(n))
    text = error_of(lambda: step(state, part(rows[0] if context.index else rows[2])))
    assert text.startswith(
        "jit_step: the call was cancelled, because before it the processes called"
    ), text
    assert f"float32[{rows[2]},16] on process 0" in text, text
    assert f"float32[{rows[0]},16] on process 1" in text, text
    for dtype in ("bfloat16", "float32"):  # which both are known, too
        step(state, part(rows[2], dtype))
    step(state, part(rows[0]))
    text = error_of(lambda: step(state, part(rows[2], "bfloat16" if context.index else "float32")))
    assert f"float32[{rows[2]},16] on process 0" in text, text
    assert f"bfloat16[{rows[2]},16] on process 1" in text, text


def check_another_step_on_one_process_is_told_before_its_state_is_read(context: Context) -> None:
    """Both programs exchange the same sizes, so that they run together, and mix their numbers."""
    mesh = ts.make_mesh("data=2,fsdp=-1")
    plan = ts.plan({"w": np.ones((8, 8), "float32")}, [("w", P("fsdp"))], mesh, min_size=0)

    def sum_of(factor: float) -> Any:
        def one_step(state: Any, x: Any) -> Any:
            return {"w": state["w"] + factor}, factor * jnp.sum(x)

        return jit_step(one_step, plan, batch=P("data"), donate=False)

    steps = [sum_of(1.0), sum_of(2.0)]
    state, x = ts.shard({"w": np.ones((8, 8), "float32")}, plan), np.ones((4, 4), "float32")
    for step in (steps[0], steps[1], steps[0]):
        state, _ = step(state, x)
    assert ts.gather(state)["w"][0, 0] == 5
    mine = steps[context.index == 1]
    state, _ = mine(state, x)
    text = error_of(lambda: ts.gather(state))
    assert text.startswith(
        "gather: the call was cancelled, because before it the processes called"
    ), text
    assert "The first: program 1 (check_another_step" in text, text
    assert "on process 0; program 2 (check_another_step" in text, text


def check_other_rules_on_one_process_raise_on_all(context: Context) -> None:
    def with_rules(rules: Any) -> Any:
        return init_sharded(init, jax.random.key(0), rules=rules, mesh="data=2,fsdp=-1")

    text = error_of(lambda: with_rules([("up", None), *RULES] if context.index else RULES))
    assert "init_sharded: the call differs between processes and was cancelled." in text
    assert (
        "params/up: float32[16,64] as P(None, 'fsdp') on process 0; float32[16,64] as P()" in text
    )
    kind = ts.ShardingRuleError if context.index else ts.ProcessError
    text = error_of(lambda: with_rules(RULES[: 1 if context.index else 2]), kind)
    assert ("params/up" if context.index else "process 1") in text, text
