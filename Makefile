# Needs git, make and Python 3.11+; everything else is put into .venv by the first target that wants it.

JOBS ?= 2
ARGS ?=
MINUTES ?= 4
N ?= 20000
SEED ?= 0

BIN := .venv/bin
# Each candidate is run, not looked up: version managers leave names on the PATH that only print an error,
# and some systems ship Python without venv. Evaluated only when .venv is made.
find-python = $(firstword $(PYTHON) $(shell for p in python3.13 python3.12 python3.11 python3.14 python3 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done))

PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest --dist worksteal
# Some of the quick tests wait for processes and servers; but each process more collects all tests again.
QUICK_JOBS := $(if $(filter file,$(origin JOBS)),4,$(JOBS))

# Set in many containers; each process would compile the package, the tests and the plugins of pytest anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help help-all setup demo test coverage test-all chaos simulate mutants check format docs docs-links codes pictures bench news clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

help-all: help ## Show this list, the other targets, and the variables
	@awk -F ':.*#: ' '/^[a-z-]+:.*#: / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  Variables: PYTHON=python3.12 (makes .venv)  JOBS=4 (test processes)  ARGS="-k sleep" (for test, coverage, test-all, bench, chaos)  MINUTES=10 (for chaos)'
	@echo '             N=100000 SEED=0 (for simulate)'

setup: .venv/dev #: Make or update the environment .venv (the other targets do it by themselves)

demo: .venv/run ## Run the order workflow on a real worker, kill it in the middle, watch it finish
	@$(BIN)/python examples/demo.py

test: .venv/dev ## Run the tests, except those marked slow
	$(PYTEST) -n $(QUICK_JOBS) -m "not slow" $(ARGS)

coverage: .venv/dev #: Run the tests of make test and list the lines and branches that they miss
	$(PYTEST) -n $(QUICK_JOBS) -m "not slow" --cov --cov-report=term $(ARGS)

test-all: .venv/dev ## Run all tests: every broker and database, interleavings, kills
	$(PYTEST) -n $(JOBS) $(ARGS)

chaos: .venv/dev #: Run real workers for MINUTES under faults: kills, freezes, outages, cut commits
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(ARGS)

simulate: .venv/dev #: Run N schedules of faults (N=20000), from seed SEED on; prints the rate
	$(BIN)/python -m tests.simulation.run -n $(N) --seed $(SEED) --jobs $(JOBS)

mutants: .venv/dev #: Plant bugs in store and engine and show what catches each
	$(BIN)/python -m tests.mutants.score --jobs $(JOBS) $(ARGS)

check: .venv/dev ## Lint, format, types, floors, spelling, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell
	$(BIN)/python -m tests.docs.sizes

format: .venv/dev ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: .venv/dev ## Build the documentation into docs/_build/html; a warning is an error
	$(BIN)/sphinx-build --fresh-env -W --keep-going --quiet -b html docs docs/_build/html

docs-links: .venv/dev #: Check the links of the documentation to other sites
	$(BIN)/sphinx-build --quiet -b linkcheck docs docs/_build/links

codes: .venv/dev #: Write the table of explain's codes into docs/how-to/debugging.md
	$(BIN)/python -m tests.docs.explain_codes

pictures: .venv/dev #: Draw docs/pictures/*.svg from their recordings
	$(BIN)/python -m tests.docs.pictures

bench: .venv/bench ## Measure beside other systems in interleaved rounds, as ratios (benchmarks/run.py)
	$(BIN)/python benchmarks/run.py $(ARGS)

news: .venv/dev #: Show what the next release will say in CHANGELOG.md
	@$(BIN)/towncrier build --draft

clean: ## Remove everything make has made, .venv included
	rm -rf demo.sqlite3 .coverage .coverage.* .venv .nox build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# Stamps, so that the demo does not wait for the tools, nor the tools for the systems of the benchmarks.

.venv/run: pyproject.toml
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then python="$(find-python)"; \
		test -n "$$python" || { echo 'No Python 3.11+ with venv found; name one: make PYTHON=/path/to/python3' >&2; exit 1; }; \
		echo "Making .venv with $$("$$python" --version), once"; "$$python" -m venv --clear .venv; fi
	@echo 'Installing celery_durable into .venv'
	@$(PIP) --editable '.[all]'
	@touch $@

.venv/dev: .venv/run
	@echo 'Installing the tools into .venv; the first time this takes a minute'
	@$(PIP) --editable '.[all,dev]'
	@touch $@

.venv/bench: .venv/dev
	@echo 'Installing the systems of the benchmarks into .venv'
	@$(PIP) --editable '.[all,dev,bench]'
	@touch $@
