# make run: sets up what it needs and trains on real data. make test: the tests. make help: the rest.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# What the other has, and Horovod.
HOROVOD := .venv-horovod
# Three tests at a time: more than a third of its time, a test waits for processes and for time to pass. One more of the
# slow ones, since one process has those that hardly compute.
THREE := --numprocesses 3 --dist worksteal
FOUR := --numprocesses 4 --dist worksteal
# Python keeps what it compiled: to compile all of it again takes each of a thousand commands a quarter of a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run ui test test-slow test-horovod lint format lock wheel horovod benchmark figures clean

help: ## these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(READY) ## .venv from requirements.lock; the others call it when it is missing or stale

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Expected Python 3.11, 3.12 or 3.13, received $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "Expected Python's venv module to work. On Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 2; }
	@echo "Installing the locked dependencies into $(VENV); TensorFlow is large, this takes a minute or two."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# On every core, which pip does on one; some packages have files for other Pythons.
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $(READY)

run: setup ## train the default model on real digits, on every core of this machine
	@$(BIN)/python -m pipeline $(ARGS)

ui: setup ## MLflow's UI on 127.0.0.1, opened at the runs by speedup; PORT=5000
	@$(BIN)/python -m pipeline ui port=$(or $(PORT),5000) $(ARGS)

test: setup ## the tests, without the slow ones
	@$(BIN)/python -m pytest -q $(THREE) -m "not slow" $(ARGS)

test-slow: setup ## the slow tests: whole runs, kills, sweeps
	@$(BIN)/python -m pytest -q $(FOUR) -m "slow and not timed" --durations=20 $(or $(ARGS),tests) || test $$? -eq 5
	@# Alone: what they measure must be right. ARGS may leave none of either.
	@$(BIN)/python -m pytest -q -m "slow and timed" $(or $(ARGS),$$(grep -rl --include=*.py mark.timed tests)) || test $$? -eq 5

test-horovod: $(HOROVOD)/.ready ## the tests of what `make horovod` builds, which it builds where it is missing
	@$(BIN)/python -m pytest -q -m horovod --durations=10 $(ARGS)

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

horovod: $(HOROVOD)/.ready ## build Horovod into .venv-horovod, for strategy.collective=horovod; takes ten minutes

# Its setup.py reads MAKEFLAGS for make's own jobs. Gloo joins its processes, whatever starts them: MPI is not linked.
# One of its sources calls what TensorFlow has no more; what it is for, XLA, is not used here.
$(HOROVOD)/.ready: horovod.txt requirements.lock | $(READY)
	@for tool in cmake make c++; do command -v $$tool > /dev/null || \
	  { echo "Expected $$tool, which compiles Horovod, received none. On Debian: apt-get install cmake make g++"; exit 2; }; done
	@rm -rf $(HOROVOD)
	@$(BIN)/python -m venv --without-pip $(HOROVOD)
	@$(HOROVOD)/bin/python -c 'import sysconfig, sys; path = sysconfig.get_path("purelib"); \
	  open(path + "/pipeline.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})")' \
	  "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@mkdir $(HOROVOD)/build
	@echo "Building Horovod into $(HOROVOD); this takes ten minutes on two cores. What it says: $(HOROVOD)/build/log.txt"
	@cd $(HOROVOD)/build && pip="../bin/python -m pip --quiet --disable-pip-version-check" && \
	  $$pip download --no-deps --no-binary horovod --require-hashes --no-build-isolation -r ../../horovod.txt && \
	  $$pip install --no-deps --ignore-installed --no-index setuptools-*.whl wheel-*.whl && \
	  tar xzf horovod-*.tar.gz && cd horovod-*/ && sed -i '/xla_mpi_ops.cc/d' horovod/tensorflow/CMakeLists.txt && \
	  { env MAKEFLAGS=-j$$(nproc) HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
	    HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 ../../bin/python -m pip install --verbose \
	    --disable-pip-version-check --no-deps --no-build-isolation . > ../log.txt 2>&1 || { tail -30 ../log.txt; exit 2; }; }
	@$(HOROVOD)/bin/python -c 'import horovod.tensorflow as hvd; assert hvd.gloo_built()'
	@rm -rf $(HOROVOD)/build
	@touch $@

benchmark: setup ## ours beside bare tf.distribute, Keras and the limit, in turn; ARGS="--against COMMIT"
	@$(BIN)/python benchmarks/side_by_side.py $(ARGS)

figures: setup ## the tables of README and docs, from what benchmarks/results/ holds
	@$(BIN)/python benchmarks/figures.py $(ARGS)

clean: ## remove the environments and caches; outputs/ stays
	@rm -rf $(VENV) $(HOROVOD) dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
