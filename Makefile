# One virtual environment in .venv; everything else runs inside it.

VENV := .venv
PYTHON := $(VENV)/bin/python
WORKDIR ?= runs/nemotron_h_tiny
CONFIG ?= experiments/configs/nemotron_h_tiny.py
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test lint clean
.DELETE_ON_ERROR:

help: ## show these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "train takes CONFIG=file, WORKDIR=folder and ARGS='--config.optimizer.learning_rate=1e-3 ...'"

setup: $(VENV)/.installed ## make .venv with what training needs

train: setup ## train the small hybrid model, resuming what WORKDIR holds
	$(PYTHON) -m experiments.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: $(VENV)/.installed-dev ## run the tests (ARGS goes to pytest)
	$(PYTHON) -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/.installed-dev ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean: ## remove .venv and all caches, keep runs/
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis
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
