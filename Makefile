# `make test` is all that a fresh machine needs: it creates the environment, installs, lints, checks types and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: test test-gpu torture demo docs docs-serve docs-version notebook lint types unit format clean

test: lint types docs unit

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	PYTHONPATH=src $(BIN)/lint-imports --no-logo

types: $(VENV)/installed
	$(BIN)/mypy

# The site, in build/site. A warning is an error, unless --quiet hides it. Material announces its end, in May 2027, at
# every build: until another generator is chosen, nobody has to read that each time. mike calls mkdocs by its name.
FOR_SITE := NO_MKDOCS_2_WARNING=1 PYTHONPATH=src PATH="$(abspath $(BIN)):$$PATH"

docs: $(VENV)/installed
	$(FOR_SITE) mkdocs build

docs-serve: $(VENV)/installed
	$(FOR_SITE) mkdocs serve --no-strict

# Commits the site of a version to the branch gh-pages, beside the others: make docs-version VERSION=0.1.0
docs-version: $(VENV)/installed
	$(FOR_SITE) mike deploy --update-aliases $(VERSION) latest
	$(FOR_SITE) mike set-default latest

# Two processes with one thread each: more would compete for two cores. All tests of a file run in the same process, so
# that what they share is made once.
unit: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -q

# Kills, damaged folders and random calls, the same each time: a quarter of an hour. Writes torture.md.
torture: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.torture --out torture.md

# Uses the machine's own Python, which has torch for its GPU. First the tests that need a GPU, then those that otherwise
# run in Triton's interpreter.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu $$(grep -rl 'mark\.gpu' tests)
	PYTHONPATH=src $(PYTHON) -m pytest -q tests/kernels tests/program/models/test_densenet_kernels.py

# Trains four losses on the built-in data; prints a table and writes demo/report.html.
demo: $(VENV)/installed
	$(BIN)/shortlist demo

# Executes the notebook of examples/ and stores its outputs.
notebook: $(VENV)/installed
	$(BIN)/python -m tests.support.notebooks

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
