"""Training on two processes with four devices each."""

from tests.multiprocess import launcher, training_checks

two, test_two_processes = launcher.tests_of(training_checks, timeout=200)
