"""Training on several processes: the same numbers as on one device, and wrong ones found on all."""

from tests.multiprocess import launcher, right_results_checks, training_checks

two, test_two_processes = launcher.tests_of(training_checks, right_results_checks, timeout=200)
