"""`collectives` reads saved program texts and live programs, and rejects damaged texts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._trace.roles import FROZEN, Role
from treeshard._trace.uses import Gather
from treeshard.communication._comparison import compare_step
from treeshard.communication._differences import collective_line
from treeshard.communication._program import read_program

TEXTS = Path(__file__).parent / "hlo"
STEP = "/home/me/model.py"


def text(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text()


# ------------------------------------------------------------------ saved texts

SAVED = {
    "cpu_by_hand": [
        ("all-gather", 128, ("fsdp",), 1, "state/head", f"{STEP}:15"),
        ("all-gather", 256, ("fsdp",), 3, "state/layers", f"{STEP}:10"),
        ("all-reduce", 4, ("data", "fsdp"), 1, None, f"{STEP}:15"),
    ],
    "gpu_async": [
        ("all-gather", 32768, ("data", "fsdp"), 1, "state/w", f"{STEP}:7"),
        ("all-gather", 8192, ("data", "fsdp"), 1, "state/v", f"{STEP}:7"),
        ("reduce-scatter", 4096, ("fsdp",), 1, None, f"{STEP}:30"),
        ("collective-permute", 1024, ("fsdp",), 1, None, None),
        ("all-gather", 32768, ("fsdp",), 4, "state/layers", f"{STEP}:12"),
        ("all-reduce", 4, ("data",), 1, None, f"{STEP}:20"),
    ],
    "tpu_fusions": [
        ("reduce-scatter", 32768, ("fsdp",), 1, None, None),
        ("all-gather", 2097152, ("data", "fsdp"), 1, "params/layers/0/weight", None),
        ("unknown", None, None, 1, None, None),
    ],
}

ASYNC = {"gpu_async": [True] * 6, "tpu_fusions": [False, True, False]}
NARROW = {"gpu_async": ["state/v"], "tpu_fusions": ["params/layers/0/weight"]}


@pytest.mark.parametrize("name", SAVED)
def test_saved_programs(name: str, mesh: jax.sharding.Mesh) -> None:
    assert text(name).startswith("// jax 0.10.2"), "the first line states the version of JAX"
    moved = ts.collectives(text(name), mesh)
    assert [(x.kind, x.bytes, x.axes, x.count, x.path, x.source) for x in moved] == SAVED[name]
    assert [x.is_async for x in moved] == ASYNC.get(name, [False] * len(moved))
    assert [x.path for x in moved if x.dtype == "bfloat16"] == NARROW.get(name, [])
    # A mesh as text, and names without `%`, as in dumps of XLA
    assert ts.collectives(text(name), "data=2,fsdp=4") == moved
    assert ts.collectives(text(name).replace("%", ""), mesh) == moved
    assert {x.axes for x in ts.collectives(text(name))} == {None}


GATHERED = """HloModule jit_f, num_partitions=8

ENTRY %main (w: f32[2]) -> f32[16] {
  %w = f32[2]{0} parameter(0), metadata={op_name="w"}
  %all-gather = f32[16]{0} all-gather(%w), replica_groups=[1,8]<=[8], IDS, OWN
  %copy = f32[16]{0} copy(%all-gather)
  ROOT %product = f32[16]{0} multiply(%copy, %copy), metadata={op_name="jit(f)/mul" LINE}
}
"""
GATHERED = GATHERED.replace("IDS", "channel_id=1, dimensions={0}, use_global_device_ids=true")
GATHERED = GATHERED.replace("LINE", 'source_file="model.py" source_line=3')
INSERTED = 'frontend_attributes={is_spmd_generated="true"}'


@pytest.mark.parametrize("own", ['metadata={op_name="w"}', INSERTED])
def test_a_gather_without_a_line_has_the_line_of_its_user(own: str) -> None:
    [moved] = ts.collectives(GATHERED.replace("OWN", own), "fsdp=8")
    assert (moved.path, moved.op_name, moved.source) == ("w", "jit(f)/mul", "model.py:3")
    assert moved.is_inserted == (own == INSERTED)
    assert ("inserted by the partitioner" in collective_line(moved)) == moved.is_inserted
    [moved] = ts.collectives(GATHERED.replace(", OWN", ""), "fsdp=8")
    assert (moved.path, moved.op_name, moved.source) == ("w", None, None)  # not the partitioner's
    unused = GATHERED.replace("%copy, %copy)", "%w, %w)").replace("OWN", own)
    assert ts.collectives(unused, "fsdp=8")[0].source is None


# How a shard in zeros reaches its all-reduce; and an edit after which it is no longer in zeros.
PLACED = {
    "a fusion": (
        """
  %zeros = f32[16]{0} broadcast(%c), dimensions={}
  %placed = f32[16]{0} fusion(%zeros, %w, %at), kind=kLoop, calls=%put
""",
        ("constant(0)", "constant(1)"),
    ),
    "copies to fast memory": (
        """
  %zeros = f32[16]{0} broadcast(%c), dimensions={}
  %put = f32[16]{0} dynamic-update-slice(%zeros, %w, %at)
  %cs = (f32[16]{0:S(1)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%put)
  %placed = f32[16]{0:S(1)} copy-done(%cs)
""",
        ("broadcast(%c)", "broadcast(%at)"),
    ),
    "a fusion that returns a tuple": (
        """
  %both = (f32[16]{0}, f32[16]{0}) fusion(%w, %at), kind=kLoop, calls=%place
  %placed = f32[16]{0} get-tuple-element(%both), index=0
""",
        ("get-tuple-element(%both), index=0", "get-tuple-element(%both), index=1"),
    ),
    "another dtype": (
        """
  %half = bf16[] convert(%c)
  %zeros = bf16[16]{0} broadcast(%half), dimensions={}
  %narrow = bf16[2]{0} convert(%w)
  %put = bf16[16]{0} dynamic-update-slice(%zeros, %narrow, %at)
  %placed = f32[16]{0} convert(%put)
""",
        ("f32[16]{0} convert(%put)", "f32[16]{0} exponential(%put)"),
    ),
    "a barrier": (
        """
  %zeros = f32[16]{0} broadcast(%c), dimensions={}
  %put = f32[16]{0} dynamic-update-slice(%zeros, %w, %at)
  %tuple = (f32[2]{0}, f32[16]{0}) tuple(%w, %put)
  %barrier = (f32[2]{0}, f32[16]{0}) opt-barrier(%tuple)
  %placed = f32[16]{0} get-tuple-element(%barrier), index=1
""",
        ("tuple(%w, %put)", "tuple(%put, %zeros)"),
    ),
    "an async computation": (
        """
  %as = ((f32[2]{0}, s32[]), (f32[16]{0}, f32[16]{0}), u32[]) async-start(%w, %at), calls=%place
  %ad = (f32[16]{0}, f32[16]{0}) async-done(%as)
  %placed = f32[16]{0} get-tuple-element(%ad), index=0
""",
        ("tuple(%put, %other)", "tuple(%other, %put)"),
    ),
    "zeros that a loop carries": (
        """
  %zeros = f32[16]{0} broadcast(%c), dimensions={}
  %start = (s32[], f32[16]{0}) tuple(%at, %zeros)
  %loop = (s32[], f32[16]{0}) while(%start), condition=%test, body=%trip
  %carried = f32[16]{0} get-tuple-element(%loop), index=1
  %placed = f32[16]{0} dynamic-update-slice(%carried, %w, %at)
""",
        ("tuple(%next, %kept)", "tuple(%next, %changed)"),
    ),
    "a dim of size 1, and zeros that are written out": (
        """
  %row = f32[1,2]{1,0} broadcast(%w), dimensions={1}
  %flat = f32[2]{0} reduce(%row, %c), dimensions={0}, to_apply=%add
  %zeros = f32[4,4]{1,0} constant({ {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0} })
  %line = f32[16]{0} reshape(%zeros)
  %placed = f32[16]{0} dynamic-update-slice(%line, %flat, %at)
""",
        ("{ {0, 0,", "{ {0, 1,"),
    ),
}
GATHERS_IN_ZEROS = """HloModule jit_f, num_partitions=8

%place (shard: f32[2], at: s32[]) -> (f32[16], f32[16]) {
  %shard = f32[2]{0} parameter(0)
  %at = s32[] parameter(1)
  %c = f32[] constant(0)
  %zeros = f32[16]{0} broadcast(%c), dimensions={}
  %put = f32[16]{0} dynamic-update-slice(%zeros, %shard, %at)
  %other = f32[16]{0} exponential(%put)
  ROOT %both = (f32[16]{0}, f32[16]{0}) tuple(%put, %other)
}

%put (into: f32[16], shard: f32[2], at: s32[]) -> f32[16] {
  %into = f32[16]{0} parameter(0)
  %shard = f32[2]{0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %result = f32[16]{0} dynamic-update-slice(%into, %shard, %at)
}

%trip (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %carry = (s32[], f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %kept = f32[16]{0} get-tuple-element(%carry), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %changed = f32[16]{0} exponential(%kept)
  ROOT %next_carry = (s32[], f32[16]{0}) tuple(%next, %kept)
}

ENTRY %main (w: f32[2]) -> f32[16] {
  %w = f32[2]{0} parameter(0), metadata={op_name="w"}
  %c = f32[] constant(0)
  %at = s32[] constant(4)
PLACED
  ROOT %sum = f32[16]{0} all-reduce(%placed), replica_groups=[1,8]<=[8], channel_id=1,\
 use_global_device_ids=true, to_apply=%add
}
"""


@pytest.mark.parametrize("name", PLACED)
def test_a_sum_of_shards_in_zeros_is_a_gather_at_twice_the_bytes(name: str) -> None:
    ops, edit = PLACED[name]
    program = GATHERS_IN_ZEROS.replace("PLACED", ops)
    [moved] = ts.collectives(program, "fsdp=8")
    assert (moved.kind, moved.path, moved.bytes) == ("all-gather", "w", 64)
    changed = program.replace(*edit)
    assert changed != program
    [reduced] = ts.collectives(changed, "fsdp=8")
    assert (reduced.kind, reduced.path, reduced.bytes) == ("all-reduce", None, 64)
    assert moved.wire_bytes == reduced.wire_bytes == 2 * 64 * 7 // 8
    plan = ts.plan({"w": np.ones(16, "float32")}, [("w", P("fsdp"))], "fsdp=8", min_size=0)
    roles = {"w": Role(FROZEN, (Gather(frozenset({"fsdp"}), "float32", 4, 1, 1, False),))}
    for hlo, is_gather in ((program, True), (changed, False)):
        compared = compare_step(plan, P("fsdp"), roles, read_program(hlo, "fsdp=8"))
        line = "The compiler gathers 64 B by all-reduces, which send twice the bytes."
        assert (line in str(compared)) == is_gather


def test_a_trip_count_that_is_not_stated_is_computed(mesh: jax.sharding.Mesh) -> None:
    silent = text("gpu_async").replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    assert [x.count for x in ts.collectives(silent, mesh)][4] == 4
    for old, new, count in [
        ("direction=LT", "direction=LE", 5),
        ("direction=LT", "direction=NE", None),
        ("%i.1, s32[] %limit), direction=LT", "%limit, s32[] %i.1), direction=GT", 4),
        ("%limit = s32[] constant(4)", "%limit = s32[] bitcast-convert(%i.1)", None),
        ("%first = s32[] constant(0)", "%first = s32[] partition-id()", None),
    ]:
        changed = silent.replace(old, new)
        assert changed != silent
        assert [x.count for x in ts.collectives(changed, mesh)][4] == count, new


HEAD = "HloModule m, num_partitions=8\n\nENTRY %main (x: f32[8]) -> f32[8] {\n"
PARAMETER = '  %x = f32[8]{0} parameter(0), metadata={op_name="x"}\n'


@pytest.mark.parametrize(
    ("op", "moved"),
    [
        pytest.param(
            "(f32[8]{0}, f32[8]{0}) all-reduce(%x, %x), channel_id=1, use_global_device_ids=true,"
            " replica_groups={{0,4},{1,5},{2,6},{3,7}}",
            [("all-reduce", 32, 32, ("data",))] * 2,
            id="one per buffer",
        ),
        pytest.param(
            "f9[8]{0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8],"
            " use_global_device_ids=true",
            [("all-reduce", None, None, ("fsdp",))],
            id="an unknown dtype",
        ),
        pytest.param(
            "f32[8]{0} all-gather-of-the-future(%x), channel_id=1, replica_groups=[1,8]<=[8]",
            [("unknown", None, None, None)],
            id="an unknown op",
        ),
        pytest.param(
            'f32[8]{0} custom-call(%x), custom_call_target="all-gather-start"',
            [("unknown", None, None, None)],
            id="an asynchronous collective of JAX 0.12 itself",
        ),
        pytest.param(
            "(f32[8]{0}, u32[], token[]) send(%x, %x), channel_id=1, is_host_transfer=true",
            [],
            id="send to the host",
        ),
        pytest.param(
            "(f32[8]{0}, u32[], token[]) send(%x, %x), channel_id=2, is_host_transfer=true,"
            ' frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
            '_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}',
            [("all-reduce", 32, None, None)],
            id="send to another slice",
        ),
        pytest.param(
            "f32[8]{0} all-reduce(%x), replica_groups={{0}}",
            [("all-reduce", 32, 0, ())],
            id="among replicas, and there is only one",
        ),
    ],
)
def test_a_single_op(op: str, moved: list[object], mesh: jax.sharding.Mesh) -> None:
    read = ts.collectives(f"{HEAD}{PARAMETER}  ROOT %y = {op}\n}}\n", mesh)
    assert [(x.kind, x.bytes, x.wire_bytes, x.axes) for x in read] == moved


GATHER = (
    "f32[64]{{0}} all-gather({}), channel_id=1, replica_groups=[1,8]<=[8],"
    " use_global_device_ids=true"
)


@pytest.mark.parametrize(
    ("ops", "path"),
    [
        ("%y = f32[8]{0} copy(%x)", "x"),
        ("%z = f32[8]{0} exponential(%x)\n  %y = f32[16]{0} concatenate(%x, %z)", None),
        ("%z = f32[8]{0} exponential(%x)\n  %y = f32[8]{0} dynamic-update-slice(%x, %z)", None),
        ("%y = f32[8]{0} call(%x), to_apply=%moves", "x"),
        ("%y = f32[8]{0} call(%x), to_apply=%computes", None),
        (
            "%s = ((f32[8]), f32[8]) async-start(%x), calls=%moves\n  %y = f32[8] async-done(%s)",
            "x",
        ),
        ('%y = f32[8]{0} custom-call(%x), custom_call_target="Sharding"', "x"),
        (
            "%t = (f32[8]) tuple(%x)\n  %b = (f32[8]) opt-barrier(%t)\n"
            "  %y = f32[8] get-tuple-element(%b), index=0",
            "x",
        ),
        ("%y = f32[8]{0} copy(%nowhere)", None),
        # A Pallas kernel with metadata of its own, on lines of their own
        (
            '%k = f32[8] custom-call(%x), frontend_attributes={kernel_metadata={\n"block":"8"\n}}\n'
            "  %y = f32[8]{0} copy(%x)",
            "x",
        ),
    ],
)
def test_the_path_of_moved_data(ops: str, path: str | None) -> None:
    called = "".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %r = f32[8]{{0}} {opcode}(%p)\n}}\n\n"
        for name, opcode in [("moves", "copy"), ("computes", "exponential")]
    )
    head = HEAD.replace("ENTRY", called + "ENTRY")
    moved = ts.collectives(f"{head}{PARAMETER}  {ops}\n  ROOT %g = {GATHER.format('%y')}\n}}\n")
    assert [x.path for x in moved] == [path]


# ------------------------------------------------------------------ live programs


def _moving() -> Any:
    def once(x: jax.Array) -> jax.Array:
        return lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)])

    def loops(x: jax.Array, n: jax.Array) -> jax.Array:
        def nested(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.scan(lambda x, _: (once(x), None), x, None, length=3)

        x = lax.scan(nested, x, None, length=5)[0]
        x = lax.while_loop(lambda c: c[0] < 20, lambda c: (c[0] + 3, once(c[1])), (2, x))[1]
        x = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, once(c[1])), (0, x))[1]
        from_outer = lambda i, x: lax.fori_loop(i, 4, lambda _, x: once(x), x)  # noqa: E731
        x = lax.fori_loop(0, 3, from_outer, x)
        x = lax.cond(n > 3, once, lambda x: x, x)
        return lax.all_to_all(x, "fsdp", 0, 0, tiled=True)

    return loops


@pytest.fixture(scope="module")
def loops(mesh: jax.sharding.Mesh) -> jax.stages.Compiled:
    fn = jax.shard_map(
        _moving(), mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((64,), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    n = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, P()))
    return jax.jit(fn).lower(x, n).compile()


def test_counts_of_loops(loops: jax.stages.Compiled) -> None:
    moved = ts.collectives(loops)
    permutes = [x.count for x in moved if x.kind == "collective-permute"]
    # Nested scans, a constant bound, a bound that depends on data, a first number that another loop
    # counts, one of two branches.
    assert permutes == [15, 6, None, None, None]
    assert {x.axes for x in moved} == {("fsdp",)}
    assert {x.bytes for x in moved} == {64}
    assert moved[-1].kind == "all-to-all"


def test_a_program_on_one_device_moves_nothing() -> None:
    assert ts.collectives(jax.jit(jnp.sin).lower(1.0).compile()) == []


def test_a_shared_function_counts_once_per_call(mesh: jax.sharding.Mesh) -> None:
    @jax.jit
    def gathered(w: jax.Array) -> jax.Array:
        return lax.all_gather(w, "fsdp", tiled=True)

    def step(state: dict[str, jax.Array]) -> jax.Array:
        return gathered(state["a"]) + gathered(state["b"])

    fn = jax.shard_map(step, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    w = jax.ShapeDtypeStruct((64,), "float32")
    moved = ts.collectives(jax.jit(fn).lower({"a": w, "b": w}).compile())
    assert [(x.path, x.count) for x in moved] == [("state/a", 1), ("state/b", 1)]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param("", "the text is empty. This backend may not provide one", id="empty"),
        pytest.param(
            "not a program at all",
            "the text is not a program. HLO starts with `HloModule`",
            id="prose",
        ),
        pytest.param(
            "module @jit_step attributes {mhlo.num_partitions = 8 : i32} {\n",
            "a lowered program shows only the collectives that were written by hand",
            id="the text of a lowered program",
        ),
        pytest.param(
            f"{HEAD}{PARAMETER}  %y = all-gather(%x), dimensions={{0}}\n}}\n",
            "line 5 has a collective that cannot be parsed",
            id="a collective without a type",
        ),
        pytest.param(
            f"{HEAD}{PARAMETER}  %z = f32[8]{{0}} call(%x), to_apply=%main\n"
            "  ROOT %y = f32[8]{0} all-reduce(%x), replica_groups={}\n}\n",
            "the computation 'main' calls itself",
            id="a circle of calls",
        ),
        pytest.param(
            f"{HEAD}{PARAMETER}  %x = f32[8]{{0}} add(%x, %x)\n}}\n",
            "line 5 defines 'x' a second time",
            id="a name twice",
        ),
        pytest.param(
            f"HloModule m\n\n%f (x: f32[8]) -> f32[8] {{\n{PARAMETER}ENTRY %main () -> u8[] {{\n}}",
            "line 5 starts a new section inside the computation 'f', which is not closed",
            id="a computation that is not closed",
        ),
    ],
)
def test_a_damaged_text_raises(broken: str, message: str) -> None:
    with pytest.raises(ts.FormatError, match=message):
        ts.collectives(broken)


def test_a_text_that_is_truncated_anywhere_raises(mesh: jax.sharding.Mesh) -> None:
    lines = text("cpu_by_hand").rstrip().split("\n")
    for end in range(2, len(lines), 5):
        with pytest.raises(ts.TreeShardError, match="truncated|not a program"):
            ts.collectives("\n".join(lines[:end]), mesh)


def test_another_program_raises() -> None:
    for_another_mesh = (
        "collectives: the program runs on 8 device(s), but the mesh (fsdp=4) has 4. Pass the"
        " mesh that it was compiled for."
    )
    with pytest.raises(ts.MeshError) as raised:
        ts.collectives(text("cpu_by_hand"), "fsdp=4")
    assert str(raised.value) == for_another_mesh
    with pytest.raises(TypeError, match="PjitFunction is not a program. Compile it first:"):
        ts.collectives(jax.jit(jnp.sin))
    with pytest.raises(TypeError, match="a lowered program shows only the collectives that were"):
        ts.collectives(jax.jit(jnp.sin).lower(1.0))


# ------------------------------------------------------------------ in tests


def test_the_message_of_a_broken_budget_lists_all_collectives(mesh: jax.sharding.Mesh) -> None:
    kept = {"all_gather": (4, 896), "all_reduce": (None, 4), "reduce_scatter": 0, "max_bytes": 900}
    ts.assert_collectives(text("cpu_by_hand"), mesh, **kept)
    with pytest.raises(ts.CommunicationError) as error:
        ts.assert_collectives(text("cpu_by_hand"), mesh, all_gather=(3, 800), max_bytes=899)
    assert isinstance(error.value, AssertionError)
    assert str(error.value).split("\n") == [
        "all-gather: 4 executions, expected 3.",
        "all-gather: 896 bytes, at most 800 allowed.",
        "all collectives: 900 bytes, at most 899 allowed.",
        "kind        axes        count  bytes each  total  array    moves"
        "                                  source",
        "all-gather  fsdp        1      128 B       128 B  float32  state/head"
        "                             /home/me/model.py:15",
        "all-gather  fsdp        3      256 B       768 B  float32  state/layers"
        "                           /home/me/model.py:10",
        "all-reduce  data, fsdp  1      4 B           4 B  float32  "
        "jit(by_hand)/shard_map/psum_invariant  /home/me/model.py:15",
    ]


def test_an_unknown_number_breaks_a_budget(loops: jax.stages.Compiled) -> None:
    with pytest.raises(ts.CommunicationError, match="unknown number of executions, expected 21"):
        ts.assert_collectives(loops, collective_permute=21)
    with pytest.raises(ts.CommunicationError, match="unknown number of bytes, at most 10 allowed"):
        ts.assert_collectives(loops, max_bytes=10)


def test_an_op_that_cannot_be_read_breaks_every_budget() -> None:
    op = 'f32[8]{0} custom-call(%x), custom_call_target="AllGatherOfTheFuture"'
    program = f"{HEAD}{PARAMETER}  ROOT %y = {op}\n}}\n"
    with pytest.raises(ts.CommunicationError) as error:
        ts.assert_collectives(program, all_gather=0)
    assert str(error.value).startswith(
        "these ops look like collectives, but cannot be read: AllGatherOfTheFuture.\n"
    )
