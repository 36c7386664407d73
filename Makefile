# `make` alone lists the targets. The first that needs it creates .venv with the versions of constraints.txt.

PYTHON ?= python3
JOBS ?= 2

ifneq ($(words $(CURDIR)),1)
$(error make cannot work in a directory with spaces in its path: $(CURDIR))
endif

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
SOURCES := mtkit tests recipes
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all test-smoke test-reliability coverage lint types format golden hooks clean distclean

help: ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-16s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(RUNTIME) ## create .venv with the mtkit command in it

demo: $(RUNTIME) ## run the whole pipeline on a small generated corpus, from text to a BLEU score
	@$(MAKE) --no-print-directory -f recipes/quickstart/Makefile results MTKIT=$(BIN)/mtkit PYTHON=$(CURDIR)/$(BIN)/python

test: $(DEV) ## run the tests
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow"

test-all: $(DEV) ## run the tests, the slow ones too
	OMP_NUM_THREADS=1 $(PYTEST)

test-smoke: $(DEV) ## kill, starve and damage runs for a minute and a half: nothing is lost (a part of `make test`)
	OMP_NUM_THREADS=1 $(PYTEST) -m smoke

test-reliability: $(DEV) ## the same with every fault, for about ten minutes (a part of `make test-all`)
	OMP_NUM_THREADS=1 $(PYTEST) -m "smoke or reliability"

coverage: $(DEV) ## run the tests and report the branch coverage, which must be at least 90 %
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" --cov --cov-report=term --cov-report=html

lint: $(DEV) ## check style and format with ruff
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(DEV) ## check the types with mypy
	$(BIN)/mypy

format: $(DEV) ## format the code and repair what ruff can repair
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

golden: $(DEV) ## accept the present commands and options as the pinned ones
	MTKIT_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/cli/test_app.py -k surface

hooks: $(DEV) ## let git check every commit
	$(BIN)/pre-commit install

clean: ## remove caches and build products
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov build dist
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)

$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mtkit needs Python 3.11 or later, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; \
		echo "Name another one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing mtkit and its libraries into $(VENV); the first time takes some minutes." >&2
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(DEV): $(RUNTIME)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
