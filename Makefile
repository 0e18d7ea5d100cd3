# Two commands on a fresh machine: `make demo` and `make test`. Each makes or extends .venv by itself and
# installs again only when pyproject.toml, constraints.txt or requirements-nodeps.txt changed.
#
# `make test` takes a few minutes on two cores: the tests that start no process and import no trainer, and at
# least one of each other kind (tests/costs.py). `make test-all` runs every test: eleven or more.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Each worker begins with half of the files: what a file or a folder prepares for its tests is prepared once.
WORKERS := -n 2 --dist worksteal
INPUTS := pyproject.toml constraints.txt requirements-nodeps.txt

.PHONY: demo test test-all test-avx2 test-gpu test-pretend launched-kernels mutate-kernels mutants covered bench museum lint docs dist clean

demo: $(VENV)/.core
	$(BIN)/leanstep demo

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) -m quick $(PYTEST_ARGS)

test-all: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

# What depends on rounding, as on a processor without AVX-512 and without native bf16. The C++ passes follow torch's
# variable, ATEN_CPU_CAPABILITY: tests/test_cpu.py asserts it.
AVX2   := ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
ROUNDS := tests/heads tests/muon tests/lens tests/recipes/speedrun tests/benchmarks tests/test_cpu.py

test-avx2: $(VENV)/.test
	$(AVX2) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(ROUNDS) $(PYTEST_ARGS)

# On a machine with a GPU: kernels compiled, not interpreted, and the `device` fixture is the GPU. Needs gcc,
# python3-venv, python3-dev and a driver that knows the venv's torch. PyPI's is built for CUDA 13.0 (driver 580 or
# newer); before, `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 make test-gpu` on the first run.
GPU    ?= cuda

test-gpu: $(VENV)/.test
	LEANSTEP_TEST_DEVICE=$(GPU) $(BIN)/python -m pytest $(PYTEST_ARGS)

# The host half of test-gpu with a mocked torch.cuda: sync debugging, kernels that are not
# interpreted, devices to choose from. Tests that need the device's memory are skipped.
HOST := tests/diagnose tests/commands tests/on_device tests/test_pretended_cuda.py
# Long runs of whole programs, which ask for no device.
LONG := --ignore=tests/commands/test_demo.py --ignore=tests/diagnose/test_third_party.py

test-pretend: $(VENV)/.test
	LEANSTEP_TEST_DEVICE=pretended OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(WORKERS) $(HOST) $(LONG) $(PYTEST_ARGS)

# Checks of kernels that take too long for CI, see docs/gpu.md.
launched-kernels: $(VENV)/.test
	$(BIN)/python dev/launched_kernels.py

mutate-kernels: $(VENV)/.test
	$(BIN)/python dev/mutate_kernels.py

# Does `make test` notice changed operators, constants and conditions? Half an hour on two cores.
mutants: $(VENV)/.test
	$(BIN)/python dev/mutants.py

# Which lines of leanstep/ run in the tests, of all processes? `make covered PYTEST_ARGS='-m quick'` for `make test`.
covered: $(VENV)/.test
	$(BIN)/python dev/covered.py $(WORKERS) $(PYTEST_ARGS)

# Real bugs of other projects: prove must name each one. It installs the versions that the exhibits need.
museum: $(VENV)/.test
	$(BIN)/python -m museum.run
	$(BIN)/python -m museum.run --page docs/museum.md

# The rows behind the README's table; OUT=DIR keeps them as JSON. Peers that are not installed are left out.
DEVICE ?= cpu
BENCH  := logprob_linear sft_step grpo_step muon_step

bench: $(VENV)/.test
	$(if $(OUT),mkdir -p $(OUT))
	for name in $(BENCH); do \
	  $(BIN)/python -m benchmarks.$$name --device $(DEVICE) $(if $(OUT),--json $(OUT)/$$name.json) || exit 1; \
	done

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python dev/prose.py

# The site in site/, from docs/, docstrings, rules and results; a broken link fails.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

# Wheel and sdist in dist/, each installed into an empty environment and tried there.
dist: $(VENV)/.test
	PYTHON=$(BIN)/python dev/try_dist

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis leanstep-report build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by its pin: a package that asks for plain "torch" then finds it and brings nothing else.
$(VENV)/.core: $(INPUTS) | $(VENV)/bin/python
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) -e ".[all]"
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps -r requirements-nodeps.txt
	@touch $@
