# Every target runs in a virtual environment of its own, .venv, which is made on first use.
#   make demo PYTHON=python3.12     another interpreter
#   make test TORCH="torch>=2.13"   another build of torch than the tested one
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# what runs in the environment finds its tools (deepspeed, ninja) first
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: demo test lint bench clean

demo: $(INSTALLED)
	@$(IN_VENV) python examples/demo.py

test: $(INSTALLED)
	$(IN_VENV) python -m pytest -n 2 --dist loadgroup

lint: $(INSTALLED)
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy

bench: $(INSTALLED)
	mkdir -p out
	$(IN_VENV) python benchmarks/tensor_parallel.py --json out/tensor_parallel.json
	$(IN_VENV) python benchmarks/tracing.py --json out/tracing.json
	$(IN_VENV) python benchmarks/fusion.py --json out/fusion.json
	$(IN_VENV) python benchmarks/pipeline.py --json out/pipeline.json
	$(IN_VENV) python benchmarks/megatron.py --json out/megatron.json

# torch comes first, in the tested version: nothing that is installed after it may choose another
$(INSTALLED): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --editable ".[demo,test,lint]"
	@touch $@

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
