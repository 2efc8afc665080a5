# `make demo` and `make test` work from a bare clone, in one .venv: the demo installs less into it.
PYTHON ?= python3
BIN := .venv/bin
# A file's tests share a worker, and files begin in the order of tests/conftest.py. Some tests wait,
# so two cores serve three workers.
PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-floor test-newest test-targets test-accelerators test-peers soak lint bench docs dist release clean

demo: .venv/installed-demo
	$(BIN)/python examples/train_fsdp.py $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# What takes many minutes: every way of training on every mesh, planned against compiled; ten times
# as many killed processes and damaged checkpoints; runs of four processes that are preempted, and
# every call left in every way; 32 processes that lose one; every file call that fails once; power cuts (as root,
# on Linux); an object store.
soak: .venv/installed
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/communication/test_comparison.py -k moves_what_is_planned
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/checkpoint/test_killed_saves.py tests/checkpoint/test_damages.py tests/checkpoint/test_power_loss.py
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/checkpoint/test_failing_calls.py
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/checkpoint/test_preemption.py tests/core/test_processes.py tests/core/test_schedules.py
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/core/test_lost_processes.py
	$(BIN)/pip install --quiet -e ".[stores]"
	$(BIN)/python -m pytest tests/checkpoint/test_object_store.py
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/training/test_explicit_axes.py tests/training/test_waiting.py
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/product/test_examples.py -k train_fsdp

# The tests on the oldest versions that pyproject.toml allows.
test-floor: .venv-floor/installed
	TREESHARD_ANNOTATIONS=1 .venv-floor/bin/python -m pytest $(PARALLEL) $(ARGS)

# The tests on Python 3.13 and the newest releases of everything: it shows first what JAX changes.
# `make clean` before it installs them anew; PYTHON_NEWEST=/path/to/python chooses the Python.
test-newest: .venv-newest/installed
	TREESHARD_ANNOTATIONS=1 .venv-newest/bin/python -m pytest $(PARALLEL) $(ARGS)

# Programs compiled for TPUs and GPUs, with their compilers (1.2 GB) and without such devices.
test-targets: .venv-targets/installed
	JAX_PLATFORMS=cpu TREESHARD_TARGETS=1 .venv-targets/bin/python -m pytest --numprocesses 2 \
		tests/targets $(ARGS)

# On attached GPUs or TPUs, with the Python of the machine: nothing is installed, and warnings of its
# packages are no errors. The measurements go to SAVE, also where a test fails.
# TREESHARD_ACCELERATORS=cpu runs the same on CPUs, without the measurements.
SAVE ?= benchmarks/accelerators.json
test-accelerators:
	PYTHONPATH=. $(PYTHON) -m pytest --confcutdir=tests/accelerators -p no:cacheprovider -W default \
		--durations=5 tests/accelerators $(ARGS); passed=$$?; \
	PYTHONPATH=. $(PYTHON) -m benchmarks.accelerators --save $(SAVE) && exit $$passed

# Random inputs beside eformer and scalax, in the versions of `make bench`.
test-peers: .venv-bench/installed
	.venv-bench/bin/python -m pytest tests/peers $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python tools/large_binaries.py

# Measures, and writes benchmarks/results, docs/numbers.md and the README's table.
# `make bench ARGS="--only bench_rules"` measures a part.
bench: .venv-bench/installed
	.venv-bench/bin/python -m benchmarks --save $(ARGS)

# Writes the pictures anew, and the site into site/.
docs: .venv/installed-docs
	$(BIN)/python -m tools.draw_pictures
	$(BIN)/python -m tools.draw_architecture
	$(BIN)/mkdocs build --strict

# The wheel and the source, into dist/.
dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# Checks the version, builds, tries the wheel in a new environment, and tags; `ARGS=--push` publishes.
release: .venv/installed
	$(BIN)/python tools/release.py $(ARGS)

clean:
	rm -rf .venv .venv-bench .venv-floor .venv-newest .venv-python .venv-targets out site

.venv/installed-demo: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --editable ".[checkpoint,examples,show]"
	touch $@

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch .venv/installed-demo $@

.venv-floor/installed: pyproject.toml tools/floor.py
	$(PYTHON) -m venv .venv-floor
	$(PYTHON) tools/floor.py > .venv-floor/floor.txt
	.venv-floor/bin/pip install --quiet --constraint .venv-floor/floor.txt --editable ".[dev]"
	touch $@

.venv-newest/installed: pyproject.toml tools/newest_python.py
	python=$$($(PYTHON) tools/newest_python.py) && $$python -m venv --clear .venv-newest
	.venv-newest/bin/pip install --quiet --upgrade --upgrade-strategy eager --editable ".[dev]"
	.venv-newest/bin/pip list
	touch $@

.venv-targets/installed: pyproject.toml
	$(PYTHON) -m venv .venv-targets
	.venv-targets/bin/pip install --quiet --editable ".[dev,tpu,cuda]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

.venv-bench/installed: pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --editable ".[bench]"
	touch $@
