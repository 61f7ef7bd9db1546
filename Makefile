.PHONY: install demo models secrets wheel test test-all test-clients test-console test-observability test-containers lint-kubernetes lint-console lint kernels kernels-all docs beside alone clusters clean fuzz lock audit
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is kept even where the environment denies it: the processes that tests start would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=

# Installed once, and again when the requirements change.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	-$(BIN)/python -m pagewire.kernels.cpu
	-$(BIN)/pagewire pull smollm2-135m-instruct
	touch $@

install: $(VENV)/installed

demo: install
	$(BIN)/pagewire demo

# The wheel, with the CPU kernels for every class of machines: a machine that installs it needs no compiler.
wheel: install
	$(BIN)/python -m tools.wheel

# For compose.yaml: a password for each service, the key of all clients, and the file for the keys of tenants. Those that
# are there stay. The files must be readable for the user in the containers; the folder keeps others out.
SERVICES := tokenizer scheduler executor detokenizer gateway supervisor
secrets:
	mkdir -p secrets && chmod 700 secrets
	for name in $(SERVICES); do test -e secrets/$$name || openssl rand -hex 24 > secrets/$$name; done
	test -e secrets/api-keys || echo '# name:key' > secrets/api-keys
	test -e .env || printf 'PAGEWIRE_API_KEY=%s\n' $$(openssl rand -hex 24) > .env
	chmod 644 secrets/* && chmod 600 .env

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	@if $(MAKE) --silent build/console/node_modules 2>/dev/null; then $(MAKE) lint-console; \
	else echo 'modules of the console not checked: npm is missing, or has no registry'; fi
	@if command -v kubectl >/dev/null; then $(MAKE) lint-kubernetes; else echo 'manifests not rendered: kubectl is missing'; fi

# The types of the console's modules, which comments state.
lint-console: build/console/node_modules
	build/console/node_modules/.bin/tsc --project tsconfig.json

# The checker of types and the judge of accessibility; nothing of either is served.
build/console/node_modules:
	mkdir -p build/console
	npm install --silent --no-audit --no-fund --prefix build/console typescript@7 axe-core@4

# Every overlay, rendered by kubectl and held against the schemas of Kubernetes.
lint-kubernetes: install
	mkdir -p build
	for overlay in deploy/kubernetes/base deploy/kubernetes/overlays/*; do \
		kubectl kustomize $$overlay > build/manifest.yaml && $(BIN)/kubernetes-validate --strict --quiet build/manifest.yaml || exit 1; \
	done

# The site of docs/ in build/docs. A broken link or anchor ends it.
docs: install
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

# Every GPU kernel, compiled without a GPU: registers, spills and shared memory. A spill or an overflow ends it.
kernels: install
	$(BIN)/python -m tests.kernels.triton.ahead.compile --arch sm_90

# The same by every Triton that PyTorch brings, for every GPU: writes bench/results/kernels.json. About 20 minutes.
kernels-all: install
	$(BIN)/python -m tests.kernels.triton.ahead.matrix

# Two workers more than two cores have: tests of faults wait for half of their time.
BESIDE := -n 4 --dist loadscope
# The files with tests marked `alone`: the others need not be imported again. Those of clusters wait for elections most
# of the time, so they run beside the rest.
ALONE := $(shell grep -rl --include='*.py' 'mark[.]alone' tests)
CLUSTERS := $(filter %/test_cluster.py,$(ALONE))

# First what needs no quiet machine, side by side.
test: install
	$(MAKE) --jobs 3 --output-sync=line lint kernels beside MARKS='not full and not cuda and not alone'
	$(MAKE) --jobs 2 alone clusters MARKS='alone and not full and not cuda'

test-all: install
	$(MAKE) --jobs 3 --output-sync=line lint kernels beside MARKS='not cuda and not alone'
	$(MAKE) --jobs 2 alone clusters MARKS='alone and not cuda'

# The + keeps --output-sync from holding back the line of progress that pytest writes every minute.
beside:
	+$(BIN)/pytest $(BESIDE) -m '$(MARKS)'

alone:
	$(BIN)/pytest -m '$(MARKS)' $(filter-out $(CLUSTERS),$(ALONE))

clusters:
	$(BIN)/pytest -m '$(MARKS)' $(CLUSTERS)

# Other projects' clients, each in an environment of its own, against `pagewire serve`. The first run installs them.
# RECORD=1 also writes the requests of agents and SDKs to tests/data/clients, which `make test` sends again.
test-clients: install
	$(BIN)/python -m tests.clients

# A stack under load and faults, scraped by Prometheus: metrics, dashboards, alerts. Needs Debian's package prometheus.
test-observability: install
	$(BIN)/python -m tests.observability

# The console in headless Chromium, against a scripted model and a real stack. Needs Debian's package chromium, and npm.
test-console: install build/console/node_modules
	$(BIN)/pytest -n 0 -rP tests/console

# The image and compose.yaml as they are, under faults. ENGINE=podman COMPOSE=podman-compose: the same with podman.
test-containers: install
	$(BIN)/python -m tests.containers

# Every front door and every decoder under random input: FUZZ_MINUTES each.
FUZZ_MINUTES ?= 10
fuzz: install
	FUZZ_MINUTES=$(FUZZ_MINUTES) $(BIN)/pytest -n logical --maxprocesses 4 --timeout 0 tests/fuzz

# The lock file of the image: exact versions with the hashes of their files. UV_EXTRA_INDEX_URL adds an index, LOCK_FLAGS
# are uv's, such as `--no-emit-package triton` for an image without a GPU.
LOCK ?= deploy/requirements.lock
LOCK_FLAGS ?=
lock: install
	$(BIN)/pip install --quiet 'uv>=0.9'
	echo 'setuptools>=77' | $(BIN)/uv pip compile pyproject.toml - --output-file $(LOCK) --quiet --universal \
		--python-version 3.12 --generate-hashes --no-annotate --custom-compile-command 'make lock' $(LOCK_FLAGS)

# Known vulnerabilities of what the lock file names. It says so where no database can be reached.
audit: install
	-$(BIN)/pip install --quiet 'pip-audit>=2.9'
	$(BIN)/python -m tools.audit $(LOCK)

# A tiny model of every family of transformers, served and compared: writes docs/models.md. About 20 minutes.
models: install
	$(BIN)/python -m tests.families

clean:
	rm -rf $(VENV) build *.egg-info
