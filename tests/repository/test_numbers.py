"""Figures: how they are measured and written, and that pages quote those that were measured."""

import re
from pathlib import Path

import jax
import pytest

from benchmarks import _harness, bench_manual, bench_transfer, page
from benchmarks._harness import verdict

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))
MEASURED = page.load()

# ------------------------------------------------------------------ a figure


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


# ------------------------------------------------------------------ the pages


def test_the_page_is_what_the_results_give() -> None:
    assert page.PAGE.read_text() == page.text(MEASURED), "python -m benchmarks.page"


def test_the_readme_quotes_what_was_measured() -> None:
    readme = page.README.read_text()
    assert readme.count("numbers/#") == len(page.CLAIMS)
    assert page.with_claims(readme, MEASURED) == readme, "python -m benchmarks.page"


@pytest.mark.skipif(not MEASURED, reason="`make bench` was never run here")
def test_every_benchmark_has_been_run() -> None:
    assert sorted(MEASURED) == BENCHMARKS


def test_results_name_no_machine_and_no_path() -> None:
    for name in MEASURED:
        text = (page.RESULTS / f"{name}.json").read_text()
        assert not re.search(r'"/\w|\s/(home|root|work|tmp)/|\\\\', text), name
        assert "absent" not in text, f"{name}: a peer is not installed: use `make bench`"


def test_the_page_on_several_hosts_quotes_what_was_counted() -> None:
    text = (ROOT / "docs/how-to/several-hosts.md").read_text().replace("`", "")
    found = {row["case"]: row for row in MEASURED["bench_scale"]["rows"]}
    for call in ("shard", "gather", "reshard", "save", "restore", "a step of jit_step"):
        cells = [call]
        for count in (2, 8, 32):
            costs = found[f"{call}, {count} processes: programs, first time"]["vs"]
            first, other = costs["bytes received by the first"], costs["by another"]
            cells.append(f"{first['measured']:,}, {other['measured']:,}")
        assert f"| {' | '.join(cells)} |" in text
    each = found["a meeting of 16,384 processes, received by the first, bytes for each"]
    assert f"process 0 receives {each['measured']:.0f} bytes from each" in " ".join(text.split())


# ------------------------------------------------------------------ bytes that benchmarks measure


def test_gather_needs_the_trees_size_and_keeps_no_copy(
    fsdp_mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_transfer, "BYTES", 2**28)
    found = bench_transfer.memory(fsdp_mesh)
    # A second copy would add 1. What the allocator keeps is more beside a small tree.
    assert found["peak"] <= 1.2
    assert found["held"] <= 0.2


def test_layers_gathered_one_by_one_take_little_memory(fsdp_mesh: jax.sharding.Mesh) -> None:
    with jax.numpy_rank_promotion("allow"):
        rows = [_harness._as_json(row) for row in bench_manual.memory(fsdp_mesh)]
    assert [verdict(row) for row in rows] == ["", ""], rows
