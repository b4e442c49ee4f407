# `make train` and `make test` are all that a fresh machine needs: they make .venv and install into it first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help train test test-all lint bench-pipeline bench-transports bench-meshes bench-memory bench-tensor bench-checkpoint bench-elastic clean

help:
	@echo "make train              train the smallest GPT on four local ranks, with a picture of what each did when"
	@echo "make test               lint and the tests; test-all adds the slow ones"
	@echo "make bench-pipeline     compare with other pipelines; bench-transports, bench-meshes, bench-memory, bench-tensor, bench-checkpoint, bench-elastic likewise"
	@echo "make clean              remove $(VENV)"

train: $(VENV)/train
	$(BIN)/ranvier train gpt-tiny

test: lint
	$(BIN)/python -m pytest

test-all: lint
	$(BIN)/python -m pytest -m "not gpu"

lint: $(VENV)/test
	$(BIN)/ruff check .

bench-pipeline: $(VENV)/train
	$(BIN)/python -m benchmarks.pipeline.pipeline

bench-transports: $(VENV)/train
	$(BIN)/python -m benchmarks.transports.transports

bench-meshes: $(VENV)/train
	$(BIN)/python -m benchmarks.meshes.losses

bench-memory: $(VENV)/train
	$(BIN)/python -m benchmarks.memory.device_bytes
	$(BIN)/python -m benchmarks.memory.peers
	$(BIN)/python -m benchmarks.memory.overlap
	$(BIN)/python -m benchmarks.memory.saved

bench-tensor: $(VENV)/train
	$(BIN)/python -m benchmarks.tensor.run

bench-checkpoint: $(VENV)/train
	$(BIN)/python -m benchmarks.checkpoint.stall

bench-elastic: $(VENV)/test
	$(BIN)/python -m benchmarks.elastic.parts

clean:
	rm -rf $(VENV)

# Each stamp is the set of extras it installs. MPI is faster but may have no wheel here; everything works without it.
$(VENV)/train: EXTRAS :=
$(VENV)/test: EXTRAS := test
$(VENV)/train $(VENV)/test: pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) -e '.[mpi$(if $(EXTRAS),$(comma)$(EXTRAS))]' || { \
	  echo "The mpi extra could not be installed: going on without it, over torch.distributed alone."; \
	  $(PIP) -e '.$(if $(EXTRAS),[$(EXTRAS)])'; }
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

comma := ,
