"""The decision table of the docs is what `benchmarks/suggest_cases.py` compiled."""

import json

from benchmarks import suggest_cases as cases

RESULTS = json.loads(cases.RESULTS.read_text())


def test_the_page_has_the_table_of_the_results() -> None:
    assert f"<!-- table -->\n{cases.table(RESULTS)}<!-- end of table -->" in cases.PAGE.read_text()


def test_each_result_is_of_a_case_and_is_complete() -> None:
    known = {cases.name_of(case): case for case in cases.CASES}
    assert len(known) == 12
    assert RESULTS.keys() <= known.keys()
    for name, one in RESULTS.items():
        assert (one["topology"], one["batch"]) == (known[name].topology, known[name].batch)
        assert one["suggested"] in one["rows"]
        assert cases.unexplained(one) == []
        assert one["least_exposed"] == min(row["exposed"] for row in one["rows"])
        assert len(one["rows"]) + len(one["lost"]) == one["candidates"]
        assert all(row["need"] <= row["capacity"] for row in one["rows"])


def test_the_results_name_no_path() -> None:
    assert "/tmp" not in cases.RESULTS.read_text()
    assert ".cache" not in cases.RESULTS.read_text()


def test_a_suggestion_that_exposes_more_than_another_does_not_hold() -> None:
    one = {"suggested": {"exposed": 106}, "least_exposed": 100}
    assert not cases.holds(one)
    assert cases.holds({**one, "least_exposed": 101})
    rows = [
        {"strategy": "FSDP", "mesh": "fsdp=8", "planned": 8, "moved": 9, "findings": []},
        {"strategy": "DP", "mesh": "data=8", "planned": 8, "moved": 9, "findings": ["again"]},
    ]
    assert cases.unexplained({"rows": rows}) == ["FSDP fsdp=8"]
