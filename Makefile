# Two commands do everything on a fresh machine with Python >= 3.11 and a C++ compiler:
#   make demo   train a small model with and without the fused kernels, side by side
#   make test   run the tests; make test-all runs the long sweeps as well
# Each begins by installing what it needs into .venv and building the extension. All targets are safe to repeat.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
TEXT ?=
ARGS ?=
COMMIT ?= HEAD

# What the extension and the demo need; and besides these, what the tests, the checks of the source and the benchmarks do.
DEMO_PACKAGES := torch setuptools wheel numpy matplotlib tqdm $(if $(filter Linux,$(shell uname -s)),triton)
TEST_PACKAGES := pytest pytest-benchmark pytest-xdist expecttest hypothesis transformers build ruff mypy clang-format
# Without --no-compile pip translates every module of torch, most of which nothing here imports.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest tests --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: demo test test-slow test-all test-arm lint setup setup-test resources fuzz sanitize bench bench-compare gpu-check clean
.DELETE_ON_ERROR:

demo: setup
	$(PY) examples/train.py $(if $(TEXT),--text "$(TEXT)") $(ARGS)

# Every operation, backend and proof.
test: setup-test
	$(PYTEST) -m "not slow" $(ARGS)

# The long sweeps that `make test` leaves out: what tests/slow.py calls slow.
test-slow: setup-test
	$(PYTEST) -m slow $(ARGS)

test-all: test test-slow

# The wheel for 64-bit ARM (ARGS=--wheel: no more than that), and parity and random cases on it under emulation.
test-arm: setup-test
	$(PY) tests/arm.py $(ARGS)

lint: $(VENV)/.test-packages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Registers, stack and shared memory of the CUDA kernels, by nvcc where there is one. A spill fails.
resources: setup-test
	$(PY) tests/nvcc.py

# Random cases against the reference for SECONDS, each time others; what fails is kept in .hypothesis and tried first.
fuzz: setup-test
	$(PY) -m pytest tests/test_fuzz.py -s -k test_random_cases --fuzz-seconds $(or $(SECONDS),120) $(ARGS)

# The CPU kernels under AddressSanitizer and UBSan: all cases, every instruction set, random cases for SECONDS.
sanitize: setup-test
	$(PY) tests/sanitize.py --seconds $(or $(SECONDS),120)

# The quick set, within eight minutes (BUDGET=0: all of it). Then `python -m benchmarks report build/bench.json NAME` keeps
# the run and makes its page and pictures. ISA=avx2 holds our kernels, torch, oneDNN and MKL to that instruction set.
bench: setup-test
	mkdir -p build
	$(PY) -m pytest benchmarks --benchmark-only --benchmark-json=build/bench.json \
		$(if $(BUDGET),--budget=$(BUDGET)) $(if $(ISA),--isa=$(ISA)) $(ARGS)

# This tree against a commit, by turns: make bench-compare COMMIT=main ARGS="-k rope"
bench-compare: setup-test
	$(PY) -m benchmarks compare $(COMMIT) $(if $(ISA),--isa=$(ISA)) $(ARGS)

setup: $(VENV)/.built
setup-test: $(VENV)/.test-packages $(VENV)/.built

$(VENV)/.demo-packages: Makefile constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "foundry_kernels needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment; on Debian: apt-get install python3-venv"; exit 1; }
	$(INSTALL) $(DEMO_PACKAGES)
	@touch $@

$(VENV)/.test-packages: $(VENV)/.demo-packages
	$(INSTALL) $(TEST_PACKAGES)
	@touch $@

$(VENV)/.built: $(VENV)/.demo-packages setup.py pyproject.toml $(shell find csrc -type f)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	$(PY) -m foundry_kernels
	@touch $@

# Everything that needs a GPU, in the Python at hand, which must have torch, and without a network.
# GPU_CHECK=build|parity|sanitize|bench runs a part.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) build *.egg-info foundry_kernels/*.so
