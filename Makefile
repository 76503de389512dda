# `make demo` and `make test` install everything they need into .venv. They require only Python 3.11 or newer.

BIN := .venv/bin
N ?= 4
ARGS ?=
# `make chaos` repeats the tests in these folders on a cluster. `make test` repeats only those that
# tests/cluster/test_promises.py imports.
ON_A_CLUSTER := $(addprefix tests/,archive cli client fundamentals log peers publish shared spark store subscribe)

.DEFAULT_GOAL := help
.PHONY: help setup demo test chaos bench bench-competitors lint format docs spark lock clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | \
		awk -F'|' '{ printf "%-24s %s\n", $$1, $$2 }'

setup: .venv/installed ## install everything into .venv

demo: .venv/installed ## show publishing, reading, takeover, history and Spark, with measured figures
	$(BIN)/meteor demo $(ARGS)

test: .venv/installed ## run the tests in N=4 processes; ARGS="-k NAME" passes options to pytest
	$(BIN)/pytest -n $(N) $(ARGS)

chaos: .venv/installed ## inject random faults and check the history; ARGS="--seeds 50"
	$(BIN)/python -m tests.chaos $(ARGS)
	$(if $(ARGS),,$(BIN)/pytest tests/chaos/spark_*.py tests/chaos/shared_*.py tests/chaos/peers_*.py \
		tests/chaos/frames_*.py tests/chaos/parquet_*.py tests/chaos/split_*.py tests/chaos/cluster_*.py)
	$(if $(ARGS),,METEOR_TEST_CLUSTER=valkey $(BIN)/pytest -n $(N) $(ON_A_CLUSTER))
	$(if $(ARGS),,METEOR_TEST_CLUSTER=redis $(BIN)/pytest -n $(N) $(ON_A_CLUSTER))

bench: .venv/installed ## run the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

bench-competitors: ## compare with Kafka, NATS and others; needs Java, Maven and network access
	python3 -m venv benchmarks/.cache/venv
	benchmarks/.cache/venv/bin/python -m pip install --quiet --upgrade pip
	benchmarks/.cache/venv/bin/python -m pip install --quiet --editable . --group competitors
	benchmarks/.cache/venv/bin/python -m benchmarks.competitors $(ARGS)

lint: .venv/installed ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed ## format the code and fix simple lint errors
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed ## build the documentation site into site/; broken links are errors
	$(BIN)/python -m pip install --quiet --group docs
	$(BIN)/zensical build --clean --strict

spark: .venv/installed ## install Java for Spark, if it is missing
	scripts/java.sh
	$(BIN)/python -m pip install --quiet --editable '.[spark]'

lock: .venv/installed ## update requirements-dev.txt, which pins the development tools by hash
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --group test --group lint --universal --python-version 3.11 \
		--upgrade --generate-hashes --no-emit-index-url --no-header --no-annotate \
		--quiet --output-file requirements-dev.txt

clean: ## remove caches and build results, but not .venv
	rm -rf dist site .cache benchmarks/.cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/installed: pyproject.toml requirements-dev.txt scripts/setup.sh
	scripts/setup.sh
