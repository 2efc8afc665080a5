"""Figures: how they are measured and written, and that pages quote those that were measured."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import benchmarks.__main__ as bench
from benchmarks import _harness, bench_manual, bench_transfer, page
from benchmarks._harness import Figure, Row, ratios, report, shown, verdict

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))
MEASURED = page.load()

# ------------------------------------------------------------------ a figure


def test_a_figure_is_the_median_and_keeps_what_was_measured() -> None:
    figure = Figure([3.0, 1.0, 2.0, 10.0, 4.0])
    assert figure == 3.0
    assert figure.spread == (2.0, 4.0)
    assert Figure([7.0]).spread is None


def test_a_ratio_is_taken_round_by_round() -> None:
    # All calls of the slow rounds are slow: the ratio is steady, the medians are not.
    ours, floor = Figure([1.0, 10.0, 2.0]), Figure([2.0, 20.0, 4.0])
    assert (ours / floor).samples == (0.5, 0.5, 0.5)
    assert (ours + floor).samples == (3.0, 30.0, 6.0)
    assert (ours * 1e3).samples == (1e3, 1e4, 2e3)
    # Of other rounds: there is nothing to set side by side.
    assert (ours / Figure([4.0, 4.0])).samples == (0.25, 2.5, 0.5)


def test_calls_are_interleaved_after_a_warm_up() -> None:
    seen: list[str] = []
    found = ratios({"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}, "a", rounds=2)
    assert [*map(sorted, zip(seen[::2], seen[1::2], strict=True))] == [["a", "b"]] * 3
    assert found["a"] == 1.0
    assert [len(figure.samples) for figure in found.values()] == [2, 2]


def test_digits() -> None:
    written = [shown(figure) for figure in (0.4567, 2, 98.76, 4549, 1.02e-06)]
    assert written == ["0.457", "2", "98.8", "4,549", "1.02e-06"]


REACHED = [
    (1.0, None, "<= 1.05", ""),
    (1.06, None, "<= 1.05", "missed"),
    (1e-4, None, "<= 2e-05", "missed"),
    (14, None, ">= 15", "missed"),
    (1, None, "< 1", "missed"),
    (2, None, "1", "missed"),
    (1, None, "1", ""),
    (9, None, "", ""),
    (1.0, (0.9, 1.05), "<= 1.05", ""),
    (1.0, (0.9, 1.1), "<= 1.05", "unclear"),
    (1.1, (1.0, 1.2), "<= 1.05", "unclear"),
    (1.1, (1.06, 1.2), "<= 1.05", "missed"),
    (16, (14, 17), ">= 15", "unclear"),
]


def test_what_a_row_reached() -> None:
    for measured, spread, reach, word in REACHED:
        row = {"measured": measured, "spread": spread, "reach": reach}
        assert verdict(row) == word, row


def test_a_reach_is_a_figure() -> None:
    with pytest.raises(ValueError, match="'2: linear' is not a figure to reach"):
        verdict({"measured": 9, "spread": None, "reach": "2: linear"})


ROWS = [
    Row("a ratio", Figure([0.5, 0.25, 1.0]), "<= 0.4", {"theirs": Figure([2.0, 4.0, 3.0])}),
    Row("a count", 12_345, "", "in words"),
]


def test_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "results" / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench_x", "--rounds", "3", f"--save={file}"])
    monkeypatch.setattr(_harness, "_setting", lambda packages: {"python": "3", packages[0]: "1"})
    report("Two things", ROWS, ("jax",))
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "Two things",
        "case    | measured | quartiles     | reach           | vs.",
        "------- | -------- | ------------- | --------------- | ---------------------",
        "a ratio | 0.5      | 0.375 to 0.75 | <= 0.4, unclear | theirs 3 (2.5 to 3.5)",
        "a count | 12,345   |               |                 | in words",
        "python 3, jax 1",
    ]
    saved = file.read_text()
    assert len(saved.splitlines()) == 11  # a line a row
    found = json.loads(saved)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert "commit" in found
    assert found["command"].endswith("--rounds 3")
    assert found["rows"][0] == {
        "case": "a ratio",
        "measured": 0.5,
        "spread": [0.375, 0.75],
        "rounds": 3,
        "reach": "<= 0.4",
        "vs": {"theirs": {"measured": 3, "spread": [2.5, 3.5], "rounds": 3}},
    }

    monkeypatch.setattr(sys, "argv", ["bench_x", "--json"])
    report("Two things", ROWS)
    assert json.loads(capsys.readouterr().out)["rows"] == found["rows"]


# ------------------------------------------------------------------ running them


def test_one_that_fails_stops_no_other(tmp_path: Path, capfd: Any) -> None:
    names = ["bench_of_nothing", "bench_plan_scale"]
    assert bench.run(names, ["--rounds=2"], tmp_path) == ["bench_of_nothing"]
    printed = capfd.readouterr()
    assert "No module named benchmarks.bench_of_nothing" in printed.err
    assert "to JSON and back" in printed.out
    assert [*page.load(tmp_path)] == ["bench_plan_scale"]
    result = page.load(tmp_path)["bench_plan_scale"]
    assert result["command"] == "python -m benchmarks.bench_plan_scale --rounds=2"
    assert result["rows"][0]["rounds"] == 2
    assert str(tmp_path) not in json.dumps(result)
    [peak] = [row for row in result["rows"] if row["case"].startswith("peak memory")]
    assert peak["measured"] < 0.5  # GiB: a plan of 405B parameters fits anywhere


def test_failures_make_the_whole_fail(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(bench, "run", lambda *args: calls.append(args) or ["bench_rules"])
    assert bench.main(["--only", "bench_rules", "bench_import", "--rounds", "3"]) == 1
    assert calls == [(["bench_rules", "bench_import"], ["--rounds", "3"], None)]
    assert "1 failed: bench_rules" in capsys.readouterr().err
    monkeypatch.setattr(bench, "run", lambda *args: [])
    assert bench.main([]) == 0


def test_a_name_that_there_is_not(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--only", "bench_rule"])
    assert "no benchmark 'bench_rule'. Did you mean 'bench_rules'?" in capsys.readouterr().err


# ------------------------------------------------------------------ the pages


def result_of(*rows: Row, **on: str) -> dict[str, Any]:
    made = [_harness._as_json(row) for row in rows]
    head = {"title": "Title", "command": "python -m benchmarks.bench_x"}
    return {**head, "commit": "0123456789", "date": "2026-01-31", "rows": made, "on": on}


def test_the_page_is_what_the_results_give() -> None:
    assert page.PAGE.read_text() == page.text(MEASURED), "python -m benchmarks.page"


def made_up() -> dict[str, Any]:
    """Results for all that the README quotes."""
    found: dict[str, Any] = {}
    for i, claim in enumerate(page.CLAIMS):
        result = found.setdefault(claim.bench, result_of())
        for j, case in enumerate([claim.case, *claim.others.values()]):
            vs = {} if claim.others or claim.ratio_to else {"theirs": 1 + i}
            result["rows"].append(_harness._as_json(Row(case, 0.5 - i / 100 - j / 10, vs=vs)))
    return found


def test_the_readmes_table_is_written() -> None:
    readme = f"# x\n\n{page.HEAD}| old | old | 0 | 1 | x |\n| old | | | | |\n\nmore\n"
    written = page.with_claims(readme, made_up())
    lines = written.splitlines()
    assert lines[4] == (
        f"| [`bench_optimizer_state`]({page.SITE}numbers/#bench_optimizer_state) |"
        " optax states placed rightly, of 135 | 50% | `optax.tree_map_params` 40%, rules 30% |"
        " treeshard |"
    )
    assert lines[5] == (
        f"| [`bench_transfer`]({page.SITE}numbers/#bench_transfer) |"
        " 1,000 leaves sharded and gathered, s | 0.49 | theirs 2 | treeshard |"
    )
    assert len(lines) == 4 + len(page.CLAIMS) + 2
    assert lines[-1] == "more"
    found = made_up()
    found["bench_transfer"]["rows"][0] |= {"reach": "<= 0.4"}
    found["bench_checkpoint"]["rows"][0] |= {"reach": "<= 0.48", "spread": [0.4, 0.6]}
    lines = page.with_claims(readme, found).splitlines()
    assert [line.split(" | ")[2] for line in lines[4:7]] == [
        "50%",
        "0.49 (missed)",
        "0.48 (unclear)",
    ]
    found["bench_checkpoint"]["rows"][0] |= {"measured": 1.3}
    assert "| Orbax |" in page.with_claims(readme, found)
    assert page.with_claims(written, made_up()) == written
    assert page.with_claims(readme, {}) == readme  # what was not measured is not touched


def test_only_what_is_compared_slower_or_missed_is_on_the_page() -> None:
    rows = [
        Row("a count", 3),
        Row("a target", 1, "1"),
        Row("a missed target", 2, "1"),
        Row("a time, x theirs", 1, "<= 2"),
        Row("a longer time, x theirs", 1.5, "<= 2"),
        Row("beside", 1, "<= 2", {"theirs": 2}),
        Row("beside, without a target", 1, "", {"theirs": 2}),
    ]
    written = page.text({"bench_import": result_of(*rows, python="3.11")})
    assert re.findall(r"^\| (a .+?|beside) \|", written, re.MULTILINE) == [
        "a missed target",
        "a longer time, x theirs",
        "beside",
    ]
    assert "bench_import" not in page.text({"bench_import": result_of(rows[0], python="3.11")})
    # What the README quotes is on the page to which it links.
    claim = page.CLAIMS[-1]
    quoted = {claim.bench: result_of(Row(claim.case, 1), python="3.11")}
    assert f"| {claim.case} |" in page.text(quoted)


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


def test_a_second_copy_on_the_arrays_would_be_seen() -> None:
    found = bench_transfer.run("memory_of_device_get", 1)
    assert found["held"] > 0.9


def test_layers_gathered_one_by_one_take_little_memory(fsdp_mesh: jax.sharding.Mesh) -> None:
    with jax.numpy_rank_promotion("allow"):
        rows = [_harness._as_json(row) for row in bench_manual.memory(fsdp_mesh)]
    assert [verdict(row) for row in rows] == ["", ""], rows
