# Every target sets up what it needs: a fresh clone and one command are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs zoo fuzz bench bench-masks bench-ao bench-trace bench-cut bench-accuracy clean

help: ## explain every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install the library with everything that tests and benchmarks need
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[test,bench]'
	touch $@

demo: setup ## train two small classifiers, cut them to half, let them recover, write the reports
	$(BIN)/secateur demo

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, type-check, run the tests and the examples of every docstring
	$(BIN)/pytest -n 2

docs: setup ## build the documentation into site/
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

zoo: setup ## the whole model zoo (slow)
	$(BIN)/pytest -m 'zoo or not zoo' -n 2 -rP tests/zoo

fuzz: setup ## many thousands of random networks, cut and checked (slow)
	SECATEUR_FUZZ=5000 $(BIN)/pytest -n 2 tests/fuzz

bench: bench-masks bench-ao bench-trace bench-cut ## every benchmark, side by side with the peers

bench-masks: setup ## masks: torch.nn.utils.prune and ours, time and peak memory
	$(BIN)/python benchmarks/masks.py

bench-ao: setup ## sparsifiers: torch.ao.pruning and ours
	$(BIN)/python benchmarks/ao.py

bench-trace: setup ## tracing: beside the bare run and Torch-Pruning
	$(BIN)/python benchmarks/engine.py trace

bench-cut: setup ## cutting: beside Torch-Pruning
	$(BIN)/python benchmarks/engine.py cut

bench-accuracy: setup ## accuracy after a cut, beside Torch-Pruning: hours; ARGS=--quick or ARGS="--only resnet56" for less
	$(BIN)/pip install -q -c constraints.txt -e '.[accuracy]'
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build site src/*.egg-info
