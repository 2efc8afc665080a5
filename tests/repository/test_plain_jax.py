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
