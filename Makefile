# Two commands on a fresh machine: `make demo` and `make test`.  Each sets up all that it needs in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
STRANGERS := $(VENV)/.strangers
SITE   := $(if $(wildcard $(READY)),$(VENV),.venv-docs)

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE = 1
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: they need not compile each time

.PHONY: demo test soak unit gpu check docs dist versions format bench clean help

help:
	@echo "make demo    train, kill, resume on other layouts; shows a table and demo-out/loss.png"
	@echo "make test    every promise once, but for trainers: about ten minutes on two cores"
	@echo "make soak    the rest: hours, with packages of others (torchao, bitsandbytes, peft, ...)"
	@echo "make unit    the fast tests only (a minute or two)"
	@echo "make gpu     on a machine with a GPU, with its own torch: what holds there, in ten minutes"
	@echo "make check   ruff, mypy, architecture, the site without warnings and dead links"
	@echo "make docs    the site of docs/, in build/site"
	@echo "make versions   other versions of torch and of trainers, each in an environment of its own; hours"
	@echo "make dist    wheel and sdist, checked, and the wheel tried in an empty environment"
	@echo "make bench   measure what is claimed, in five hours; which claims hold, and which no longer do"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "holdfast needs Python 3.10 or newer; set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(STRANGERS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[strangers]'
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

# Four at a time keep two cores busy (98 %), since ranks wait for each other; each more costs 20 CPU seconds.
# No test compares times.
test: $(READY)
	$(BIN)/python -m pytest -n 4 --dist loadfile --durations 20 -m "not soak"

unit: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not distributed and not slow and not soak"

soak: $(READY) $(STRANGERS)
	$(BIN)/python -m pytest -n 3 --dist loadfile --durations 50 --hypothesis-profile anew -m "soak or hypothesis"

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/house/test_architecture.py tests/docs/test_site.py
	$(BIN)/python .ci/shape.py
	$(MAKE) --no-print-directory docs

# With the environment of development where there is one, else with a small one of its own.
docs: $(SITE)/.ready
	$(SITE)/bin/python docs/make_site.py
	$(SITE)/bin/zensical build --clean --strict

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

dist: $(READY)
	$(BIN)/python .ci/dist.py

versions: $(READY) $(STRANGERS)
	$(BIN)/python .ci/versions.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# With the Python that has torch for the device, not the environment of development.
gpu:
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "make gpu: $(PYTHON) has no torch that sees a CUDA device; set PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import ml_dtypes, msgspec, rich, xxhash' 2>/dev/null || \
	  $(PYTHON) -m pip install ml_dtypes msgspec rich xxhash
	PYTHONPATH=src $(PYTHON) -m bench.claims.gpu
	@$(PYTHON) -c 'import pytest' 2>/dev/null || $(PYTHON) -m pip install pytest
	PYTHONPATH=src $(PYTHON) -m pytest -q -m "" tests/system/gpu

bench: $(READY) $(STRANGERS)
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .venv-docs demo-out build dist .pytest_cache .mypy_cache .ruff_cache
