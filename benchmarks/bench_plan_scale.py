"""Planning 405B parameters with their training state: python -m benchmarks.bench_plan_scale"""

import subprocess
import sys

import treeshard as ts
from benchmarks._harness import Row, medians, options, report
from examples.plan_405b import RULES, training_state

SMALL, LARGE = "fsdp=4,tensor=2", "data=8,fsdp=512,tensor=16"

_PEAK = r"""
import re
from benchmarks.bench_plan_scale import LARGE, RULES, training_state
import treeshard as ts
plan = ts.plan(training_state(), RULES, LARGE)
plan.findings, plan.bytes_per_device(), str(plan), plan.to_json()
# Not what getrusage says, which remembers the process that started this one.
print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 2**20)
"""


def peak_gib() -> float:
    """What a fresh process needs for the plan and all that is asked of it."""
    run = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    return float(run.stdout)


def main() -> None:
    state = training_state()
    plans = {name: ts.plan(state, RULES, name) for name in (SMALL, LARGE)}
    seconds = medians(
        {
            **{name: lambda name=name: ts.plan(state, RULES, name) for name in plans},
            "findings": lambda: ts.plan(state, RULES, LARGE).findings,
            "describe": lambda: str(plans[LARGE]),
            "json": lambda: plans[LARGE].to_json(),
            "diff": lambda: plans[SMALL].diff(plans[LARGE]),
        },
        options().rounds,
    )
    leaves = f"{len(plans[LARGE].leaves):,} leaves"
    rows = [
        Row(f"plan on 65,536 devices, {leaves}, s", seconds[LARGE], "<= 1"),
        Row("the same, x on 8 devices", seconds[LARGE] / seconds[SMALL], "<= 1.1"),
        Row("plan and its findings, s", seconds["findings"]),
        Row("describe, s", seconds["describe"]),
        Row("to JSON, s", seconds["json"]),
        Row("diff of the two, s", seconds["diff"]),
        Row("peak memory of all that in a fresh process, GiB", peak_gib(), "< 1"),
    ]
    report("Planning the training state of a 405B-parameter decoder", rows)


if __name__ == "__main__":
    main()
