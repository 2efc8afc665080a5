"""`treeshard check`: its table, exit codes and errors."""

import textwrap

import pytest

from treeshard._cli import main

MODULE = """
import jax, jax.numpy as jnp, numpy as np
import treeshard as ts

def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

def params():
    return {"w": np.full((16, 8), 0.1, "float32")}

def batch():
    return np.linspace(-1, 1, 256, dtype="float32").reshape(16, 16)

def right():
    return loss, params(), batch(), [("w", ts.fsdp("fsdp"))]

def wrong():
    def by_axis(p, x):
        return loss(p, x) * ts.get_axes_size_in_mesh("fsdp")
    return by_axis, params(), batch(), [("w", ts.fsdp("fsdp"))]

def other_axis():
    return loss, params(), batch(), [("w", ts.fsdp("tensor"))]

def three():
    return loss, params(), batch()

def fails():
    return (lambda p, x: p["v"]), params(), batch(), [("w", None)]
"""


@pytest.fixture
def run(tmp_path, capsys, monkeypatch, quick_compiles):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_to_check.py").write_text(textwrap.dedent(MODULE))

    def run(function: str, *options: str):
        code = main(["check", f"model_to_check:{function}", *options])
        return code, *capsys.readouterr()

    return run


def test_right_gradients(run) -> None:
    code, out, err = run("right")
    assert code == 0, out
    lines = out.splitlines()
    assert lines[0] == "check_gradients: Nothing is wrong."
    assert lines[1].split() == [
        *("leaf", "plan", "mesh", "axes", "batch", "minibatches", "remat", "sees")
    ]
    assert lines[3].split() == ["w", *["ok"] * 6, lines[3].split()[-1]]
    assert err == ""


def test_wrong_gradients(run) -> None:
    code, out, _ = run("wrong")
    assert code == 1
    assert "w P('fsdp',): a multiple of the right result (x 4.000; x 2.000 in `mesh`)." in out


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "three",
            "model_to_check:three returned a tuple of function, dict, ndarray. It must return",
        ),
        ("fails", "KeyError: 'v'"),
        ("other_axis", "'tensor'"),
    ],
)
def test_wrong_input(run, function: str, says: str) -> None:
    code, out, err = run(function)
    assert (code, out) == (2, "")
    assert says in err
