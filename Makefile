# Needs git, make and Python 3.11 or later with the venv module. Everything else goes into .venv of this
# clone; the engine environment and the test model go into the user cache (~/.cache/kvlease).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
GENERATED := $(VENV)/.generated
PROTO_FILES := $(shell find protos -name '*.proto' 2>/dev/null)
PYTEST_FLAGS ?=

.PHONY: help up test test-all soak check bench engine-env protos docs examples format clean

help: ## Show the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml protos/hatch_build.py
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvlease needs Python 3.11 or later; name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "==> Setting up $(VENV): downloads about 150 MB from PyPI, about one minute"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.8'
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -r pyproject.toml \
	  --extra services --extra embedded --extra dev
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps -e .
	@touch $(INSTALLED) $(GENERATED)

$(GENERATED): $(INSTALLED) $(PROTO_FILES) protos/hatch_build.py
	@$(BIN)/python protos/hatch_build.py
	@touch $(GENERATED)

protos: $(INSTALLED) ## Generate the Python code of the .proto files
	$(BIN)/python protos/hatch_build.py
	@touch $(GENERATED)

engine-env: $(GENERATED) ## Build the environment of the real vLLM engines (user cache)
	$(BIN)/python -m kvlease.dev.engine_env

up: $(GENERATED) ## Start the whole system on this machine and hold a conversation through it
	@$(BIN)/kvlease dev

check: $(GENERATED) ## Format, lint, types, layers, protos and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pyright --warnings
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against tests/upgrade/v0_1.binpb
	$(BIN)/python -m pytest -m "not polyglot and not engine and not slow and not soak" $(PYTEST_FLAGS)

test: $(GENERATED) engine-env ## Set up everything and run the tests, real engines included
	@if [ -z "$$CI" ] && ! command -v go >/dev/null; then \
	  echo "==> Go is not installed: the tests against a real Jaeger, which is built with it, are left out"; \
	  set -x; exec $(BIN)/python -m pytest -m "not jaeger and not slow and not soak" $(PYTEST_FLAGS); \
	else \
	  set -x; exec $(BIN)/python -m pytest -m "not slow and not soak" $(PYTEST_FLAGS); \
	fi

test-all: $(GENERATED) engine-env ## The same, and the tests that take long; needs Go
	$(BIN)/python -m pytest -m "not soak" $(PYTEST_FLAGS)

soak: $(GENERATED) engine-env ## 300 turns over 30 conversations on real engines, each compared with a cold run
	$(BIN)/python -m pytest -m soak -s $(PYTEST_FLAGS)

docs: $(GENERATED) ## Write the reference pages: configuration and API
	$(BIN)/python docs/generate.py

examples: $(GENERATED) ## Build the examples in Python, Go, TypeScript, Java and Rust
	$(MAKE) -C examples

format: $(INSTALLED) ## Format the code and apply the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(GENERATED) engine-env ## Measure what retaining costs an idle decode engine (tests/bench has more)
	$(BIN)/python -m tests.bench.idle_decode

clean: ## Remove what was built in this clone (the user cache stays; see ~/.cache/kvlease)
	rm -rf $(VENV) build dist services/kvlease/v1 services/kvlease/etcd
	rm -rf examples/*/gen examples/typescript/dist examples/typescript/node_modules examples/java/target
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find services connector tests -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
