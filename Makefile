# `make demo` and `make test` make what they need: a virtual environment, PyTorch, this package.
#
#   make test                      in ./.venv, made on the first run
#   make test VENV=$VIRTUAL_ENV    in an environment you have; what is missing is installed there
#   make test PYTHON=python        with an interpreter you have; nothing is installed

VENV ?= .venv
TORCH ?= torch==2.13.0
TESTS ?= tests

ifeq ($(origin PYTHON),command line)
ENVIRONMENT :=
else
PYTHON := $(VENV)/bin/python
ENVIRONMENT := $(VENV)/.autoptd-installed
endif

DEMO_ARGUMENTS ?=

.PHONY: demo test test-all lint format install benchmarks clean

demo: $(ENVIRONMENT)
	$(PYTHON) -m samples.demo $(DEMO_ARGUMENTS)

# Whatever the environment says of bytecode: tests start dozens of processes, each of which would compile our modules.
test test-all: export PYTHONDONTWRITEBYTECODE =

test: $(ENVIRONMENT)
	$(PYTHON) -m pytest -q -n auto --dist worksteal -m "not slow" $(TESTS)

test-all: $(ENVIRONMENT)
	$(PYTHON) -m pytest -q -n auto --dist worksteal $(TESTS)

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(ENVIRONMENT)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

benchmarks: $(ENVIRONMENT)
	$(PYTHON) -m samples.benchmarks.compile_time --write
	$(PYTHON) -m samples.benchmarks.pipeline_efficiency --write
	$(PYTHON) -m samples.benchmarks.throughput --write
	$(PYTHON) -m samples.benchmarks.activation_memory --write
	$(PYTHON) -m samples.benchmarks.peak_memory --write
	$(PYTHON) -m samples.benchmarks.launches --write
	$(PYTHON) -m samples.benchmarks.one_device --write
	$(PYTHON) -m samples.benchmarks.call_overhead --write
	$(PYTHON) -m samples.benchmarks.experts --write
	$(PYTHON) -m samples.benchmarks.kernels --write
	$(PYTHON) -m samples.benchmarks.compiled_kernels --write
	$(PYTHON) -m samples.benchmarks.paper_tables --write
	$(PYTHON) -m samples.benchmarks.paper_figures --write
	$(PYTHON) -m samples.benchmarks.planner --write
	$(PYTHON) -m samples.benchmarks.cut --write
	$(PYTHON) -m samples.benchmarks.cut_measured --write
	$(PYTHON) -m samples.benchmarks.honesty --write

install: $(ENVIRONMENT)

$(VENV)/bin/python:
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"autoptd needs Python 3.11 or newer; python3 is {sys.version}")'
	python3 -m venv $(VENV)

# PyTorch first and alone, so that the wheel chosen here is the one everything else is resolved against.
$(VENV)/.autoptd-installed: pyproject.toml | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet $(TORCH)
	$(PYTHON) -m pip install --quiet --editable '.[models,test]' $(TORCH)
	touch $@

clean:
	rm -rf out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
