# The name of the stamp contains a hash of the lock files and pyproject.toml, so a change of them rebuilds the environment.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
LOCKS := requirements/cpu.txt requirements/test.txt requirements/docs.txt
PIP_INSTALL := $(PY) -m pip install -q --no-deps
# PyTorch's index of CPU wheels. It is used if torch from the package index, such as a CUDA build, cannot be imported.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell grep -h ^torch== $(LOCKS))
# Number of pytest workers, for two cores. Engines do not use both cores while they start.
JOBS ?= 3
# Further environments: for mutants, the S3 server of the tests, and Ray. `make types` has one for each library.
MUTANTS := .mutants/venv
S3 := .s3
S3_STAMP := $(S3)/.stamp-$(shell sha256sum < requirements/s3.txt | cut -c1-16)
RAY := .ray
RAY_STAMP := $(RAY)/.stamp-$(shell sha256sum < requirements/ray.txt | cut -c1-16)
TYPES ?= $(basename $(notdir $(wildcard requirements/types/*.txt)))
# An environment in $(1) with the packages of $(VENV) and those of the lock file $(2).
define beside
test -x $(1)/bin/python || $(PY) -m venv $(1); \
$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
  "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"; \
$(1)/bin/python -m pip install -q --no-deps -r $(2)
endef
STAMP := $(VENV)/.stamp-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)

.PHONY: help env s3 ray demo test soak compat lint docs bench models mutants notebooks types rooms

help:
	@echo "make env    build $(VENV) from requirements/ (minutes, once)"
	@echo "make demo   capture every hook of a tiny model and compare it with transformers"
	@echo "make test   run the tests           make soak   run the long tests"
	@echo "make s3     install the tests' S3 server in $(S3) (make test does this too)"
	@echo "make mutants   make small changes to the code, count those that the fast tests find (two hours; ARGS=--help)"
	@echo "make types   test conversions to other libraries, with these libraries (TYPES=transformer-lens for one)"
	@echo "make ray    test dmi run on Ray clusters on this machine, installed in $(RAY) (minutes)"
	@echo "make lint   run ruff, mypy and import-linter     make bench  measure capture throughput (ARGS=--help)"
	@echo "make docs   build the documentation as a website in site/"
	@echo "make rooms  draw the rooms and their imports in CONTRIBUTING.md"
	@echo "make notebooks   run the notebooks of examples/, and store their outputs (NAMES=sae for one)"
	@echo "make models compare every hook of every model family with transformers (an hour)"
	@echo "make compat run the core tests with each supported vLLM and Python (ARGS=--help)"

env: $(STAMP)
	@:

$(STAMP):
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	  f"PYTHON={sys.executable} is Python {v[0]}.{v[1]}, not 3.11 to 3.13: run make env PYTHON=python3.11")'
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	@rm -f $(VENV)/.stamp-*
	@echo "env 1/3: $(VENV), $$($(PY) --version)"
	@echo "env 2/3: $$(cat $(LOCKS) | grep -c ==) pinned packages (about 1 GB, some minutes)"
	@$(PIP_INSTALL) $(addprefix -r ,$(LOCKS))
	@$(PY) -c 'import torch' 2>/dev/null || { \
	  echo "env 2/3: $(TORCH) of the package index cannot be imported: taking its CPU wheel from $(TORCH_INDEX)"; \
	  PIP_EXTRA_INDEX_URL=$(TORCH_INDEX) $(PIP_INSTALL) --force-reinstall --index-url $(TORCH_INDEX) $(TORCH) && \
	    $(PY) -c 'import torch'; } || { \
	  echo "env 2/3: no CPU wheel there: taking the libraries of the CUDA build (requirements/cuda.txt, 2.5 GB)"; \
	  $(PIP_INSTALL) -r requirements/cuda.txt && $(PY) -c 'import torch'; } || { \
	  echo "$(TORCH) cannot be imported, nor replaced by a CPU wheel from $(TORCH_INDEX): see above." \
	    "Name an index that has it: make env TORCH_INDEX=URL" >&2; exit 1; }
	@echo "env 3/3: dmi_connector, editable"
	@$(PIP_INSTALL) --no-build-isolation -e .
	@$(PY) -P -c 'import vllm, dmi_connector' || { echo "vllm cannot be imported: see above. Build anew:" \
	  "rm -r $(VENV), then make env" >&2; exit 1; }
	@touch $@

demo: env
	@$(VENV)/bin/dmi demo

# Without the S3 server, tests that need it are skipped with a reason.
s3: $(S3_STAMP)
	@:

$(S3_STAMP): | env
	@rm -f $(S3)/.stamp-*
	@$(call beside,$(S3),requirements/s3.txt)
	@touch $@

# Without Ray, the tests of dmi run --ray are skipped with a reason.
ray: $(RAY_STAMP)
	@$(PY) -m pytest tests/engine/test_ray.py $(ARGS)

$(RAY_STAMP): | env
	@rm -f $(RAY)/.stamp-*
	@$(call beside,$(RAY),requirements/ray.txt)
	@touch $@

# --max-worker-restart=0: if a test process dies, the run ends. Otherwise xdist waits forever for its tests.
# PYTHONDONTWRITEBYTECODE is unset, because the many processes of the tests start faster with cached bytecode.
test: export PYTHONDONTWRITEBYTECODE =
test: env
	@$(MAKE) --no-print-directory s3 || { rm -rf $(S3); echo "the S3 server cannot be installed: its tests are skipped" >&2; }
	@$(PY) -m pytest tests -n $(JOBS) --dist loadscope --max-worker-restart=0 --durations=20

soak: env
	@$(PY) -m pytest tests -m soak -s
	@$(PY) -m pytest tests/unit -m hypothesis --hypothesis-profile=random

mutants: env
	@$(call beside,$(MUTANTS),requirements/mutants.txt)
	@$(MUTANTS)/bin/python -m tests.mutants.run $(ARGS)

types: env
	@for name in $(TYPES); do \
	  venv=.types/$$name; echo "types: $$name"; \
	  $(call beside,$$venv,requirements/types/$$name.txt); \
	  $$venv/bin/python -m pytest tests/types $(ARGS); \
	done

# Each notebook starts an engine.
notebooks: env
	@$(PY) -m tests.notebookkit $(NAMES)

models: env
	@$(PY) -m benchmarks.checks.models $(ARGS)

compat: env
	@$(PY) -m benchmarks.checks.compat $(ARGS)

lint: env
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy dmi_connector benchmarks
	@$(VENV)/bin/lint-imports --no-cache --no-logo

rooms: env
	@$(PY) -m tests.rooms

docs: env
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

bench: env
	@$(PY) -m benchmarks.capture $(ARGS)
