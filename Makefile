# `make install demo test test-rdma lint fuzz soak bench gpu-check`: see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-rdma lint fuzz soak bench gpu-check clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Hypercast needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: install
	@$(BIN)/python -m benchmarks.demo

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests

# In a guest whose kernel has RDMA in software. As root it installs what it needs; else it says what, and skips.
test-rdma: install
	$(BIN)/python -m tests.rdma

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: install
	OMP_NUM_THREADS=1 HYPERCAST_FUZZ_REQUESTS=2000 $(BIN)/python -m pytest -q -s tests/test_fuzz_http.py

# With the tests over RDMA, which take minutes in the emulated guest, and say so where they are skipped, and
# with killed nodes in 200 casts, which take nine minutes.
soak: install
	$(BIN)/python -m tests.rdma
	$(BIN)/python -m benchmarks.cast_faults --casts 200
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m soak tests/test_soak.py

bench: install
	mkdir -p .bench
	$(BIN)/python -m benchmarks.starts --json .bench/starts.json
	$(BIN)/python -m benchmarks.channel --json .bench/channel.json
	$(BIN)/python -m benchmarks.engine --json .bench/engine.json
	$(BIN)/python -m benchmarks.load --json .bench/load.json

# For a machine with a GPU: no network, no Redis, with whatever python has torch and transformers there.
GPU_PYTHON ?= $(shell test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m benchmarks.gpu_check --json benchmarks/results/gpu-check-$(shell date +%F).json

clean:
	rm -rf $(VENV) build *.egg-info
