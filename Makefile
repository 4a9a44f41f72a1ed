# make demo | make test   work on a fresh machine: Linux, Python 3.10+ with venv, a C++20 compiler, make. `make help`
# lists all targets with their texts behind ## below.
SHELL    := /bin/bash
PY       ?= python3
VENV     ?= .venv
TORCH    ?= torch==2.13.0
BUILD    ?= build/make
JOBS     ?= $(shell nproc)
PIPFLAGS ?= -q --disable-pip-version-check --no-input
SHARDS   ?= 4
# Many tests wait for their processes, and some use several cores. More tests at a time would exceed their time limits.
WORKERS  ?= 2

# The archive for `test` if neither the system nor its package manager has GoogleTest: an address or a path.
GTEST_SOURCE ?= https://github.com/google/googletest/releases/download/v1.17.0/googletest-1.17.0.tar.gz
GTEST_SHA256 ?= 65fab701d9829d38cb77c14acdc431d2108bfdbf8979e40eb8ae567edf10b27c

# By its path, since the venv's python comes first on PATH below.
OUTER    := $(shell command -v $(PY))
BIN      := $(abspath $(VENV))/bin
PYTHON   := $(BIN)/python
PIP      := $(PYTHON) -m pip install $(PIPFLAGS)
# Tools come from the venv, else from the folder of the python whose packages it sees, else from the system. That python
# is the $(PY) that the venv was made with, which may belong to another environment than today's.
BESIDE   := $(or $(shell cat $(VENV)/.made-with 2>/dev/null),$(patsubst %/,%,$(dir $(OUTER))))
export PATH := $(BIN):$(BESIDE):$(PATH)
# CMake reads these in every build below.
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER  ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
export CCACHE_BASEDIR ?= $(CURDIR)
export CCACHE_NOHASHDIR ?= 1
endif
export HYDRA_WERROR ?= OFF
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

# The sources of the extension. The package's Python files are imported in place.
SRC      := $(shell find csrc emulator/CMakeLists.txt emulator/sources.cmake cmake CMakeLists.txt pyproject.toml -type f)
CPP      := $(shell find csrc emulator tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu')
PYTEST   := cd tests && $(PYTHON) -m pytest -q
PARALLEL := -n $(WORKERS) --dist worksteal
# A few cases of each test that has many, and fewer examples: `test-full` runs all of them.
SAMPLE   := --sample
# Tests of every part of the package that take seconds.
FAST     := test_architecture.py test_blocks.py test_cpp_source.py test_guard.py test_import.py test_make.py test_wheels.py \
            checkpoint/test_values.py cli/test_schedule.py codec construction/test_refusals.py data/test_places.py fleet/test_guides.py \
            fleet/test_journal.py heads/test_unmade.py integrations/test_versions.py optim/test_rules.py \
            parity/test_hook.py pipeline/test_plain_refusals.py plan profile/test_cuts.py pytorch/test_saved_digest.py rounds/test_norms.py \
            runtime/test_devices.py schedule/test_text.py schedule/test_verifier.py split/test_kinds.py stash/test_parts.py state \
            tables/test_refusals.py tiled/test_formats.py
# Ninja by its present path: a build folder remembers the ninja of the venv that first configured it.
CMAKE     = cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$$(command -v ninja) -DHYDRA_WERROR=ON
NVCC     := $(shell command -v nvcc)
# ThreadSanitizer of older compilers fails under the address randomisation of newer kernels.
FIXED    := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: all help demo check test test-full pytest lint format ctest ctest-full asan tsan check-cuda \
        emulated emulated-bench emulated-test emulated-test-full gpu-test gpu-bench mutants \
        stubs stubs-check docs wheel wheel-test other-key clean FORCE
all: $(BUILD)/.built ## build, and install into $(VENV), editable: Python files are used in place

help: ## this list
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "%-12s %s\n", $$1, $$2}' Makefile

# ---- the environment ------------------------------------------------------------------------------------------------
# A suitable torch that $(PY) can import is used in place: a .pth file puts its folder on the venv's path
# (--system-site-packages would not see it if $(PY) is itself in a venv).
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

$(VENV)/.deps-full: $(VENV)/.deps-test
	$(PYTHON) tools/requirements.py full > $(VENV)/requirements-full.txt
	$(PIP) -r $(VENV)/requirements-full.txt
	@touch $@

$(VENV)/.deps-dev: $(VENV)/.deps
	$(PYTHON) tools/requirements.py dev > $(VENV)/requirements-dev.txt
	$(PIP) -r $(VENV)/requirements-dev.txt
	@touch $@

$(VENV)/.deps-docs: $(VENV)/.deps
	$(PYTHON) tools/requirements.py docs data trainers > $(VENV)/requirements-docs.txt
	$(PIP) -r $(VENV)/requirements-docs.txt
	@touch $@

# An editable install lists the modules by name, so it is made again when a module is added or removed.
$(BUILD)/.modules: FORCE
	@mkdir -p $(@D); find hydra_ext -name '*.py' | sort > $@.now; cmp -s $@.now $@ || cp $@.now $@

# The stamp is in the clone, not in the venv: a venv that several clones use must not vouch for this clone's build.
$(BUILD)/.built: $(VENV)/.deps $(SRC) $(BUILD)/.modules
	$(PIP) --no-build-isolation --no-deps --force-reinstall --editable . --config-settings=build-dir=$(BUILD)
	@sed -n 's/^WITHOUT_CUDA = "\(..*\)"/hydra_ext was built without CUDA kernels: \1/p' $(BUILD)/_build_info.py
	@touch $@

$(BUILD)-gtest/googletest.cmake: tools/googletest.py $(VENV)/.deps
	$(PYTHON) tools/googletest.py $(@D) --source '$(GTEST_SOURCE)' --sha256 $(GTEST_SHA256)

# ---- demo and tests -------------------------------------------------------------------------------------------------
demo: $(BUILD)/.built ## build, then run the demonstration on this machine
	cd / && $(PYTHON) -W ignore -m hydra_ext demo --picture $(CURDIR)/memory.png

test: export HYDRA_WERROR = ON
test: lint pytest stubs-check asan tsan $(if $(NVCC),check-cuda emulated-test) wheel-test ## all parts that need no GPU, as CI: a sample of the Python tests, C++ tests under sanitizers
	@$(if $(NVCC),,echo "this machine has no nvcc: the CUDA sources were not compiled")

check: lint $(BUILD)/.built $(VENV)/.deps-test ## the checks before a commit: lint and fast tests of every part, under 2 minutes
	$(PYTEST) $(PARALLEL) $(FAST)

pytest: $(BUILD)/.built $(VENV)/.deps-test ## a sample of the Python tests, WORKERS=2 at a time; SAMPLE= runs every case, but the long ones
	$(PYTEST) $(PARALLEL) $(SAMPLE) .

test-full: $(BUILD)/.built $(VENV)/.deps-full $(if $(SHARD),,other-key ctest-full $(if $(NVCC),emulated-test-full)) ## every case of every test that needs no GPU, C++ tests also without sanitizers, in SHARDS=4 runs; SHARD=2 runs one of them
	@set -e; for shard in $(or $(SHARD),$(shell seq $(SHARDS))); do \
	  echo "shard $$shard of $(SHARDS)"; ($(PYTEST) $(PARALLEL) -m "not gpu and not emulated" --shard=$$shard/$(SHARDS) .); done

# A venv that sees the packages of $(VENV), but not its editable install, which would go before any PYTHONPATH.
define venv_beside
	rm -rf $(1)
	$(PYTHON) -m venv --without-pip $(1)
	$(PYTHON) -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_outer.pth"
endef

# Operator coverage with the other dispatch key that device parameters can carry, in a separate build.
other-key: $(VENV)/.deps-test ## tests of operators, in a build with the other dispatch key for device parameters
	$(call venv_beside,build/other-key)
	$(PYTHON) -m pip --python build/other-key/bin/python install $(PIPFLAGS) --no-build-isolation --no-deps . \
	  --config-settings=build-dir=$(BUILD)-other-key --config-settings=cmake.define.HYDRA_FAULT_KEY=TESTING_ONLY_GenericWrapper
	cd tests && ../build/other-key/bin/python -c \
	  'import hydra_ext._build_info as info; print(info.FAULT_KEY); raise SystemExit(info.FAULT_KEY == "DeferredInit")'
	cd tests && ../build/other-key/bin/python -m pytest -q pytorch/test_op_coverage.py runtime/test_window_cases.py

CTEST = --output-on-failure --no-tests=error --parallel $(WORKERS)
# Includes the place of GoogleTest.
CORE_CMAKE = $(CMAKE) -C $(BUILD)-gtest/googletest.cmake -DHYDRA_PYTHON=OFF -DHYDRA_TESTS=ON

ctest: $(BUILD)-gtest/googletest.cmake ## the C++ tests of all code without torch
	$(CORE_CMAKE) -B $(BUILD)-core
	cmake --build $(BUILD)-core && ctest --test-dir $(BUILD)-core $(CTEST)

# The tests that take minutes are disabled by name.
ctest-full: ctest ## the C++ tests that take minutes
	$(BUILD)-core/hydra_tests --gtest_also_run_disabled_tests --gtest_filter='*.DISABLED_*'

# What they compare does not depend on a sanitizer, and other tests run the same code.
LONG_SEARCHES = -E 'OfAWideGraphIsAPlanWithABound|AlmostAlwaysTreatedInTheBestWay|ALargerBudgetIsNotSlower|EveryPatternOfSixteenBits'

asan: $(BUILD)-gtest/googletest.cmake ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(CORE_CMAKE) -B $(BUILD)-asan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHYDRA_SANITIZE=address,undefined
	cmake --build $(BUILD)-asan && ctest --test-dir $(BUILD)-asan $(CTEST) $(LONG_SEARCHES)

tsan: $(BUILD)-gtest/googletest.cmake ## the C++ tests of code with threads under ThreadSanitizer
	$(CORE_CMAKE) -B $(BUILD)-tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DHYDRA_SANITIZE=thread
	cmake --build $(BUILD)-tsan && $(FIXED) ctest --test-dir $(BUILD)-tsan $(CTEST) $(LONG_SEARCHES)

# Every CUDA source compiled with warnings as errors, nothing linked: needs nvcc and any torch, no GPU.
check-cuda: $(VENV)/.deps ## compile every CUDA source with warnings as errors; needs nvcc, no GPU
	$(CMAKE) -B $(BUILD)-cuda -DPython_EXECUTABLE=$(PYTHON) -DHYDRA_CUDA=CHECK
	cmake --build $(BUILD)-cuda --target hydra_cuda

emulated: $(BUILD)/.built ## the emulated CUDA machine, and the extension with its CUDA backend; needs CUDA's headers, no GPU
	cmake --build $(BUILD) --target emulated

emulated-test: emulated $(VENV)/.deps-test ## a sample of the tests of the emulated machine, and of those for a GPU on it; SAMPLE= runs every case
	$(call venv_beside,build/emulated-venv)
	@# One after the other: torch's own samples of operators fix settings that the others change.
	cd tests && for folder in emulated cuda; do \
	  PYTHONPATH=../$(BUILD)/emulated ../build/emulated-venv/bin/python -m pytest -q $(PARALLEL) $(SAMPLE) \
	    -p emulated_cuda.pytest_plugin -m "emulated or gpu" $$folder || exit; done

emulated-test-full: ## every test on the emulated machine
	$(MAKE) emulated-test SAMPLE=

emulated-bench: emulated ## steps on an emulated card under a virtual clock; CELL='--emulated h100-pcie5 --model 4b --tokens 8192 --budget 24GiB'
	$(call venv_beside,build/emulated-venv)
	cd benchmarks && PYTHONPATH=../$(BUILD)/emulated ../build/emulated-venv/bin/python gpu_step.py \
	  $(or $(CELL),--emulated h100-pcie5 --model tiny --tokens 256 --budget 64MiB)

# Continues an earlier run: results stay valid until their files change. MUTANTS has further options.
COUNT ?= 200
SEED  ?= 1
mutants: $(VENV)/.deps-test ## puts small faults into package and engine, and checks that tests find them: hours; COUNT=200 SEED=1
	$(call venv_beside,build/mutants-venv)
	$(PYTHON) -m pip --python build/mutants-venv/bin/python install $(PIPFLAGS) --no-build-isolation --no-deps . --config-settings=build-dir=$(BUILD)
	cd tests && PYTHONPATH=$(CURDIR)/tools ../build/mutants-venv/bin/python -W ignore -m mutants --count $(COUNT) --seed $(SEED) --jobs $(WORKERS) $(MUTANTS)

# ---- GPU: these targets fail without one ----------------------------------------------------------------------------
gpu-test: $(BUILD)/.built $(VENV)/.deps-test $(BUILD)-gtest/googletest.cmake ## the tests that need a GPU; fails without one
	cd tests && $(PYTHON) ../tools/check_gpu.py
	$(CORE_CMAKE) -B $(BUILD)-gpu -DHYDRA_GPU_TESTS=ON
	cmake --build $(BUILD)-gpu --target hydra_cuda_tests
	$(PYTHON) tools/gpu_session.py --contract ctest --test-dir $(CURDIR)/$(BUILD)-gpu -R gpu_ --output-on-failure --no-tests=error
	$(PYTEST) -m gpu .

gpu-bench: $(BUILD)/.built ## benchmarks on a GPU; CELL='--model 4b --tokens 8192' selects one cell of the table of steps
	cd tests && $(PYTHON) ../tools/check_gpu.py
	cd benchmarks && $(PYTHON) $(if $(CELL),gpu_step.py $(CELL),gpu.py)

# ---- style, stubs, wheel --------------------------------------------------------------------------------------------
lint: $(VENV)/.deps-dev $(VENV)/.deps-test ## ruff, clang-format, mypy strict, schemas of workflows and hooks
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CPP)
	$(PYTHON) -m mypy
	pre-commit validate-config
	check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

format: $(VENV)/.deps-dev ## apply the fixes of ruff and clang-format
	ruff check --fix .
	ruff format .
	clang-format -i $(CPP)

$(BUILD)-stubs/.written: $(BUILD)/.built $(VENV)/.deps-dev
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(@D) && $(PYTHON) -m pybind11_stubgen hydra_ext._C --exit-code --output-dir .
	ruff format -q --isolated --line-length 120 $(@D)/hydra_ext
	@touch $@

stubs: $(BUILD)-stubs/.written ## regenerate the type stubs of hydra_ext/_C
	rm -rf hydra_ext/_C hydra_ext/_C.pyi
	cp -r $(BUILD)-stubs/hydra_ext/_C* hydra_ext/
	@touch $(BUILD)/.built $(BUILD)-stubs/.written   # new stubs must not trigger a build

stubs-check: $(BUILD)-stubs/.written ## check that those stubs are up to date
	@for stub in _C _C.pyi; do \
	  if test -e $(BUILD)-stubs/hydra_ext/$$stub -o -e hydra_ext/$$stub; then \
	    diff -ru $(BUILD)-stubs/hydra_ext/$$stub hydra_ext/$$stub || { echo "hydra_ext/$$stub is out of date: make stubs"; exit 1; }; fi; done

# Started in tests/, so that Python imports the installed package.
docs: $(BUILD)/.built $(VENV)/.deps-docs ## the site, in build/docs/index.html; warnings are errors
	cd tests && $(PYTHON) -m sphinx -q -W --keep-going -d ../build/doctrees ../docs ../build/docs
	@echo "$(CURDIR)/build/docs/index.html"

# The wheel's name and requirements have torch's minor version: a wheel fits no other one.
wheel: $(VENV)/.deps ## dist/: a wheel for the installed torch, which installs without a compiler
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m pip wheel $(PIPFLAGS) --no-build-isolation --no-deps --wheel-dir build/wheel . --config-settings=build-dir=$(BUILD)
	$(PYTHON) tools/name_wheel.py build/wheel/*.whl dist

wheel-test: wheel ## check that wheel's size and contents, and run the doctor in a fresh environment
	$(PYTHON) tools/check_wheel.py dist/*.whl
	$(call venv_beside,build/wheel-venv)
	$(PYTHON) -m pip --python build/wheel-venv/bin/python install $(PIPFLAGS) --no-deps dist/*.whl
	cd / && $(CURDIR)/build/wheel-venv/bin/python -c 'import sys, hydra_ext; sys.exit(not all(file.startswith(sys.prefix) for file in (hydra_ext.__file__, hydra_ext._C.__file__)))'
	cd / && $(CURDIR)/build/wheel-venv/bin/hydra-ext doctor

clean: ## remove builds and $(VENV)
	rm -rf build dist $(VENV)
