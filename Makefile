# Two commands do everything on a fresh machine: `make search` and `make test`. Both create .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup search test test-all check

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed --editable '.[dev]'
	touch $@

search: setup
	$(BIN)/python -m nas.search --budget-latency 5min --time-budget 14min

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-all: check
	$(BIN)/python -m pytest -m 'not gpu'
