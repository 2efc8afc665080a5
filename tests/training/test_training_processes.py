"""Training on two processes with four devices each."""

import pytest

from tests.multiprocess import launcher, training_checks


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launcher.launch(training_checks, tmp_path_factory.mktemp("training"), timeout=200)


@pytest.mark.parametrize("check", launcher.checks_of(training_checks))
def test_two_processes(check, two) -> None:
    two.assert_passed(check)
