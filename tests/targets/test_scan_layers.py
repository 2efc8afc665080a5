"""Gathers of a Llama's layers that are hidden behind products, in programs for TPUs and GPUs.

`make test-targets` runs this with the compilers of these devices; other runs skip it. Gradients are
compared on CPUs, in `tests/training/test_scan_layers.py`.
"""

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

LAYERS = SIZES["1b"].layers
MIB_OF_LAYER = 116  # in bfloat16
_GATHER = re.compile(r"%([\w.\-]+) = (.*?) all-gather-(start|done)\((?:.*%([\w.\-]+)\))?")
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


def waited_for_in_loops(text: str) -> Iterator[str]:
    """The gathers in loops of a program for GPUs that begin and end with no product between."""
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        lines = [] if computation.startswith("ENTRY") else computation.split("\n")
        begun: dict[str, int] = {}
        for number, line in enumerate(lines):
            found = _GATHER.search(line)
            if found is None:
                continue
            if found[3] == "start":
                begun[found[1]] = number
            elif not any(map(_PRODUCT.search, lines[begun[found[4]] : number])):
                yield line


@pytest.mark.parametrize(("prefetch", "waits"), [(0, 2), (1, 0)])
def test_a_gpu_waits_for_no_gather_in_a_loop(prefetch: int, waits: int) -> None:
    compiled = compiled_llama("h100:8", "fsdp=8", 8192, prefetch)
    assert mib(gathers(compiled)) == MIB_OF_LAYER * (2 * LAYERS - prefetch)
    assert len(list(waited_for_in_loops(compiled.text))) == waits
    assert compiled.communication().unplanned == ()


def test_a_tpu_waits_for_no_gather_in_a_loop() -> None:
    plain, ahead = (compiled_llama("v5e:4x4", "fsdp=16", 1024, n) for n in (0, 1))
    of_plain, of_ahead = ([x for x in gathers(one) if not x.is_async] for one in (plain, ahead))
    assert {x.count for x in of_plain} == {LAYERS}
    # Of the first two layers, which are gathered before the loop.
    assert {x.count for x in of_ahead} == {1}
    assert mib(of_ahead) < mib(of_plain)
    assert mib(gathers(ahead)) == MIB_OF_LAYER * (2 * LAYERS - 1)
    more = ahead.memory().temporaries - plain.memory().temporaries
    assert more <= 1.05 * MIB_OF_LAYER * 2**20
