"""The values of a step in programs for TPUs and GPUs that are not attached."""

import os

import pytest
from jax.sharding import PartitionSpec as P
from typed_steps import forward, marked, transformer

import treeshard as ts

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8"])
def test_the_program_tells_what_the_compiler_chose(topology: str) -> None:
    """As on the CPU: the rows are split over all devices, and the gathered weights are whole."""
    mesh = ts.make_mesh("data=2,fsdp=4", topology=topology)
    step, state, batch = transformer(mesh, batch=P(("data", "fsdp")))
    types = step.types(state, batch)
    for mark, width in (("logits", 512), ("hidden", 256), ("stream", 64)):
        value = forward(types, mark)
        assert value.where in ("memory", "fused"), mark
        assert (value.axes, value.by_hand) == (("fsdp",), ("data",)), mark
        assert value.bytes == 2 * 32 * width * 4, mark
    gathered = [x for x in types.at(marked("gathered layer")) if x.axes == ()]
    assert {value.name for value in gathered} == {"layers/down", "layers/up"}
