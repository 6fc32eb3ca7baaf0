# From a fresh clone, `make demo` and `make test` need Python 3.11 or newer and nothing else.
# What they install goes into $(VENV); when nothing has changed, a second run installs nothing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
# `env -u`: nproc would answer OMP_NUM_THREADS
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
OCTAVO_STRESS_RUNS ?= 20000
OCTAVO_SOAK_REQUESTS ?= 10000
OCTAVO_FUZZ_CASES ?= 10000
OCTAVO_LOSSY_TOKENS ?= 10240
OCTAVO_BASELINE ?= $(shell ls docs/benchmarks/baseline/*.json 2>/dev/null | sort -V | tail -n 1)

# Pip shows its progress bars to people and is silent in logs.
PIP_INSTALL := [ -t 1 ] || export PIP_QUIET=2; $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# One thread a worker: workers already use all cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# The folders as Python sees them, for tools that do not run an editable install's finder.
TYPINGS := .typings/octavo
# What the native library is built from: installed again when one changes.
NATIVE := $(wildcard core/native/*.cpp core/native/*.h)

.PHONY: help demo dev fmt lint types test test-slow test-all stress soak regression peers profile sanitize arm fuzz lossy check docs bench clean typings
.DELETE_ON_ERROR:

help:            ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(VENV)/.installed  ## answer with a real model, compare every installed stack, then four of them with intervals (octavo ablate quick)
	@$(BIN)/octavo demo
	@$(BIN)/octavo ablate quick --allow-noise --out "$$(mktemp -d)"

dev: $(VENV)/.dev  ## install what developers need
	@echo "Ready: source $(BIN)/activate (and once: pre-commit install)"

fmt: $(VENV)/.dev  ## format, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/.dev typings  ## style, format and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=.typings $(BIN)/lint-imports

types: $(VENV)/.dev typings  ## mypy, strict
	$(BIN)/mypy

test: $(VENV)/.dev  ## the fast tests, in under six minutes
	$(PYTEST) -m "not slow and not exhaustive"

test-slow: $(VENV)/.dev  ## the slow tests
	$(PYTEST) -m "slow and not exhaustive"

test-all: $(VENV)/.dev  ## every test, full products included
	$(PYTEST)

stress: $(VENV)/.dev  ## the state machines, OCTAVO_STRESS_RUNS times
	OCTAVO_STRESS_RUNS=$(OCTAVO_STRESS_RUNS) $(PYTEST) -m stress --timeout=0

soak: $(VENV)/.dev  ## OCTAVO_SOAK_REQUESTS unruly requests to a server, each answer checked
	OCTAVO_SOAK_REQUESTS=$(OCTAVO_SOAK_REQUESTS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/test_soak.py -k at_length

check: lint types test  ## what a change must pass

docs: $(VENV)/.dev  ## write the reference pages that come from the code
	$(BIN)/python docs/build_reference.py

bench: $(VENV)/.installed  ## measure on this machine
	$(BIN)/python -m octavo.bench.command_start
	$(BIN)/python -m octavo.bench.host_overhead
	$(BIN)/python -m octavo.bench.attention

regression: $(VENV)/.installed  ## measure the short set, and compare it with the one kept in OCTAVO_BASELINE
	@test -n "$(OCTAVO_BASELINE)" || { echo "There is nothing to compare with: see docs/benchmarks/baseline/README.md" >&2; exit 2; }
	rm -rf build/regression
	$(BIN)/octavo ablate regression --out build/regression
	$(BIN)/octavo bench compare $(OCTAVO_BASELINE) build/regression

peers: $(VENV)/.installed  ## measure beside vLLM and llama.cpp: make peers VLLM=VENV LLAMA=VENV (20 minutes)
	$(BIN)/python -m octavo.bench.peers --out docs/benchmarks/peers-cpu.md $(if $(VLLM),--vllm $(VLLM)) $(if $(LLAMA),--llama-cpp $(LLAMA))

profile: $(VENV)/.dev  ## where a step's time goes on this machine, as a page
	$(BIN)/python -m octavo.bench.profile --out docs/benchmarks/profile-cpu.md

sanitize: $(VENV)/.dev  ## the native library's tests, with AddressSanitizer and UndefinedBehaviorSanitizer
	@OCTAVO_NATIVE_FLAGS="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" \
	    $(BIN)/python setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize
	LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 OMP_NUM_THREADS=2 OCTAVO_NATIVE_LIBRARY=build/sanitize/octavo/core/native/liboctavo.so \
	    $(BIN)/python -m pytest tests/core/native tests/plugins/ops/test_cpu.py tests/plugins/ops/test_cpu_layers.py tests/plugins/ops/test_cpu_weight_only.py \
	    tests/plugins/kernels/test_cpu_paged.py

arm: $(VENV)/.dev  ## the native library built for Arm and run under QEMU, where both are installed
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -rs tests/core/native/test_other_processors.py

fuzz: $(VENV)/.dev  ## OCTAVO_FUZZ_CASES random cases of the native attention against the reference
	OCTAVO_FUZZ_CASES=$(OCTAVO_FUZZ_CASES) $(PYTEST) tests/plugins/kernels/test_cpu_paged.py -k at_random

lossy: $(VENV)/.dev  ## OCTAVO_LOSSY_TOKENS tokens of the native library in bf16, each by the fp32 reference
	OCTAVO_LOSSY_TOKENS=$(OCTAVO_LOSSY_TOKENS) $(BIN)/python -m pytest tests/matrix/test_sixteen_bits.py

clean:           ## remove all that make made
	rm -rf .venv .venv-ci .typings build dist src/octavo.egg-info *.egg-info core/native/*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

typings:
	@rm -rf .typings && mkdir -p $(TYPINGS)
	@cd $(TYPINGS) && ln -s ../../src/octavo/* ../../{core,plugins,server,bench} .

# The first Python that is new enough and can make an environment.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
	    python=; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "Octavo needs Python 3.11 or newer with its venv module. Found: $$($(or $(PYTHON),python3) --version 2>&1 || true)"; \
	    echo "Install one (on Debian and Ubuntu: apt install python3-venv), or name it: make PYTHON=/path/to/python3"; \
	    exit 1; \
	fi >&2; \
	echo "Making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(NATIVE) | $(BIN)/python
	@echo "Installing Octavo into $(VENV); torch is a large download"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py constraints.txt $(NATIVE) | $(BIN)/python
	@echo "Installing Octavo and what its tests need into $(VENV); torch is a large download"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.installed $@
