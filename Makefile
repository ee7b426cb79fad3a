# All commands of this repository; `make` without a target lists them.

VENV := .venv
BIN := $(VENV)/bin
VLLM ?= 0.32.0
# Set-up runs again when something it depends on is newer than these files: of the CPU stack, and of the tools besides.
STACK := $(VENV)/.stack
READY := $(VENV)/.ready
# Where byte code is not kept, every process compiles what it imports: 15 % of the time of the fast tests.
unexport PYTHONDONTWRITEBYTECODE

# Tests whose process joins a Ray cluster with another authentication: Ray keeps it for the life of a process.
OWN_PROCESS := tests/integrations/test_shared_cluster.py tests/integrations/test_nodes.py tests/experiments/test_jobs.py

# In which tests see the report; Debian's.
CHROMIUM := /usr/bin/chromium

.DEFAULT_GOAL := help
.PHONY: help setup quickstart example test test-fast test-exhaustive test-faults test-vllm upstream check docs results bench fuzz chaos vulnerabilities wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with the CPU stack, the project (editable) and the tools for tests and checks

quickstart: $(STACK) ## train dapo, gtpo and grpo_s on the embedded task and write a report
	$(BIN)/gtpo-verl quickstart

example: $(READY) ## train a pretrained model, SmolLM2-135M, on sums of two numbers of one digit and write a report (docs/start/real-model.md)
	$(BIN)/gtpo-verl prepare-data smollm2
	$(BIN)/gtpo-verl prepare-data reasoning-gym:chain_sum,min_terms=2,max_terms=2,max_digits=1 --output data/smollm2-sums
	$(BIN)/gtpo-verl train setting=smollm2 hardware=cpu verifier=reasoning_gym algo=gtpo actor_rollout_ref.model.path=outputs/smollm2 \
		data.train_files=data/smollm2-sums/train.parquet data.val_files=data/smollm2-sums/val.parquet trainer.run_dir=outputs/example
	$(BIN)/gtpo-verl report outputs/example

test: $(READY) $(CHROMIUM) ## all tests but the exhaustive ones, including end-to-end runs
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

test-fast: $(READY) ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow and not e2e and not exhaustive" --numprocesses 2 --dist loadscope

test-exhaustive: test-faults $(CHROMIUM) ## every test, including whole option grids, more trainings and seeded faults
	$(BIN)/python -m pytest -m "" --numprocesses 2 --dist loadscope --no-loadscope-reorder $(addprefix --ignore=,$(OWN_PROCESS))
	for file in $(OWN_PROCESS); do $(BIN)/python -m pytest -m "" $$file || exit 1; done

test-faults: $(READY) ## seed known faults one by one in a copy and check that the tests catch them
	$(BIN)/python tests/seeded_faults.py

test-vllm: $(READY) ## rollout entropies with another vLLM, in its own environment: VLLM=0.24.0 and later
	$(BIN)/python tests/integrations/vllm/other_version.py $(VLLM)

upstream: $(READY) ## what another verl has moved of the symbols that we use: VERL=/path/to/a/verl, read, not imported
	@test -n "$(VERL)" || { echo "error: make upstream VERL=/path/to/verl (a source tree, or site-packages)" >&2; exit 2; }
	@$(BIN)/python -m gtpo_verl.integrations.contract $(VERL)

check: $(READY) ## check format, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY) ## build the documentation into build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --fresh-env --quiet docs build/docs

results: $(READY) ## compute docs/results/verdict.md and its picture from the committed data
	$(BIN)/python docs/results/verdict.py page

bench: $(READY) ## run every benchmark
	@set -e; for file in benchmarks/bench_*.py; do echo "$$file"; $(BIN)/python "$$file"; done

fuzz: $(READY) ## hostile input: 100,000 cases in process and 300 whole commands; goes on where it was stopped
	$(BIN)/python tests/fuzz.py

chaos: $(READY) ## kills and faults on real trainings, hours of them; goes on where it was stopped
	$(BIN)/python tests/chaos.py

vulnerabilities: ## ask PyPI for known vulnerabilities of the pinned packages of both stacks; needs the internet
	$(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==2.10.1
	for file in gpu_constraints cpu_requirements dev_requirements; do .venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r gtpo_verl/$$file.txt || exit 1; done

wheel: $(READY) ## build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## remove .venv, builds and caches; keep outputs/
	rm -rf $(VENV) .venv-vllm-* .venv-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CHROMIUM):
	$(if $(filter 0,$(shell id -u)),,sudo) sh -c 'apt-get update && apt-get install --yes --no-install-recommends chromium' || \
		{ echo "error: the tests of the report need $(CHROMIUM): apt install chromium" >&2; exit 1; }

# PYTHON=/path/to/python chooses the interpreter; the default is the first of these that is 3.11 or 3.12.
PYTHON ?= $(firstword $(foreach name,python3 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $(name))))

define VIRTUAL_ENVIRONMENT
	@test -n "$(PYTHON)" || \
		{ echo "error: Python 3.11 or 3.12 is needed and none was found: apt install python3.11 python3.11-venv, or make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || \
		{ echo "error: $(PYTHON) is not Python 3.11 or 3.12: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
endef

SETUP := pyproject.toml gtpo_verl/commands/setup.py gtpo_verl/cpu_requirements.txt

$(STACK): $(SETUP)
	$(VIRTUAL_ENVIRONMENT)
	$(BIN)/gtpo-verl setup --cpu
	@touch $(STACK)

# One of the tools is compiled: it needs a C compiler and Python's headers.
$(READY): $(SETUP) gtpo_verl/dev_requirements.txt
	$(VIRTUAL_ENVIRONMENT)
	$(BIN)/gtpo-verl setup --cpu --dev
	@touch $(STACK) $(READY)
