"""Tables of pages, and what the text beside them says, are what scripts and results give."""

import json
from typing import Any

from benchmarks import llama_pods, plain_jax
from tools import beside_orbax
from treeshard.communication._differences import WORDS

# ------------------------------------------------------------------ checkpoints beside Orbax's


def test_the_page_beside_orbax_has_every_row_with_an_outcome_of_both() -> None:
    lines = beside_orbax.written().splitlines()
    rows = [[x.strip() for x in line.strip("|").split(" | ")] for line in lines if "| " in line]
    _, *rows = [row for row in rows if not set("".join(row)) <= set("-|")]
    assert [row[:2] for row in rows] == [[row.what, row.promise] for row in beside_orbax.ROWS]
    assert all(all(row[2:]) for row in rows)
    # One runs here: that which needs no other process and no restore.
    index = next(i for i, row in enumerate(beside_orbax.ROWS) if "replica" in row.what)
    said = beside_orbax.outcome(index, "treeshard")
    assert said == beside_orbax.ERROR
    assert rows[index][3] == said


# ------------------------------------------------------------------ Llamas on pods

PODS = json.loads(llama_pods.RESULTS.read_text())


def test_the_page_of_pods_has_the_table_of_the_results() -> None:
    for page, text in llama_pods.pages(PODS).items():
        assert page.read_text() == text, "python -m benchmarks.llama_pods --page"
    assert [llama_pods.Pod(*map(one.get, llama_pods.Pod._fields)) for one in PODS] == (
        llama_pods.PODS
    )
    for one in PODS:
        assert one["need"] <= one["capacity"]
        assert one["gathers_found"] == one["gathers_planned"]


# ------------------------------------------------------------------ beside plain JAX

PLAIN: dict[str, Any] = json.loads(plain_jax.RESULTS.read_text())


def test_the_page_of_pods_has_the_table_beside_plain_jax() -> None:
    mark = plain_jax.MARK
    table = f"<!-- {mark} -->\n{plain_jax.table(PLAIN)}<!-- end of {mark} -->"
    assert table in plain_jax.PAGE.read_text(), "python -m benchmarks.plain_jax --page"
    cases = {case.name: case for case in plain_jax.CASES}
    assert list(PLAIN) == list(cases)
    for name, result in PLAIN.items():
        assert {field: result[field] for field in cases[name]._fields} == cases[name]._asdict()
        codes = {code for way in result["ways"].values() for code in way.get("findings", ())}
        assert codes <= WORDS.keys()
    assert len({json.dumps(result["with"]) for result in PLAIN.values()}) == 1


def sent(name: str, way: str) -> int:
    return PLAIN[name]["ways"][way]["sent"]


def test_what_the_text_below_the_table_beside_plain_jax_says() -> None:
    _, plain, ours = plain_jax.WAYS
    pod, hybrid = "FSDP 8B v5e:16x16", "HSDP 8B v5e:16x16"
    assert 1.415 < sent(pod, plain) / sent(pod, ours) < 1.425
    assert 1.045 < sent(hybrid, plain) / sent(hybrid, ours) < 1.055
    for strategy in ("FSDP", "HSDP"):
        assert sent(f"{strategy} 1B h100:8", plain) < sent(f"{strategy} 1B h100:8", ours)
        assert PLAIN[f"{strategy} 1B h100:8"]["ways"][ours]["findings"] == []
    without = "FSDP, embedding and head as they are 1B h100:8"
    assert sent(without, ours) == sent("FSDP 1B h100:8", plain)
