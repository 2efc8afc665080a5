"""Gathers of a Llama's layers that are hidden behind products, in programs for TPUs and GPUs.

`make test-targets` runs this with the compilers of these devices; other runs skip it. Gradients are
compared on CPUs, in `tests/training/test_scan_layers.py`.
"""

import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import treeshard as ts
from examples.compile_llama import SIZES, make_llama

if "TREESHARD_TARGETS" not in os.environ:
    pytest.skip("make test-targets runs it", allow_module_level=True)

MIB_OF_LAYER = 116  # of 1B, in bfloat16
VOCABULARY = SIZES["1b"].vocabulary
_GATHER = re.compile(r"%([\w.\-]+) = (.*?) all-gather-(start|done)\((?:.*%([\w.\-]+)\))?")
_SHAPE = re.compile(r"bf16\[([\d,]+)\]")
_PRODUCT = re.compile(r"%\S*(gemm|dot)\S* = .* (fusion|custom-call)\(")


def compiled_llama(target: str, axes: str, tokens: int, prefetch: int) -> Any:
    mesh = ts.make_mesh(axes, topology=target)
    step, state, batch = make_llama(mesh, size="1b", tokens=tokens, prefetch=prefetch)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return step.compile(state, batch)


def gathers(compiled: Any) -> list[Any]:
    """Those of layers, and not of the embedding or of the head."""
    moved = ts.collectives(compiled.compiled)
    return [x for x in moved if x.kind == "all-gather" and "layers" in (x.path or "")]


def mib(moved: list[Any]) -> int:
    return sum(x.total_bytes for x in moved) // 2**20


def waited_for(text: str) -> Iterator[int]:
    """The MiB of each gather in a program for GPUs that begins and ends with no product between."""
    lines = text.split("\n")
    begun: dict[str, int] = {}
    for number, line in enumerate(lines):
        found = _GATHER.search(line)
        if found is None:
            continue
        if found[3] == "start":
            begun[found[1]] = number
        elif not any(map(_PRODUCT.search, lines[begun[found[4]] : number])):
            # `%x = (bf16[2048,512]{1,0}, bf16[2048,2048]{1,0}) all-gather-done(%y)`
            shapes = [shape.split(",") for shape in _SHAPE.findall(found[2])]
            is_of_layer = not any(str(VOCABULARY) in shape for shape in shapes)
            if is_of_layer:
                yield sum(2 * math.prod(map(int, shape)) for shape in shapes) // 2**20


@pytest.mark.parametrize(("prefetch", "waited"), [(0, [20, 20]), (1, [20])])
def test_a_gpu_waits_for_no_gather_in_a_loop(prefetch: int, waited: list[int]) -> None:
    """Without prefetch it waits in each trip; with it once, before the loop."""
    compiled = compiled_llama("h100:8", "fsdp=8", 8192, prefetch)
    assert mib(gathers(compiled)) == MIB_OF_LAYER * 2 * SIZES["1b"].layers
    assert list(waited_for(compiled.text)) == waited
    assert compiled.communication().unplanned == ()


def test_a_tpu_waits_for_fewer_gathers() -> None:
    plain, ahead = (compiled_llama("v5e:4x4", "fsdp=16", 1024, n) for n in (0, 1))
    of_plain, of_ahead = ([x for x in gathers(one) if not x.is_async] for one in (plain, ahead))
    assert (mib(of_plain), mib(of_ahead)) == (128, 84)
    assert mib(gathers(ahead)) == mib(gathers(plain))
    more = ahead.memory().temporaries - plain.memory().temporaries
    assert more <= (MIB_OF_LAYER + 1) * 2**20
