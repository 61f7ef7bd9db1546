.PHONY: install demo test test-all lint clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Installed once, and again when the requirements change.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

install: $(VENV)/installed

demo: install
	$(BIN)/pagewire demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m 'not full and not cuda'

test-all: lint
	$(BIN)/pytest -m 'not cuda'

clean:
	rm -rf $(VENV) build *.egg-info
