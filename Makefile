# The verbs of this project; CI calls only these. Each installs what it needs into .venv by itself.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
OTHERS := .venv-others
BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find native -name '*.h' -o -name '*.cc')
FORMATTED_SOURCES := $(NATIVE_SOURCES) $(shell find benchmarks tests -name '*.h' -o -name '*.cc' -o -name '*.c')
NATIVE := $(NATIVE_SOURCES) CMakeLists.txt $(wildcard cmake/*.cmake)
JOBS := $(shell nproc)
# Where it is set, each of the thousand workers that tests start would compile all modules: 0.66 s of CPU instead of 0.37 s.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: demo test-quick test test-all test-others test-native coverage check sanitize chaos bench bench-cluster bench-sync docs clean
TEST_JOBS ?= 3
CHAOS_S ?= 600
CHAOS_SEED ?= 1
CHAOS_WIRES ?= ipc tcp

# Train LunarLander on two local workers with APS: live display, a picture and a summary at the end (a minute or two).
demo: $(VENV)/with-demo
	$(BIN)/python examples/demo.py --require-target

# More processes than cores, for most tests wait for something; in the order of tests/conftest.py.
PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadscope --no-loadscope-reorder --durations 10

# After each change, in under three minutes: no engines, few processes, nothing that must time out.
test-quick: $(VENV)/with-test
	$(PYTEST) -m "not engine and not long and not slow"

# Before a commit, in under twelve minutes: the C++ core's tests and all of Python's that need no engine.
test: $(VENV)/with-test test-native
	$(PYTEST) -m "not engine and not long"

# What CI runs: also long statistics and sweeps, chaos, outages, and the launchers on real engines.
test-all: $(VENV)/with-test test-native build/cleanrl/ready build/old-gym/ready
	$(PYTEST)

# The tests of the C++ core, and of the environments on MuJoCo and Box2D.
test-native: build/native/plain/passed

# Counts workers, spawners and children too, which is why it is no part of the others: tracing makes them slow.
coverage: $(VENV)/with-test
	$(PYTEST) -m "not engine and not long" --cov --cov-report=term:skip-covered

# What does not go with the rest has an environment of its own: dm_control and MuJoCo 3, EnvPool, a build without Box2D.
test-others: $(OTHERS)/ready build/cleanrl/ready build/envpool/ready
	$(OTHERS)/bin/python -m pytest tests/pool/simulators/test_dm_control.py tests/pool/simulators/test_older_mujoco.py \
		tests/pool/vector/test_envpool_tasks.py tests/cluster/worker/test_vector_on_workers.py \
		tests/pool/simulators/test_box2d_missing.py tests/compat/envpool
	PYTHONPATH=build/envpool $(BIN)/python -m pytest tests/compat/envpool/test_against_envpool.py

check: $(VENV)/with-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED_SOURCES)

# The same under the thread sanitizer, and under the address and undefined-behaviour sanitizers. MuJoCo's and Box2D's own
# libraries are as they come.
sanitize: build/native/thread/passed build/native/address/passed

# Kill, stop, delay, drop and duplicate for ten minutes on each wire; tcp needs root. make chaos CHAOS_S=3600 CHAOS_SEED=7
chaos: $(VENV)/with-test
	set -e; for wire in $(CHAOS_WIRES); do \
		$(BIN)/python -m tests.cluster.network.chaos --wire $$wire --seconds $(CHAOS_S) --seed $(CHAOS_SEED); \
	done

bench: $(VENV)/with-bench
	$(BIN)/python -m benchmarks.pool
	$(BIN)/python -m benchmarks.simulators
	$(BIN)/python -m benchmarks.policy_loop
	$(BIN)/python -m benchmarks.sb3
	PYTHONPATH=examples $(BIN)/python -m benchmarks.xla
	$(BIN)/python -m benchmarks.first_ready
	$(BIN)/python -m benchmarks.malloc_count
	$(BIN)/python -m benchmarks.facade_cost
	$(BIN)/python -m benchmarks.help_worth

# RLlib and TorchRL want another Gymnasium than we do: they have an environment of their own.
bench-cluster: $(VENV)/with-demo $(PEERS)/ready
	$(BIN)/python -m benchmarks.cluster --peers-python $(PEERS)/bin/python

# The examples under different rules of synchronisation: pulls, returns, bytes.
bench-sync: $(VENV)/with-demo
	PYTHONPATH=examples $(BIN)/python -m benchmarks.sync

docs: $(VENV)/with-docs
	$(BIN)/pdoc envfleet envfleet.testing -o build/docs
	@echo "written: build/docs/index.html"

clean:
	rm -rf build dist runs $(VENV) $(PEERS) $(OTHERS) .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# -- what they need --

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# What builds the C++ stays installed: each verb installs its extra, and only the first compiles everything.
$(VENV)/build-requires: $(BIN)/python pyproject.toml
	$(BIN)/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' > $@
	$(BIN)/pip install --quiet --constraint constraints.txt cmake ninja --requirement $@

# Without what it depends on: pygame-ce would overwrite pygame. What it imports is in the extra `test`.
RL_GAMES := rl_games==1.6.5
$(VENV)/with-%: $(VENV)/build-requires constraints.txt $(NATIVE)
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$*]'
	$(if $(filter test,$*),$(BIN)/pip install --quiet --no-deps $(RL_GAMES))
	@touch $@

# The wheel is built where the editable package was: only what has to do with Box2D is done again.
$(OTHERS)/ready: pyproject.toml constraints.txt $(NATIVE) | $(VENV)/with-test
	rm -rf build/others
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/others \
		--config-settings=cmake.define.ENVFLEET_BOX2D=OFF .
	$(PYTHON) -m venv --clear $(OTHERS)
	$(OTHERS)/bin/pip install --quiet --constraint constraints.txt "$$(echo build/others/envfleet-*.whl)[atari,box2d,dm-control]" \
		envpool==1.2.5 imageio pytest pytest-timeout pytest-xdist
	@touch $@

# EnvPool beside the MuJoCo that our native envs are for: the other environment's, without the rest of it.
build/envpool/ready: $(OTHERS)/ready
	mkdir -p build/envpool
	ln -sfn $(CURDIR)/$(OTHERS)/lib/python3*/site-packages/envpool* $(CURDIR)/$(OTHERS)/lib/python3*/site-packages/optree* build/envpool
	@touch $@

# CleanRL's scripts, which tests run as files: the package itself wants an older Python.
build/cleanrl/ready: | $(BIN)/python
	$(BIN)/python -m pip download --quiet --no-deps --ignore-requires-python --dest build/cleanrl cleanrl==1.2.0
	$(BIN)/python -m zipfile --extract build/cleanrl/cleanrl-1.2.0-py3-none-any.whl build/cleanrl
	@touch $@

# The gym that CleanRL's scripts for EnvPool import, in a folder of its own.
build/old-gym/ready: | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --target build/old-gym gym==0.23.1 gym-notices==0.1.0
	@touch $@

$(PEERS)/ready: constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --constraint constraints.txt torch 'ray[rllib]==2.60.0' torchrl==0.14.1
	@touch $@

SANITIZER_plain :=
SANITIZER_thread := thread
SANITIZER_address := address,undefined
build/native/%/passed: $(NATIVE) | $(VENV)/with-test
	$(BIN)/cmake -S . -B $(@D) -DENVFLEET_NATIVE_TESTS=ON -DENVFLEET_SANITIZE=$(SANITIZER_$*) \
		-DPython_EXECUTABLE=$(abspath $(BIN)/python) > /dev/null
	$(BIN)/cmake --build $(@D) --parallel $(JOBS)
	$(BIN)/ctest --test-dir $(@D) --output-on-failure --timeout 300 --parallel $(JOBS)
	@touch $@
