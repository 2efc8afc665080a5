"""What the page says of published runs is what `benchmarks/published_runs.py` compiled."""

import re

import pytest

from benchmarks import published_runs as runs
from treeshard.programs._cost import REACHED

RESULTS = runs.read_results()


def test_the_page_has_the_table_of_the_results() -> None:
    marks = f"<!-- {runs.MARKS} -->\n{runs.table(RESULTS)}<!-- end of {runs.MARKS} -->"
    assert marks in runs.PAGE.read_text(), "python -m benchmarks.published_runs --page"


@pytest.mark.parametrize("name", RESULTS)
def test_each_published_time_is_within_the_error_bar(name: str) -> None:
    one = RESULTS[name]
    assert one.least <= one.published <= one.most
    assert one.most == pytest.approx(one.seconds / REACHED)
    if name != runs.PSUM:
        assert one.published == pytest.approx(runs.RUNS[name].published_seconds)


def test_the_page_says_how_much_longer_published_runs_took() -> None:
    text = " ".join(runs.PAGE.read_text().split())
    least = float(re.search(r"no run reached less than (\d+)%", text)[1]) / 100
    assert least == REACHED <= min(one.reached for one in RESULTS.values())


def test_the_published_times_follow_from_the_published_speeds() -> None:
    # 16B, 12,288 tokens a chip: 6 operations of each weight and token, and attention.
    assert runs.RUNS["16b/v5e-256"].published_seconds == pytest.approx(10.3, abs=0.05)
    assert runs.RUNS["8b/v6e-8"].published_seconds == 3.443
