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
        assert one["least_seconds"] == min(row["seconds"] for row in one["rows"])
        assert cases.holds(one), name
        assert len(one["rows"]) + len(one["lost"]) == one["candidates"]
        assert all(row["need"] <= row["capacity"] for row in one["rows"])


def test_the_results_name_no_path() -> None:
    assert "/tmp" not in cases.RESULTS.read_text()
    assert ".cache" not in cases.RESULTS.read_text()


def test_a_suggestion_that_is_slower_than_another_does_not_hold() -> None:
    one = {"suggested": {"seconds": 1.04}, "least_seconds": 1.0}
    assert not cases.holds(one)
    assert cases.holds({**one, "least_seconds": 1.01})
    rows = [
        {"strategy": "FSDP", "mesh": "fsdp=8", "planned": 8, "moved": 9, "findings": []},
        {"strategy": "DP", "mesh": "data=8", "planned": 8, "moved": 9, "findings": ["again"]},
    ]
    assert cases.unexplained({"rows": rows}) == ["FSDP fsdp=8"]
