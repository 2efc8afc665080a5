"""Listing the values of a step before it is compiled: a Llama of 80 layers in a scan, in seconds.

`step.types(state, batch)` on Explicit axes traces the step and reads its types. Each round makes
the step anew, so that JAX traces it anew; what JAX keeps of its own functions between rounds, as
between the steps of one program, is kept.

    python -m benchmarks.bench_types [--json] [--rounds 15]
"""

import random
import time

import treeshard as ts
from benchmarks._harness import Figure, Row, options, report
from examples.compile_llama import SIZES, make_llama

MOST_SECONDS = 1


def seconds(mesh: object, name: str) -> float:
    """How long the trace of a new step takes, or the list of its values with that trace."""
    step, state, batch = make_llama(mesh, size="70b")
    start = time.perf_counter()
    result = getattr(step, name)(state, batch)
    took = time.perf_counter() - start
    if name == "types":
        assert SIZES["70b"].layers in {value.times for value in result}
        assert not result.is_compiled
    return took


def main() -> None:
    ts.simulate_devices(8)
    mesh = ts.make_mesh("fsdp=8", axis_types="explicit")
    found: dict[str, list[float]] = {"types": [], "trace": []}
    for round_ in range(options().rounds + 1):
        for name in random.Random(round_).sample(list(found), len(found)):
            took = seconds(mesh, name)
            if round_:
                found[name].append(took)
    types, trace = (Figure(found[name]) for name in ("types", "trace"))
    rows = [
        Row("step.types, 80 layers in a scan, seconds", types, f"<= {MOST_SECONDS}"),
        Row("of it, JAX's trace of the step (step.trace), seconds", trace),
        Row("step.types over step.trace", types / trace),
    ]
    report("The values of a Llama of 70 billion parameters on Explicit axes, fsdp=8", rows)


if __name__ == "__main__":
    main()
