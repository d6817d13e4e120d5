# Everything a developer or a CI needs: make demo · make test · make check · make bench · make clean
#
# Each target first installs what is missing (see scripts/setup_*.sh); stamps under .cache/stamps make that free when
# nothing has changed.
.PHONY: demo test check bench clean setup tools check-python check-rust check-style
.DEFAULT_GOAL := check
SHELL := /bin/sh
export PATH := $(CURDIR)/.venv/bin:$(HOME)/.cargo/bin:$(PATH):/usr/local/sbin:/usr/sbin:/sbin
export CARGO_TERM_PROGRESS_WHEN := never
STAMPS := .cache/stamps
CRATES := $(shell find crates -type f \( -name '*.rs' -o -name Cargo.toml \) 2>/dev/null)
TOOLS := build/tools/chronus build/tools/sh build/tools/bash

## demo: sixty-four rollouts of a real project in sandboxes, then nothing is left
demo: setup tools
	@python examples/demo/run.py

## test: every test there is
test: setup tools
	cargo test --quiet --locked --workspace
	pytest -q

## check: the quick checks (under 60 s when warm)
check: check-python check-rust check-style

check-python: setup
	ruff check --quiet .
	ruff format --quiet --check .
	mypy --no-error-summary sdk/src server/src
	lint-imports >$(STAMPS)/imports.log 2>&1 || { cat $(STAMPS)/imports.log; exit 1; }

check-rust: setup
	cargo fmt --all --check
	@if cargo clippy --version >/dev/null 2>&1; then \
	  cargo clippy --quiet --locked --workspace --all-targets -- -D warnings; \
	else \
	  echo "check: this Rust has no clippy; only compiling" >&2; cargo check --quiet --locked --workspace --all-targets; \
	fi

check-style: setup
	pytest -q --no-header -p no:cacheprovider tests/style >$(STAMPS)/style.log 2>&1 || { cat $(STAMPS)/style.log; exit 1; }

## bench: the benchmarks, each printing one JSON object as its last line
bench: setup tools
	python benchmarks/create.py
	python benchmarks/exec.py
	python benchmarks/density.py
	python benchmarks/flood.py

## clean: remove everything that was built or cached
clean:
	rm -rf build target .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find sdk server tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(STAMPS)/python

tools: $(TOOLS)

$(STAMPS)/system: scripts/setup_system.sh
	@mkdir -p $(@D)
	@scripts/setup_system.sh
	@touch $@

$(STAMPS)/python: requirements.lock sdk/pyproject.toml server/pyproject.toml scripts/setup_python.sh | $(STAMPS)/system
	@scripts/setup_python.sh
	@touch $@

build/tools/chronus: $(CRATES) Cargo.toml $(wildcard Cargo.lock) scripts/build_chronus.sh | $(STAMPS)/system
	@scripts/build_chronus.sh $@
	@touch $@

build/tools/sh: scripts/build_dash.sh | $(STAMPS)/system
	@scripts/build_dash.sh $(CURDIR)/$@

build/tools/bash: | $(STAMPS)/system
	@mkdir -p $(@D)
	@install -m 755 /bin/bash-static $@
