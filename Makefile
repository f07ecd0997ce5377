# Two commands do everything on a fresh machine with Python >= 3.11 and a C++ compiler:
#   make demo   train a small model with and without the fused kernels, side by side
#   make test   run the tests
# Both begin with `make setup`, which builds .venv. All targets are safe to repeat.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
TEXT ?=
ARGS ?=
COMMIT ?= HEAD

.PHONY: demo test lint setup resources fuzz sanitize bench bench-compare gpu-check clean
.DELETE_ON_ERROR:

demo: setup
	$(PY) examples/train.py $(if $(TEXT),--text "$(TEXT)") $(ARGS)

test: setup
	OMP_WAIT_POLICY=passive $(PY) -m pytest tests --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Registers, stack and shared memory of the CUDA kernels, by nvcc where there is one. A spill fails.
resources: setup
	$(PY) tests/nvcc.py

# Random cases against the reference for SECONDS, each time others; what fails is kept in .hypothesis and tried first.
fuzz: setup
	$(PY) -m pytest tests/test_fuzz.py -s -k test_random_cases --fuzz-seconds $(or $(SECONDS),120) $(ARGS)

# The CPU kernels under AddressSanitizer and UBSan: all cases, every instruction set, random cases for SECONDS.
sanitize: setup
	$(PY) tests/sanitize.py --seconds $(or $(SECONDS),120)

# Then `python -m benchmarks report build/bench.json NAME` keeps the run and makes its page and pictures.
bench: setup
	mkdir -p build
	$(PY) -m pytest benchmarks --benchmark-only --benchmark-json=build/bench.json $(ARGS)

# This tree against a commit, by turns: make bench-compare COMMIT=main ARGS="-k rope"
bench-compare: setup
	$(PY) -m benchmarks compare $(COMMIT) $(ARGS)

setup: $(VENV)/.built

$(VENV)/.dependencies: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "foundry_kernels needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools wheel ninja
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt numpy pytest pytest-benchmark pytest-xdist expecttest hypothesis transformers matplotlib tqdm ruff mypy $(if $(filter Linux,$(shell uname -s)),triton)
	@touch $@

$(VENV)/.built: $(VENV)/.dependencies setup.py $(shell find csrc -type f)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(PY) -m foundry_kernels
	@touch $@

# Everything that needs a GPU, in the Python at hand, which must have torch, and without a network.
# GPU_CHECK=build|parity|sanitize|bench runs a part.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) build *.egg-info foundry_kernels/*.so
