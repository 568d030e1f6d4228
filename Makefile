# Everything here works on a fresh machine that has make and Python 3.11 to 3.13. The first target that you make also
# makes .venv, from what constraints.txt pins. Another Python: make test PYTHON=python3.12. Fewer workers: WORKERS=1.

PYTHON  ?= python3
WORKERS ?= auto

BIN   := .venv/bin
READY := .venv/.ready
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

export MPLBACKEND := Agg
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DELETE_ON_ERROR:
.PHONY: help demo test lint format types clean

help:
	@echo 'make demo     train a private classifier on the embedded digits, at epsilon 3'
	@echo 'make test     lint, types, the whole test suite'
	@echo 'make lint     ruff: rules and formatting'
	@echo 'make format   ruff: put both right'
	@echo 'make types    mypy, strict, on src/'
	@echo 'make clean    remove caches and what the demo wrote; never runs/, which holds spent budgets'

# torch goes in first and alone: any looser request may fetch another build, with gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	    { echo "quietgrad needs Python 3.11 to 3.13, and $(PYTHON) is another: make PYTHON=python3.12 ..."; exit 1; }
	@echo 'setting up .venv (once, a minute or two)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-input -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-input -c constraints.txt -e '.[app,dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(READY)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(READY)
	@$(BIN)/mypy

# First the tests that measure time, by themselves and with all cores; then all others, one torch thread to a worker.
# Both always run, either can fail the target, and pytest's closing line comes last. (Status 5: no test is so marked.)
test: lint types
	@failed=0; $(BIN)/python -m pytest -m alone || [ $$? -eq 5 ] || failed=1; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not alone' --durations=10 \
	    -n $(WORKERS) --maxprocesses=8 --dist=worksteal || failed=1; \
	exit $$failed

clean:
	rm -rf build dist demo .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
