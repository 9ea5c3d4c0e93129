# `make demo` and `make test` need nothing but Python 3.11 or newer: they make .venv themselves,
# and again when pyproject.toml or constraints.txt have changed.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.made
FASHION := /usr/share/datasets/fashion-mnist

.PHONY: demo test lint format environment constraints data clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         train on the shipped text with five methods and compare them'
	@echo 'make test         the whole test suite'
	@echo 'make lint         ruff and mypy'
	@echo 'make format       let ruff rewrite the sources'
	@echo 'make data         install Fashion-MNIST, for recipes/fashion.toml (Debian, as root)'
	@echo 'make environment  only make .venv, with the versions of constraints.txt'
	@echo 'make constraints  pin what is installed in .venv now'

demo: $(STAMP)
	$(BIN)/gossamer demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

environment: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Gossamer needs Python 3.11 or newer; $(PYTHON) is' "$$($(PYTHON) --version 2>&1)."; \
	  echo 'Name another one: make PYTHON=/path/to/python3.12 ...'; exit 1; } >&2
	@echo 'Making .venv (torch is large: this takes a few minutes the first time)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

data:
	@if [ -d $(FASHION) ]; then echo 'Fashion-MNIST is installed in $(FASHION).'; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get install -y --no-install-recommends dataset-fashion-mnist || \
	  { apt-get update && apt-get install -y --no-install-recommends dataset-fashion-mnist; }; \
	else \
	  echo 'Fashion-MNIST is not installed. On Debian or Ubuntu: sudo apt-get install'; \
	  echo 'dataset-fashion-mnist. Elsewhere: put its four IDX files (t10k-* and train-*) into a'; \
	  echo 'folder, and name the folder in the recipe: --set task.data=FOLDER'; exit 1; fi >&2

constraints: $(STAMP)
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
