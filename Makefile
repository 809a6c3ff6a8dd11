# One virtual environment in .venv; everything else runs inside it. Only compiling for absent GPUs has its own,
# which sees what is in .venv: where its packages are, JAX looks for a GPU at every start and complains.

VENV := .venv
AOT := .venv-aot
PYTHON := $(VENV)/bin/python
WORKDIR ?= runs/nemotron_h_tiny
CONFIG ?= experiments/configs/nemotron_h_tiny.py
AOT_CONFIG ?= experiments/configs/llama_tiny.py
TOPOLOGY ?= 1x1x4
CHIP ?= h200
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test aot lint clean
.DELETE_ON_ERROR:

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "train takes CONFIG=file, WORKDIR=folder and ARGS='--config.optimizer.learning_rate=1e-3 ...'"
	@echo "aot takes AOT_CONFIG=file, TOPOLOGY=1x1x8, CHIP=h100 and ARGS"

setup: $(VENV)/.installed ## make .venv with what training needs

train: setup ## train the small hybrid model, resuming what WORKDIR holds
	$(PYTHON) -m experiments.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: $(VENV)/.installed-dev ## run the tests (ARGS goes to pytest)
	$(PYTHON) -m pytest -n $(WORKERS) $(ARGS)

aot: $(AOT)/.installed ## compile a training step for GPUs that are not here
	$(AOT)/bin/python -m experiments.aot --config=$(AOT_CONFIG) --topology=$(TOPOLOGY) --chip=$(CHIP) $(ARGS)

lint: $(VENV)/.installed-dev ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean: ## remove the environments and all caches, keep runs/
	rm -rf $(VENV) $(AOT) .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment counts only once pip is in it, so that an interrupted attempt is repeated.
$(VENV)/.made:
	@found=$$(sh tools/find_python.sh) && echo "making $(VENV) with $$found" && "$$found" -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: requirements.txt $(VENV)/.made
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(AOT)/.installed: requirements-aot.txt $(VENV)/.installed-dev
	$(PYTHON) -m venv --clear $(AOT)
	$(PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $(AOT)/.shared
	cp $(AOT)/.shared $$($(AOT)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/shared.pth
	$(AOT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-aot.txt
	@touch $@
