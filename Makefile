# `make quickstart` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: quickstart test test-slow lint benchmarks clean system-packages

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=68" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[tasks,plot,test]"
	touch $@

quickstart: $(READY)
	$(BIN)/unirl-scale train configs/quickstart.yaml --overwrite

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(READY) lint
	OMP_NUM_THREADS=1 MKL_CBWR=AVX2,STRICT $(BIN)/python -m pytest

test-slow: $(READY)
	OMP_NUM_THREADS=1 MKL_CBWR=AVX2,STRICT $(BIN)/python -m pytest -x -m "slow and not cuda and not npu"

benchmarks: $(READY)
	$(BIN)/python benchmarks/price.py

# What test-slow runs besides Python: Open MPI, a SLURM on loopback, a linter for the batch scripts.
system-packages:
	apt-get install -y openmpi-bin slurm-wlm munge shellcheck

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
