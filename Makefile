# All targets work in a fresh clone. They need Python 3.11 and a C++ compiler.
# `make demo` trains a small model. `make test` runs the same checks as CI.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH  ?= 2.13.0
DEMO   ?=
JOBS   ?= 2
RESULTS ?= bench/results
BENCH  ?=
ONLY   ?=
RELEASE ?=

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready-torch-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint matrix downstream bench docs release release-check format clean

help:
	@echo "make demo    train a small GPT on two processes (options: DEMO='--strategy zero2')"
	@echo "make test    run linters, type checks, import contracts and tests (JOBS=4: four jobs, each with worker processes)"
	@echo "make matrix  run the larger test sweeps"
	@echo "make downstream  run other libraries with composable_shard and with FSDP2 (ONLY=accelerate_fsdp2)"
	@echo "make bench   run the benchmarks, about an hour; writes JSON and charts to $(RESULTS)/ (BENCH='--only memory')"
	@echo "make release-check  install wheel and sdist in new environments and check them (RELEASE=--all)"
	@echo "make release VERSION=0.1.0  set the version and write the section in CHANGELOG.md; commits nothing"
	@echo "make docs    build the documentation: site/index.html; warnings are errors"
	@echo "make format  format the sources with ruff"
	@echo "make clean   delete the environment, caches and runs"

# Install the exact torch first, because pip would choose the newest build for `torch>=2.11`.
# If the stamp file is up to date, nothing is installed.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[cli,plot,checkpoint,remote,dev,docs]" "torch==$(TORCH)"
	rm -f $(VENV)/.ready-torch-*
	touch $@

setup: $(READY)

demo: $(READY)
	$(BIN)/python tutorials/01_train_gpt.py $(DEMO)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

matrix: $(READY)
	$(BIN)/python -m pytest -m matrix -n $(JOBS) --dist worksteal

downstream: $(READY)
	$(BIN)/python downstream/run.py $(if $(ONLY),--only $(ONLY)) --table docs/integrations_table.md

bench: $(READY)
	$(BIN)/python bench/run_all.py --results $(RESULTS) $(BENCH)

# Does not use .venv: creates an environment for each pair of Python and torch.
release-check:
	$(PYTHON) tools/release/check.py $(RELEASE)

# Changes only files of the working tree: no commit, no tag, no upload.
release: $(READY)
	$(BIN)/python tools/release/prepare.py $(VERSION)

docs: $(READY)
	$(BIN)/python tools/build_site.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis runs build/site site
