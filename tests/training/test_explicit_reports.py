"""What is reported of a step is the program that a call runs, on axes of all types.

`TREESHARD_SOAK=1` compares all programs in all layouts, and not each in one.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import treeshard as ts
from tests.training.explicit_programs import (
    LAYOUTS,
    MODELS,
    make_step,
    mesh_of,
    plan_of,
    state_of,
)

pytestmark = pytest.mark.usefixtures("broadcasting")

# Each strategy and each kind of axes, and each model in one of them.
SOME = [
    ("fsdp", "auto"),
    ("fsdp", "explicit"),
    ("hsdp", "first"),
    ("hsdp", "explicit"),
    ("zero-1", "explicit"),
    ("zero-1", "last"),
    ("fsdp x tp", "auto"),
]
# Checks run a step in several layouts, which takes seconds.
CHECKED = [("zero-1", "first"), ("fsdp x tp", "explicit")]


def programs(which: list[str], layouts: list[tuple[str, str]] = SOME) -> list[tuple[str, str, str]]:
    """Models, strategies and kinds of axes: each layout with one model, or all with all."""
    if "TREESHARD_SOAK" in os.environ:
        return [(name, *layout) for layout in LAYOUTS for name in MODELS]
    return [(which[i % len(which)], *layout) for i, layout in enumerate(layouts)]


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the text of each program that is compiled."""
    seen: list[str] = []
    original = jax.stages.Lowered.compile

    def compile_and_keep(lowered: Any, *args: Any, **options: Any) -> Any:
        compiled = original(lowered, *args, **options)
        seen.append(without_frames(compiled.as_text() or ""))
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_keep)
    return seen


def without_frames(text: str) -> str:
    """A text without the lines of code that a program was traced from, which a call has too."""
    tables = r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n"
    text = re.sub(tables, "", text, flags=re.M)
    return re.sub(r",? ?(metadata|origin)=\{[^{}]*\}| stack_frame_id=\d+", "", text)


def struct_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def forms(model: Any, plan: ts.Plan) -> Iterator[tuple[Any, Any]]:
    """A state and a batch, in all forms that a report takes."""
    state = state_of(model)
    yield plan.structs, model.batch
    yield state, jax.tree.map(struct_of, model.batch)
    yield jax.tree.map(struct_of, jax.eval_shape(lambda: state)), model.batch
    yield ts.shard(state, plan), model.batch


def watched_step(model: Any, plan: ts.Plan) -> tuple[Any, list[Any]]:
    """A step of a model, and a list of the types of each of its traces."""
    traced: list[Any] = []
    step = make_step(model, plan, ts.training.value_and_grad)

    def watched(state: Any, batch: Any) -> Any:
        traced.append([jax.typeof(x).str_short() for x in jax.tree.leaves((state, batch))])
        return step.__wrapped__(state, batch)

    return ts.jit_step(watched, plan, batch=step.batch_specs), traced


REPORTS = {
    "compile": lambda step, *args: step.compile(*args),
    "communication": lambda step, *args: step.communication(*args),
}


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("name", "strategy", "kind"), programs(list(MODELS)))
def test_a_report_is_of_the_program_that_a_call_runs(
    name: str, strategy: str, kind: str, texts: list[str], compiles: Any
) -> None:
    model = MODELS[name]()
    plan = plan_of(model, strategy, mesh_of(strategy, kind))
    step, traced = watched_step(model, plan)
    state = ts.shard(state_of(model), plan)
    with jax.set_mesh(plan.mesh):
        expected = [jax.typeof(x).str_short() for x in jax.tree.leaves(state)]
    compiles.clear()
    step(state, model.batch)
    assert len(compiles) == 1
    [called] = texts
    given = list(forms(model, plan))
    count = len(traced)
    for each in given:
        step.lower(*each)
    assert len(traced) == count  # a trace of other types would be another one
    for i, (report, ask) in enumerate(REPORTS.items()):
        step, traced = watched_step(model, plan)
        texts.clear()
        ask(step, *given[i])
        assert {tuple(types[: len(expected)]) for types in traced} == {tuple(expected)}
        assert texts == [called], report
        state = ts.shard(state_of(model), plan)
        compiles.clear()
        step(state, model.batch)
        assert not compiles, report


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("name", "strategy", "kind"), programs(["mlp", "layers"], CHECKED))
def test_what_is_checked_is_the_program_that_a_call_runs(
    name: str, strategy: str, kind: str, texts: list[str]
) -> None:
    model = MODELS[name]()
    plan = plan_of(model, strategy, mesh_of(strategy, kind))
    step = make_step(model, plan, ts.training.value_and_grad)
    step(ts.shard(state_of(model), plan), model.batch)
    [called] = texts
    texts.clear()
    report = ts.testing.check_step(step, state_of(model), model.batch)
    assert called in texts
    assert not [note for note in report.notes if note.startswith("plan: not compared")]


def test_the_texts_of_other_programs_differ(texts: list[str]) -> None:
    """So that equal texts say something."""
    model = MODELS["mlp"]()
    for strategy, kind in (("hsdp", "explicit"), ("hsdp", "auto"), ("zero-1", "explicit")):
        plan = plan_of(model, strategy, mesh_of(strategy, kind))
        make_step(model, plan, jax.value_and_grad).compile(plan.structs, model.batch)
    assert len(set(texts)) == len(texts) == 3


def test_memory_is_of_that_program_too() -> None:
    model = MODELS["layers"]()
    plan = plan_of(model, "hsdp", mesh_of("hsdp", "explicit"))
    given = [(ts.shard(state_of(model), plan), model.batch), next(forms(model, plan))]
    compiled = [make_step(model, plan, ts.training.value_and_grad).compile(*each) for each in given]
    of_arrays, of_structs = compiled
    assert str(of_arrays.memory()) == str(of_structs.memory())
    shards = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(given[0][0]))
    rows = sum(np.asarray(x).nbytes for x in model.batch) // plan.mesh.size
    assert of_structs.memory().arguments == shards + rows
