"""The examples run with small sizes and print what they promise."""

import os
import re

import equinox as eqx
import jax
import numpy as np
import pytest

import treeshard as ts
from examples import compile_llama, train_fsdp

pytestmark = pytest.mark.usefixtures("quick_compiles", "standard_promotion")

TINY = ["--layers=2", "--width=64", "--heads=2", "--batch=16", "--time=16", "--text-bytes=300000"]


DEMOS = [["--mesh=data=4,fsdp=2", "--explicit"]]
if os.environ.get("TREESHARD_SOAK"):  # `make soak`; `make demo` runs the first of these
    DEMOS += [["--mesh=fsdp=-1"], ["--mesh=data=4,fsdp=2"]]


@pytest.mark.parametrize("mesh", DEMOS, ids=" ".join)
def test_train_fsdp(mesh, tmp_path, capfd) -> None:
    out = tmp_path / "deep" / "loss.png"
    train_fsdp.main([*TINY, *mesh, "--steps=21", "--warmup=5", f"--out={out}"])
    printed = capfd.readouterr()
    text = printed.out
    assert (
        re.search(r"model/blocks/attn/q/weight +float32\[2,64,64\]", text) or "--explicit" in mesh
    )
    before, after = map(float, re.search(r"byte: (\S+) before, (\S+) after", text).groups())
    assert after < before - 1
    assert len(re.findall(r"cpu:\d holds", text)) == 8
    # As planned: one layer at a time, and no activation instead.
    moved = text.partition("compared with the plan:\n")[2].partition("\n\n")[0]
    assert re.search(r"all-gather +fsdp +(\d+ x, \S+ KiB) +\1\n", moved)
    for remark in moved.partition("such as the loss")[2].strip().splitlines():
        assert remark.startswith("The CPU compiler all-reduces full gradients")
    gradients = float(re.search(r"raw gradients differ by (\S+)", text)[1])
    losses = float(re.search(r"losses of 20 steps by (\S+) at most", text)[1])
    assert gradients <= 1e-5
    assert losses <= 2e-5
    assert out.read_bytes().startswith(b"\x89PNG")
    # Drawn for each tenth of the steps at most, since this is no terminal.
    assert 1 <= printed.err.count("tokens_per_s") <= 11
    on = re.findall(r"step (\d+): loss (\S+) here, (\S+) there", text)
    assert [int(step) for step, _, _ in on] == [22, 23, 24, 25, 26]
    assert all(abs(float(here) - float(there)) <= 2e-5 for _, here, there in on)
    assert "arning" not in printed.out + printed.err


def test_the_demo_splits_its_state_evenly() -> None:
    args = train_fsdp.parse([])
    init = train_fsdp.make_init(args, train_fsdp.make_optimizer(args))
    state = eqx.filter_eval_shape(init, jax.random.key(0))
    plan = ts.plan(state, train_fsdp.RULES, "fsdp=8")
    assert plan.bytes_per_device() <= 1.02 * sum(leaf.bytes for leaf in plan.leaves) / 8


LLAMA = compile_llama.Size(layers=2, width=64, hidden=128, heads=4, kv_heads=2, vocabulary=256)


@pytest.mark.usefixtures("all_sizes")
def test_a_llama_compiles_and_trains_alike_on_both_kinds_of_axes(capsys) -> None:
    """Computed in bfloat16, and the gradients in other orders."""

    def drawn(path, x):
        seed = [len(path), *path.encode()]
        return (0.2 * np.random.default_rng(seed).standard_normal(x.shape)).astype(x.dtype)

    axes = "data=2,fsdp=2,tensor=2"
    batch = np.random.default_rng(0).integers(0, 256, (16, 17)).astype("int32")
    planned, losses = [], []
    for kind, arguments in (("auto", []), ("explicit", ["--explicit"])):
        mesh = ts.make_mesh(axes, axis_types=kind)
        step, state, _ = compile_llama.make_llama(mesh, size=LLAMA, tokens=16)
        state = ts.named_tree_map(drawn, state)
        state = ts.shard({**state, "opt": jax.tree.map(np.zeros_like, state["opt"])}, step.plan)
        losses.append([])
        with jax.numpy_rank_promotion("allow"):  # its norms multiply a batch by a vector
            for _ in range(4):
                state, loss = step(state, batch)
                losses[-1].append(float(loss))
            arguments = [f"--mesh={axes}", "--tokens=16", "--batch=16", *arguments]
            compared, _ = compile_llama.main(arguments, size=LLAMA)
        planned.append(
            [(row.kind, row.axes, row.planned_bytes) for row in compared.rows if row.planned_count]
        )
    assert "float32[2,128@" in capsys.readouterr().out
    assert planned[0] == planned[1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.001
