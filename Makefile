# `make demo` and `make test` are all a newcomer needs: both set everything up on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: install demo test test-all check format bench lock clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/uv:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "xbm needs Python 3.11 or newer: call `make PYTHON=python3.12 ...`")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv

$(READY): requirements.lock pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes requirements.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

install: $(READY)  ## make .venv from the hashed lock and install the package into it

demo: install  ## train with and without memory on built-in data and write a page that shows the difference
	$(BIN)/python -m xbm demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: install  ## the tests (under 6 minutes on 2 cores)
	$(PYTEST)

test-all: install  ## the slow tests
	$(PYTEST) -m slow

check: install  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install  ## measure against dense torch and pytorch-metric-learning, in one process
	$(BIN)/python -m benchmarks

lock: $(BIN)/uv  ## resolve requirements.lock anew
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra dev \
	  --constraint constraints.txt --custom-compile-command "make lock" pyproject.toml -o requirements.lock

clean:  ## remove everything that was built (the installed packages too)
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
