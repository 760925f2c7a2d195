# make demo            train the byte-level transformer with DDP, 1-bit Adam and BinSGDM, and compare   (ARGS="..." for its options)
# make test            lint, types and the whole test suite                                          (ARGS="..." for pytest)
# make docs            the documentation as a site in build/docs; warnings are errors
# make test-oldest     the tests that depend on versions, with the oldest ones that are supported       (ARGS="..." for pytest)
# make install         only prepare .venv; demo and test do it when pyproject.toml or constraints.txt changed
#
# Needs GNU make and Python >= 3.10 with venv (PYTHON=... chooses one). Everything else comes through pip into .venv.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# Tests that run at once. Most start processes of their own and wait for them; three keep two cores busy.
JOBS   ?= 3

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

# A second environment: Python 3.10 or 3.11, with several GB of CUDA libraries, because torch came with them then.
OLDEST       ?= .venv-oldest
OLDEST_TESTS := $(foreach name,optim_adam optim_all optim_lamb optim_zero_one optim_binsgdm exchange \
                resume strategy lightning_training lightning_checkpoint late_gradients what_programs_write ddp ddp_habits \
                all_or_nothing saving_whole compact,$(wildcard tests/*/test_$(name).py))

.PHONY: demo test lint docs install clean
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

install: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than Python 3.10; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) (once; again only when pyproject.toml or constraints.txt change)"
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,cli]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build $(ARGS)

# mypy takes a minute on a fresh clone: it runs beside the tests, and its output comes after theirs
test: $(STAMP)
	$(BIN)/ruff check .
	@mkdir -p build
	@echo "$(BIN)/mypy, beside the tests"; \
	  $(BIN)/mypy > build/mypy.txt 2>&1 & types=$$!; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS); tests=$$?; \
	  wait $$types; typed=$$?; cat build/mypy.txt; exit $$((tests ? tests : typed))

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --constraint constraints-oldest.txt --editable '.[cli,plot]' \
	  lightning hypothesis pytest pytest-timeout pytest-xdist rich scikit-learn tensorboard
	@touch $@

test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist loadfile $(OLDEST_TESTS) $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) demo_out build *.egg-info .pytest_cache .mypy_cache .ruff_cache
