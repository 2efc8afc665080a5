"""The cost of a compiled step: operations counted by hand, bytes, and the least time."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from rich.table import Table
from targets.programs import case_of

import treeshard as ts
from treeshard._core.topologies import CHIPS, parse_topology
from treeshard.communication._dataflow import Dataflow
from treeshard.communication._program import read_program
from treeshard.programs import Cost, Transfer
from treeshard.programs._buffers import peak_of
from treeshard.programs._cost import cost_of
from treeshard.programs._flops import (
    compiled_flops,
    least_flops,
    traced_flops,
    written_out_attention,
)
from treeshard.programs._links import Links, Torus, arranged_torus, torus_of
from treeshard.programs._traffic import host_traffic, memory_traffic

ROWS, WIDTH, HIDDEN, LAYERS = 64, 16, 32, 3
PRODUCT = 2 * ROWS * WIDTH * HIDDEN


def layer(x, w):
    return jax.nn.relu(x @ w["up"]) @ w["down"]


def loss(x, weights, layer=layer):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0])


def params(*stacked):
    shapes = {"up": (*stacked, WIDTH, HIDDEN), "down": (*stacked, HIDDEN, WIDTH)}
    return {name: jnp.ones(shape) for name, shape in shapes.items()}


X = jnp.ones((ROWS, WIDTH))


def by_hand(fn, *args):
    """The operations of `fn` as it is traced, and as it is compiled for one device."""
    traced = jax.jit(fn).trace(*args)
    program = read_program(traced.lower().compile().as_text() or "").graph
    return traced_flops(traced.jaxpr.jaxpr), compiled_flops(Dataflow(program))


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (lambda x, w: layer(x, w), (X, params()), 2 * PRODUCT),
        # A product for each gradient, except that of the first input.
        (jax.grad(lambda w, x: jnp.sum(layer(x, w) ** 2)), (params(), X), 5 * PRODUCT),
        (loss, (X, params(LAYERS)), LAYERS * 2 * PRODUCT),
        (jax.grad(loss, (0, 1)), (X, params(LAYERS)), LAYERS * 6 * PRODUCT),
        (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (X[None], X.T[None]), 2 * ROWS**2 * WIDTH),
    ],
    ids=["mlp", "gradient", "scan", "gradient of a scan", "batched"],
)
def test_operations_are_those_counted_by_hand(fn, args, expected) -> None:
    traced, compiled = by_hand(fn, *args)
    assert traced == (expected, frozenset())
    assert compiled == traced


def test_what_is_repeated_for_the_gradients_counts() -> None:
    def deep(x, w):
        return layer(layer(x, w), w)

    def grad(chosen):
        return jax.grad(lambda x, w: loss(x, w, chosen), (0, 1))

    once, _ = by_hand(grad(deep), X, params(LAYERS))
    again, compiled = by_hand(grad(jax.checkpoint(deep)), X, params(LAYERS))
    assert once.number == LAYERS * 12 * PRODUCT
    # The last product of a layer has no use in the backward pass.
    assert again.number == LAYERS * (12 + 3) * PRODUCT
    assert compiled.number == again.number


@pytest.mark.parametrize(
    ("padding", "strides", "groups", "pairs"),
    [
        ("VALID", (1, 1), 1, 6 * 6 * 9),
        ("SAME", (1, 1), 1, (8 * 3 - 2) ** 2),  # the edges meet padding
        ("VALID", (2, 2), 2, 3 * 3 * 9),
    ],
)
def test_convolutions_count_what_is_not_padding(padding, strides, groups, pairs) -> None:
    image, kernel = jnp.ones((2, 8, 8, 4)), jnp.ones((3, 3, 4 // groups, 6))

    def convolve(image, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            image, kernel, strides, padding, dimension_numbers=numbers, feature_group_count=groups
        )

    traced = jax.jit(convolve).trace(image, kernel)
    assert traced_flops(traced.jaxpr.jaxpr).number == 2 * 2 * 6 * (4 // groups) * pairs


def test_a_batch_of_products_as_tpus_write_it_counts_without_its_padding() -> None:
    text = """HloModule m

ENTRY %main (a: bf16[16,64,128], b: bf16[16,128,256]) -> bf16[16,64,256] {
  %a = bf16[16,64,128]{2,1,0} parameter(0)
  %b = bf16[16,128,256]{2,1,0} parameter(1)
  ROOT %c = bf16[16,64,256]{2,1,0} convolution(%a, %b), window={WINDOW}, dim_labels=0bf_0io->0bf
}
"""
    text = text.replace("WINDOW", "size=16 stride=15 lhs_dilate=16")
    flops = compiled_flops(Dataflow(read_program(text).graph))
    assert flops.number == 16 * 2 * 64 * 128 * 256


def test_what_cannot_be_counted_is_said() -> None:
    def until(x, n):
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] @ s[1]), (0, x))

    traced, compiled = by_hand(until, X[:WIDTH], 5)
    reason = "products in a loop whose trips depend on data"
    assert traced == (0, {reason})
    assert compiled == (0, {"products in a loop or a branch that depends on data"})
    text = """HloModule m

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} custom-call(%a, %a), custom_call_target="__cudnn$fmhaSoftmax"
}
"""
    flow = Dataflow(read_program(text).graph)
    assert compiled_flops(flow) == (0, {"products inside __cudnn$fmhaSoftmax"})
    assert compiled_flops(flow, {"fmha": 512}) == (512, frozenset())


def test_a_branch_counts_as_the_largest_when_traced() -> None:
    def choose(x, w, flag):
        return jax.lax.cond(flag, lambda: layer(x, w), lambda: x)

    traced, compiled = by_hand(choose, X, params(), True)
    assert traced == (2 * PRODUCT, frozenset())
    assert compiled == (0, {"products in a loop or a branch that depends on data"})


# ------------------------------------------------------------------ kernels


def double(x, estimate=None):
    """A kernel, as Pallas interprets it on CPUs."""

    def kernel(x, out):
        out[...] = x[...] @ x[...]

    return pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=estimate, interpret=True,
        name="squared",
    )(x)  # fmt: skip


def test_a_kernel_counts_as_it_states_or_as_the_caller_says() -> None:
    estimate = pl.CostEstimate(flops=123, transcendentals=0, bytes_accessed=0)

    def run(x, estimate):
        body = lambda x, _: (double(x, estimate), None)  # noqa: E731
        return jax.lax.scan(body, x, length=3)[0] @ x

    square = X[:WIDTH]
    product = 2 * WIDTH**3
    stated = jax.make_jaxpr(lambda x: run(x, estimate))(square)
    assert traced_flops(stated) == (3 * 123 + product, frozenset())
    unstated = jax.make_jaxpr(lambda x: run(x, None))(square)
    # What is known stays known.
    assert traced_flops(unstated) == (product, {"products inside squared"})
    assert traced_flops(unstated, {"square": 10}) == (3 * 10 + product, frozenset())
    assert traced_flops(stated, {"square": 10}) == (3 * 10 + product, frozenset())


KERNELS = """HloModule m

ENTRY %main (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  %flash.1 = bf16[64,64]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", metadata={\
op_name="jit(f)/jit(flash)/pallas_call"}, backend_config={"custom_call_config":{"body":"TUzv",\
"cost_estimate":{"flops":"173","transcendentals":"3","bytes_accessed":"33"}}}
  %splash_mha_dq.2 = bf16[64,64]{1,0} custom-call(%flash.1), custom_call_target="tpu_custom_call",\
 frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, \\"q_layout\\": 1}"
}}, metadata={op_name="jit(f)/splash_mha_dq/pallas_call" stack_frame_id=5}, backend_config={"n":1}
  ROOT %c = bf16[64,64]{1,0} dot(%splash_mha_dq.2, %a), lhs_contracting_dims={1},\
 rhs_contracting_dims={0}
}
"""


def test_a_compiled_kernel_counts_as_it_states_or_as_the_caller_says() -> None:
    flow = Dataflow(read_program(KERNELS).graph)
    product = 2 * 64**3
    assert compiled_flops(flow) == (173 + product, {"products inside splash_mha_dq"})
    assert compiled_flops(flow, {"splash": 7}) == (180 + product, frozenset())
    assert compiled_flops(flow, {"splash": 7, "flash": 1}) == (8 + product, frozenset())
    # A kernel may do less than it states.
    assert least_flops(flow) == product


def test_products_of_eight_bits_have_another_peak() -> None:
    text = KERNELS.replace("dot(%splash_mha_dq.2, %a)", "dot(%small, %small)").replace(
        "  ROOT", "  %small = f8e4m3fn[64,64]{1,0} convert(%a)\n  ROOT"
    )
    flow = Dataflow(read_program(text).graph)
    assert compiled_flops(flow).number == 173 + 2 * 64**3
    assert least_flops(flow) == 0


def test_attention_that_is_written_out_is_said() -> None:
    q, k = jnp.ones((2, 64, 4, 8)), jnp.ones((2, 64, 4, 8))

    def attend(q, k):
        return jax.nn.dot_product_attention(q, k, k)

    assert written_out_attention(jax.make_jaxpr(attend)(q, k)) == "float32[2,4,64,64]"
    assert written_out_attention(jax.make_jaxpr(jax.grad(lambda q: attend(q, k).sum()))(q))
    # The products and the exponentials of an MLP, of a few keys, and of a kernel are no scores.
    assert (
        written_out_attention(jax.make_jaxpr(lambda x, w: jnp.exp(layer(x, w)))(X, params()))
        is None
    )
    assert written_out_attention(jax.make_jaxpr(attend)(q[:, :4], k[:, :4])) is None
    assert written_out_attention(jax.make_jaxpr(double)(X[:WIDTH])) is None


# ------------------------------------------------------------------ memory


def test_memory_traffic_counts_slices_and_updates_in_place_as_parts() -> None:
    text = """HloModule m, is_scheduled=true

%part (p0: f32[16,1024], p1: s32[]) -> f32[1024] {
  %p0 = f32[16,1024]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,1024]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,1024}
  ROOT %out = f32[1024]{0} bitcast(%slice)
}

ENTRY %main (a: f32[16,1024], i: s32[]) -> f32[16,1024] {
  %a = f32[16,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1024]{0} fusion(%a, %i), kind=kLoop, calls=%part
  %again = f32[1,1024]{1,0} bitcast(%row)
  %fast = f32[1024]{0:S(1)} copy(%row)
  %c = s32[] constant(3)
  ROOT %new = f32[16,1024]{1,0} dynamic-update-slice(%a, %again, %i, %c)
}
"""
    row = 4 * 1024
    # The fusion reads and writes a row and an index; the copy reads a row into other memory; the
    # update reads a row and two indices, and writes a row.
    expected = (2 * row + 4) + row + (2 * row + 8)
    assert memory_traffic(Dataflow(read_program(text).graph)) == (expected, True)


def test_a_fusion_that_updates_several_arrays_in_place_counts_what_it_writes() -> None:
    text = """HloModule m, is_scheduled=true

%rows (p0: f32[16,1024], p1: f32[16,1024], p2: f32[1,1024], p3: s32[]) -> (f32[16,1024], f32[16,1024], f32[1,1024]) {
  %p0 = f32[16,1024]{1,0} parameter(0)
  %p1 = f32[16,1024]{1,0} parameter(1)
  %p2 = f32[1,1024]{1,0} parameter(2)
  %p3 = s32[] parameter(3)
  %zero = s32[] constant(0)
  %one = f32[16,1024]{1,0} dynamic-update-slice(%p0, %p2, %p3, %zero)
  %flat = f32[16384]{0} bitcast(%p1)
  %same = f32[16,1024]{1,0} bitcast(%flat)
  %row = f32[1,1024]{1,0} negate(%p2)
  %two = f32[16,1024]{1,0} dynamic-update-slice(%same, %row, %p3, %zero)
  ROOT %all = (f32[16,1024]{1,0}, f32[16,1024]{1,0}, f32[1,1024]{1,0}) tuple(%one, %two, %row)
}

ENTRY %main (a: f32[16,1024], b: f32[16,1024], r: f32[1,1024], i: s32[]) -> (f32[16,1024], f32[16,1024], f32[1,1024]) {
  %a = f32[16,1024]{1,0} parameter(0)
  %b = f32[16,1024]{1,0} parameter(1)
  %r = f32[1,1024]{1,0} parameter(2)
  %i = s32[] parameter(3)
  ROOT %new = (f32[16,1024]{1,0}, f32[16,1024]{1,0}, f32[1,1024]{1,0}) fusion(%a, %b, %r, %i), kind=kLoop, calls=%rows
}
"""  # noqa: E501
    row = 4 * 1024
    # A row is written into each of two arrays; one is read and one is new; and the index.
    program = read_program(text).graph
    assert memory_traffic(Dataflow(program)).bytes == 4 * row + 4
    assert peak_of(program).bytes == 0


OFFLOADED = """HloModule m, is_scheduled=true

%put (p0: f32[4,1024], p1: f32[1,1024], p2: s32[]) -> f32[4,1024] {
  %p0 = f32[4,1024]{1,0:S(5)} parameter(0)
  %p1 = f32[1,1024]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[4,1024]{1,0:S(5)} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

ENTRY %main (x: f32[1,1024], i: s32[]) -> f32[1,1024] {
  %x = f32[1,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %host = f32[4,1024]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
LINES
}
"""


@pytest.mark.parametrize(
    ("lines", "to_host", "from_host", "in_memory"),
    [
        # TPUs, asynchronous.
        (
            """
  %us = ((f32[4,1024]{1,0:S(5)}, f32[1,1024]{1,0}, s32[], s32[]), f32[4,1024]{1,0:S(5)}, u32[]{:S(2)}) dynamic-update-slice-start(%host, %x, %i, %i)
  %ud = f32[4,1024]{1,0:S(5)} dynamic-update-slice-done(%us)
  %ds = ((f32[4,1024]{1,0:S(5)}, s32[], s32[]), f32[1,1024]{1,0}, u32[]{:S(2)}) dynamic-slice-start(%ud, %i, %i), dynamic_slice_sizes={1,1024}
  ROOT %dd = f32[1,1024]{1,0} dynamic-slice-done(%ds)
""",  # noqa: E501
            1,
            1,
            2,
        ),
        # GPUs: the same in fusions.
        (
            """
  %us = ((f32[4,1024]{1,0:S(5)}, f32[1,1024]{1,0}, s32[]), f32[4,1024]{1,0:S(5)}, u32[]) fusion-start(%host, %x, %i), kind=kCustom, calls=%put
  %ud = f32[4,1024]{1,0:S(5)} fusion-done(%us)
  ROOT %out = f32[1,1024]{1,0} dynamic-slice(%ud, %i, %i), dynamic_slice_sizes={1,1024}
""",  # noqa: E501
            1,
            1,
            2,
        ),
        # Whole arrays.
        (
            """
  %cs = (f32[1,1024]{1,0:S(5)}, f32[1,1024]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %cd = f32[1,1024]{1,0:S(5)} copy-done(%cs)
  %rs = (f32[1,1024]{1,0}, f32[1,1024]{1,0:S(5)}, u32[]{:S(2)}) copy-start(%cd)
  ROOT %rd = f32[1,1024]{1,0} copy-done(%rs)
""",
            1,
            1,
            2,
        ),
        ("  ROOT %out = f32[1,1024]{1,0} negate(%x)", 0, 0, 2),
    ],
    ids=["tpu", "gpu", "whole", "none"],
)
def test_what_goes_to_the_host_and_back_is_counted(lines, to_host, from_host, in_memory) -> None:
    flow = Dataflow(read_program(OFFLOADED.replace("LINES", lines.strip("\n"))).graph)
    row = 4 * 1024
    assert host_traffic(flow) == (to_host * row, from_host * row)
    # On the device a row is read, and one is written; indices come on top.
    assert 0 <= memory_traffic(flow).bytes - in_memory * row <= 64


def test_memory_traffic_of_a_loop_counts_its_trips() -> None:
    def run(x):
        return jax.lax.fori_loop(0, 10, lambda i, x: jnp.sin(x) @ x, x)

    program = read_program(jax.jit(run).lower(jnp.ones((256, 256))).compile().as_text()).graph
    traffic = memory_traffic(Dataflow(program))
    assert traffic.is_complete
    assert 10 * 4 * 2**18 <= traffic.bytes <= 10 * 8 * 2**18


# ------------------------------------------------------------------ a step


def step_of(mesh, batch):
    plan = ts.plan(
        {"up": jnp.ones((WIDTH, HIDDEN)), "down": jnp.ones((HIDDEN, WIDTH))},
        [("up", P(None, "fsdp")), ("down", P("fsdp"))],
        mesh,
        min_size=0,
    )

    @ts.jit_step(plan=plan, batch=batch)
    def step(state, x):
        def loss(w, x):
            return jnp.mean(layer(x, ts.unshard(w, plan.specs, "fsdp")) ** 2)

        value, grads = jax.value_and_grad(loss)(state, x)
        return jax.tree.map(jnp.subtract, state, grads), value

    return step.compile(plan.structs, np.ones((ROWS, WIDTH), "float32"))


def test_a_step_split_evenly_does_an_even_share(fsdp_mesh) -> None:
    cost = step_of(fsdp_mesh, P("fsdp")).cost()
    assert cost.flops == cost.even_flops == 5 * PRODUCT // 8
    assert cost.hidden_bytes == 0
    # Two weights gathered, two gradients all-reduced, and the loss, in rings of 8.
    weight = 4 * WIDTH * HIDDEN
    assert cost.exposed_bytes == 2 * weight * 7 // 8 + 2 * 2 * weight * 7 // 8 + 2 * 4 * 7 // 8
    assert (cost.compute_seconds, cost.exposed_seconds, cost.bound) == (None, None, None)
    # Full gradients are all-reduced; the loss is of no leaf.
    gathered, reduced = {"up", "down"}, {"up", "down", None}
    for kind, leaves in (("all-gather", gathered), ("all-reduce", reduced)):
        assert {x.leaf for x in cost.transfers if x.collective.kind == kind} == leaves
    assert cost.unknown == ("the peaks of cpu",)
    text = str(cost)
    assert text.startswith("per step and cpu, computed from published peak speeds, not measured;")
    assert "compute               41.0 KFLOP  unknown" in text
    assert "unknown: the peaks of cpu" in text
    assert "even share" not in text


def test_devices_that_repeat_work_are_said(fsdp_mesh) -> None:
    with pytest.warns(ts.ShardingWarning, match="do the same work"):
        cost = step_of(fsdp_mesh, P()).cost()
    assert cost.even_flops == 5 * PRODUCT // 8
    assert cost.flops > cost.even_flops
    ratio = f"{cost.flops / cost.even_flops:.2f}"
    assert f"Each device does {ratio} x an even share of the step's operations" in str(cost)


# ------------------------------------------------------------------ links


def torus(topology, **sizes):
    return arranged_torus(sizes, parse_topology(topology))


@pytest.mark.parametrize(
    ("topology", "sizes", "extents"),
    [
        ("v5e:16x16", {"f": 256}, {"f": (16, 16)}),
        ("v5e:16x16", {"d": 16, "f": 16}, {"d": (1, 16), "f": (16, 1)}),
        ("v5e:16x16", {"d": 2, "f": 128}, {"d": (1, 2), "f": (16, 8)}),
        ("v5p:4x4x4", {"d": 4, "f": 16}, {"d": (1, 1, 4), "f": (4, 4, 1)}),
        ("v5p:4x4x4", {"d": 8, "f": 8}, {"d": (1, 2, 4), "f": (4, 2, 1)}),
        ("v5e:2x4", {"d": 1, "f": 8}, {"d": (1, 1), "f": (2, 4)}),
    ],
    ids=str,
)
def test_axes_take_the_dims_of_the_torus_that_jax_gives_them(topology, sizes, extents) -> None:
    assert torus(topology, **sizes).extents == extents


class Device(NamedTuple):
    """What a mesh of TPUs has in place of devices of this machine."""

    coords: tuple[int, ...]
    platform: str = "tpu"


def test_the_torus_of_a_mesh_is_read_from_the_coordinates_of_its_devices() -> None:
    grid = np.empty((2, 4, 8), object)
    for x, y, z in np.ndindex(4, 4, 4):
        grid[x // 2, y, x % 2 + 2 * z] = Device((x, y, z))
    axes = ("data", "fsdp", "tensor")
    found = torus_of(grid, axes, CHIPS["v5p"])
    assert found == Torus(
        (4, 4, 4), (True,) * 3, {"data": (2, 1, 1), "fsdp": (1, 4, 1), "tensor": (2, 1, 4)}
    )
    assert [span.links for span in found.spans(("fsdp",))] == [2]
    assert [span.links for span in found.spans(("tensor",))] == [1, 2]  # half a dim is a line
    assert [span.links for span in found.spans(("data", "tensor"))] == [2, 2]
    assert torus_of(grid, axes, CHIPS["h100"]) is None
    assert torus_of(grid, axes, None) is None


SENT = 36 * 10**9


@pytest.mark.parametrize(
    ("topology", "sizes", "links"),
    [
        ("v5e:16x16", {"f": 256}, 4),
        ("v5e:16x16", {"d": 16, "f": 16}, 2),
        ("v5e:16x16", {"d": 2, "f": 128}, 3),  # a ring, and half of a dim
        ("v5e:8x8", {"d": 8, "f": 8}, 1),  # 8 chips of v5e are no ring
        ("v5e:2x4", {"f": 8}, 2),
        ("v5p:4x4x4", {"f": 64}, 6),
        ("v5p:4x4x4", {"d": 4, "f": 16}, 4),
    ],
    ids=str,
)
def test_a_collective_takes_the_links_of_the_dims_that_its_axes_cover(
    topology, sizes, links
) -> None:
    chip = parse_topology(topology).chip
    used = Links(chip, set(), torus(topology, **sizes))
    assert used.seconds("all-gather", SENT, ("f",)) == SENT / (links * chip.link_bandwidth)


def test_the_links_that_the_text_says_are_used_count() -> None:
    v5e = CHIPS["v5e"]
    links = Links(v5e, set(), torus("v5e:16x16", f=256))
    assert links.seconds("all-gather", SENT, ("f",), used=2) == SENT / (2 * 45e9)
    # But no more than there are: the text has colors for dims that are no rings.
    assert links.seconds("all-gather", SENT, ("f",), used=6) == SENT / (4 * 45e9)


def test_an_all_to_all_waits_for_the_middle_of_a_dim() -> None:
    v5e = CHIPS["v5e"]
    # Of 16 chips in a ring with 16 bytes each, 8 send 8 across 2 links: 32 each. A chip sends 15.
    ring = Links(v5e, set(), torus("v5e:16x16", d=16, f=16))
    assert ring.seconds("all-to-all", 15, ("f",)) == pytest.approx(32 / 45e9)
    # Of 4 in a line with 4 bytes each, 2 send 2 across 1 link. A chip sends 3.
    line = Links(v5e, set(), torus("v5e:4x4", d=4, f=4))
    assert line.seconds("all-to-all", 3, ("f",)) == pytest.approx(4 / 45e9)
    assert line.seconds("collective-permute", 3, ("f",)) == 3 / 45e9


def test_what_is_not_a_torus_and_what_is_unknown() -> None:
    v5e, h100 = CHIPS["v5e"], CHIPS["h100"]
    assert Links(h100, set()).seconds("all-reduce", 27 * 10**9, ("fsdp",)) == pytest.approx(0.06)
    between = Links(h100, {"fsdp"})
    assert between.seconds("all-reduce", 27 * 10**9, ("fsdp",)) == pytest.approx(0.54)
    # Without coordinates, a ring.
    assert Links(v5e, set()).seconds("all-reduce", 27 * 10**9, ("f",)) == pytest.approx(0.3)
    assert Links(None, set()).seconds("all-reduce", 1, ("f",)) is None
    assert Links(v5e, set()).seconds("all-reduce", None, ("f",)) is None
    assert Links(v5e, set()).seconds("all-reduce", 1, None) is None
    assert Links(None, set()).seconds("all-reduce", 0, ()) == 0


def test_no_algorithm_beats_all_links_of_a_chip() -> None:
    links = Links(CHIPS["v5e"], {"slices"}, torus("v5e:16x16", f=256))
    assert links.least_seconds([(90 * 10**9, ("f",)), (90 * 10**9, ("f",))]) == 1
    # The network works beside the links.
    beside = [(180 * 10**9, ("f",)), (62 * 10**8, ("slices",))]
    assert links.least_seconds(beside) == 2
    # An algorithm may send less over the network, or an unknown part over no link at all.
    assert links.least_seconds([(1, ("slices", "f")), (None, ("f",)), (1, None)]) == 0
    assert Links(None, set()).least_seconds([(1, ("f",))]) == 0


ALGORITHMS = {
    'all-reduce("debug":"\\nStrategyRing{colors:1 phases:1 cores:{16} ': 2,
    'all-reduce("strategy":"StrategyND","debug":"\\nStrategyND{colors:2 phases:2 cores:{16 16}': 4,
    'all-reduce("debug":"\\nUniDirection1DRingStrategy{colors:2 phases:1 cores:{8},{8} ': 2,
    'all-reduce("debug":"\\nUniDirectionNDRingStrategy{colors:6 phases:3 cores:{4 4 4}': 6,
    'all-gather("emitter":"1DAllGatherNonMajorDimImbalanced","debug":"\\ngroup_size = 256 ': 2,
    'all-gather("emitter":"3DAllGatherOnMajorDim","debug":"\\ngroup_size = 64 ': 6,
    'all-to-all("emitter":"NetRouterEmitter"': None,
}


@pytest.mark.parametrize(("algorithm", "links"), ALGORITHMS.items())
def test_the_text_of_a_tpus_program_says_how_many_links_are_used(algorithm, links) -> None:
    kind, _, config = algorithm.partition("(")
    text = f"""HloModule m, num_partitions=8

ENTRY %main (a: f32[64]) -> f32[64] {{
  %a = f32[64]{{0}} parameter(0)
  ROOT %c = f32[64]{{0}} {kind}(%a), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}},\
 use_global_device_ids=true, dimensions={{0}},\
 backend_config={{"collective_algorithm_config":{{{config}"}}}}
}}
""".replace("\\\n", "")
    [moved] = ts.communication.collectives(text, "fsdp=8")
    assert (moved.kind, moved.links) == (kind, links)


def test_the_links_of_a_reduce_scatter_are_those_of_its_fusion() -> None:
    text = """HloModule m, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: f32[64]) -> f32[8] {
  %input = f32[64]{0} parameter(0)
  %all-reduce.2 = f32[64]{0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}},\
 use_global_device_ids=true, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %slice = f32[8]{0} dynamic-slice(%all-reduce.2, %zero), dynamic_slice_sizes={8}
}

ENTRY %main (a: f32[64]) -> f32[8] {
  %a = f32[64]{0} parameter(0)
  ROOT %f = f32[8]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1, backend_config={\
"debug":"\\nStrategySubgroupND{colors:2 phases:2 cores:{4 4},{4 4} "}
}
""".replace("\\\n", "")
    [moved] = ts.communication.collectives(text, "fsdp=8")
    assert (moved.kind, moved.links) == ("reduce-scatter", 4)


# ------------------------------------------------------------------ times


def test_the_time_its_bound_and_its_error_bar() -> None:
    cost = Cost(10, 10, 1, 1, 1, 0.02, 0.01, 0.03, 0.04, (), (), "TPU v5 lite", least_seconds=0.025)
    assert (cost.seconds, cost.bound) == (pytest.approx(0.07), "collectives, exposed")
    assert cost.range == (0.025, pytest.approx(0.07 / 0.5))
    text = str(cost)
    assert "compute               10.0 FLOP  20.00 to 40.00 ms" in text
    assert "about 70.00 ms, bound by collectives, exposed\n" in text
    assert "at least 25.00 ms, and 140.00 ms where a chip reaches 50% of them" in text


def test_what_lacks_a_part_is_a_lower_bound() -> None:
    cost = Cost(10, 10, 1, 1, 1, 0.02, 0.01, 0.03, 0.04, (), ("products inside flash",),
                "TPU v5 lite", incomplete=("compute",))  # fmt: skip
    assert cost.seconds == pytest.approx(0.07)
    assert (cost.bound, cost.range, cost.share) == (None, None, None)
    text = str(cost)
    assert "compute               > 10.0 FLOP  > 20.00 ms" in text
    assert "collectives, hidden           1 B  30.00 to 60.00 ms" in text
    assert "70.00 ms, and the time of what is unknown\nunknown: products inside flash" in text
    assert "at least" not in text


def _grouped(groups: list[list[int]], mesh: jax.sharding.Mesh) -> ts.programs.CompiledStep:
    plan = ts.plan({"w": jnp.ones((16, 16))}, [("w", None)], mesh)

    @ts.shard_map_step(plan=plan, batch=P("fsdp"))
    def step(state, x):
        x = jnp.tanh(x @ state["w"])
        x = jax.lax.all_to_all(x, "fsdp", 0, 0, axis_index_groups=groups, tiled=True)
        return state, jax.lax.pmean(jnp.mean(x @ state["w"]), "fsdp")

    return step.compile(plan.structs, np.ones((ROWS, 16), "float32"))


def test_products_in_a_loop_that_depends_on_data_make_the_work_a_lower_bound(fsdp_mesh) -> None:
    plan = ts.plan({"w": jnp.ones((16, 16))}, [("w", None)], fsdp_mesh)

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(state, x):
        def layer(x):
            return jnp.tanh(x @ state["w"])

        return state, jnp.mean(jax.lax.while_loop(lambda x: jnp.mean(x) > 0.1, layer, x))

    cost = step.compile(plan.structs, np.ones((ROWS, 16), "float32")).cost(CHIPS["h100"])
    assert "compute" in cost.incomplete
    assert (cost.bound, cost.range, cost.share) == (None, None, None)
    assert "> 0.0 FLOP" in str(cost)
    assert "unknown: products in a loop" in str(cost)


def test_groups_within_an_axis_have_a_time(fsdp_mesh) -> None:
    compiled = _grouped([[0, 1, 2, 3], [4, 5, 6, 7]], fsdp_mesh)
    cost = compiled.cost(CHIPS["h100"])
    [grouped] = [one for one in cost.exposed if one.kind == "all-to-all"]
    assert (grouped.axes, grouped.within) == (None, ("fsdp",))
    # Three quarters of 8 rows of 16 floats, and the loss.
    assert cost.exposed_bytes == 8 * 16 * 4 * 3 // 4 + 2 * 4 * 7 // 8
    assert cost.exposed_seconds == pytest.approx(cost.exposed_bytes / 450e9)
    assert cost.unknown == ()
    assert "all-to-all of 512 B (float32) along parts of 'fsdp', 1 time" in str(cost)


def test_parts_of_an_axis_between_nodes_have_no_time_and_a_reason(fsdp_mesh, monkeypatch) -> None:
    compiled = _grouped([[0, 1, 2, 3], [4, 5, 6, 7]], fsdp_mesh)
    monkeypatch.setattr("treeshard.programs._cost.network_axes", lambda mesh: {"fsdp"})
    cost = compiled.cost(CHIPS["h100"])
    assert cost.incomplete == ("collectives, exposed",)
    reason = "the links of collectives between devices that do not form axes"
    assert cost.unknown == (reason,)
    assert f"unknown: {reason}" in str(cost)


# ------------------------------------------------------------------ along time

TEXTS = Path(__file__).parent.parent / "targets" / "texts"


def cost_of_text(name: str, chip) -> tuple[Cost, ts.communication.Comparison]:
    """The cost of a program that was compiled for v5e:2x4, and how it compares with its plan."""
    text = gzip.decompress((TEXTS / f"{name}.v5e_2x4.txt.gz").read_bytes()).decode()
    case = case_of(name)
    compared = ts.compare_communication(
        case.plan, text, batch=case.step.batch_specs, scan=case.scan, remat=case.remat
    )
    moved = list(zip(compared.compiled, compared.leaves, strict=True))
    jaxpr = case.step.trace(case.plan.structs, case.batch).jaxpr
    return cost_of(read_program(text), moved, jaxpr, case.plan, chip), compared


class DrawnRow(NamedTuple):
    """A row of a picture: its words, the milliseconds where its bar begins and ends, its time."""

    words: str
    bar: tuple[float, float] | None
    time: str


def rows_of(cost: Cost) -> list[DrawnRow]:
    table = next(part for part in cost.__rich__().renderables if isinstance(part, Table))
    rows: list[DrawnRow] = []
    for *words, bar, time in zip(*(column.cells for column in table.columns), strict=True):
        ends = None
        if bar.seconds is not None:
            ends = (1000 * bar.begin, 1000 * (bar.begin + bar.seconds))
        rows.append(DrawnRow(" ".join(map(str, words)).strip(), ends, str(time)))
    return rows


def lanes_of(rows: list[DrawnRow]) -> dict[str, list[DrawnRow]]:
    """The rows below each lane, and the lane itself first."""
    lanes: dict[str, list[DrawnRow]] = {}
    for row in rows:
        lane = next((name for name in LANES if row.words.startswith(name)), None)
        name = lane or next(reversed(lanes))
        lanes.setdefault(name, []).append(row)
    return lanes


LANES = ("compute", "memory", "collectives, hidden", "collectives, exposed")


def test_a_picture_along_time_adds_up_to_the_figures() -> None:
    cost, compared = cost_of_text("scan_remat", CHIPS["v5e"])
    lanes = lanes_of(rows_of(cost))
    seconds = (
        cost.compute_seconds, cost.memory_seconds, cost.hidden_seconds, cost.exposed_seconds
    )  # fmt: skip
    for (lane, *parts), expected in zip(lanes.values(), seconds, strict=True):
        begin, end = lane.bar
        assert end - begin == pytest.approx(1000 * expected)
        assert lane.time == f"{1000 * expected:,.2f} ms"
        if parts:
            # One after another, from where the lane begins to where it ends.
            starts, ends = zip(*(row.bar for row in parts), strict=True)
            assert [*starts, end] == pytest.approx([begin, *ends])
    assert cost.hidden_seconds > 0
    assert cost.exposed
    assert not any(x.is_async for x in cost.exposed)
    assert [lanes[name][0].bar[0] for name in LANES[:3]] == [0, 0, 0]
    exposed = lanes["collectives, exposed"][0]
    assert exposed.bar[0] == pytest.approx(1000 * max(seconds[:3]))
    assert exposed.bar[1] == pytest.approx(1000 * cost.seconds)
    assert {x.leaf for x in cost.transfers if x.collective.rank} == {"params/up", "params/down"}
    assert compared.leaves == tuple(x.leaf for x in cost.transfers)


def test_a_picture_names_leaves_and_draws_a_loop_once() -> None:
    cost, _ = cost_of_text("scan_remat", CHIPS["v5e"])
    words = [" ".join(row.words.split()) for row in rows_of(cost)]
    assert "params/down reduce-scatter fsdp gradient x 4" in words
    assert [row for row in words if row.startswith("params/up all-gather fsdp")]
    assert not any("while" in row for row in words)
    alike = "Gradients of leaves of one size are told apart by their order only."
    assert alike in map(str, cost.__rich__().renderables)
    without_up = [x for x in cost.transfers if x.leaf != "params/up"]
    assert alike not in map(str, replace(cost, transfers=tuple(without_up)).__rich__().renderables)


def test_a_picture_says_what_is_unknown(tmp_path) -> None:
    unknown_peaks = rows_of(cost_of_text("scan_remat", None)[0])
    assert {(row.bar, row.time) for row in unknown_peaks} == {(None, "unknown")}
    cost, _ = cost_of_text("scan_remat", CHIPS["v5e"])
    first = next(i for i, x in enumerate(cost.transfers) if x.leaf and not x.collective.is_async)
    lacking = replace(cost.transfers[first], bytes=None, seconds=None)
    cost = replace(
        cost,
        transfers=(*cost.transfers[:first], lacking, *cost.transfers[first + 1 :]),
        incomplete=("collectives, exposed",),
        unknown=("bytes of collectives",),
    )
    lane, *parts = lanes_of(rows_of(cost))["collectives, exposed"]
    assert lane.time.startswith("> ")
    assert [row.words.split()[0] for row in parts if row.bar is None] == [lacking.leaf]
    ts.draw(cost, to=tmp_path / "cost.svg")
    shown = "".join(ElementTree.parse(tmp_path / "cost.svg").getroot().itertext())
    shown = shown.replace("\xa0", " ")
    for said in ("unknown: bytes of collectives", "time unknown", "and not measured", "> "):
        assert said in shown


@pytest.mark.parametrize(
    ("begin", "seconds", "drawn"),
    [
        (0.0, 1.0, "█" * 40),
        (0.5, 0.25, " " * 20 + "█" * 10),
        (0.5, 0.26, " " * 20 + "█" * 10 + "▍"),
        (0.99, 1e-6, " " * 39 + "▏"),  # what is short is not zero
        (0.5, 0.0, " " * 20),
        (0.5, None, "time unknown"),
    ],
)
def test_a_bar_is_as_long_as_its_time(begin, seconds, drawn) -> None:
    cost = Cost(1, 1, 1, 0, 1, 0.1, 0.1, 0.0, 1.0, (), (), "TPU v5 lite")
    bar = next(iter(cost.__rich__().renderables[2].columns[4].cells))
    whole = bar._replace(begin=begin, seconds=seconds, whole=1.0)
    assert str(whole.__rich__()) == drawn


def test_rows_beyond_the_slowest_are_drawn_as_one() -> None:
    moved = ts.communication.Collective(
        "all-gather", "float32", 8, 8, ("f",), 1, op_name="jit(step)/jvp()/dot_general", rank=1
    )
    leaves = [f"{chr(97 + i)}/w" for i in range(14)]
    transfers = [Transfer(moved, leaf, ("f",), 8, 0.001 * (i + 1)) for i, leaf in enumerate(leaves)]
    layers = [Transfer(moved, f"layers/{i}/w", ("f",), 8, 0.5) for i in range(32)]
    cost = Cost(10, 10, 1, 0, 1, 0.02, 0.01, 0.0, 16.105, (*transfers, *layers), (), "TPU v5 lite")
    _, *rows = lanes_of(rows_of(cost))["collectives, exposed"]
    assert len(rows) == 13
    assert " ".join(rows[-2].words.split()) == "layers/{0..31}/w all-gather f forward x 32"
    assert (" ".join(rows[-1].words.split()), rows[-1].time) == ("and 3 more x 3", "6.00 ms")
    assert "d/w" in rows[0].words
    # A program may not say in which pass an op is.
    unnamed = replace(transfers[0], collective=replace(moved, op_name=None))
    [_, row] = lanes_of(rows_of(replace(cost, transfers=(unnamed,))))["collectives, exposed"]
    assert " ".join(row.words.split()) == "a/w all-gather f ? x 1"
