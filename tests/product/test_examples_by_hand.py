"""The examples with `shard_map` run with small sizes and print what they promise."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from examples import fsdp_by_hand, fsdp_flax, parallel_matmuls, tensor_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

TINY = ["--inputs=48", "--hidden=32", "--batch=64"]


@pytest.fixture(autouse=True)
def promotion():
    # optax mixes counts and floats, and the models add biases to batches.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


AXES = pytest.mark.parametrize("axes", [[], ["--explicit"]], ids=["auto", "explicit"])


def losses_in(text: str, title: str) -> np.ndarray:
    return np.array(re.search(rf"^{title}: losses (.*)$", text, re.M)[1].split(), float)


def test_fsdp_by_hand(capsys) -> None:
    fsdp_by_hand.main([*TINY, "--lr=0.005"])
    text = capsys.readouterr().out
    whole, sharded = losses_in(text, "data parallel"), losses_in(text, "fully sharded")
    assert len(whole) == len(sharded) == 15
    np.testing.assert_allclose(sharded, whole, atol=1e-3)  # bfloat16
    assert whole[-1] < whole[0] - 0.7
    assert gap_in(text) <= 1e-3

    sharded = text[text.index("fully sharded: how each leaf is sharded") :]
    specs = dict(re.findall(r"^(\S+) +\w+\[.*?\] +(P\(.*?\)) ", sharded, re.M))
    parameters = {
        "input_dense/weight": "P(None, 'data')",
        "input_dense/bias": "P('data',)",
        "output_dense/weight": "P(None, 'data')",
        "output_dense/bias": "P()",
    }
    for path, spec in parameters.items():
        for where in ("model", "opt_state/0/mu", "opt_state/0/nu"):
            assert specs[f"{where}/{path}"] == spec

    means = re.search(r"last step\n  accuracy +(\S+)\n  loss +(\S+)", sharded)
    assert float(means[1]) > 0.3
    assert float(means[2]) == pytest.approx(losses_in(text, "fully sharded")[-1], abs=1e-4)


def gap_in(text: str) -> float:
    return float(re.search(r"the losses of the two differ by (\S+) at most", text)[1])


def test_fsdp_by_hand_in_float32_trains_as_data_parallel(capsys, monkeypatch) -> None:
    """By SGD, since Adam hides a wrong scale; on Explicit axes."""
    monkeypatch.setattr(fsdp_by_hand, "COMPUTE", "float32")
    monkeypatch.setattr(optax, "adamw", optax.sgd)
    fsdp_by_hand.main([*TINY, "--lr=0.1", "--explicit"])
    text = capsys.readouterr().out
    assert "float32[32,48@data]" in text
    losses = losses_in(text, "fully sharded")
    assert losses[-1] < losses[0] - 0.1
    assert gap_in(text) <= 2e-5


def test_fsdp_flax(capsys) -> None:
    state, sharded = fsdp_flax.main([*TINY, "--lr=0.005"])
    printed = capsys.readouterr().out
    _, whole = fsdp_flax.main([*TINY, "--lr=0.005", "--whole", "--explicit"])
    np.testing.assert_allclose(sharded, whole, atol=2e-5)
    assert len(sharded) == 15
    assert sharded[-1] < sharded[0] - 0.7
    specs = {
        "input_dense/bias": P("data"),
        "input_dense/kernel": P("data", None),
        "output_dense/bias": P(),
        "output_dense/kernel": P("data", None),
    }
    for path, spec in specs.items():
        for where in ("params", "opt_state/0/mu", "opt_state/0/nu"):
            assert re.search(rf"^{where}/{path} +{re.escape(str(spec))}$", printed, re.M)
    kernel = state.params["input_dense"]["kernel"].value
    assert kernel.shape == (48, 32)
    assert {x.data.shape for x in kernel.addressable_shards} == {(6, 32)}


@pytest.mark.parametrize(
    ("mesh", "axes"), [("data=2,model=4", []), ("data=4,model=2", ["--explicit"])]
)
def test_parallel_matmuls(mesh: str, axes: list[str], capsys) -> None:
    parallel_matmuls.main([f"--mesh={mesh}", "--rows=16", "--features=8", "--hidden=32", *axes])
    text = capsys.readouterr().out
    errors = [float(x) for x in re.findall(r"off by (\S+);", text)]
    assert len(errors) == 4
    assert max(errors) <= 1e-5
    assert re.findall(r"sends (.*)", text)[:3] == [
        "2 all-gather",
        "1 all-gather, 1 reduce-scatter",
        "3 all-gather, 1 reduce-scatter",
    ]


def test_a_wrong_product_ends_in_an_error(monkeypatch) -> None:
    right = parallel_matmuls.row_parallel
    wrong = lambda *args, **how: 1.001 * right(*args, **how)  # noqa: E731
    monkeypatch.setattr(parallel_matmuls, "row_parallel", wrong)
    with pytest.raises(SystemExit, match="differs from the product on one"):
        parallel_matmuls.main(["--rows=16", "--features=8", "--hidden=32"])


@AXES
def test_tensor_parallel(axes: list[str], capsys) -> None:
    tensor_parallel.main(["--time=4", "--width=16", "--heads=4", *axes])
    text = capsys.readouterr().out
    errors = re.findall(r"outputs are off by (\S+), gradients by (\S+)", text)
    assert len(errors) == 4  # Equinox and nnx, by jit and by hand
    assert max(float(x) for pair in errors for x in pair) <= 1e-5
    split = "@tensor" if axes else ""
    assert re.search(rf"up/weight +float32\[64{split},16\] +P\('tensor', None\)", text)
    assert re.search(rf"up/kernel +float32\[16,64{split}\] +P\(None, 'tensor'\)", text)
