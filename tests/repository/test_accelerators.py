"""The command for machines with an accelerator works, and its page says what it measured."""

import os
import subprocess
import sys

from files import ROOT

from benchmarks import accelerators


def test_the_command_passes_on_cpus() -> None:
    command = ["make", "test-accelerators", f"PYTHON={sys.executable}", "ARGS=-p no:xdist"]
    variables = os.environ | {"TREESHARD_ACCELERATORS": "cpu", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
    assert "nothing is measured" in done.stdout


def test_the_page_has_the_section_of_the_results() -> None:
    assert accelerators.PAGE.read_text() == accelerators.page(), (
        "python -m benchmarks.accelerators --page"
    )


def test_a_section_shows_the_card_and_what_failed() -> None:
    results = {
        "device": "NVIDIA H100",
        "count": 1,
        "date": "2026-01-02",
        "with": {"jax": "0.11.2"},
        "cases": {
            "memory 1B": {"attached": {"planned": 3 * 2**29, "collectives": 0}},
            "disk": {"failed": "it took more than 90 s"},
        },
    }
    assert accelerators.section(results).splitlines() == [
        "Measured on 1 x NVIDIA H100 on 2026-01-02, with jax 0.11.2.",
        "",
        "| case | figures |",
        "| --- | --- |",
        "| memory 1B | attached: planned 1.50 GiB; collectives 0 |",
        "| disk | failed it took more than 90 s |",
    ]
