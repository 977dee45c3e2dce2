# `make demo` and `make test` need nothing but Python >= 3.12; they make .venv themselves.

VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
NAME ?=
ARGS ?=
# Processes of `make test`, of about 2 GB each: one more than cores, since two of them mostly wait for the whole runs that
# they have started (tests/conftest.py); each spends a dozen CPU-seconds on importing the tests. One that crashes ends the
# run: were it replaced, xdist could wait for ever for tests that it has lost.
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --no-loadscope-reorder --max-worker-restart=0
# What `make test-isa` pretends: the newest instructions that XLA may emit, and the processor that NumPy's BLAS sees. XLA's
# library of products (YNN) asks the processor itself. Not Haswell: its kernel overruns the stack (OpenBLAS issue 6026).
ISAS ?= AVX2 SSE4_2
BLAS_AVX2 := Sandybridge
BLAS_SSE4_2 := Nehalem
MARKS ?= numerics and not full
PATHS := axlearn_like rl models mesh experiments tools tests examples docs
SOURCES := pyproject.toml constraints.txt tools/install.sh tools/find_python.sh tools/have_compiler.sh

# The venv must not inherit packages of another environment; and without stored bytecode each of the hundreds of
# processes of the tests would compile the project again.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
# The name of an interpreter to build .venv with may be given: make PYTHON=/path/to/python3.12
export PYTHON

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install demo test test-slow test-full test-isa coverage lint types docs format clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

# The stamps are written last, so an interrupted install is taken up again and a finished one costs nothing.
$(VENV)/.installed: $(SOURCES)
	@sh tools/install.sh $(VENV) rl-pure
	@touch $@

$(VENV)/.installed-dev: $(SOURCES)
	@sh tools/install.sh $(VENV) rl-pure,dev
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: $(SOURCES)
	@sh tools/install.sh $(VENV) rl-pure,dev,docs
	@touch $(VENV)/.installed $(VENV)/.installed-dev $@

install: $(VENV)/.installed-dev ## make .venv with everything for development

demo: $(VENV)/.installed ## the main job: SFT, RL with a killed worker, report (SEED=0, NAME=, ARGS=)
	@$(BIN)/axl rl demo --seed $(SEED) --run-dir runs/$(or $(NAME),demo-seed$(SEED)) $(ARGS)

test: $(VENV)/.installed-dev ## the tests, side by side; with ARGS="-k name" those alone, in one process
	@$(BIN)/python -m pytest $(or $(ARGS),$(PARALLEL))

test-slow: $(VENV)/.installed-dev ## the slow tests that CI runs too, some 20 minutes
	@$(BIN)/python -m pytest -m "slow and not full" $(or $(ARGS),$(PARALLEL))

test-full: $(VENV)/.installed-dev ## all tests, slow ones included
	@$(BIN)/python -m pytest --full $(ARGS)

test-isa: $(addprefix isa-,$(ISAS)) ## the numerical tests as on processors with AVX2 and with SSE4.2 only (ISAS=AVX2, MARKS=numerics)

# Each has a compilation cache of its own: what is compiled depends on the instructions.
isa-%: $(VENV)/.installed-dev
	@XLA_FLAGS="$(XLA_FLAGS) --xla_cpu_max_isa=$*" OPENBLAS_CORETYPE=$(BLAS_$*) \
	  AXL_COMPILATION_CACHE="$${XDG_CACHE_HOME:-$$HOME/.cache}/axlearn-like/xla-tests-$*" \
	  $(BIN)/python -m pytest -m "$(MARKS)" $(or $(ARGS),$(PARALLEL))

coverage: $(VENV)/.installed-dev ## the tests with the lines that they reach, in build/coverage/index.html
	@$(BIN)/python -m pytest $(or $(ARGS),$(PARALLEL)) --cov --cov-report=term:skip-covered --cov-report=html

lint: $(VENV)/.installed-dev ## ruff: rules and layout
	@$(BIN)/ruff check $(PATHS)
	@$(BIN)/ruff format --check $(PATHS)

types: $(VENV)/.installed-dev ## pyright
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --threads 2

docs: $(VENV)/.installed-docs ## the site in build/site, strictly: no broken link, every page reachable
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(VENV)/.installed-dev ## format, sort imports, fix what ruff can fix
	@$(BIN)/ruff check --fix $(PATHS)
	@$(BIN)/ruff format $(PATHS)

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(PATHS) -name __pycache__ -type d -prune -exec rm -rf {} +
