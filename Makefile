# These targets install everything that they need. A fresh machine needs only Python 3.11 or newer, and make.
PYTHON ?= python3
CHECKPOINT ?= checkpoints/kvasir-20m
HOST ?= 127.0.0.1
PORT ?= 8000
SECONDS ?= 60
SEED ?= 1
BIN := .venv/bin
SERVING := .venv/.serving
INSTALLED := .venv/.installed
TOOLS := .venv-tools
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP_INSTALL) --require-hashes --no-deps
CLIENTS := .venv-clients
CLIENTS_INSTALLED := $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/.installed,$(wildcard tests/clients/requirements/*.txt))

.PHONY: help install serve test families test-fast test-clients check format types rules bench performance peers attention loadtest fuzz test-faults test-image lock audit sbom check-monitoring clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(INSTALLED) ## install everything for serving, tests and benchmarks into .venv; `make serve` installs only what serving needs

# Two stamp files for one environment: $(SERVING) has what serving needs, and $(INSTALLED) adds what tests need.
# plots.txt is for pictures by `kvasir train` and `kvasir inspect attention`. Serving images leave it out.
# pip checks the hash of every file but torch's: docs/operations.md, "Dependencies".
$(SERVING): pyproject.toml $(addprefix requirements/,serve.txt plots.txt torch.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; run: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing torch, LitServe and the other dependencies of serving into .venv. This takes some minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python $(LOCKED) --requirement requirements/serve.txt --requirement requirements/plots.txt
	$(BIN)/python $(PIP_INSTALL) --requirement requirements/torch.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m model.kernels.build --local || echo "The native kernels were not built, so PyTorch's slower kernels are used. For native kernels install a C++ compiler, then run: $(BIN)/python -m model.kernels.build --local"
	@touch $@

# Without bytecode: most modules of these packages are never imported, and the others are compiled then.
$(INSTALLED): $(SERVING) requirements/dev.txt
	@echo "Installing the dependencies of tests and benchmarks into .venv. This takes some more minutes, once."
	$(BIN)/python $(LOCKED) --no-compile --no-build-isolation --requirement requirements/dev.txt
	@touch $@

# The environment of `make lock`, `make audit` and `make sbom`.
$(TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python $(LOCKED) --requirement $<
	@touch $@

serve: $(SERVING) ## serve the shipped model on http://127.0.0.1:8000; CHECKPOINT=DIR, PORT=N and HOST=0.0.0.0 (or ::) change model and address
	$(BIN)/kvasir serve --checkpoint $(CHECKPOINT) --host $(HOST) --port $(PORT)

test: install ## run all tests in up to four processes, one test file at a time in each, the longest files first
	@$(BIN)/python -m compileall -q model service loadtest # compile once here, instead of in each of the hundred processes that tests start
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

families: install ## test the parity of every family with transformers, also over HTTP, and write the date of each proof for `kvasir families`
	$(BIN)/python -m pytest -q --families --numprocesses auto --maxprocesses 4 --dist loadfile tests/families/test_parity.py tests/families/test_serving.py tests/model/gguf/test_architectures.py

test-clients: install $(CLIENTS_INSTALLED) $(CLIENTS)/node/.installed ## test every client of docs/clients.md against a live server, each in its own environment (4 GB)
	$(BIN)/python -m pytest -q tests/clients

test-faults: SECONDS = 300
test-faults: DTYPE = float64
test-faults: install ## inject faults into a real server, compare every response, and write docs/reliability.md; SECONDS=N (300), SEED=N, DTYPE=float32 for the native kernels
	$(BIN)/python -m tests.faults --checkpoint $(CHECKPOINT) --dtype $(DTYPE) --seconds $(SECONDS) --seed $(SEED) --report docs/reliability.md

# One environment per client, because clients need different versions of the same packages. All use .venv's torch build.
$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt | $(INSTALLED)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt --requirement $<
	@touch $@

$(CLIENTS)/node/.installed: tests/clients/node/package.json
	mkdir -p $(@D)
	cp $< $(@D)/
	@command -v npm >/dev/null || echo "npm is not installed, so the test of the Node client cannot run; install Node.js with npm"
	@if command -v npm >/dev/null; then cd $(@D) && npm install --silent --ignore-scripts --no-audit --no-fund && touch .installed; fi

check: install ## check format, lint, types, architecture and words: about a minute on 2 cores
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 types rules

types:
	$(BIN)/mypy

rules:
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_words.py

test-fast: install ## run all tests but those marked `slow`, which start servers or train models: about 4 minutes on 2 cores
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile -m 'not slow'

format: install ## format the code and apply automatic lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## benchmark the engine without a server; CHECKPOINT=DIR
	$(BIN)/kvasir bench --checkpoint $(CHECKPOINT) --out docs/results/engine.json

performance: bench ## benchmark engine and service, and write docs/performance.md; CHECKPOINT=DIR
	$(BIN)/python -m loadtest.scenarios.bench_service --checkpoint $(CHECKPOINT) --out docs/results/service.json
	$(BIN)/python -m loadtest.scenarios.bench_frontend --checkpoint $(CHECKPOINT) --out docs/results/frontend.json
	$(BIN)/python -m loadtest.scenarios.bench_latency --out docs/results/latency.json -- --dtype bfloat16
	$(BIN)/python -m loadtest.docgen.pages

peers: install ## benchmark Kvasir beside llama.cpp on shapes of models that people run (two hours; resumable; the first run compiles llama.cpp)
	$(BIN)/python -m loadtest.peers.bench_peers --threads 2 --rounds 1 --peers llama.cpp --shapes qwen3-0.6b --precisions defaults-q4_k_m --kinds http --streams 1 4 16 64 --out docs/results/default_gguf.json
	$(BIN)/python -m loadtest.peers.bench_peers --threads 2 --rounds 1 --peers llama.cpp --shapes qwen3-0.6b llama-3.2-1b gemma-3-270m qwen3-moe --precisions bfloat16 int8 int4 q4_k_m --kinds decode prompt --contexts 128 1024 --out docs/results/models.json
	$(BIN)/python -m loadtest.docgen.pages

attention: install ## train every mechanism of docs/attention.md with two seeds (hours; resumable; needs the corpora of docs/training.md)
	@for recipe in model/training/configs/attention/*.toml; do for seed in 1 2; do \
	    run=runs/attention/$$(basename $$recipe .toml)-$$seed; \
	    [ -f $$run/checkpoint/MODEL_CARD.md ] || $(BIN)/kvasir train --config $$recipe --seed $$seed --run-directory $$run --out $$run/checkpoint --threads 1 --no-compile || exit; \
	done; done

loadtest: install ## run locust for 1 minute against a service on 127.0.0.1:8000; PORT=N and HOST=ADDRESS change the address
	$(BIN)/python -m loadtest --headless --users 8 --spawn-rate 8 --run-time 1m --host http://$(HOST):$(PORT)

fuzz: $(INSTALLED) ## coverage-guided fuzzing of all parsers of untrusted input, 1 minute each; SECONDS=N (Linux, Python 3.11 to 3.13)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

lock: $(TOOLS)/.installed ## write the lock files in requirements/, from pip's index, for Python 3.11 and newer; UPGRADE=1 takes the newest versions
	$(COMPILE) --extra dev --output-file requirements/dev.txt pyproject.toml
	$(COMPILE) --extra traces --extra kv-events --constraint requirements/dev.txt --output-file requirements/serve.txt pyproject.toml
	$(EXTRA) plots | $(COMPILE) --constraint requirements/dev.txt --output-file requirements/plots.txt -
	$(EXTRA) loadtest | $(COMPILE) --constraint requirements/dev.txt --output-file requirements/loadtest.txt -
	printf '%s\n' cyclonedx-bom pip-audit uv | $(COMPILE) --output-file requirements/tools.txt -

# uv does not read pip's configuration. Its universal mode writes one file for all platforms and versions of Python.
COMPILE = UV_DEFAULT_INDEX="$${PIP_INDEX_URL:-$$($(PYTHON) -m pip config get global.index-url 2>/dev/null || echo https://pypi.org/simple)}" \
	$(TOOLS)/bin/uv pip compile --quiet --system-certs --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade) --no-emit-package torch --constraint requirements/torch.txt
EXTRA = $(TOOLS)/bin/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'

audit: $(TOOLS)/.installed ## check the locked packages against PyPI's advisories of known vulnerabilities (needs the internet)
	@$(TOOLS)/bin/python -c 'import requests; requests.get("https://pypi.org/pypi/pip/24.0/json", timeout=30).raise_for_status()' 2>/dev/null || { echo "Nothing was checked: PyPI's advisories (https://pypi.org/pypi) cannot be read from here. Run this on a machine with access to PyPI itself; mirrors have no advisories."; exit 1; }
	$(TOOLS)/bin/pip-audit --strict --disable-pip --requirement requirements/dev.txt
	$(TOOLS)/bin/pip-audit --strict --disable-pip --requirement requirements/tools.txt
	$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps --requirement requirements/torch.txt

sbom: install $(TOOLS)/.installed ## write a CycloneDX SBOM of .venv to build/sbom.cdx.json; the image has its own in /opt/kvasir
	@mkdir -p build
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.cdx.json $(BIN)/python

test-image: ## build the image with docker or podman, run it, and check it; skipped without an engine; REQUIRE=1 fails instead
	$(PYTHON) -m tests.image

check-monitoring: ## check monitoring/ with promtool, and with Prometheus on a running service (needs prometheus); PORT=N
	monitoring/check.sh http://$(HOST):$(PORT)

clean: ## remove environments, caches and build files
	rm -rf .venv .venv-clients .venv-peers .venv-tools build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
