.PHONY: demo test test-full gpu lint types setup dist docs clean
PYTHON ?= python3
RUN := .venv/bin/python
WORKERS ?= 2  # processes of the tests

demo: .venv/ready
	$(RUN) -m autopar.cli demo

test: .venv/ready lint types
	$(RUN) -m pytest $(RECORD) --numprocesses $(strip $(WORKERS)) --dist loadfile --no-loadscope-reorder

# Every case of the laws that `test` samples.
test-full: .venv/ready lint types
	$(RUN) -m pytest --full $(RECORD) --numprocesses $(strip $(WORKERS)) --dist loadfile --no-loadscope-reorder

# In any environment with torch and the packages of pyproject.toml: nothing is installed.
GPU_PYTHON := $(if $(filter command,$(firstword $(origin PYTHON))),$(PYTHON),$(or $(wildcard .venv/bin/python),$(PYTHON)))

gpu:
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu tests/test_gpu.py
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu

lint: .venv/ready
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .

types: .venv/ready
	.venv/bin/mypy

setup: .venv/ready

# torch's CPU build is asked for first, by the exact version of constraints.txt.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test]"
	touch $@

# Wheel and source distribution; each is installed, or unpacked, elsewhere and tests itself there.
TORCH := $$(grep '^torch==' $(CURDIR)/constraints.txt)
dist:
	rm -rf dist build
	$(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --disable-pip-version-check build
	build/tools/bin/python -m build --outdir dist .
	mkdir build/elsewhere && tar xzf dist/autopar-*.tar.gz --directory build/elsewhere
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	build/clean/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(ls dist/*.whl)[test]"
	cd build && clean/bin/autopar doctor && clean/bin/autopar demo --steps 3
	cd build/elsewhere/autopar-* && ../../clean/bin/python -m pytest tests/test_architecture.py tests/test_cluster.py tests/test_cli_plan.py tests/report

# A static site in site/, to be opened or served without a network.
docs: .venv/ready
	.venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt ".[docs]"
	$(RUN) docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis out
