"""A compiled step tells its memory, and is the program that runs."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treeshard as ts
from treeshard._core.topologies import usable_memory
from treeshard.communication._hlo import HloProgram
from treeshard.programs import Memory
from treeshard.programs._buffers import peak_of, read_type
from treeshard.programs._memory import temporaries_of


def _mlp(mesh: jax.sharding.Mesh, *, donate: bool = True, make=ts.jit_step, **options):
    params = {f"w{i}": jax.ShapeDtypeStruct((256, 256), "float32") for i in range(4)}
    plan = ts.plan(params, [(".*", P("fsdp"))], mesh, min_size=0)

    def loss(params, batch):
        for w in params.values():
            batch = jax.nn.relu(batch @ ts.unshard(w, P("fsdp"), "fsdp"))
        return jnp.mean(batch)

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return plan, make(step, plan, batch=P("fsdp"), donate=donate, **options)


BATCH = np.ones((512, 256), "float32")


def test_the_compiled_program_is_the_one_that_runs(fsdp_mesh) -> None:
    plan, step = _mlp(fsdp_mesh)
    compiled = step.compile(plan.structs, BATCH)
    state = ts.shard(
        {name: np.full((256, 256), 0.01, "float32") for name in ["w0", "w1", "w2", "w3"]}, plan
    )
    expected, _ = _mlp(fsdp_mesh, donate=False)[1](state, BATCH)
    for _ in range(2):
        new, _ = step(jax.tree.map(jnp.copy, state), BATCH)
        jax.tree.map(np.testing.assert_array_equal, new, expected)
    [program] = step._programs
    assert [*program.compiled.values()] == [compiled.compiled]
    assert program.run._cache_size() == 0  # jit compiled nothing of its own


@pytest.mark.usefixtures("standard_promotion")
def test_batches_of_other_forms_run_too(fsdp_mesh) -> None:
    plan, step = _mlp(fsdp_mesh, donate=False)
    state = ts.shard({f"w{i}": np.full((256, 256), 0.01, "float32") for i in range(4)}, plan)
    batches = [BATCH, BATCH[:64], BATCH.astype("int32"), BATCH.astype("bfloat16")]
    expected = [step(state, batch) for batch in batches]
    plan, step = _mlp(fsdp_mesh, donate=False)
    for batch in batches[:2]:
        step.compile(plan.structs, batch)
    for batch, results in zip(batches, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, step(state, batch), results)
    [program] = step._programs
    assert program.run._cache_size() == 2  # for the batches that were not compiled before


@pytest.mark.usefixtures("standard_promotion")
def test_a_compiled_step_of_numbers_takes_other_numbers(fsdp_mesh) -> None:
    plan = ts.plan({"w": jnp.ones(8)}, [("w", P("fsdp"))], fsdp_mesh, min_size=0)
    step = ts.jit_step(lambda s, b: ({"w": s["w"] * b["rate"]}, b["rate"]), plan, donate=False)
    step.compile(plan.structs, {"rate": 2.0})
    state = ts.shard({"w": jnp.ones(8)}, plan)
    for rate in (2.0, 3.0, 4, True, jnp.float32(5)):
        new, _ = step(state, {"rate": rate})
        np.testing.assert_array_equal(new["w"], np.full(8, rate, "float32"))
    [program] = step._programs
    assert program.run._cache_size() == 3  # for int, bool, and an array, which promotes others


@pytest.mark.parametrize("x", [np.ones(8, "int32"), np.ones(16, "float32")])
def test_a_compiled_step_names_a_state_of_another_form(fsdp_mesh, x) -> None:
    plan = ts.plan({"w": jnp.ones(8)}, [("w", P("fsdp"))], fsdp_mesh, min_size=0)
    step = ts.jit_step(lambda s, b: (s, b), plan)
    step.compile(plan.structs, {})
    with pytest.raises(ts.StateError, match="w: enters the step as .*, but the plan has float32"):
        step(ts.shard({"w": x}, P("fsdp"), fsdp_mesh), {})


def test_compiling_places_no_batch(fsdp_mesh, monkeypatch) -> None:
    monkeypatch.setattr("treeshard.training._batch.move_leaves", lambda *args: pytest.fail("moved"))
    plan, step = _mlp(fsdp_mesh)
    step.compile(plan.structs, BATCH)
    step.lower(plan.structs, BATCH)


def test_memory_is_that_of_the_compiler_and_what_is_live_at_its_peak(fsdp_mesh) -> None:
    plan, step = _mlp(fsdp_mesh)
    compiled = step.compile(plan.structs, BATCH)
    memory, analysis = compiled.memory(), compiled.compiled.memory_analysis()
    weights, rows = 4 * 32 * 256 * 4, 64 * 256 * 4
    assert memory.arguments == weights + rows == analysis.argument_size_in_bytes
    assert memory.temporaries == analysis.temp_size_in_bytes
    assert 0 < memory.results < 256  # the loss, and the tuple of results
    assert memory.total == (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.generated_code_size_in_bytes
    )
    live = sum(buffer.bytes for buffer in memory.at_peak)
    assert 0.95 * memory.temporaries <= live <= 1.05 * memory.temporaries
    assert "test_compiled_step.py:" in str(memory.at_peak[0].source)


@pytest.mark.parametrize(
    ("platform", "peak", "temporaries"),
    [("tpu", 700, 400), ("tpu", 900, 500), ("tpu", 0, 500), ("cpu", 700, 500)],
    ids=["counted twice", "not", "no peak", "one number"],
)
def test_temporaries_that_a_tpu_counts_twice_are_counted_once(platform, peak, temporaries) -> None:
    names = ("argument", "output", "alias", "host_argument", "host_output", "host_alias")
    sizes = {f"{name}_size_in_bytes": 100 for name in (*names, "host_temp")}
    sizes |= {"temp_size_in_bytes": 500, "peak_memory_in_bytes": peak}
    assert temporaries_of(SimpleNamespace(**sizes), platform) == temporaries


def test_a_gathered_weight_has_its_path(fsdp_mesh) -> None:
    plan = ts.plan({"w": np.ones((512, 512), "float32")}, [("w", P("fsdp"))], fsdp_mesh, min_size=0)

    @ts.jit_step(plan=plan, batch=P("fsdp"))
    def step(state, batch):
        return state, jnp.sin(batch @ ts.unshard(state["w"], P("fsdp"), "fsdp")).sum()

    memory = step.compile(plan.structs, np.ones((8, 512), "float32")).memory()
    assert memory.at_peak[0][:3] == (512 * 512 * 4, "f32[512,512]", "state/w")
    assert "1.0 MiB f32[512,512], of state/w" in str(memory)


def test_what_does_not_fit_or_cannot_be_known_is_an_error() -> None:
    memory = Memory(2**30, 0, 2**30, 0, None, "cpu", ())
    with pytest.raises(ts.errors.DoesNotFitError, match=r"2.0 GiB .* memory of cpu is not known"):
        memory.assert_fits()
    small = dataclasses.replace(memory, capacity=2**30, device="TPU v5 lite")
    assert small.fits is False
    with pytest.raises(ts.errors.DoesNotFitError, match=r"needs 2.0 GiB .* has 1.0 GiB"):
        small.assert_fits()
    dataclasses.replace(memory, capacity=2**31).assert_fits()


def on_h100() -> Memory:
    """That of a step of 60 GiB, where the environment says how much JAX allocates."""
    h100 = ts.programs.CHIPS["h100"]
    memory = Memory(60 * 2**30, 0, 0, 0, None, "NVIDIA H100 80GB HBM3", ())
    return dataclasses.replace(memory, capacity=usable_memory(h100))


@pytest.mark.parametrize(
    ("variable", "value", "gib"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "0.9", 71.2),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", 79.1),
    ],
)
def test_on_gpus_what_jax_allocates_decides(variable, value, gib, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    assert on_h100().fits
    assert f"of {gib} GiB on NVIDIA H100 80GB HBM3" in str(on_h100())


def test_what_does_not_fit_in_what_jax_allocates_is_an_error() -> None:
    with pytest.raises(ts.errors.DoesNotFitError) as caught:
        on_h100().assert_fits()
    assert str(caught.value).startswith(
        "The step needs 60.0 GiB per device, and NVIDIA H100 80GB HBM3 has 59.4 GiB.\n"
    )


def test_a_fraction_that_is_no_number_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    message = "^XLA_CLIENT_MEM_FRACTION is 'most', and not a number, such as 0.9.$"
    with pytest.raises(ts.errors.FormatError, match=message):
        usable_memory(ts.programs.CHIPS["h100"])


def test_a_program_that_the_compiler_refuses_does_not_fit(fsdp_mesh, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO"
            " temporaries (64.00G) exceeds available HBM (31.25G)."
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    plan, step = _mlp(fsdp_mesh)
    with pytest.raises(ts.errors.DoesNotFitError) as caught:
        step.compile(plan.structs, BATCH)
    assert str(caught.value).startswith(
        "The step needs at least 64.00GiB per device, and cpu has 31.25GiB. Shard more"
    )
    assert (caught.value.need, caught.value.capacity) == (64 * 2**30, 31.25 * 2**30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[1024,8]{1,0:T(8,128)}", {(): ("f32[1024,8]", 1024 * 128 * 4, 0)}),
        ("bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}", {(): ("bf16[512,1024]", 2**20, 1)}),
        ("s4[9]{0}", {(): ("s4[9]", 5, 0)}),
        (
            "((f32[8]{0}), /*index=1*/u32[]{:S(2)}, (), token[])",
            {
                (0, 0): ("f32[8]", 32, 0),
                (1,): ("u32[]", 4, 2),
                (3,): ("token[]", 0, 0),
            },
        ),
    ],
    ids=["tiles", "another memory", "half bytes", "tuples"],
)
def test_types_have_the_bytes_of_their_layout(text, expected) -> None:
    assert read_type(text) == expected


@pytest.mark.parametrize(
    ("lines", "kibibytes"),
    [
        (
            # The second element is not needed while `big` is: only the first is read again.
            """
            %a = f32[1024]{0} negate(%p)
            %b = f32[2048]{0} pad(%p, %zero), padding=0_1024
            %both = (f32[1024]{0}, f32[2048]{0}) tuple(%a, %b)
            %big = f32[4096]{0} pad(%p, %zero), padding=0_3072
            %sum = f32[] reduce(%big, %zero), dimensions={0}, to_apply=%add
            %again = f32[1024]{0} get-tuple-element(%both), index=0
            """,
            4 + 16,
        ),
        (
            # TPUs, whose layouts have tiles, all-reduce in place.
            """
            %a = f32[1024]{0:T(1024)} negate(%p)
            %again = f32[1024]{0:T(1024)} all-reduce(%a), replica_groups={}, to_apply=%add
            """,
            4,
        ),
        (
            # Both results are needed to the end.
            """
            %a = f32[1024]{0} negate(%p)
            %b = f32[2048]{0} pad(%p, %zero), padding=0_1024
            %start = (f32[1024]{0}, f32[2048]{0}) all-reduce-start(%a, %b), replica_groups={}
            %done = (f32[1024]{0}, f32[2048]{0}) all-reduce-done(%start)
            %big = f32[4096]{0} pad(%p, %zero), padding=0_3072
            %sum = f32[] reduce(%big, %zero), dimensions={0}, to_apply=%add
            %other = f32[2048]{0} get-tuple-element(%done), index=1
            %rest = f32[] reduce(%other, %zero), dimensions={0}, to_apply=%add
            %again = f32[1024]{0} get-tuple-element(%done), index=0
            """,
            4 + 8 + 16,
        ),
        (
            # One element of the result is the operand itself, and the other is new.
            """
            %a = f32[1024]{0} negate(%p)
            %both = (f32[1024]{0}, f32[1024]{0}) call(%a), to_apply=%with_negated
            %again = f32[1024]{0} get-tuple-element(%both), index=0
            """,
            4 + 4,
        ),
    ],
    ids=["element", "tpu", "several reduced at once", "called"],
)
def test_buffers_are_live_as_long_as_compilers_keep_them(lines: str, kibibytes: int) -> None:
    program = HloProgram(f"""HloModule step, is_scheduled=true

%with_negated (q: f32[1024]) -> (f32[1024], f32[1024]) {{
  %q = f32[1024]{{0}} parameter(0)
  %n = f32[1024]{{0}} negate(%q)
  ROOT %t = (f32[1024]{{0}}, f32[1024]{{0}}) tuple(%q, %n)
}}

ENTRY %main (p: f32[1024]) -> f32[] {{
  %p = f32[1024]{{0}} parameter(0)
  %zero = f32[] constant(0)
{lines}
  ROOT %out = f32[] reduce(%again, %zero), dimensions={{0}}, to_apply=%add
}}
""")
    assert peak_of(program).bytes // 1024 == kibibytes
