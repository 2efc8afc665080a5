"""safetensors files, saved and loaded by several processes."""

import pytest

from tests.multiprocess import interchange_checks, launcher


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Runs the checks on two processes of four devices, or on four of two."""
    verdicts = {}

    def launch(processes: int) -> launcher.Verdicts:
        if processes not in verdicts:
            directory = tmp_path_factory.mktemp(f"interchange-{processes}")
            module = interchange_checks
            devices = 8 // processes
            verdicts[processes] = launcher.launch(
                module, directory, processes=processes, devices=devices
            )
        return verdicts[processes]

    return launch


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("check", launcher.checks_of(interchange_checks))
def test_processes(processes, check, launched) -> None:
    launched(processes).assert_passed(check)
