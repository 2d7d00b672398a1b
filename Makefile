# All that one does with a checkout. `make` alone lists the targets.
#
#   make PYTHON=python3.12 ...     another Python than the first that is new enough
#   make PIP_FLAGS=... demo        further flags for pip (an index with CPU builds of torch, a proxy)

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help serve demo test lint types golden proto soak check-cuda gpu-artifacts gpu-check wheel clean c-compiler

PROMPT ?= Name three rivers.
SERVE_FLAGS ?=
PIP_FLAGS ?=
PYTEST_FLAGS ?=
CHECK_FLAGS ?=
GPU ?= h200
TRITON ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
NAMESPACE := build/namespace
PACKAGES := compiler runtime templates configs autotune
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

# What decides an artifact's bytes.
SOURCES := $(shell find compiler templates configs -type f ! -name '*.pyc')

# Evaluated only when the virtual environment is made.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p $(NEW_ENOUGH) >/dev/null 2>&1 && { echo $$p; break; }; done)

help:
	@echo "pagec: compiles model specs into fused kernels and serves them. Targets:"
	@echo
	@echo "  make serve    install, compile SmolLM2-135M-Instruct for this CPU, answer a prompt, serve:"
	@echo "                a page to look at, and the OpenAI API (SERVE_FLAGS=\"--port 9000\")"
	@echo "  make demo     the same without the server"
	@echo "                (PROMPT=\"...\" asks something else; a second run compiles nothing)"
	@echo "  make test     lint, check types, run all tests (what CI runs)"
	@echo "  make lint     ruff and mypy only"
	@echo "  make golden   write the golden files anew; look at the diff before you commit it"
	@echo "  make proto    write the gRPC messages' Python code anew from pagec_v1.proto"
	@echo "  make soak     five minutes of 200 clients against a server, some of them rude"
	@echo "  make check-cuda  compile the shipped GPU kernels that have changed and record what they take"
	@echo "                   (CHECK_FLAGS=--all: all of them; TRITON=3.6.0: a few of each template by"
	@echo "                   another Triton, in an environment of its own, without torch)"
	@echo "  make gpu-artifacts  compile what is checked and measured on a GPU into build/gpu (GPU=a100, h100,"
	@echo "                      h200); needs no GPU"
	@echo "  make gpu-check   on a machine with that GPU: tests/gpu/check.sh quick (see there for more)"
	@echo "  make wheel    build dist/pagec-*.whl"
	@echo "  make clean    remove everything that make has made, .venv too"
	@echo
	@echo "Everything is installed into .venv, in the versions of constraints.txt."
	@echo "Needs Python 3.11 or newer with venv, and a C compiler."

# ------------------------------------------------------------------------------------ installing

c-compiler:
	@command -v cc >/dev/null || command -v gcc >/dev/null || { \
		echo "make: kernels are linked by a C compiler, and there is none on PATH" >&2; \
		echo "  fix: install gcc or clang (Debian: apt install gcc)" >&2; exit 1; }

$(VENV)/made:
	@test -n "$(PYTHON)" || { \
		echo "make: no Python 3.11 or newer on PATH (python3: $$(python3 --version 2>/dev/null || echo none))" >&2; \
		echo "  fix: install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) $(NEW_ENOUGH) || { \
		echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), pagec needs 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "make: $(PYTHON) cannot make a virtual environment" >&2; \
		echo "  fix: install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@$(PIP) setuptools
	@touch $@

$(VENV)/compile: $(VENV)/made constraints.txt pyproject.toml
	@echo "installing pagec, its compiler and its server into $(VENV) (torch, apache-tvm, transformers: a few minutes)"
	@$(PIP) --no-build-isolation --editable ".[compile,serve]"
	@touch $@

$(VENV)/dev: $(VENV)/made constraints.txt pyproject.toml
	@echo "installing pagec, its compiler and what the tests need into $(VENV)"
	@$(PIP) --no-build-isolation --editable ".[compile,serve,cuda,dev]"
	@touch $(VENV)/compile $@

# --------------------------------------------------------------------------------- demo and serve

$(DEMO)/manifest.json: $(VENV)/compile $(SOURCES)
	@mkdir -p build
	@model=$$($(BIN)/python tests/fetch_models.py) && $(BIN)/pagec compile "$$model" -o $(DEMO)

demo: c-compiler $(DEMO)/manifest.json
	@echo "> $(PROMPT)"
	@$(BIN)/pagec generate $(DEMO) --chat --prompt "$(PROMPT)"

serve: demo
	@exec $(BIN)/pagec serve $(DEMO) $(SERVE_FLAGS)

# ------------------------------------------------------------------------------------------ tests

lint: $(VENV)/dev types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

# mypy finds `pagec` in a directory of links: the packages' own directories are not called so.
.PHONY: namespace
namespace:
	@mkdir -p $(NAMESPACE)/pagec
	@for p in $(PACKAGES); do ln -sfn ../../../$$p $(NAMESPACE)/pagec/$$p; done

types: $(VENV)/dev namespace
	@MYPYPATH=$(NAMESPACE):tests:tests/bench $(BIN)/mypy --no-error-summary $(PACKAGES:%=-p pagec.%) \
		-p support -p gpu -m fetch_models -m check_cuda -m soak -m peers -m peer_workers

# By file, so that what a file compiles for its tests is compiled once.
test: c-compiler $(VENV)/dev lint
	@$(BIN)/python tests/fetch_models.py >/dev/null
	@$(BIN)/pytest -n 2 --dist loadfile --durations 10 $(PYTEST_FLAGS)

golden: $(VENV)/dev
	@$(BIN)/pytest --update-golden
	@git status --short tests/goldens

proto: $(VENV)/dev
	@$(BIN)/python -m grpc_tools.protoc -I runtime/server/grpc --python_out=runtime/server/grpc \
		--pyi_out=runtime/server/grpc pagec_v1.proto

soak: c-compiler $(VENV)/dev
	@$(BIN)/python tests/soak.py

# Of another Triton what compiling needs, and nothing else: no torch, no TVM.
TRITON_VENV := build/triton-$(TRITON)
$(TRITON_VENV)/made: | $(VENV)/made
	@mkdir -p build && $(BIN)/python -m venv $(TRITON_VENV)
	@$(TRITON_VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) \
		triton==$(TRITON) numpy jinja2 pyyaml
	@touch $@

ifeq ($(TRITON),)
check-cuda: $(VENV)/dev
	@PYTHONPATH=tests $(BIN)/python tests/check_cuda.py $(CHECK_FLAGS)
else
check-cuda: $(TRITON_VENV)/made namespace
	@PYTHONPATH=$(NAMESPACE):tests $(TRITON_VENV)/bin/python tests/check_cuda.py --templates
endif

gpu-artifacts: $(VENV)/dev
	@PYTHONPATH=tests $(BIN)/python -m gpu.build --target $(GPU)

# Where the GPU is there need be no virtual environment.
gpu-check:
	@tests/gpu/check.sh quick

wheel: $(VENV)/dev
	@rm -rf build/lib  # setuptools would take deleted files from it
	@$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
