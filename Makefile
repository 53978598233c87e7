# The environment is rebuilt only when a lock file or pyproject.toml changes: their hash is in the stamp's name.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
LOCKS := requirements/cpu.txt requirements/test.txt
# On two cores: engines that start leave some of them idle.
JOBS ?= 3
STAMP := $(VENV)/.stamp-$(shell cat $(LOCKS) pyproject.toml | sha256sum | cut -c1-16)

.PHONY: help env demo test soak lint bench

help:
	@echo "make env    build $(VENV) from requirements/ (minutes, once)"
	@echo "make demo   capture every hook of a tiny model and compare it with transformers"
	@echo "make test   the test suite          make soak   its long-running part"
	@echo "make lint   ruff and mypy           make bench  capture throughput (ARGS=--help)"

env: $(STAMP)
	@:

$(STAMP):
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	  f"PYTHON={sys.executable} is Python {v[0]}.{v[1]}, not 3.11 to 3.13: run make env PYTHON=python3.11")'
	@echo "env 1/3: $(VENV), $$("$(PYTHON)" --version)"
	@test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	@echo "env 2/3: $$(cat $(LOCKS) | grep -c ==) pinned packages (about 1 GB, some minutes)"
	@$(PY) -m pip install -q --no-deps $(addprefix -r ,$(LOCKS))
	@echo "env 3/3: dmi_connector, editable"
	@$(PY) -m pip install -q --no-deps -e .
	@$(PY) -c 'import torch' || { echo "torch $$(grep ^torch== requirements/cpu.txt) cannot be imported: the" \
	  "package index served its CUDA build. Name an index with CPU wheels in PIP_EXTRA_INDEX_URL and run" \
	  "make env again after rm -r $(VENV)"; exit 1; }
	@rm -f $(VENV)/.stamp-*
	@touch $@

demo: env
	@$(VENV)/bin/dmi demo

test: env
	@$(PY) -m pytest tests -n $(JOBS) --dist loadscope --no-loadscope-reorder

soak: env
	@rm -f benchmarks/results/v2-runner-cpu.jsonl
	@SOAK_RESULT=benchmarks/results/soak-cpu.json V2_RESULT=benchmarks/results/v2-runner-cpu.jsonl \
	  $(PY) -m pytest tests -m soak -s
	@$(PY) -m pytest tests/unit -m hypothesis --hypothesis-profile=random

lint: env
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy dmi_connector

bench: env
	@$(PY) -m benchmarks.capture $(ARGS)
