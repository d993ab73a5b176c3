# Everything below happens in a virtual environment of its own; nothing outside it is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: train test lint notebooks lab clean

train: $(VENV)/.base             ## set up and train the embedded default
	$(BIN)/python -m experiments.train $(ARGS)

test: $(VENV)/.dev               ## set up and run the tests
	$(BIN)/python -m pytest -n 2 $(ARGS)
	$(BIN)/lint-imports --no-cache

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

notebooks: $(VENV)/.notebooks    ## run every notebook and keep its output
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

lab: $(VENV)/.notebooks
	$(BIN)/jupyter lab notebooks

INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(INSTALL) ".[dev]"
	touch $@

$(VENV)/.notebooks: $(VENV)/.base
	$(INSTALL) ".[notebooks]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis outputs multirun
