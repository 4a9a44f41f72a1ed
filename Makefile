# make demo | make test   work on a fresh machine: Python 3.10+ with venv, a C++20 compiler, make (and, for `test`,
# GoogleTest). `make help` lists the rest.
SHELL    := /bin/bash
PY       ?= python3
VENV     ?= .venv
TORCH    ?= torch==2.13.0
BUILD    ?= build/make
JOBS     ?= $(shell nproc)
PIPFLAGS ?= -q --disable-pip-version-check --no-input
SHARDS   ?= 4
# Many tests wait for processes of theirs, some use several cores: more of them at a time would run into their limits.
WORKERS  ?= 2

# By its path: the venv's python comes first on PATH below.
OUTER    := $(shell command -v $(PY))
BIN      := $(abspath $(VENV))/bin
PYTHON   := $(BIN)/python
PIP      := $(PYTHON) -m pip install $(PIPFLAGS)
# Tools come from the venv, else from beside the python whose packages it sees (the $(PY) that it was made with, which
# may have been another environment's than today's), else from the system.
BESIDE   := $(or $(shell cat $(VENV)/.made-with 2>/dev/null),$(patsubst %/,%,$(dir $(OUTER))))
export PATH := $(BIN):$(BESIDE):$(PATH)
# Honoured by CMake, for the sake of every build below.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER  ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
endif
export HYDRA_WERROR ?= OFF
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

SRC      := $(shell find csrc hydra_ext CMakeLists.txt pyproject.toml README.md -type f -not -path '*/__pycache__/*')
CPP      := $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu')
# Not at the root: ./hydra_ext, which holds no build, would hide the installed one.
PYTEST   := cd tests && $(PYTHON) -m pytest -q
PARALLEL := -n $(WORKERS) --dist worksteal
# Ninja by its path of today: a build folder remembers that of the venv it was first configured with.
CMAKE     = cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$$(command -v ninja) -DHYDRA_WERROR=ON
# ThreadSanitizer of older compilers does not survive the address randomisation of newer kernels.
FIXED    := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: all help demo test test-full pytest lint format ctest ctest-full asan tsan check-cuda no-nvcc gpu-test gpu-bench mutants \
        stubs stubs-check wheel-test other-key clean
all: $(BUILD)/.built

help:
	@echo "demo        build, then show it at work on this machine"
	@echo "test        everything that needs no GPU: pytest, C++ tests (plain, ASan, TSan), lint, CUDA compile check, wheel"
	@echo "test-full   pytest with its long tests, in SHARDS=$(SHARDS) runs, other-key and ctest-full; SHARD=2 runs one of them; WORKERS=$(WORKERS) tests at a time"
	@echo "pytest ctest asan tsan lint check-cuda stubs-check wheel-test   the parts of test; format  mends what lint finds"
	@echo "gpu-test gpu-bench   on a machine with a GPU; fail without one. CELL='--model 4b --tokens 8192' is one cell of steps"
	@echo "mutants     small faults in package and engine, which the tests are to find: hours; COUNT=200 SEED=1"
	@echo "stubs       write hydra_ext/_C's type stubs anew"

# ---- the environment ------------------------------------------------------------------------------------------------
# A suitable torch that $(PY) can import is used as it is: its folder is put on the venv's path by a .pth file
# (--system-site-packages would not see it where $(PY) is itself in a venv).
$(VENV)/.deps: pyproject.toml tools/requirements.py
	test -x $(PYTHON) || $(OUTER) -m venv $(VENV)
	@test -e $(VENV)/.made-with || echo $(BESIDE) > $(VENV)/.made-with
	@set -e; probe='import sys, torch; v = tuple(map(int, torch.__version__.split(".")[:2])); sys.exit(not (2, 11) <= v < (2, 14))'; \
	if $(PYTHON) -W ignore -c "$$probe" 2>/dev/null; then echo "torch: already in $(VENV)"; \
	elif $(OUTER) -W ignore -c "$$probe" 2>/dev/null; then echo "torch: using that of $(PY)"; \
	  $(OUTER) -W ignore -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' \
	    > "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_outer.pth"; \
	else echo "torch: installing $(TORCH)"; $(PIP) '$(TORCH)'; fi
	$(PYTHON) tools/requirements.py build run demo > $(VENV)/requirements.txt
	$(PIP) -r $(VENV)/requirements.txt $(if $(shell command -v cmake),,'cmake>=3.24')
	@touch $@

$(VENV)/.deps-test: $(VENV)/.deps
	$(PYTHON) tools/requirements.py test > $(VENV)/requirements-test.txt
	$(PIP) -r $(VENV)/requirements-test.txt
	@touch $@

$(VENV)/.deps-dev: $(VENV)/.deps
	$(PYTHON) tools/requirements.py dev > $(VENV)/requirements-dev.txt
	$(PIP) -r $(VENV)/requirements-dev.txt
	@touch $@

# The stamp lies in the clone, not in the venv: a venv kept between clones must not vouch for this one's build.
$(BUILD)/.built: $(VENV)/.deps $(SRC)
	$(PIP) --no-build-isolation --no-deps --force-reinstall . -Cbuild-dir=$(BUILD)
	@touch $@

# ---- demo and tests -------------------------------------------------------------------------------------------------
demo: $(BUILD)/.built
	cd / && $(PYTHON) -W ignore -m hydra_ext demo --picture $(CURDIR)/memory.png

test: export HYDRA_WERROR = ON
test: lint ctest pytest stubs-check asan tsan $(if $(shell command -v nvcc),check-cuda,no-nvcc) wheel-test

pytest: $(BUILD)/.built $(VENV)/.deps-test
	$(PYTEST) $(PARALLEL) .

test-full: $(BUILD)/.built $(VENV)/.deps-test $(if $(SHARD),,other-key ctest-full)
	@set -e; for shard in $(or $(SHARD),$(shell seq $(SHARDS))); do \
	  echo "shard $$shard of $(SHARDS)"; ($(PYTEST) $(PARALLEL) -m "not gpu" --shard=$$shard/$(SHARDS) .); done

# Operator coverage with the other dispatch key that device parameters can carry, in a build of its own.
other-key: $(VENV)/.deps-test
	rm -rf build/other-key
	$(PIP) --no-build-isolation --no-deps --target build/other-key . -Cbuild-dir=$(BUILD)-other-key \
	  -Ccmake.define.HYDRA_FAULT_KEY=TESTING_ONLY_GenericWrapper
	cd tests && export PYTHONPATH=$(CURDIR)/build/other-key && \
	  $(PYTHON) -c 'import hydra_ext._build_info as info; print(info.FAULT_KEY); raise SystemExit(info.FAULT_KEY == "DeferredInit")' && \
	  $(PYTHON) -m pytest -q pytorch/test_op_coverage.py runtime/test_window_cases.py

ctest: $(VENV)/.deps
	$(CMAKE) -B $(BUILD)-core -DHYDRA_PYTHON=OFF -DHYDRA_TESTS=ON
	cmake --build $(BUILD)-core && ctest --test-dir $(BUILD)-core --output-on-failure --no-tests=error

# Tests of minutes are disabled ones.
ctest-full: ctest
	$(BUILD)-core/hydra_tests --gtest_also_run_disabled_tests --gtest_filter='*.DISABLED_*'

asan: $(VENV)/.deps
	$(CMAKE) -B $(BUILD)-asan -DHYDRA_PYTHON=OFF -DHYDRA_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHYDRA_SANITIZE=address,undefined
	cmake --build $(BUILD)-asan && ctest --test-dir $(BUILD)-asan --output-on-failure --no-tests=error

tsan: $(VENV)/.deps
	$(CMAKE) -B $(BUILD)-tsan -DHYDRA_PYTHON=OFF -DHYDRA_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHYDRA_SANITIZE=thread
	cmake --build $(BUILD)-tsan && $(FIXED) ctest --test-dir $(BUILD)-tsan --output-on-failure --no-tests=error

# Every CUDA source compiled with warnings as errors, nothing linked: needs nvcc and any torch, no GPU.
check-cuda: $(VENV)/.deps
	$(CMAKE) -B $(BUILD)-cuda -DPython_EXECUTABLE=$(PYTHON) -DHYDRA_CUDA=CHECK
	cmake --build $(BUILD)-cuda --target hydra_cuda

no-nvcc:
	@echo "no nvcc here: the CUDA sources were not compiled"

# Goes on where an earlier run was stopped: what has not changed since keeps its results. MUTANTS are further options.
COUNT ?= 200
SEED  ?= 1
mutants: $(BUILD)/.built $(VENV)/.deps-test
	cd tests && PYTHONPATH=$(CURDIR)/tools $(PYTHON) -W ignore -m mutants --count $(COUNT) --seed $(SEED) --jobs $(WORKERS) $(MUTANTS)

# ---- GPU: what is asked for here fails where there is none ----------------------------------------------------------
gpu-test: $(BUILD)/.built $(VENV)/.deps-test
	cd tests && $(PYTHON) ../tools/check_gpu.py
	$(CMAKE) -B $(BUILD)-gpu -DHYDRA_PYTHON=OFF -DHYDRA_TESTS=ON -DHYDRA_GPU_TESTS=ON
	cmake --build $(BUILD)-gpu --target hydra_cuda_tests && ctest --test-dir $(BUILD)-gpu -R gpu_ --output-on-failure --no-tests=error
	$(PYTEST) -m gpu .

gpu-bench: $(BUILD)/.built
	cd tests && $(PYTHON) ../tools/check_gpu.py
	cd benchmarks && $(PYTHON) $(if $(CELL),gpu_step.py $(CELL),gpu.py)

# ---- style, stubs, wheel --------------------------------------------------------------------------------------------
lint: $(VENV)/.deps-dev $(VENV)/.deps-test
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CPP)
	$(PYTHON) -m mypy

format: $(VENV)/.deps-dev
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP)

$(BUILD)-stubs/.written: $(BUILD)/.built $(VENV)/.deps-dev
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && $(PYTHON) -m pybind11_stubgen hydra_ext._C --exit-code --output-dir .
	ruff format -q --isolated --line-length 120 $(@D)/hydra_ext
	@touch $@

stubs: $(BUILD)-stubs/.written
	rm -rf hydra_ext/_C hydra_ext/_C.pyi
	cp -r $(BUILD)-stubs/hydra_ext/_C* hydra_ext/
	@touch $(BUILD)/.built $(BUILD)-stubs/.written   # stubs are no reason to build again

stubs-check: $(BUILD)-stubs/.written
	@for stub in _C _C.pyi; do \
	  if test -e $(BUILD)-stubs/hydra_ext/$$stub -o -e hydra_ext/$$stub; then \
	    diff -ru $(BUILD)-stubs/hydra_ext/$$stub hydra_ext/$$stub || { echo "hydra_ext/$$stub is out of date: make stubs"; exit 1; }; fi; done

# The wheel in a venv of its own, which sees this one's torch, safetensors and numpy.
wheel-test: $(VENV)/.deps
	rm -rf build/wheel build/wheel-venv && mkdir -p build/wheel
	$(PYTHON) -m pip wheel $(PIPFLAGS) --no-build-isolation --no-deps --wheel-dir build/wheel . -Cbuild-dir=$(BUILD)
	$(PYTHON) tools/check_wheel.py build/wheel/*.whl
	$(PYTHON) -m venv --without-pip build/wheel-venv
	$(PYTHON) -m pip --python build/wheel-venv/bin/python install $(PIPFLAGS) --no-deps build/wheel/*.whl
	$(PYTHON) -W ignore -c 'import os, numpy, safetensors, torch; print(*{os.path.dirname(m.__path__[0]) for m in (numpy, safetensors, torch)}, sep="\n")' \
	  > "$$(build/wheel-venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_outer.pth"
	cd / && $(CURDIR)/build/wheel-venv/bin/python -c 'import sys, hydra_ext; sys.exit(not hydra_ext.__file__.startswith(sys.prefix))'
	cd / && $(CURDIR)/build/wheel-venv/bin/python -m hydra_ext doctor

clean:
	rm -rf build $(VENV)
