# `make train` and `make test` are all a fresh machine needs: they make .venv and install the locked packages first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ORIGINAL := $(VENV)/gpt-simple
MLX := $(VENV)/.mlx

.PHONY: train test test-long lint bench docs pictures clean

train: $(READY)
	@$(BIN)/ingot train --recipe demo
	@echo "(the ingot command is in $(BIN); put it on your path with: source $(BIN)/activate)"

# Compiled first: tests start many programs, and where PYTHONDONTWRITEBYTECODE is set each would compile it again.
test: $(READY) $(ORIGINAL)/.ready $(MLX)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 3

# The cases that `make test` leaves out, and new examples for the tests that draw theirs.
test-long: $(READY) $(ORIGINAL)/.ready $(MLX)
	$(BIN)/python -m pytest -n 2 -m long
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile search

lint: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY)
	$(BIN)/python benchmarks/first_model.py

docs: $(READY)
	$(BIN)/ingot config docs -o docs/configuration.md

# By the commands that their pages show; trains the demo for 90 s first.
pictures: $(READY)
	$(BIN)/python tools/pictures.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# torch first and by itself: every other package then finds the locked version already there.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; told = (sys.executable, *v); v >= (3, 11) or sys.exit("ingot needs Python 3.11 or newer and %s is %d.%d; choose one with: make PYTHON=python3.12" % told); print("setting up $(VENV) with %s, Python %d.%d" % told, flush=True)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(shell grep '^torch==' requirements.lock)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

# The original gpt-simple, which tests run beside ours; without its dependencies, in a folder of its own.
$(ORIGINAL)/.ready: $(READY) tests/compat/gpt_simple/requirements.txt
	rm -rf $(ORIGINAL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(ORIGINAL) -r tests/compat/gpt_simple/requirements.txt
	@touch $@

# Tried once: where there is no wheel (glibc older than 2.35, a Mac without Apple silicon), the tests of MLX are skipped.
$(MLX): $(READY) requirements-mlx.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: -r requirements-mlx.lock 2>/dev/null || echo "mlx does not install here: the tests of the MLX backend are skipped"
	@touch $(MLX)
