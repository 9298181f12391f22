# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo serve compare test lint format docs docs-tables release-check clean help

help: ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

demo: $(VENV)/.bench ## adapt small networks to a stream of corrupted digits, and write an HTML report
	$(BIN)/acclimate demo

serve: $(VENV)/.serve ## serve a small network that adapts to corrupted digits, with a page at http://127.0.0.1:8000/
	$(BIN)/acclimate serve --demo

compare: $(VENV)/.bench ## compare every method on a shorter stream of the same digits (some minutes)
	$(BIN)/acclimate compare

test: $(VENV)/.dev lint ## ruff, mypy and pytest
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## build the site, examples included, into build/site (some minutes; no network)
	rm -rf docs/api/generated
	$(BIN)/python -m sphinx -W --keep-going -q -j 1 -d build/site-cache docs build/site
	@echo "build/site/index.html"

docs-tables: $(VENV)/.dev ## write the tables and figures of README.md and docs/ from result files
	$(BIN)/python -m benchmarks.docs_tables

release-check: ## build sdist and wheel, install them into clean environments and use them (some minutes)
	$(PYTHON) .ci/release_check.py

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "acclimate needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	@echo "making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.%: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing acclimate[$*] into $(VENV): a few minutes the first time ..."
	@$(PIP) install -c constraints.txt -e '.[$*]'
	@if [ $* = dev ]; then $(PIP) install -c constraints.txt --no-deps imagecorruptions-imaug; fi  # its OpenCV needs libGL
	@touch $@

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build docs/gallery docs/api/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
