"""Programs on meshes of Auto, Explicit and mixed axes equal one device, and reports are of these.

`TREESHARD_SOAK=1` runs all programs on all meshes; without it, each mesh has one.
"""

import os
import re
from typing import Any

import jax
import optax
import pytest
from helpers import assert_close
from jax._src import compiler

import treeshard as ts
from tests.training.explicit_programs import (
    KINDS,
    LAYOUTS,
    MODELS,
    OPTIMIZER,
    make_step,
    mesh_of,
    plan_of,
    rows_of,
    state_of,
    watched_step,
)
from treeshard import manual
from treeshard.testing import check_gradients, check_step
from treeshard.training import value_and_grad

pytestmark = pytest.mark.usefixtures("broadcasting")


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    """What two steps of each program give on one device."""
    results = {}
    for name, make in MODELS.items():
        model = make()
        step = jax.jit(jax.value_and_grad(model.loss))
        params, opt = model.params, OPTIMIZER.init(model.params)
        for _ in range(2):
            value, grads = step(params, model.batch)
            updates, opt = OPTIMIZER.update(grads, opt)
            params = optax.apply_updates(params, updates)
        results[name] = params, value
    return results


def programs(layouts: list[tuple[str, str]], names: list[str]) -> list[tuple[str, str, str]]:
    """Layouts, each with one of the programs, or all with all."""
    if "TREESHARD_SOAK" in os.environ:
        return [(name, *layout) for layout in layouts for name in names]
    # Not one kind of axes for each program.
    numbers = [i + i // len(KINDS) for i in range(len(layouts))]
    return [(names[i % len(names)], *layout) for i, layout in zip(numbers, layouts, strict=True)]


EXPLICIT = [layout for layout in LAYOUTS if layout[1] == "explicit"]
TRAINED = [
    *((value_and_grad, *program) for program in programs(LAYOUTS, [*MODELS])),
    *((jax.value_and_grad, *program) for program in programs(EXPLICIT, [*MODELS][::-1])),
]


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(("differentiate", "name", "strategy", "kind"), TRAINED)
def test_each_program_equals_one_device(
    differentiate: Any, name: str, strategy: str, kind: str, on_one_device: Any
) -> None:
    model = MODELS[name]()
    plan = plan_of(model, strategy, mesh_of(strategy, kind))
    step = make_step(model, plan, differentiate)
    state = ts.shard(state_of(model), plan)
    for _ in range(2):
        state, value = step(state, model.batch)
    assert_close((state["params"], value), on_one_device[name])


# ------------------------------------------------------------------ reports


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the text of each step that is compiled, by a call or by `step.compile`."""
    seen: list[str] = []
    original = compiler.compile_or_get_cached

    def compile_and_keep(*args: Any, **options: Any) -> Any:
        compiled = original(*args, **options)
        text = "\n\n".join(module.to_string() for module in compiled.hlo_modules())
        if text.startswith(("HloModule jit_watched", "HloModule jit_step")):
            seen.append(without_frames(text))
        return compiled

    monkeypatch.setattr(compiler, "compile_or_get_cached", compile_and_keep)
    return seen


def without_frames(text: str) -> str:
    """A text without the lines of code that a program was traced from, which a call has too."""
    tables = r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*\n"
    text = re.sub(tables, "", text, flags=re.M)
    return re.sub(r",? ?(metadata|origin)=\{[^{}]*\}| stack_frame_id=\d+", "", text)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("name", "strategy", "kind"),
    [
        ("attention", "zero-1", "explicit"),
        ("layers", "hsdp", "first"),
        ("language", "hsdp", "explicit"),
        ("experts", "fsdp x tp", "last"),
    ],
)
def test_a_report_is_of_the_program_that_a_call_runs(
    name: str, strategy: str, kind: str, texts: list[str], compiles: Any
) -> None:
    model = MODELS[name]()
    plan = plan_of(model, strategy, mesh_of(strategy, kind))
    step, traced = watched_step(model, plan)
    state = state_of(model)
    placed = ts.shard(state, plan)
    with jax.set_mesh(plan.mesh):
        expected = [jax.typeof(x).str_short() for x in jax.tree.leaves(placed)]
    # NumPy arrays get the types of the plan, too.
    step(state if kind == "explicit" else ts.shard(state, plan), model.batch)
    [called] = texts
    assert traced[0][: len(expected)] == expected
    count = len(traced)
    for given in (plan.structs, state, jax.eval_shape(lambda: state), placed):
        step.lower(given, model.batch)
    assert len(traced) == count  # a trace of other types would be another one

    step, traced = watched_step(model, plan)
    texts.clear()
    compiled = step.compile(plan.structs, model.batch)
    assert {tuple(types[: len(expected)]) for types in traced} == {tuple(expected)}
    assert texts == [called]
    assert compiled.communication().unplanned == ()
    given = jax.tree.leaves((placed, ts.shard(model.batch, rows_of(plan.mesh), plan.mesh)))
    held = sum(x.addressable_shards[0].data.nbytes for x in given)
    assert compiled.memory().arguments == held
    compiles.clear()
    step(placed, model.batch)
    assert not compiles


@pytest.mark.usefixtures("quick_compiles")
def test_checks_find_nothing_wrong_in_the_program_that_a_call_runs(texts: list[str]) -> None:
    model, mesh = MODELS["mlp"](), mesh_of("hsdp", "first")
    plan = plan_of(model, "hsdp", mesh)
    step = make_step(model, plan, value_and_grad)
    step(ts.shard(state_of(model), plan), model.batch)
    [called] = texts
    texts.clear()
    report = check_step(step, state_of(model), model.batch)
    assert called in texts
    assert report.ok
    assert not report.notes

    plan = ts.plan(model.params, [(".*", ts.fsdp("fsdp", min_size=0))], mesh, min_size=0)
    by_hand = manual.value_and_grad(model.loss, mesh.axis_names, plan)
    report = check_gradients(
        model.loss, model.params, model.batch, plan, by_hand=by_hand, batch_specs=rows_of(mesh)
    )
    assert report.ok
    assert not report.notes
