"""`treeshard compile`: its report, exit codes and errors. Here the devices are simulated CPUs."""

import json
import re
import sys

import pytest

from treeshard._cli import main

MODULE = """
import jax, jax.numpy as jnp
import treeshard as ts
from jax.sharding import PartitionSpec as P

def make(mesh, hint=True):
    shapes = {"up": (2, 64, 128), "down": (2, 128, 64)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    plan = ts.plan(params, [(".*", ts.fsdp("fsdp", min_size=0, skip=(0,)))], mesh)
    specs = ts.layer_specs(plan.specs)

    def body(x, w):
        w = ts.unshard(w, specs, "fsdp") if hint else w
        return jax.nn.relu(x @ w["up"]) @ w["down"], None

    def loss(params, x):
        x, _ = jax.lax.scan(body, x, params)
        return jnp.mean(x ** 2)

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step, plan.structs, jax.ShapeDtypeStruct((64, 64), "float32")

def activations(mesh):
    return make(mesh, hint=False)

def swapped(mesh):
    step, state, batch = make(mesh)
    return state, step, batch

def fails(mesh):
    return mesh.shape["tensor"]

def other_batch(mesh):
    step, state, batch = make(mesh)
    return step, state, jax.ShapeDtypeStruct((64, 32), "float32")

def tensor_parallel(mesh):
    params = {k: jax.ShapeDtypeStruct((64, 64), "float32") for k in ("up", "down")}
    plan = ts.plan(params, [("up", P(None, "tensor")), ("down", P("tensor"))], mesh, min_size=0)

    @ts.jit_step(plan=plan, batch=P("data"))
    def step(state, x):
        loss = lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step, plan.structs, jax.ShapeDtypeStruct((64, 64), "float32")
"""


pytestmark = pytest.mark.usefixtures("full_compiles")

FILES = {
    "steps.py": MODULE,
    "broken.py": "\nnumber = undefined\n",
    "shop/__init__.py": "",
    "shop/train.py": "def make_step(mesh):\n    return 1\n",
}


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the command where the modules are; returns its exit code, output and errors."""
    (tmp_path / "shop").mkdir()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def go(function: str, *options: str):
        code = main(["compile", function, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.replace(f"{tmp_path}", "HERE")

    yield go
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_the_report_has_plan_communication_and_memory(run) -> None:
    code, out, err = run("steps:make")
    assert code == 0, out
    parts = out.split("\n\n")
    assert parts[0].startswith("path")
    assert "all-gather      fsdp" in parts[1]
    assert "2 leaves, 32,768 elements" in parts[0]
    assert "parameters" in parts[2]
    [size] = [line[6:].strip() for line in parts[2].split("\n") if line.startswith("in all")]
    verdict = f"It needs {size} per device; whether that fits is unknown. It moves what is planned."
    assert parts[3].strip() == verdict
    assert err == "compiling steps:make for 8 x cpu (fsdp=8) ...\n"


def test_the_exit_code_is_3_for_what_is_not_planned_and_1_for_what_does_not_fit(
    run, monkeypatch
) -> None:
    code, out, _ = run("steps:activations")
    assert code == 3
    assert "It moves what was not planned: activation" in out
    # The memory of CPUs is not known: their steps are compared with that of a device here.
    monkeypatch.setattr("treeshard.programs._memory._capacity", lambda device: 1000)
    code, out, _ = run("steps:activations")
    assert code == 1
    assert "It does NOT fit: " in out
    code, out, _ = run("steps:activations", "--json")
    assert (code, json.loads(out)["fits"]) == (1, False)


def test_activations_that_a_plan_cannot_predict_are_counted(run) -> None:
    code, out, _ = run("steps:tensor_parallel", "--mesh", "data=2,tensor=4")
    assert code == 0
    last = out.rstrip().splitlines()[-1]
    assert re.search("It moves what is planned, and [0-9]+ activations?, of which", last)


@pytest.mark.filterwarnings("ignore:jit_step")  # of the axis that nothing uses
def test_json_has_the_same_facts(run) -> None:
    code, out, _ = run("steps:make", "--mesh", "data=2,fsdp=4", "--json")
    report = json.loads(out)
    assert code == 3  # the batch is not split over `data`
    assert [one["code"] for one in report["communication"]["unplanned"]] == ["batch-not-split"]
    assert report["fits"] is None
    assert report["memory"]["kinds"]["parameters"] == 4 * 2 * 2 * 64 * 128 // 4
    assert report["memory"]["at_peak"][0].keys() >= {"bytes", "array", "source"}
    assert [axis["size"] for axis in report["plan"]["mesh"]] == [2, 4]
    gathers = [x for x in report["communication"]["rows"] if x["kind"] == "all-gather"]
    assert [x["planned_count"] for x in gathers] == [x["count"] for x in gathers]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("steps:swapped", "", "swapped returned a tuple of dict, Step, ShapeDtypeStruct. It gets"),
        ("steps:fails", "", "steps:fails failed at HERE/steps.py:35: KeyError: 'tensor'"),
        ("steps:other_batch", "", "steps:other_batch failed at HERE/steps.py:14: TypeError: "),
        ("steps:make", "--topology=v5e-3", "no slice of v5e has this shape. The nearest are"),
        ("steps:make", "--mesh=tensor=8", "the mesh has no axis 'fsdp'"),
        ("shop.train", "", "'shop.train' is not MODULE:FUNCTION, as in `train:make_step` for the"),
        ("./shop/train.py:make_step", "", "Write shop.train:make_step."),
        ("train:make_step", "", "train:make_step: there is no module 'train' in HERE, nor is one"),
        ("shop.train:make_stp", "", "has no function 'make_stp'. Did you mean 'make_step'?"),
        ("broken:f", "", "broken:f: importing broken failed at HERE/broken.py:2: NameError: name"),
    ],
)
def test_wrong_input_is_exit_code_2_and_says_the_way_out(run, function, options, message) -> None:
    code, out, err = run(function, *options.split())
    assert (code, out) == (2, "")
    assert "\ntreeshard: error: " in f"\n{err}"
    assert message in err
