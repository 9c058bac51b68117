# make serve        install what is missing and serve the default model (MODEL=qwen2.5-coder-1.5b serves another one,
#                   ARGS="..." adds any SGLang flag)
# make pd           install what is missing and serve it disaggregated: prefill, decode and router on this machine
# make test         install what is missing, then lint, types and the tests that CI runs
# make test-fast    the same without the tests that start servers
# make test-full    the same with long prompts, more settings and all CUDA architectures
# make chaos        faults at random against real servers, for 15 minutes (ARGS="--minutes 5 --seed 7")
# make test-gpu     what needs a GPU
# make test-ipex    the CPU worker with Intel's extension for PyTorch, in an environment of its own (x86_64 only)
# make test-compat  tests of what touches SGLang, on each SGLang that we know, each in its own venv
# make wheel        build the source distribution and a wheel with the CPU kernels of this architecture, into dist
# make docs         build the documentation site into build/site
# make clean        remove what this checkout made: .venv, build, caches of tools
# make clean-cache  remove what is kept for all checkouts: the converted default model, compiled kernels
#
# INSTALL="..." adds options of tools/install.py, such as --device cpu

# the first Python that is 3.11 or 3.12
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
COMPAT_VERSIONS = $(shell $(PYTHON) -c "from sglang_hybrid.integration.versions import TESTED; print(*TESTED)")

# Two processes share the tests that may run at the same time: most of them wait for one thread of another program. Each
# gets half of the cores; a GPU would be too small for both. tests/conftest.py says which tests stay together.
PROCESSES ?= $(if $(shell command -v nvidia-smi),0,2)
PYTEST := $(BIN)/python -m pytest --durations=10
TOGETHER := $(if $(filter 2,$(PROCESSES)),OMP_NUM_THREADS=$(shell expr \( $$(nproc) + 1 \) / 2)) \
	$(PYTEST) -n $(PROCESSES) --dist loadscope --no-loadscope-reorder

.PHONY: serve pd chaos test tests test-fast test-full test-gpu test-compat test-ipex lint types install docs wheel clean clean-cache help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \(make .*\|  .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

install:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: make ... PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) tools/install.py --venv $(VENV) --for $(or $(USE),test) $(INSTALL)

serve: USE := serve
serve: install
	@$(BIN)/sglang-hybrid serve --hybrid host_memory=4GiB --max-running-requests 16 $(if $(MODEL),--model-path "$(MODEL)") $(ARGS)

pd: USE := pd
pd: install
	@$(BIN)/sglang-hybrid pd --hybrid host_memory=2GiB --max-running-requests 16 $(if $(MODEL),--model-path "$(MODEL)") $(ARGS)

chaos: USE := serve
chaos: install
	@$(BIN)/python -m bench.chaos $(ARGS)

test: lint
	@$(MAKE) --no-print-directory -j2 types tests  # types take one core for a minute, tests begin meanwhile

tests:
	$(TOGETHER) -m "not gpu and not full"

test-fast: lint types
	$(TOGETHER) -m "not gpu and not full and not server"

test-full: lint types
	HYPOTHESIS_PROFILE=full $(TOGETHER) -m "not gpu"

test-gpu: install
	$(PYTEST) -m gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'kernels/*.cpp' 'kernels/*.h' 'kernels/*.cu' 'kernels/*.cuh' 'tests/emulation/*.h' 'tests/emulation/*.cpp')

types: install
	$(BIN)/mypy

# no $(MAKE) in these lines: make runs such ones even when asked only to print
test-ipex:
	@if test "$$(uname -m)" = x86_64 || test -n "$$SGLANG_HYBRID_TEST_IPEX_PROVIDER"; then \
		$(PYTHON) tools/install.py --venv $(VENV) --for test $(INSTALL) && $(BIN)/python tools/check_ipex.py $(filter --any-torch,$(INSTALL)); \
	else $(PYTHON) tools/check_ipex.py; fi

test-compat:
	@for version in $(COMPAT_VERSIONS); do \
		$(PYTHON) tools/install.py --venv .venv-$$version --sglang $$version && \
		.venv-$$version/bin/python -m pytest tests/compat || exit 1; \
	done

wheel:
	@$(PYTHON) tools/build_wheel.py

docs: install
	$(BIN)/python -m tools.build_site

clean:
	@$(PYTHON) tools/clean.py

clean-cache:
	@$(PYTHON) tools/clean.py --cache
