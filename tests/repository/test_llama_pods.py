"""What the page about pods says of Llamas is what `benchmarks/llama_pods.py` compiled."""

import json
from typing import Any

from benchmarks import llama_pods

RESULTS = json.loads(llama_pods.RESULTS.read_text())


def of(size: str, mesh: str) -> dict[str, Any]:
    [one] = [one for one in RESULTS if (one["size"], one["mesh"]) == (size, mesh)]
    return one


def test_a_page_has_the_table_of_the_results() -> None:
    for page, text in llama_pods.pages(RESULTS).items():
        assert page.read_text() == text, "python -m benchmarks.llama_pods --page"


def test_each_program_has_its_result() -> None:
    assert [llama_pods.Pod(*map(one.get, llama_pods.Pod._fields)) for one in RESULTS] == (
        llama_pods.PODS
    )
    assert len({json.dumps(one["with"]) for one in RESULTS}) == 1


def test_what_the_text_beside_the_table_says() -> None:
    for one in RESULTS:
        assert one["need"] <= one["capacity"]
        assert one["gathers_found"] == one["gathers_planned"]
    whole, halves = of("8b", "fsdp=256"), of("8b", "data=4,fsdp=64")
    for scattered in (whole, halves, of("70b", "fsdp=512")):
        assert scattered["sends"] <= 1.01 * scattered["sends_planned"]
    assert of("8b", "fsdp=64,tensor=4")["findings"] == ["all-reduce", "activation"]
    assert halves["need"] > whole["need"]
    used = RESULTS[0]["with"]
    page = llama_pods.PAGE.read_text()
    assert f"with JAX {used['jax']} and libtpu {used['libtpu']}:" in page
