"""safetensors files, saved and loaded by several processes."""

from tests.multiprocess import interchange_checks, launcher

launched, test_processes = launcher.tests_of(interchange_checks, processes=4, devices=2)
