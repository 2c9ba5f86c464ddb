# make demo   train a small Mixture-of-Experts model under an enforced memory limit (two to three minutes)
# make test   lint, types and the tests (about 8 minutes on 2 cores)
# make test-sweeps  the same claims on all architectures and with more examples, real benchmark runs, long combinations
# make bench  one benchmark: BENCH=step, planner, predict, survive, ep or host
# make doctor versions, devices, limits and launch settings
# All of them make .venv and install into it the first time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
JOBS ?= 2
BENCH ?= step

# Tests of several ranks come after the others, one at a time: they share ranks, which take the cores themselves.
# One thread per test process: with several processes on few cores more threads only get in each other's way.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline

.PHONY: demo test test-sweeps pytest lint style imports types format bench doctor clean help

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(INSTALLED)
	@$(BIN)/flex-trainer train demo

test: lint pytest

pytest: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) -m "not ranks and not sweep"
	$(TEST_ENV) $(BIN)/python -m pytest -m "ranks and not sweep"

test-sweeps: $(INSTALLED)
	$(TEST_ENV) FLEX_TEST_EXAMPLES=all $(BIN)/python -m pytest -n $(JOBS) -m "(sweep or hypothesis) and not ranks"
	$(TEST_ENV) $(BIN)/python -m pytest -m "sweep and ranks"

lint: $(INSTALLED)
	@$(MAKE) --no-print-directory -j2 style imports types

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

imports: $(INSTALLED)
	$(BIN)/lint-imports

types: $(INSTALLED)
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/flex-trainer bench $(BENCH) --json bench-$(BENCH).json

doctor: $(INSTALLED)
	@$(BIN)/flex-trainer doctor

clean:
	rm -rf $(VENV) build dist runs wandb bench-*.json *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is renewed when what is to be installed changes, so that a second call starts at once.
$(INSTALLED): pyproject.toml .ci/make-venv
	@.ci/make-venv $(VENV) $(PYTHON)
	@touch $@
