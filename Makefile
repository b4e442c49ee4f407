# `make train` and `make test` are all that a fresh machine needs: they make .venv and install into it first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# The tests share the cores: one worker for each and one more, since many tests wait for their ranks.
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
# The order of files is that of tests/conftest.py.
SPREAD := -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(SPREAD)

# Some images set it: each of the hundreds of processes of the tests would then compile the package, and each worker
# rewrite all tests.
unexport PYTHONDONTWRITEBYTECODE

# Interpreter:torch pairs that `make test-versions` runs the tests with; an interpreter that is not installed is skipped, by name.
VERSIONS ?= python3.11:2.11.0 python3.12:2.11.0 python3.12:2.13.0

# Largest file that `make lint` accepts.
MAX_FILE_KIB := 2048

.PHONY: help train test test-slow test-all test-versions mutations lint lint-lines check-files docs wheel lock bench-pipeline bench-transports bench-meshes bench-memory bench-tensor bench-checkpoint bench-elastic bench-finetune clean

help:
	@echo "make train              train the smallest GPT on four local ranks, with a picture of what each did when"
	@echo "make test               lint and the tests; test-slow: one case of each slow one; test-all: all cases, and other versions of Python and torch (hours)"
	@echo "make mutations          a hundred one-line faults in the code, and those that no test notices (hours)"
	@echo "make docs               build the site into site/; make wheel builds dist/"
	@echo "make bench-pipeline     compare with other pipelines; bench-transports, bench-meshes, bench-memory, bench-tensor, bench-checkpoint, bench-elastic, bench-finetune likewise"
	@echo "make lock               the newest versions of all packages into constraints.txt, but for torch's"
	@echo "make clean              remove $(VENV)"

train: $(VENV)/train
	$(BIN)/ranvier train gpt-tiny

# A test that no signal reaches, such as one that waits in C, ends with its process, which shows all threads. Types are
# checked meanwhile, by one process, which takes half a minute where it has no cache.
test: lint-lines
	@$(BIN)/mypy & types=$$!; \
	$(PYTEST) -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true; tests=$$?; \
	wait $$types || { echo "mypy has found errors, which are above the tests"; exit 1; }; exit $$tests

# With the packages of the site, where they can be installed, the tests build it as well: a warning or a dead link fails.
test-all: lint
	-@$(MAKE) --no-print-directory $(VENV)/docs
	$(PYTEST) -rs -m "not gpu" --hypothesis-profile random
	$(MAKE) test-versions

# What `make test` leaves out, without its many cases: half an hour of two cores.
test-slow: $(VENV)/test
	$(PYTEST) -m "slow and not gpu" --one-case -o timeout=900

test-versions:
	@for version in $(VERSIONS); do \
	  python=$${version%%:*} torch=$${version##*:} venv=$(VENV)/$${version%%:*}-torch-$${version##*:}; \
	  command -v $$python >/dev/null || { echo "$$python is not installed: torch $$torch is not tested with it"; continue; }; \
	  echo "$$python, torch $$torch:" && $$python -m venv $$venv \
	  && $$venv/bin/python -m pip install --quiet --disable-pip-version-check torch==$$torch -e '.[mpi,test]' \
	  && $$venv/bin/python -m pytest $(SPREAD) || exit 1; \
	done

mutations: $(VENV)/test
	$(BIN)/python -m tests.mutations

lint: lint-lines
	$(BIN)/mypy

lint-lines: check-files $(VENV)/test
	$(BIN)/ruff check .

# No large file and no merge marker is committed. Outside a git checkout there is nothing to check.
check-files:
	@if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then \
	  large=$$(git ls-files -z | xargs -0 sh -c 'find "$$@" -maxdepth 0 -type f -size +$(MAX_FILE_KIB)k' sh); \
	  marked=$$(git grep -lE '^(<{7}|>{7}|[|]{7})( |$$)'); \
	  if [ -n "$$large" ]; then echo "larger than $(MAX_FILE_KIB) KiB, keep it outside the repository: $$large"; fi; \
	  if [ -n "$$marked" ]; then echo "has merge markers: $$marked"; fi; \
	  [ -z "$$large$$marked" ]; \
	fi

# The site in site/, which needs no network and no server: open site/index.html. A warning is an error.
docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# A source distribution and a wheel of it, in dist/.
wheel: $(VENV)/test
	rm -rf dist build
	$(BIN)/python -m build --no-isolation

# All versions anew, but for those of torch and mypy, which are raised by hand. Test what it wrote before you commit it.
lock:
	rm -rf $(VENV)/lock && $(PYTHON) -m venv $(VENV)/lock
	grep -E '^(torch|mypy)==' constraints.txt > $(VENV)/lock/kept.txt
	$(VENV)/lock/bin/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/lock/kept.txt -e '.[mpi,test,docs]'
	{ grep '^#' constraints.txt; $(VENV)/lock/bin/python -m pip freeze --all --exclude-editable | grep -v '^pip==' | sed 's/+cpu//' | sort -f; } > $(VENV)/lock/found.txt
	mv $(VENV)/lock/found.txt constraints.txt && rm -rf $(VENV)/lock

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

bench-finetune: $(VENV)/test
	$(BIN)/python -m benchmarks.finetune.sentences

clean:
	rm -rf $(VENV)

# Each stamp is the set of extras it installs. MPI is faster but may have no wheel here; everything works without it.
$(VENV)/train: EXTRAS :=
$(VENV)/test: EXTRAS := test
$(VENV)/docs: EXTRAS := docs
$(VENV)/train $(VENV)/test $(VENV)/docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing PyTorch and the other packages of constraints.txt into $(VENV), which takes some minutes"
	@$(PIP) -e '.[mpi$(if $(EXTRAS),$(comma)$(EXTRAS))]' || { \
	  echo "The mpi extra could not be installed: going on without it, over torch.distributed alone."; \
	  $(PIP) -e '.$(if $(EXTRAS),[$(EXTRAS)])'; }
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

comma := ,
