# Two commands on a fresh machine: `make demo` and `make test`. Each makes or extends .venv by itself and
# installs again only when pyproject.toml, constraints.txt or requirements-nodeps.txt changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check
INPUTS := pyproject.toml constraints.txt requirements-nodeps.txt

.PHONY: demo test bench lint clean

demo: $(VENV)/.core
	$(BIN)/leanstep demo

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

bench: $(VENV)/.core
	$(BIN)/leanstep bench $(BENCH_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis leanstep-report build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by its pin: a package that asks for plain "torch" then finds it and brings nothing else.
$(VENV)/.core: $(INPUTS) | $(VENV)/bin/python
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps -r requirements-nodeps.txt
	@touch $@
