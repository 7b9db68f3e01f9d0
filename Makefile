# Every target sets up what it needs: a fresh clone and one command are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup test lint zoo bench bench-masks clean

help: ## explain every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install the library with everything that tests and benchmarks need
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test,bench]'
	touch $@

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, type-check, run the tests and the examples of every docstring
	$(BIN)/pytest -n 2

zoo: setup ## the whole model zoo (slow)
	$(BIN)/pytest -m zoo -s tests/zoo

bench: bench-masks ## every benchmark, side by side with the peers

bench-masks: setup ## masks: torch.nn.utils.prune and ours, time and peak memory
	$(BIN)/python benchmarks/masks.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
