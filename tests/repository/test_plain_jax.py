"""The page beside plain JAX says what `benchmarks/plain_jax.py` compiled."""

import json
from typing import Any

from benchmarks import plain_jax

RESULTS: dict[str, Any] = json.loads(plain_jax.RESULTS.read_text())
PAGE = plain_jax.PAGE.read_text()


def of(name: str, way: str) -> dict[str, Any]:
    return RESULTS[name]["ways"][way]


def test_the_page_has_the_table_of_the_results() -> None:
    table = f"<!-- table -->\n{plain_jax.table(RESULTS)}<!-- end of table -->"
    assert table in PAGE, "python -m benchmarks.plain_jax --page"


def test_each_result_is_of_a_case_and_compiled_with_the_same_versions() -> None:
    cases = {case.name: case for case in plain_jax.CASES}
    assert len(cases) == len(plain_jax.CASES)
    assert list(RESULTS) == list(cases)
    for name, result in RESULTS.items():
        assert {field: result[field] for field in cases[name]._fields} == cases[name]._asdict()
        assert list(result["ways"]) == list(plain_jax.WAYS)
    assert len({json.dumps(result["with"]) for result in RESULTS.values()}) == 1


def sent(name: str, way: str) -> int:
    return of(name, way)["sent"]


def planned(name: str) -> int:
    return of(name, plain_jax.OURS)["planned"]["sent"]


def test_what_the_text_below_the_table_says() -> None:
    alone, plain, ours = plain_jax.WAYS
    pod = "FSDP 8B v5e:16x16"
    assert "at least 27.99GiB" in of(pod, alone)["does not fit"]
    assert sent(pod, plain) > 1.4 * sent(pod, ours)
    assert sent(pod, ours) < 1.001 * planned(pod)
    assert of(pod, plain)["findings"] == ["all-reduce", "again"]
    hybrid = "HSDP 8B v5e:16x16"
    assert 1.045 < sent(hybrid, plain) / sent(hybrid, ours) < 1.055
    needed = [of(hybrid, way)["temporaries"] for way in (plain, ours)]
    assert max(needed) < 1.001 * min(needed)
    for case in plain_jax.CASES:
        if "ZeRO-1" not in case.strategy and case.topology != "v5e:16x16":
            assert sent(case.name, alone) > max(sent(case.name, plain), sent(case.name, ours))
            assert "Muon" in case.strategy or sent(case.name, plain) < planned(case.name)
    whole = "FSDP 1B h100:8"
    assert 6.5 < sent(whole, alone) / planned(whole) < 7.5
    as_they_are = "FSDP, embedding and head as they are 1B h100:8"
    assert sent(as_they_are, ours) == sent(whole, plain)
    torus = "FSDP 8B, 4 layers v5e:4x4"
    assert of(torus, plain)["kinds"]["collective-permute"] > 1000
    assert of(torus, ours)["findings"] == []
    for zero in ("ZeRO-1 0.1B v5e:2x4", "ZeRO-1 1B h100:8"):
        assert sent(zero, ours) == sent(zero, plain) < planned(zero)
        assert set(of(zero, ours)["findings"]) == {"activation", "not-moved"}
    for case in plain_jax.CASES:
        if "Muon" in case.strategy:
            assert 2 * sent(case.name, ours) < sent(case.name, plain)
        if "HSDP" in case.strategy and case.topology != "v5e:16x16":
            assert sent(case.name, plain) < sent(case.name, ours)
    assert "reduction-inside-loop" in of("HSDP 1B h100:8", plain)["findings"]
