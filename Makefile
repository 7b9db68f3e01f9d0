# Every target sets up what it needs: a fresh clone and one command are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
OLDEST := .venv-oldest
ECOSYSTEM := .venv-ecosystem
LLAMA  := -DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF -DLLAMA_BUILD_COMMON=OFF  # what the tests need of llama.cpp, which is compiled

export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest ecosystem lint docs zoo fuzz mutations bench bench-masks bench-ao bench-trace bench-cut bench-scale bench-accuracy bench-recovery bench-sparse-training clean

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
	$(BIN)/pytest -n 2 --dist worksteal

test-oldest: $(OLDEST)/.ready ## run the tests with the oldest torch that the library takes (installs several GB)
	$(OLDEST)/bin/pytest -n 2 --dist worksteal
$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install -q -c constraints-oldest.txt -e '.[test,bench]'
	touch $@

ecosystem: $(ECOSYSTEM)/.ready ## cut models in the libraries around: PEFT, Lightning, diffusers, … (an environment of its own)
	YOLO_OFFLINE=1 YOLO_AUTOINSTALL=false $(ECOSYSTEM)/bin/pytest -m ecosystem -rs tests/ecosystem
$(ECOSYSTEM)/.ready: pyproject.toml constraints.txt requirements-ecosystem.txt
	$(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install -q -c constraints.txt -e '.[test]'
	CMAKE_ARGS='$(LLAMA)' $(ECOSYSTEM)/bin/pip install -q --no-deps -r requirements-ecosystem.txt
	rm -f $(ECOSYSTEM)/lib/python*/site-packages/torchaudio/lib/*.so # linked to CUDA; its models do without
	touch $@

docs: setup ## build the documentation into site/
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

zoo: setup ## the whole model zoo, and every test that is too slow for `make test`
	$(BIN)/pytest -m 'zoo or not zoo' -n 2 -rP tests/zoo
	$(BIN)/pytest -m 'slow and not zoo' -n 2

fuzz: setup ## many thousands of new random networks and layouts; what fails is kept in tests/fuzz/cases (slow)
	SECATEUR_FUZZ=5000 $(BIN)/pytest --timeout 36000 -n 2 tests/fuzz tests/axes

mutations: setup ## break each mechanism on purpose, one at a time, and see whether a test notices (slow)
	$(BIN)/python tools/mutations.py

bench: bench-masks bench-ao bench-trace bench-cut ## every benchmark, side by side with the peers

bench-masks: setup ## masks: torch.nn.utils.prune and ours, time and peak memory
	$(BIN)/python benchmarks/masks.py

bench-ao: setup ## sparsifiers: torch.ao.pruning and ours
	$(BIN)/python benchmarks/ao.py

bench-trace: setup ## tracing: beside the bare run and Torch-Pruning
	$(BIN)/python benchmarks/engine.py trace
	$(BIN)/python benchmarks/engine.py variants

bench-cut: setup ## cutting: beside Torch-Pruning
	$(BIN)/python benchmarks/engine.py cut

bench-scale: setup ## plans of models with up to 671 billion parameters, and checkpoints cut and compressed in their files
	$(BIN)/python benchmarks/scale.py

bench-accuracy: setup ## accuracy after a cut, beside Torch-Pruning: hours; ARGS=--quick or ARGS="--only resnet56" for less
	$(BIN)/pip install -q -c constraints.txt -e '.[accuracy]'
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

bench-recovery: setup ## how much of a cut comes back in a given time, beside Torch-Pruning; ARGS="--minutes 15"
	$(BIN)/pip install -q -c constraints.txt -e '.[accuracy]'
	$(BIN)/python benchmarks/recovery.py $(ARGS)

bench-sparse-training: setup ## RigL, SET, GMP and a static mask at equal steps on Fashion-MNIST
	$(BIN)/python benchmarks/sparse_training.py $(ARGS)

.PHONY: bench-sparse
bench-sparse: setup ## zeros in one shot beside SparseGPT, Wanda, RIA, magnitude: hours; ARGS="speed" or ARGS="vision" for a part
	$(BIN)/pip install -q -c constraints.txt -e '.[accuracy]'
	$(if $(ARGS),$(BIN)/python -m benchmarks.sparse $(ARGS),for part in speed vision language; do $(BIN)/python -m benchmarks.sparse $$part || exit 1; done)

.PHONY: dist
dist: setup ## build the wheel and the source package; install the wheel elsewhere and run the README's example
	rm -rf build dist
	$(BIN)/pip install -q -c constraints.txt build
	$(BIN)/python -m build
	$(BIN)/python tools/check_dist.py dist/*.whl

clean: ## remove the virtual environment, caches and what was built
	rm -rf $(VENV) $(OLDEST) $(ECOSYSTEM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site src/*.egg-info
