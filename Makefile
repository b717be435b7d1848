# Everything a fresh machine needs is made by these targets: Python 3.11+ and make are enough.
PYTHON ?= python3
CHECKPOINT ?= checkpoints/kvasir-9m
HOST ?= 127.0.0.1
PORT ?= 8000
SECONDS ?= 60
SEED ?= 1
BIN := .venv/bin
SERVING := .venv/.serving
INSTALLED := .venv/.installed
CLIENTS := .venv-clients
CLIENTS_INSTALLED := $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/.installed,$(wildcard tests/clients/requirements/*.txt))

.PHONY: help install serve test test-clients check format bench performance peers attention loadtest fuzz test-faults audit check-monitoring clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

install: $(INSTALLED) ## make .venv with all that tests and measurements need; `make serve` makes what serving needs

# Two stamps of one environment: what is installed for tests serves too, and what serves is completed for tests.
# `plots` draws what `kvasir train` and `kvasir inspect attention` write; an image that only serves leaves it out.
$(SERVING): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing torch, LitServe and what else serving needs into .venv: some minutes, once."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[plots]'
	@$(BIN)/python -m model.kernels.build --local || echo "Without native kernels PyTorch's serve, more slowly: install a C++ compiler, then run make again."
	@touch $@

$(INSTALLED): $(SERVING)
	@echo "Installing what tests and measurements need besides: some minutes more, once."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: $(SERVING) ## serve the shipped model on http://127.0.0.1:8000; another by CHECKPOINT=DIR, elsewhere by PORT=N and HOST=ADDRESS
	$(BIN)/kvasir serve --checkpoint $(CHECKPOINT) --host $(HOST) --port $(PORT)

test: install ## every test, a file at a time on each of up to four cores, the longest files first
	@$(BIN)/python -m compileall -q model service loadtest # or each of the hundred processes that tests start would, for itself
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-clients: install $(CLIENTS_INSTALLED) $(CLIENTS)/node/.installed ## every client of docs/clients.md against a live server; each gets an environment of its own (4 GB)
	$(BIN)/python -m pytest -q tests/clients

test-faults: SECONDS = 300
test-faults: DTYPE = float64
test-faults: install ## kill, stop and flood a real server and compare every answer, writes docs/reliability.md; SECONDS=N (300), SEED=N, DTYPE=float32 by our own kernels
	$(BIN)/python -m tests.faults --checkpoint $(CHECKPOINT) --dtype $(DTYPE) --seconds $(SECONDS) --seed $(SEED) --report docs/reliability.md

# One environment a client: they want different versions of the same packages. Torch is the build that .venv has.
$(CLIENTS)/%/.installed: tests/clients/requirements/%.txt | $(INSTALLED)
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >$(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt --requirement $<
	@touch $@

$(CLIENTS)/node/.installed: tests/clients/node/package.json
	mkdir -p $(@D)
	cp $< $(@D)/
	@command -v npm >/dev/null || echo "npm is not installed: the test of the Node client will say that it needs Node.js"
	@if command -v npm >/dev/null; then cd $(@D) && npm install --silent --ignore-scripts --no-audit --no-fund && touch .installed; fi

check: install ## format, lint, strict types, architecture, fast tests: about three minutes on 2 cores
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m 'not slow'

format: install ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## sweep the engine in this process; CHECKPOINT=DIR
	$(BIN)/kvasir bench --checkpoint $(CHECKPOINT) --out docs/results/engine.json

performance: bench ## measure engine and service, write docs/performance.md; CHECKPOINT=DIR
	$(BIN)/python -m loadtest.bench_service --checkpoint $(CHECKPOINT) --out docs/results/service.json
	$(BIN)/python -m loadtest.bench_frontend --checkpoint $(CHECKPOINT) --out docs/results/frontend.json
	$(BIN)/python -m loadtest.bench_latency --out docs/results/latency.json --plot docs/latency.png -- --dtype bfloat16
	$(BIN)/python -m loadtest.bench_scaling --checkpoint $(CHECKPOINT) --out docs/results/scaling.json
	$(BIN)/python -m loadtest.performance_page

peers: install ## measure other engines beside ours, each in an environment of its own (5 GB, ten minutes of compiling, once; may be interrupted)
	$(BIN)/python -m loadtest.bench_peers --out docs/results/peers.json
	$(BIN)/python -m loadtest.performance_page

attention: install ## train and measure every mechanism of docs/attention.md (hours; may be interrupted; needs the corpora of docs/training.md)
	$(BIN)/python -m loadtest.bench_attention train --seeds 1 2
	$(BIN)/python -m loadtest.bench_attention speed
	$(BIN)/python -m loadtest.attention_page

loadtest: install ## a minute of locust against a service on 127.0.0.1:8000; PORT=N and HOST=ADDRESS
	$(BIN)/locust -f loadtest/locustfile.py --headless --users 8 --spawn-rate 8 --run-time 1m --host http://$(HOST):$(PORT)

fuzz: $(INSTALLED) ## fuzz what reads strangers' bytes, guided by the code that inputs reach: a minute each; SECONDS=N (Linux, Python 3.11 to 3.13)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt atheris
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

audit: install ## known vulnerabilities of all that is installed, by the advisories of PyPI (needs the internet)
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/python -m pip freeze --exclude-editable >.venv-audit/requirements.txt
	.venv-audit/bin/pip-audit --disable-pip --no-deps --requirement .venv-audit/requirements.txt

check-monitoring: ## promtool and a real Prometheus against a running service (needs prometheus); PORT=N
	monitoring/check.sh http://$(HOST):$(PORT)

clean: ## remove what the targets made
	rm -rf .venv .venv-clients .venv-peers .venv-audit build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
