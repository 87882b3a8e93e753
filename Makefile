# `make demo` and `make test` work from a bare checkout: they make .venv, install everything into it, and go.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MEMBERS := libs/common libs/weightsync libs/algo services/controller services/policy services/rollout services/reward libs/cli libs/sim
MANIFESTS := pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(MEMBERS))

# uv does not read pip's settings. Where somebody keeps wheels (a CPU build of torch, say), uv is told; elsewhere it is
# asked to choose the build of torch that fits this machine.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
TORCH :=
else
TORCH := --torch-backend=auto
endif

.PHONY: demo smoke test lint types imports unit sim system bench docs install clean

demo: $(STAMP)
	$(BIN)/starling run recipes/quickstart.toml

smoke: $(STAMP)
	$(BIN)/starling smoke

test: lint types imports unit sim system

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

# Threads that spin on shared cores are ten times slower; every process computes with one.
unit sim system: export OMP_NUM_THREADS = 1
unit: $(STAMP)
	$(BIN)/pytest tests/unit tests/scenarios

sim: $(STAMP)
	$(BIN)/pytest tests/sim

system: $(STAMP)
	$(BIN)/pytest tests/system

bench: $(STAMP)
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
	$(BIN)/python bench/chaos.py --quick

docs: $(STAMP)
	$(BIN)/python -m starling.common.wire.schema > libs/common/starling/common/wire/schema.json
	$(BIN)/python -m starling.common.wire.schema --markdown > docs/protocol.md

install: $(STAMP)

$(STAMP): $(MANIFESTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python $(TORCH) --compile-bytecode --constraint constraints.txt \
		$(addprefix --editable ,$(MEMBERS)) --group dev
	$(BIN)/python -m compileall -q libs services
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis runs
