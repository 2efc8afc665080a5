"""Figures: how they are measured and written, and that pages quote those that were measured."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

import benchmarks.__main__ as bench
from benchmarks import _harness, bench_manual, bench_transfer, page
from benchmarks._harness import Figure, verdict

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))
MEASURED = page.load()

# ------------------------------------------------------------------ a figure


def test_a_ratio_is_taken_round_by_round() -> None:
    # All calls of the slow rounds are slow: the ratio is steady, the medians are not.
    ours, floor = Figure([1.0, 10.0, 2.0]), Figure([2.0, 20.0, 4.0])
    assert (ours / floor).samples == (0.5, 0.5, 0.5)


REACHED = [
    (1.0, None, "<= 1.05", ""),
    (14, None, ">= 15", "missed"),
    (2, None, "1", "missed"),
    (1.0, (0.9, 1.1), "<= 1.05", "unclear"),
    (1.1, (1.06, 1.2), "<= 1.05", "missed"),
]


def test_what_a_row_reached() -> None:
    for measured, spread, reach, word in REACHED:
        row = {"measured": measured, "spread": spread, "reach": reach}
        assert verdict(row) == word, row


# ------------------------------------------------------------------ running them


def test_failures_make_the_whole_fail(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(bench, "run", lambda *args: calls.append(args) or ["bench_rules"])
    assert bench.main(["--only", "bench_rules", "bench_import", "--rounds", "3"]) == 1
    assert calls == [(["bench_rules", "bench_import"], ["--rounds", "3"], None)]
    assert "1 failed: bench_rules" in capsys.readouterr().err
    monkeypatch.setattr(bench, "run", lambda *args: [])
    assert bench.main([]) == 0


# ------------------------------------------------------------------ the pages


def test_the_page_is_what_the_results_give() -> None:
    assert page.PAGE.read_text() == page.text(MEASURED), "python -m benchmarks.page"


def test_the_readme_quotes_what_was_measured() -> None:
    readme = page.README.read_text()
    quoted = re.findall(r"^\| \[?`(bench_\w+)`", readme, re.MULTILINE)
    assert {*quoted} == {claim.bench for claim in page.CLAIMS}
    assert {*quoted} <= {*BENCHMARKS}
    assert page.with_claims(readme, MEASURED) == readme, "python -m benchmarks.page"


@pytest.mark.skipif(not MEASURED, reason="`make bench` was never run here")
def test_every_benchmark_has_been_run() -> None:
    assert sorted(MEASURED) == BENCHMARKS


def test_results_name_no_machine_and_no_path() -> None:
    for name in MEASURED:
        text = (page.RESULTS / f"{name}.json").read_text()
        assert not re.search(r'"/\w|\s/(home|root|work|tmp)/|\\\\', text), name
        assert "absent" not in text, f"{name}: a peer is not installed: use `make bench`"


# ------------------------------------------------------------------ bytes that benchmarks measure


def test_gather_needs_the_trees_size_and_keeps_nothing() -> None:
    found = bench_transfer.run("memory", 1)
    assert found["peak"] <= 1.05
    assert found["held"] <= 0.02


def test_layers_gathered_one_by_one_take_little_memory(fsdp_mesh: jax.sharding.Mesh) -> None:
    with jax.numpy_rank_promotion("allow"):
        rows = [_harness._as_json(row) for row in bench_manual.memory(fsdp_mesh)]
    assert [verdict(row) for row in rows] == ["", ""], rows
