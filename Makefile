# Two commands do everything on a fresh machine: `make search` and `make test`. Both create .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On two cores, the tests of a group in one process (`GROUPS` in tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n 2 --durations 60 --junitxml build/tests.xml

.PHONY: setup search test tests test-all check docs lock

setup: $(VENV)/.installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --upgrade-strategy only-if-needed --editable .
	touch $@

# With the test tools, at once: the engine asks for older numpy and pyarrow than the package alone would get.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --upgrade-strategy only-if-needed --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps crypten==0.4.1
	touch $(VENV)/.installed $@

# The package with what builds the site, if the test tools are not there.
$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	[ -e $(VENV)/.installed-dev ] || $(BIN)/python -m pip install --quiet --no-compile --upgrade-strategy only-if-needed --editable '.[docs]'
	touch $@

search: setup
	$(BIN)/python -m nas.search --budget-latency 5min --time-budget 14min

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# The site of the pages and the API reference, in build/site; a dead link or a name that is not there fails.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test: check docs tests

# The tests alone, also under another interpreter: make tests PYTHON=python3.13 VENV=.venv-3.13
tests: $(VENV)/.installed-dev
	$(PYTEST) -m 'not slow and not gpu'

test-all: check docs
	$(PYTEST) -m 'not gpu' --hypothesis-profile thorough

# Every package of '.[dev]' and CrypTen, with hashes, for Linux on x86_64 and Python 3.11 (SECURITY.md).
LOCK := build/uv/bin/uv pip compile --quiet --no-config --no-header --no-annotate --generate-hashes \
	--python-version 3.11.7 --python-platform x86_64-manylinux_2_28

lock:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install --quiet uv
	echo "# made by \`make lock\`" > requirements.lock
	$(LOCK) --extra dev pyproject.toml >> requirements.lock
	echo crypten==0.4.1 | $(LOCK) --no-deps - >> requirements.lock
