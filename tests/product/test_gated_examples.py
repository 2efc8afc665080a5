"""The steps of the examples are as locked in `examples/locks`; `make gate` compares them all."""

import jax
import pytest

from tools import gate
from treeshard._cli import main

pytestmark = pytest.mark.usefixtures("full_compiles", "standard_promotion")


def test_each_step_has_a_lock_for_each_target() -> None:
    names = {f"{step}.{target}.lock" for step in gate.STEPS for target in gate.TARGETS}
    assert {path.name for path in (gate.ROOT / "examples" / "locks").iterdir()} == names


@pytest.mark.parametrize("step", ["by_hand"])
def test_a_step_is_as_locked_on_cpus(step, monkeypatch, capsys) -> None:
    monkeypatch.chdir(gate.ROOT)
    with jax.numpy_rank_promotion("allow"):
        code = main(["gate", *gate.arguments(step, "cpu")])
    assert code == 0, capsys.readouterr().out
