# make run: sets up what it needs and trains on real data. make test: the tests. make help: the rest.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Three tests at a time: more than a third of its time, a test waits for processes and for time to pass.
THREE := --numprocesses 3 --dist worksteal
# Python keeps what it compiled: to compile all of it again takes each of a thousand commands a quarter of a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run ui test test-slow lint format lock wheel benchmark figures clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY) ## .venv from requirements.lock; the others call it when it is missing or stale

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Expected Python 3.11, 3.12 or 3.13, received $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "Expected Python's venv module to work. On Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 2; }
	@echo "Installing the locked dependencies into $(VENV); TensorFlow is large, this takes a minute or two."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

run: setup ## train the default model on real digits, on every core of this machine
	@$(BIN)/python -m pipeline $(ARGS)

ui: setup ## MLflow's UI on 127.0.0.1, opened at the runs by speedup; PORT=5000
	@$(BIN)/python -m pipeline ui port=$(or $(PORT),5000) $(ARGS)

test: setup ## the tests, without the slow ones
	@$(BIN)/python -m pytest -q $(THREE) -m "not slow" $(ARGS)

test-slow: setup ## the slow tests: whole runs, kills, sweeps
	@$(BIN)/python -m pytest -q $(THREE) -m "slow and not timed" --durations=20 $(ARGS) || test $$? -eq 5
	@# Alone: what they measure must be right. ARGS may leave none of either.
	@$(BIN)/python -m pytest -q -m "slow and timed" $(ARGS) || test $$? -eq 5

lint: setup ## formatting, lint, types, and who imports whom
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: setup ## resolve the dependencies anew into requirements.lock
	@$(BIN)/python -m pip install --quiet uv
	@$(BIN)/uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --quiet -o requirements.lock

wheel: setup ## build dist/*.whl, which holds conf/ and works outside the checkout
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w dist .

benchmark: setup ## ours beside bare tf.distribute, Keras and the limit, in turn; ARGS="--against COMMIT"
	@$(BIN)/python benchmarks/side_by_side.py $(ARGS)

figures: setup ## the tables of README and docs, from what benchmarks/results/ holds
	@$(BIN)/python benchmarks/figures.py $(ARGS)

clean: ## remove the environment and caches; outputs/ stays
	@rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
