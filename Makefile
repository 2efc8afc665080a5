# `make demo` and `make test` work from a bare clone: each builds .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test soak lint bench docs clean

demo: .venv/installed
	$(BIN)/python examples/train_fsdp.py $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest $(ARGS)

# What takes minutes: every way of training on every mesh, planned against compiled.
soak: .venv/installed
	TREESHARD_SOAK=1 $(BIN)/python -m pytest tests/test_communication.py -k planned_is_compiled

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: .venv/installed-bench
	$(BIN)/python -m benchmarks

docs: .venv/installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv out site

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/pip install --quiet --editable ".[bench]"
	touch $@
