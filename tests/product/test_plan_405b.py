"""The 405B example: what it prints, and its figures against a calculation by hand."""

import pytest

from examples import plan_405b

# Half a million calls take 2 s, and 15 s with the annotations of each checked.
pytestmark = pytest.mark.usefixtures("unchecked")


def test_it_shows_meshes_side_by_side(capsys) -> None:
    plans = plan_405b.main([])
    out = capsys.readouterr().out
    assert "405.9B parameters; with gradients and moments 4.87 TB" in out
    assert [int(plan.mesh.size) for plan, _ in plans.values()] == [
        4096, 4096, 16384, 65536, 65536,
    ]  # fmt: skip
    lines = [line.split() for line in out.splitlines()[2:8]]
    assert [line[-3] for line in lines[1:]] == ["NO", "yes", "yes", "yes", "yes"]
    # A rule names the norms and replicates them.
    assert out.count("no findings: no large leaf is replicated.") == len(plans)
    assert "params/layers/{0..125}/mlp/gate " in out
    assert not any(f.severity == "error" for plan, _ in plans.values() for f in plan.findings)


def test_the_figures_by_hand_and_types_of_explicit_axes(capsys) -> None:
    arguments = ["--mesh=data=8,fsdp=64,tensor=8", "--memory=9GB", "--explicit"]
    ((plan, _),) = plan_405b.main(arguments).values()
    width, ffn, vocab, layers = 16384, 53248, 128256, 126
    matrices = layers * (2 * width * width + 2 * width * 1024 + 3 * width * ffn)
    norms = (2 * layers + 1) * width
    split = (matrices + 2 * vocab * width) // (64 * 8)
    # bf16 parameters and gradients, two fp32 moments, and a step counter
    assert plan.bytes_per_device() == (2 + 2 + 4 + 4) * (split + norms) + 4
    assert matrices + norms + 2 * vocab * width == 405_853_388_800
    out = capsys.readouterr().out
    assert " NO " in out
    assert "bfloat16[16384@fsdp,53248@tensor]" in out
