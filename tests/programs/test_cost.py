"""The cost of a compiled step: operations counted by hand, bytes, and the least time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.topologies import CHIPS
from treeshard.communication._dataflow import Dataflow
from treeshard.communication._program import read_program
from treeshard.programs import Cost
from treeshard.programs._buffers import peak_of
from treeshard.programs._cost import link_seconds
from treeshard.programs._flops import compiled_flops, traced_flops
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
    assert traced == (None, {reason})
    assert compiled == (None, {"products in a loop or a branch that depends on data"})
    text = """HloModule m

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %c = f32[8,8]{1,0} custom-call(%a, %a), custom_call_target="__cudnn$fmhaSoftmax"
}
"""
    compiled = compiled_flops(Dataflow(read_program(text).graph))
    assert compiled == (None, {"products inside __cudnn$fmhaSoftmax"})


def test_a_branch_counts_as_the_largest_when_traced() -> None:
    def choose(x, w, flag):
        return jax.lax.cond(flag, lambda: layer(x, w), lambda: x)

    traced, compiled = by_hand(choose, X, params(), True)
    assert traced.number == 2 * PRODUCT
    assert compiled.number is None


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
    assert memory_traffic(Dataflow(read_program(text).graph)) == expected


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
    assert memory_traffic(Dataflow(program)) == 4 * row + 4
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
    assert 0 <= memory_traffic(flow) - in_memory * row <= 64


def test_memory_traffic_of_a_loop_counts_its_trips() -> None:
    def run(x):
        return jax.lax.fori_loop(0, 10, lambda i, x: jnp.sin(x) @ x, x)

    program = read_program(jax.jit(run).lower(jnp.ones((256, 256))).compile().as_text()).graph
    traffic = memory_traffic(Dataflow(program))
    assert traffic is not None
    assert 10 * 4 * 2**18 <= traffic <= 10 * 8 * 2**18


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
    assert cost.unknown == ("the peaks of cpu",)
    text = str(cost)
    assert "per step and cpu, an estimate from published peaks that no chip has confirmed:" in text
    assert "compute               41.0 KFLOP  unknown" in text
    assert "unknown: the peaks of cpu" in text
    assert "even share" not in text


def test_devices_that_repeat_work_are_said(fsdp_mesh) -> None:
    with pytest.warns(ts.ShardingWarning, match="do the same work"):
        cost = step_of(fsdp_mesh, P()).cost()
    assert cost.flops is not None
    assert cost.even_flops == 5 * PRODUCT // 8
    assert cost.flops > cost.even_flops
    ratio = f"{cost.flops / cost.even_flops:.2f}"
    assert f"Each device does {ratio} x an even share of the step's operations" in str(cost)


def test_collectives_take_the_links_that_they_use() -> None:
    v5e, h100, sent = CHIPS["v5e"], CHIPS["h100"], 27 * 10**9
    assert link_seconds(sent, ("fsdp",), v5e, set()) == pytest.approx(0.3)  # 2 links of 45 GB/s
    assert link_seconds(sent, ("fsdp",), h100, set()) == pytest.approx(0.06)
    assert link_seconds(sent, ("fsdp",), h100, {"fsdp"}) == pytest.approx(0.54)  # between nodes
    assert link_seconds(sent, ("fsdp",), None, set()) is None
    assert link_seconds(None, ("fsdp",), v5e, set()) is None
    assert link_seconds(sent, None, v5e, set()) is None
    assert link_seconds(0, (), None, set()) == 0


def test_the_least_time_and_its_bound() -> None:
    cost = Cost(10, 10, 1, 1, 1, 0.02, 0.01, 0.03, 0.04, (), (), "TPU v5 lite")
    assert (cost.seconds, cost.bound) == (pytest.approx(0.07), "collectives, exposed")
    assert "at least 70.00 ms, bound by collectives, exposed" in str(cost)


def _grouped(groups: list[list[int]], mesh: jax.sharding.Mesh) -> ts.programs.CompiledStep:
    plan = ts.plan({"w": jnp.ones((16, 16))}, [("w", None)], mesh)

    @ts.shard_map_step(plan=plan, batch=P("fsdp"))
    def step(state, x):
        x = jnp.tanh(x @ state["w"])
        x = jax.lax.all_to_all(x, "fsdp", 0, 0, axis_index_groups=groups, tiled=True)
        return state, jax.lax.pmean(jnp.mean(x @ state["w"]), "fsdp")

    return step.compile(plan.structs, np.ones((ROWS, 16), "float32"))


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
    monkeypatch.setattr("treeshard.programs._cost._network_axes", lambda mesh: {"fsdp"})
    cost = compiled.cost(CHIPS["h100"])
    assert cost.exposed_seconds is None
    reason = "the links of collectives between devices that do not form axes"
    assert cost.unknown == (reason,)
    assert f"unknown: {reason}" in str(cost)
