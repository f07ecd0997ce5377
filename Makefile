# Two commands do everything on a fresh machine with Python >= 3.11 and a C++ compiler:
#   make demo   train a small model with and without the fused kernels, side by side
#   make test   run the tests; make test-all runs the long sweeps as well
# Each begins by installing what it needs into .venv and building the extension. All targets are safe to repeat.

# Any target with STACK=2.11 runs on the older torch and Triton of constraints-2.11.txt, in a copy of this tree with an
# environment and a build folder of its own, build/stack-2.11 (5 GB). STACK=newest: on the newest that the package index
# has, in the newest Python here. Its versions are the stack's own: a file that constrains pip on this machine is not read.

PYTHON ?= python3
ifneq ($(STACK),)
GOALS := $(or $(MAKECMDGOALS),demo)
.PHONY: $(GOALS)
$(GOALS):
	$(PYTHON) tests/support/stack.py $(STACK)
	PIP_CONSTRAINT=$(CURDIR)/build/stack-$(STACK)/constraints.txt $(MAKE) -C build/stack-$(STACK) $@ STACK= \
		ARCHIVE=$(CURDIR)/build/gpu-cache.tar.xz $(if $(filter file,$(origin PYTHON)),PYTHON=$(shell $(PYTHON) tests/support/stack.py --python $(STACK)))
else

# Where this is set, each process translates all of torch that it imports, which takes as long again as to import it.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
DOCS := build/docs
TEXT ?=
ARGS ?=
COMMIT ?= HEAD

# What the extension and the demo need; and besides these, what the tests, the checks of the source and the benchmarks do.
DEMO_PACKAGES := torch setuptools wheel numpy matplotlib tqdm $(if $(filter Linux,$(shell uname -s)),triton)
TEST_PACKAGES := pytest pytest-benchmark pytest-xdist expecttest hypothesis transformers tokenizers build ruff mypy clang-format
# What the tests of a stack run on.
VERSIONS = echo "on:" $$($(PY) -m pip --disable-pip-version-check list 2>/dev/null | \
	awk '$$1 ~ /^(torch|triton|numpy|transformers|tokenizers)$$/ {print $$1, $$2 ","}') "$$($(PY) --version)"
# An environment with these packages; says how far it is, and in one line what this machine lacks.
INSTALL := $(PYTHON) bootstrap.py $(VENV)
# Where no GPU could run them the CUDA kernels are left to `make cuda-build`: they take minutes.
WITHOUT_GPU := $(if $(wildcard /dev/nvidia0 /dev/dxg),,CUDA_HOME=none)
RUN_TESTS := OMP_WAIT_POLICY=passive $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
PYTEST := $(RUN_TESTS) tests
# The extension for this processor; where it was once built for all instruction sets, it stays so.
BUILT := $(VENV)/.built$(if $(wildcard $(VENV)/.built-all),-all)

.PHONY: demo test test-slow test-all test-isa test-arm lint setup setup-test setup-all test-stack test-native test-releases resources \
	cuda-build docs fuzz sanitize bench bench-compare gpu-cache gpu-check clean
.DELETE_ON_ERROR:

demo: setup
	$(PY) examples/train.py --steps 100 $(if $(TEXT),--text "$(TEXT)") $(ARGS)

# Every operation, backend, direction, dtype and kind of proof, by its telling cases.
test: setup-test
	@echo "The tests: about 10 minutes on 2 cores, and the first time 5 more. make test-all: the long sweeps too, an hour and more."
	$(PYTEST) -m "not slow" $(ARGS)

# The long sweeps that `make test` leaves out: what tests/support/slow.py calls slow, among them all instruction sets but this
# processor's. THIRD=0, 1 or 2: a third of them; CI runs the one that follows that of the commit before.
test-slow: setup-all
	$(PYTEST) -m slow $(if $(THIRD),--third=$(THIRD)) $(ARGS)

test-all: setup-all test test-slow

# What depends on instruction sets as on older processors: our kernels, torch, oneDNN and MKL held to AVX2, then to AVX-512.
test-isa: setup-all
	$(PY) tests/support/forced_isa.py $(ARGS)

# The wheel for 64-bit ARM (ARGS=--wheel: no more than that), and parity on it under emulation (--fuzz: random cases).
test-arm: setup-test
	$(PY) tests/support/arm.py $(ARGS)

lint: $(VENV)/.test-packages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# What depends most on the versions of torch and Triton, a few minutes of it and without the extension: how kernels are
# launched, attention and the norms of heads compiled ahead of time, patched models compiled in training, and operators and
# float32 results in the interpreter. .ci/run runs it on the older stack, and every third commit on the newest.
test-stack: $(VENV)/.test-packages
	@$(VERSIONS)
	$(PYTEST) -m "not slow" $(ARGS) -k "test_launch or test_gpu or test_gluon or (test_aot and (attention or qk_norm)) \
		or one_graph_forward_and_backward or test_packing and test_compiled \
		or (test_parity and triton and (opcheck or (float32 and (glu or rms_norm or cross_entropy))))"

# Patched models on the oldest transformers that is supported and on the newest there is, in environments of their own.
test-releases: setup-test
	$(PY) tests/support/releases.py $(ARGS)

# What depends most on torch, a few minutes of it, with the extension as an installation has it: for this processor alone.
# Every third commit .ci/run runs it on the newest.
test-native: $(VENV)/.test-packages $(VENV)/.built
	@$(VERSIONS)
	$(RUN_TESTS) tests/core tests/compat tests/integrations tests/ops/test_*.py tests/proof/test_parity.py -m "not slow" $(ARGS) \
		-k "not triton and not cuda_on_cpu and (not test_parity or float32 or opcheck)"

# Registers, stack and shared memory of the CUDA kernels, by nvcc where there is one. A spill fails.
resources: setup-test
	$(PY) tests/support/nvcc.py

# The whole extension, its CUDA half too, against a CUDA build of torch: by nvcc, without a GPU. 8 minutes on 2 cores.
cuda-build: $(VENV)/.test-packages
	$(PY) tests/support/cuda_build.py

# The site of docs/, in build/site. A warning fails, a broken link among them. Its packages need no torch.
docs: $(DOCS)/.packages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build $(ARGS)

$(DOCS)/.packages: constraints.txt bootstrap.py
	@$(PYTHON) bootstrap.py $(DOCS) mkdocs-material "mkdocstrings[python]" ruff
	@touch $@

# Random cases against the reference for SECONDS, each time others; what fails is kept in .hypothesis and tried first.
fuzz: setup-all
	$(PY) -m pytest tests/proof/test_fuzz.py -s -k test_random_cases --fuzz-seconds $(or $(SECONDS),120) $(ARGS)

# The CPU kernels under AddressSanitizer and UBSan: all cases, every instruction set, random cases for SECONDS.
sanitize: setup-test
	$(PY) tests/support/sanitize.py --seconds $(or $(SECONDS),120)

# The quick set, within five minutes (BUDGET=0: all of it; ARGS=-v: every row). Then `python -m benchmarks report build/bench.json NAME` keeps
# the run and makes its page and pictures, `python -m benchmarks readme` README.md's part of it. ISA=avx2 holds our kernels, torch, oneDNN and MKL to that instruction set.
bench: setup-all
	mkdir -p build
	$(PY) -m pytest benchmarks --benchmark-only --benchmark-json=build/bench.json \
		$(if $(BUDGET),--budget=$(BUDGET)) $(if $(ISA),--isa=$(ISA)) $(ARGS)

# This tree against a commit, by turns: make bench-compare COMMIT=main ARGS="-k rope"
bench-compare: setup-all
	$(PY) -m benchmarks compare $(COMMIT) $(if $(ISA),--isa=$(ISA)) $(ARGS)

setup: $(VENV)/.built
setup-test: $(VENV)/.test-packages $(BUILT)
setup-all: $(VENV)/.test-packages $(VENV)/.built-all

$(VENV)/.demo-packages: Makefile constraints.txt bootstrap.py
	@$(INSTALL) $(DEMO_PACKAGES)
	@touch $@

$(VENV)/.test-packages: $(VENV)/.demo-packages
	@$(INSTALL) $(TEST_PACKAGES)
	@touch $@

# Compiles the extension, for this machine's processor or all (setup.py), and installs it. pip hides what it does, so that
# it finds all compiled.
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
define build
	@$(WITHOUT_GPU) $(PY) setup.py --quiet build_ext --inplace --instruction-sets=$(1)
	@$(WITHOUT_GPU) FOUNDRY_KERNELS_INSTRUCTION_SETS=$(1) \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@$(PY) -m foundry_kernels
endef

$(VENV)/.built: $(VENV)/.demo-packages $(SOURCES)
	$(call build,native)
	@touch $@

# Long sweeps and measurements are about every instruction set.
$(VENV)/.built-all: $(VENV)/.test-packages $(SOURCES)
	$(call build,all)
	@touch $@ $(VENV)/.built

# Triton's kernels compiled here for `make gpu-check` on another machine, whose Triton and Python these must be:
# make gpu-cache STACK=2.11 PYTHON=python3.12 VENV=.venv-3.12. It leaves build/gpu-cache.tar.xz.
ARCHIVE ?= build/gpu-cache.tar.xz
gpu-cache: $(VENV)/.demo-packages
	$(PY) -m benchmarks.gpu_cache --archive $(ARCHIVE) $(ARGS)

# Everything that needs a GPU, in the Python at hand, which must have torch, and without a network.
# GPU_CHECK=build,parity,suite,sanitize,bench runs those parts, GPU_CHECK=rest what has not passed yet.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) build *.egg-info foundry_kernels/*.so

endif
