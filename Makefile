# `make demo` and `make test` do all their own set-up; Python 3.11 is all that has to be there.

BIN := .venv/bin
N ?= 4
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test chaos bench lint format docs spark clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: .venv/installed ## install everything into .venv

demo: .venv/installed ## see a stream at work
	$(BIN)/meteor demo $(ARGS)

test: .venv/installed ## run the tests on N=4 processes; more options for pytest in ARGS=
	$(BIN)/pytest -n $(N) $(ARGS)

chaos: .venv/installed ## kill, pause and cut at random, and check what happened; ARGS="--seeds 50"
	$(BIN)/python -m tests.chaos $(ARGS)
	$(if $(ARGS),,$(BIN)/pytest tests/chaos/spark_*.py tests/chaos/shared_*.py tests/chaos/peers_*.py)

bench: .venv/installed ## measure the speed
	$(BIN)/python -m benchmarks $(ARGS)

lint: .venv/installed ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed ## put the code into its usual form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed ## build the documentation site into site/; a broken link is an error
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/zensical build --clean --strict

spark: .venv/installed ## add Spark, and Java where it is missing
	scripts/java.sh
	$(BIN)/python -m pip install --quiet --editable '.[spark]'

clean: ## remove caches and built files; .venv stays
	rm -rf dist site .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/installed: pyproject.toml scripts/setup.sh
	scripts/setup.sh
