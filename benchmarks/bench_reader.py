"""Reading the text of large programs: seconds, and whether they grow with the size alone.

The text is that of an unrolled model, made of lines as the CPU's compiler prints them.

    python -m benchmarks.bench_reader [--json] [--rounds 3] [--megabytes 50]
"""

# ruff: noqa: E501 - a line of a program is as long as compilers print it

import argparse
import random
import time

from benchmarks._harness import Figure, Row, options, report
from treeshard._core.mesh import abstract_mesh
from treeshard.communication._collectives import collectives

MESH = abstract_mesh("data=2,fsdp=4")
HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=8\n"
FUSED = """
%fused_computation.{i} (param_0.{i}: f32[16,512]) -> f32[16,512] {{
  %param_0.{i} = f32[16,512]{{1,0}} parameter(0)
  %constant.{i} = f32[] constant(0.5)
  %broadcast.{i} = f32[16,512]{{1,0}} broadcast(%constant.{i}), dimensions={{}}
  %multiply.{i} = f32[16,512]{{1,0}} multiply(%param_0.{i}, %broadcast.{i}), metadata={{op_name="jit(step)/jvp(layer_{i})/mul" stack_frame_id=19}}
  ROOT %tanh.{i} = f32[16,512]{{1,0}} tanh(%multiply.{i}), metadata={{op_name="jit(step)/jvp(layer_{i})/tanh" stack_frame_id=20}}
}}
"""
LAYER = """\
  %copy.{i} = f32[128,512]{{1,0}} copy(%param.{i}), metadata={{op_name="jit(step)/jvp(layer_{i})/transpose" stack_frame_id=18}}
  %all-gather.{i} = f32[512,512]{{1,0}} all-gather(%copy.{i}), channel_id={i}, replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {{'axis_0'}}, dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="jit(step)/jvp(layer_{i})/sharding_constraint" stack_frame_id=19}}
  %ynn_fusion.{i} = f32[16,512]{{1,0}} fusion(%x.{i}, %all-gather.{i}), kind=kCustom, calls=%fused_computation.{i}, metadata={{op_name="jit(step)/jvp(layer_{i})/dot_general" stack_frame_id=25}}, backend_config={{"fusion_config":{{"kind":"__ynn_fusion"}},"outer_dimension_partitions":[]}}
  %x.{j} = f32[16,512]{{1,0}} fusion(%ynn_fusion.{i}), kind=kLoop, calls=%fused_computation.{i}, metadata={{op_name="jit(step)/jvp(layer_{i})/tanh" stack_frame_id=25}}
  %dot.{i} = f32[512,512]{{1,0}} dot(%x.{i}, %x.{j}), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/transpose(jvp(layer_{i}))/dot_general" stack_frame_id=26}}
  %all-reduce.{i} = f32[512,512]{{1,0}} all-reduce(%dot.{i}), channel_id={i}, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(step)/transpose(jvp(layer_{i}))/dot_general" stack_frame_id=26}}
"""
PARAMETER = (
    "  %param.{i} = f32[128,512]{{1,0}} parameter({i}), sharding={{devices=[4,1,2]<=[2,4]T(1,0)"
    " last_tile_dim_replicate}}, metadata={{op_name=\"state[\\'layers\\'][{i}]\"}}\n"
)


def program(megabytes: float) -> tuple[str, int]:
    """A program text of this size, and its number of layers."""
    size = sum(len(part.format(i=9999, j=9999)) for part in (FUSED, LAYER, PARAMETER))
    layers = int(megabytes * 1e6 / size)
    start = f'  %x.0 = f32[16,512]{{1,0}} parameter({layers}), metadata={{op_name="x"}}\n'
    fused = "".join(FUSED.format(i=i) for i in range(layers))
    body = "".join(PARAMETER.format(i=i) for i in range(layers)) + start
    body += "".join(LAYER.format(i=i, j=i + 1) for i in range(layers))
    end = f"  ROOT %out = f32[16,512]{{1,0}} copy(%x.{layers})\n}}\n"
    return f"{HEAD}{fused}\nENTRY %main (x: f32[16,512]) -> f32[16,512] {{\n{body}{end}", layers


def seconds(text: str, layers: int) -> float:
    """How long reading it takes, with a look at what was read."""
    start = time.perf_counter()
    moved = collectives(text, MESH)
    took = time.perf_counter() - start
    gathers = [x for x in moved if x.kind == "all-gather"]
    assert [x.path for x in gathers] == [f"state/layers/{i}" for i in range(layers)]
    assert len(moved) == 2 * layers
    return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=50, help="the size of the text")
    chosen = options(parser)
    rounds = min(chosen.rounds, 3)
    programs = {part: program(part * chosen.megabytes) for part in (0.25, 0.5, 1.0)}
    found: dict[float, list[float]] = {part: [] for part in programs}
    for round_ in range(rounds):
        for part in random.Random(round_).sample(list(programs), len(programs)):
            found[part].append(seconds(*programs[part]))
    took = {part: Figure(seconds) for part, seconds in found.items()}
    full = f"{chosen.megabytes:g} MB"
    rows = [
        Row(f"{full}, seconds", took[1.0], "<= 10"),
        Row(f"{full} over half of it", took[1.0] / took[0.5], "<= 2.2"),
        Row(f"{full} over a quarter of it", took[1.0] / took[0.25], "<= 4.6"),
    ]
    report("collectives() of a text", rows)


if __name__ == "__main__":
    main()
