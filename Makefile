# make serve: set everything up and serve the demo model.   make test: set everything up and run all tests.
# MODEL=smollm2 downloads and serves a real model, CONFIG=other.yaml yours. PYTHON=python3.12 takes another interpreter.

PYTHON ?= python3
CONFIG ?= serve_config.yaml
VENV := .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest $(FULL)
CXX_FILES := $(wildcard llama_core/backends/native/*.[ch]pp llama_core/backends/native/*/*.hpp benchmarks/harness/*.cpp tests/support/*.[ch]pp)

.PHONY: help setup serve test test-full chaos soak fuzz gpu-check gpu-bench audit lint clean

help:
	@sed -n '1,2p' Makefile
	@echo "targets: setup serve test test-full chaos soak fuzz gpu-check gpu-bench audit lint clean"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt scripts/setup.sh
	PYTHON=$(PYTHON) sh scripts/setup.sh $(VENV)
	@touch $@

serve: setup
ifeq ($(origin MODEL),command line)
	@config=$$($(BIN)/python -m deployments.local.fetch_model '$(MODEL)') && exec $(BIN)/llama-ray up $$config
else
	exec $(BIN)/llama-ray up $(CONFIG)
endif

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

# Tests that compute run in the background, with a lower priority because Ray and Ray Serve allow a process only seconds to start;
# the linters follow them. Meanwhile the tests of ranks run, and after them those of servers, whose ranks would claim the same
# cores: at most two servers at a time, and tests/conftest.py says which tests share one. test-full adds the full matrices, every
# combination of instruction sets, ranks, proxies, damaged files and faults that `make test` takes one or two of.
# They start hundreds of Python processes, in which importing torch takes twice as long without compiled modules on the disk.
test test-full: export PYTHONDONTWRITEBYTECODE :=
test test-full: export OMP_WAIT_POLICY := passive
test-full: FULL := --full
test test-full:
	@# Beside the set-up, which keeps one core busy: the native engine for the instruction sets that tests compare.
	@# pip compiles no module, because most are never imported: Python compiles a module when it is first imported.
	@$(PYTHON) tests/support/native_builds.py $(FULL) & \
	PIP_COMPILE=0 $(MAKE) --no-print-directory setup && $(BIN)/python -m llama_core.backends.native || exit; wait
	@status=0; log=$$(mktemp); \
	(nice -n 5 $(PYTEST) -n 2 -m "not ranks and not servers" || status=1; \
	nice -n 5 $(MAKE) --no-print-directory lint || status=1; exit $$status) >$$log 2>&1 & \
	$(PYTEST) -m ranks tests/cluster || status=1; \
	$(PYTEST) -n 2 -m servers --no-loadscope-reorder || status=1; \
	wait $$! || status=1; cat $$log; rm $$log; exit $$status

# 200 faults at random moments under 50 live streams: ten minutes.
chaos: setup
	$(BIN)/python -m tests.chaos --faults 200 --streams 50

# Two hours under load with a rank killed about every minute.
soak: setup
	$(BIN)/python -m tests.chaos --kinds kill --faults 120 --pause 120 --streams 8

# Published vulnerabilities in the versions of constraints.txt. Needs the network, so it is no part of the tests.
audit:
	$(PYTHON) scripts/audit.py

# Made-up requests, operations, messages and files, 1.4 million: an hour on two cores that others use too.
fuzz: setup
	$(BIN)/python -m tests.fuzz

# Every Triton kernel for six GPUs that need not be here: about 15 minutes on two cores.
gpu-check: setup
	$(BIN)/python -m tests.programs.gpu_check

# One GPU, with its own tests; a second call goes on where the first was cut. Needs torch, Triton, NumPy and pytest, but no set-up
# and no Ray: GPU_PYTHON is the interpreter that has them, ARGS has --out FILE.json and further options, such as --only decode.
gpu-bench:
	$(or $(GPU_PYTHON),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))) -m benchmarks gpu $(ARGS)

clean:
	rm -rf $(VENV) .venv-audit .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
