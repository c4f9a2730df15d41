# `make demo` and `make test` are all a newcomer needs: both set everything up on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
LIGHT  := $(VENV)/.ready-demo

.PHONY: install demo test test-all test-torch docs check format package bench lock clean
.DEFAULT_GOAL := help

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(BIN)/uv: requirements-uv.lock
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "xbm needs Python 3.11 or newer: call `make PYTHON=python3.12 ...`")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.lock
	@touch $@

$(READY): requirements.lock pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes requirements.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(LIGHT): requirements-demo.lock pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes requirements-demo.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

install: $(READY)  ## make .venv from the hashed lock and install the package into it

demo: $(if $(wildcard $(READY)),install,$(LIGHT))  ## train with and without memory on built-in data and write a page that shows the difference
	$(BIN)/python -m xbm demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: install  ## the tests (under 6 minutes on 2 cores)
	$(PYTEST)

test-all: install  ## the slow tests
	$(PYTEST) -m slow

# Another torch, in an environment of its own that is removed at the end. TRITON=no is a machine without Triton; WITH adds
# requirements, such as an older numpy. docs/compatibility.md has the results.
TORCH   ?= 2.6.0
TRITON  ?= yes
WITH    ?=
OTHER   := .venv-torch-$(TORCH)
IMPORTS := (importing or star_import or docstrings) and not xbm_app

test-torch: | $(BIN)/uv  ## the library's tests with another torch: make test-torch TORCH=2.6.0 [TRITON=no] [WITH=numpy==1.26.4] [PYTHON=python3.12]
	@trap 'rm -rf $(OTHER)' EXIT; trap 'exit 1' INT TERM; set -e; \
	$(PYTHON) -m venv --clear --without-pip $(OTHER); \
	$(BIN)/uv pip install --quiet --python $(OTHER) torch==$(TORCH) $(WITH) --editable '.[test]'; \
	test $(TRITON) = yes || $(BIN)/uv pip uninstall --quiet --python $(OTHER) triton; \
	$(OTHER)/bin/python -VV; $(BIN)/uv pip list --python $(OTHER) | grep -E '^(torch|triton|numpy|pytorch-metric-learning) '; \
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile -p no:cacheprovider tests/xbm; \
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest -p no:cacheprovider tests/test_architecture.py -k '$(IMPORTS)'

docs: install  ## build the documentation site into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python docs/site/links.py site

check: install  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# An sdist, a wheel from the checkout and a wheel from the sdist; the two wheels and two sdists must be the same to the byte.
package: install  ## build the wheel and the sdist into dist/, and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/python -m build --no-isolation --outdir dist/again --sdist --wheel . >/dev/null
	cmp dist/*.whl dist/again/*.whl && cmp dist/*.tar.gz dist/again/*.tar.gz && rm -r dist/again
	$(BIN)/twine check --strict dist/*
	cd dist && sha256sum *

bench: install  ## measure against dense torch and pytorch-metric-learning, in one process
	$(BIN)/python -m benchmarks

lock: $(BIN)/uv  ## resolve requirements.lock anew, and the part of it that the demo needs
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra dev \
	  --constraint constraints.txt --custom-compile-command "make lock" pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --extra train --extra serve --extra build \
	  --constraint requirements.lock --custom-compile-command "make lock" pyproject.toml -o requirements-demo.lock
	$(BIN)/uv --version | awk '{print "uv==" $$2}' | $(BIN)/uv pip compile --quiet --universal --generate-hashes \
	  --python-version 3.11 --no-header --no-annotate - -o requirements-uv.lock

clean:  ## remove everything that was built (the installed packages too)
	rm -rf $(VENV) .venv-torch-* dist build site .pytest_cache .mypy_cache .ruff_cache
