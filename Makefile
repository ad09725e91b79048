# `make train`, `make test` and `make docs` do all of their own set-up, once.
#   make train ARGS="run.steps=20"      arguments for `harts train`
#   make test ARGS="-k normalization"   arguments for pytest
#   PYTHON=python3.12                   the interpreter that .venv is made with (3.11 or newer)
#   PIP_ARGS="--index-url ..."          arguments for every pip install
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet $(PIP_ARGS)
# On Linux, pip's newest torch may be a CUDA build. Machines without an NVIDIA GPU pin a release first.
TORCH := $(shell if [ "$$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1; then echo torch==2.13.0; else echo torch; fi)

.PHONY: train test lint docs clean

train: $(VENV)/.installed-rl
	$(BIN)/harts train $(ARGS)

# One process a core: the tests' tensors are too small for several threads.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The variable turns off an advertisement of the theme; everything else that it or mkdocs says is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

$(VENV)/.installed-torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "harts needs Python 3.11 or newer, but PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Install one and name it: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	@touch $@

$(VENV)/.installed-rl: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) --editable '.[rl]'
	@touch $@

# The dev extra includes rl, so `make train` after `make test` installs nothing.
$(VENV)/.installed-dev: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) --editable '.[dev]'
	@touch $(VENV)/.installed-rl $@

$(VENV)/.installed-docs: $(VENV)/.installed-torch pyproject.toml
	$(INSTALL) --editable '.[docs]'
	@touch $@
