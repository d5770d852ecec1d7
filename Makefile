# Every target sets itself up: a fresh Debian or Ubuntu needs python3, make and package registries.

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-full simulated tests sanitized soak check lint types rules bench docs setup

PYTHON_BIN := .venv/bin/python
CODE := src tests $(wildcard bench)
# More than half of the time of tests is waiting, so two cores have four workers. One file stays on one worker, so a
# server that a module starts is started once; tests/conftest.py has the order, and the files that are shared out. What
# `check` has run already is left out.
PYTEST := $(PYTHON_BIN) -m pytest -n 4 --dist loadfile --no-loadscope-reorder --ignore tests/test_tidy.py
# Tests of the compiled modules and of what calls them; none of them starts a JVM.
KERNEL_TESTS := tests/native tests/iproto tests/xlog tests/text tests/box tests/columns tests/limestone/format \
	tests/limestone/store tests/limestone/tsurugi tests/archive/test_encoded_rows.py tests/replication/test_row_stream.py \
	tests/spark/fold/test_key_fold.py tests/spark/index/test_limestone_kernels.py \
	tests/spark/sources/tarantool/test_encode_kernels.py tests/spark/sources/tarantool/test_select_kernels.py \
	tests/spark/sources/tarantool/test_tuple_encoder.py tests/fuzz
RUNS ?= 250
SIDE_BY_SIDE := $(MAKE) --no-print-directory --jobs 2

help: ## show these lines
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target text; do printf '  make %-10s %s\n' "$$target" "$$text"; done

demo: setup ## show what Flowstone does, with no configuration and no outside server
	$(PYTHON_BIN) -m flowstone.cli demo

quick: setup ## lint, types and the tests of what has changed (2 minutes at most); BASE names a commit to compare with
	$(PYTHON_BIN) scripts/quick.py $(BASE)

test: setup ## check, simulated runs and the whole suite at CI scale (some 15 minutes on 2 cores); PYTEST_ARGS passes options on
	+$(SIDE_BY_SIDE) RUNS=250 simulated tests

soak: setup ## simulated runs for SECONDS (default 3600): whole replica sets under faults, each from a seed of its own
	$(PYTHON_BIN) -m tests.simulation --soak $(or $(SECONDS),3600) --first $(or $(FIRST),0)

sanitized: setup ## kernel tests and fuzz targets under the address and undefined-behaviour sanitizers
	scripts/sanitized -n 2 --dist loadfile $(KERNEL_TESTS) $(PYTEST_ARGS)

test-full: setup ## the same at full scale (under 4 hours), and `sanitized`
	+$(SIDE_BY_SIDE) RUNS=2000 PYTEST='FLOWSTONE_SCALE=full $(PYTEST) --timeout 7200' simulated tests
	+$(MAKE) --no-print-directory sanitized

# Parts of `test`. Simulated runs live in virtual time and take what the rest leaves of the processor.
simulated: lint
	nice $(PYTHON_BIN) -m tests.simulation --runs $(RUNS) --fresh 50

tests: lint types rules
	$(PYTEST) $(PYTEST_ARGS)

check: setup ## lint, formatting, types, import rules, and the rules of the house (tests/test_tidy.py)
	+@$(SIDE_BY_SIDE) --output-sync lint types rules

# Parts of `check`.
lint:
	$(PYTHON_BIN) -m ruff check $(CODE) examples hatch_build.py
	$(PYTHON_BIN) -m ruff format --check $(CODE) examples hatch_build.py

types:
	$(PYTHON_BIN) -m mypy --strict $(CODE)

rules:
	.venv/bin/lint-imports
	$(PYTHON_BIN) -m pytest -q tests/test_tidy.py

bench: setup ## measure against the real server, in one run, and print the ratios
	$(PYTHON_BIN) -m bench

docs: setup ## build the documentation into site/, without the network
	$(PYTHON_BIN) scripts/reference.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON_BIN) -m mkdocs build --strict --quiet

setup: ## only the set-up: .venv, the compiled modules, and where possible Java 17 and Debian's tarantool, chromium, zsh and fish
	@scripts/setup
