# `make test` is all that a fresh machine needs: it makes the environment, installs, lints, type-checks and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test test-gpu torture demo lint types unit format clean

test: lint types unit

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

types: $(VENV)/installed
	$(BIN)/mypy

# Two processes of one thread each, theirs too: more would wait for one another on two cores. A file stays with one of
# them: what its tests share is then made once.
unit: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -q

# Kills, damaged folders and random calls, the same ones every time: a quarter of an hour. Writes torture.md.
torture: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture --out torture.md

# Uses the python at hand: a GPU machine has its own build of torch.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu tests
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/kernels/test_noised_hinge.py tests/kernels/test_smooth_hinge.py \
		tests/program/models/test_densenet_kernels.py

# Four losses on the built-in data: a table, and a page at demo/report.html.
demo: $(VENV)/installed
	$(BIN)/shortlist demo

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
