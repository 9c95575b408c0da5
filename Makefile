# `make install demo test lint soak bench`: see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint soak bench clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: install
	$(BIN)/python -m pytest -q -m soak tests/test_soak.py

bench: install
	mkdir -p .bench
	$(BIN)/python -m benchmarks.starts --json .bench/starts.json
	$(BIN)/python -m benchmarks.channel --json .bench/channel.json

clean:
	rm -rf $(VENV) build *.egg-info
