# The commands that one types while working on jaxstack; .ci/run and the workflows of .github call the same ones.
.PHONY: lint types test test-all docs

lint: ## style, imports between layers
	ruff check .
	ruff format --check .
	lint-imports

types: ## static types
	pyright

test: ## the quick tests
	python -m pytest -n 2

test-all: ## all tests that need no GPU
	python -m pytest -n 2 -m "not gpu"

docs: ## the site, in site/
	mkdocs build --strict
