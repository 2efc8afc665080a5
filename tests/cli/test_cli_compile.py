"""`treeshard compile`: its report, exit codes and errors. Here the devices are simulated CPUs."""

import json
import re
import sys
import textwrap

import pytest

from treeshard._cli import main

MODULE = """
import jax, jax.numpy as jnp
import treeshard as ts
from jax.sharding import PartitionSpec as P

def make(mesh, remat=False, hint=True):
    shapes = {"up": (2, 64, 128), "down": (2, 128, 64)}
    params = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in shapes.items()}
    plan = ts.plan(params, [(".*", ts.fsdp("fsdp", min_size=0, skip=(0,)))], mesh)
    specs = ts.layer_specs(plan.specs)

    def body(x, w):
        w = ts.unshard(w, specs, "fsdp") if hint else w
        return jax.nn.relu(x @ w["up"]) @ w["down"], None

    def loss(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, params)
        return jnp.mean(x ** 2)

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(state, x):
        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step, plan.structs, jax.ShapeDtypeStruct((64, 64), "float32")

def again(mesh):
    return make(mesh, remat=True)

def activations(mesh):
    return make(mesh, hint=False)

def dictionary(mesh):
    return {"step": 1}

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


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Runs the command where `steps.py` is; returns its exit code, output and errors."""
    (tmp_path / "steps.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def go(function: str, *options: str):
        code = main(["compile", f"steps:{function}", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.replace(f"{tmp_path}/", "")

    yield go
    sys.modules.pop("steps", None)


def test_the_report_has_plan_communication_and_memory(run) -> None:
    code, out, err = run("make")
    assert code == 0, out
    parts = out.split("\n\n")
    assert [part.partition("\n")[0].partition(",")[0].split()[0] for part in parts] == [
        "path",
        "communication:",
        "memory:",
        "It",
    ]
    assert "all-gather      fsdp" in parts[1]
    assert "2 leaves, 32,768 elements" in parts[0]
    assert "parameters" in parts[2]
    [size] = [line[6:].strip() for line in parts[2].split("\n") if line.startswith("in all")]
    verdict = f"It needs {size} per device; whether that fits is unknown. It moves what is planned."
    assert parts[3].strip() == verdict
    assert err == "compiling steps:make for 8 x cpu (fsdp=8) ...\n"


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        ("make", [], 0),
        ("make", ["--strict"], 0),
        ("activations", [], 3),
        ("activations", ["--strict"], 1),
        ("activations", ["--strict", "--json"], 1),
    ],
)
def test_what_moves_other_than_planned_is_exit_code_3_or_1_if_strict(
    run, function, options, expected
) -> None:
    code, out, _ = run(function, *options)
    assert code == expected
    if "--json" not in options:
        assert ("It moves what was not planned: activation" in out) == bool(expected)


@pytest.mark.parametrize("options", [[], ["--strict"], ["--json"]])
def test_what_does_not_fit_is_exit_code_1_whatever_it_moves(run, monkeypatch, options) -> None:
    # The memory of CPUs is not known: their steps are compared with that of a device here.
    monkeypatch.setattr("treeshard.programs._memory._capacity", lambda device: 1000)
    code, out, _ = run("activations", *options)
    assert code == 1
    assert '"fits": false' in out or "It does NOT fit: " in out


def test_activations_that_a_plan_cannot_predict_are_counted(run) -> None:
    code, out, _ = run("tensor_parallel", "--mesh", "data=2,tensor=4")
    assert code == 0
    last = out.rstrip().splitlines()[-1]
    assert re.search("It moves what is planned, and [0-9]+ activations?, of which", last)


def test_a_model_that_gathers_again_needs_no_option(run) -> None:
    code, out, _ = run("again")
    assert code == 0
    assert "trained, gathered" in out.partition("\n\n")[0]


def test_types_adds_the_values_of_the_step(run) -> None:
    code, out, _ = run("make", "--types", "--json")
    values = json.loads(out)["types"]
    assert code == 0
    # Without `jax.checkpoint` a scan keeps the gathered weights of all layers for the gradients.
    [kept] = [x for x in values if x["part"] == "forward" and x["name"] == "down"]
    assert (kept["ops"], kept["shape"], kept["spec"]) == (["scan"], [2, 128, 64], "P()")
    [grads] = [x for x in values if x["part"] == "update" and x["name"] == "up"]
    assert (grads["shape"], grads["spec"]) == ([2, 64, 128], "P(None, None, 'fsdp')")
    assert (grads["local_shape"], grads["where"]) == ([2, 64, 16], "memory")
    code, out, _ = run("make", "--types")
    assert "values of a step on fsdp=8, in the compiled program" in out.split("\n\n")[3]


@pytest.mark.filterwarnings("ignore:jit_step")  # of the axis that nothing uses
def test_json_has_the_same_facts(run) -> None:
    code, out, _ = run("make", "--mesh", "data=2,fsdp=4", "--json")
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
        ("dictionary", [], "steps:dictionary returned dict. It gets the mesh, and must return"),
        ("swapped", [], "steps:swapped returned a tuple of dict, Step, ShapeDtypeStruct. It gets"),
        ("fails", [], "steps:fails failed at steps.py:41: KeyError: 'tensor'"),
        ("other_batch", [], "steps:other_batch failed at steps.py:14: TypeError: dot_general"),
        ("absent", [], "steps has no function 'absent'."),
        ("make", ["--mesh", "fsdp"], "fsdp"),
        ("make", ["--topology", "v5e-3"], "no slice of v5e has this shape. The nearest are"),
        ("make", ["--mesh", "tensor=8"], "fsdp"),
    ],
)
def test_wrong_input_is_exit_code_2_and_says_the_way_out(run, function, options, message) -> None:
    code, out, err = run(function, *options)
    assert (code, out) == (2, "")
    assert err.split("\n")[-2].startswith("treeshard: error: ")
    assert message in err
