# Everything starts from a bare clone with Python 3.11 and a C++ compiler.
# `make demo` trains a small model, `make test` runs what CI runs.

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
	@echo "make test    linters, types, the import contract and the test suite (JOBS=4 for more cores; each has worker processes)"
	@echo "make matrix  the larger sweeps of the test suite"
	@echo "make downstream  other people's libraries, beside torch's FSDP2 (ONLY=accelerate)"
	@echo "make bench   the benchmarks, an hour or so; JSON and charts under $(RESULTS)/ (BENCH='--only memory')"
	@echo "make release-check  wheel and sdist, installed where nothing else is and tried (RELEASE=--all)"
	@echo "make release VERSION=0.1.0  the version in pyproject.toml and the section in CHANGELOG.md; commits nothing"
	@echo "make docs    the documentation as a site: open site/index.html; a warning is an error"
	@echo "make format  rewrite the sources as ruff likes them"
	@echo "make clean   remove the environment, caches and runs"

# torch comes first and by its exact version: a bare `torch>=2.11` would let pip
# choose the newest build. The stamp makes a second run skip all of this.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[cli,plot,checkpoint,dev,docs]" "torch==$(TORCH)"
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
	$(BIN)/python downstream/run.py $(if $(ONLY),--only $(ONLY)) --table docs/neighbours.md

bench: $(READY)
	$(BIN)/python bench/run_all.py --results $(RESULTS) $(BENCH)

# Needs no environment of its own: it makes one for each pair of Python and torch.
release-check:
	$(PYTHON) tools/release/check.py $(RELEASE)

# Changes files of the working tree and nothing else: no commit, no tag, no upload.
release: $(READY)
	$(BIN)/python tools/release/prepare.py $(VERSION)

docs: $(READY)
	$(BIN)/python tools/build_site.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis runs build/site site
