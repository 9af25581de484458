# `make train` and `make test` are all a fresh machine needs: they make .venv and install the locked packages first.
PYTHON ?= python3
TORCH := torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS := $(VENV)/.tests
LOCK := uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
WITHOUT_TORCH = awk 'BEGIN { print "\# $(1), pinned with hashes. Written by `make locks`." } /^[a-z]/ { skip = /^(torch|triton|nvidia-|cuda-)/ } !skip'
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ORIGINAL := $(VENV)/gpt-simple
MLX := $(VENV)/.mlx

.PHONY: train test test-long lint bench docs pictures locks clean

train: $(READY)
	@$(BIN)/ingot train --recipe demo
	@echo "(the ingot command is in $(BIN); put it on your path with: source $(BIN)/activate)"

# Compiled first: tests start many programs, and where PYTHONDONTWRITEBYTECODE is set each would compile it again.
test: $(TESTS) $(ORIGINAL)/.ready $(MLX)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n 3

# The cases that `make test` leaves out, and new examples for the tests that draw theirs.
test-long: $(TESTS) $(ORIGINAL)/.ready $(MLX)
	$(BIN)/python -m pytest -n 2 -m long
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile search

lint: $(TESTS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY)
	$(BIN)/python benchmarks/first_model.py

docs: $(READY)
	$(BIN)/ingot config docs -o docs/configuration.md

# By the commands that their pages show; trains the demo for 90 s first.
pictures: $(TESTS)
	$(BIN)/python tools/pictures.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# torch comes last and without a hash, because PyPI's build and the builds for CPUs differ; all packages it needs but CUDA's are
# in the lock. The import compiles the modules that training uses; pip would compile thousands of others.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; told = (sys.executable, *v); v >= (3, 11) or sys.exit("ingot needs Python 3.11 or newer and %s is %d.%d; choose one with: make PYTHON=python3.12" % told); print("setting up $(VENV) with %s, Python %d.%d" % told, flush=True)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --no-deps --require-hashes -r requirements.lock
	$(PIP) --no-compile $(TORCH)
	$(PIP) --no-deps --no-build-isolation -e .
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -c 'import ingot.train.start, ingot.backends.torch.backend'
	@touch $(READY)

$(TESTS): $(READY) requirements-test.lock
	$(PIP) --no-compile --no-deps --require-hashes -r requirements-test.lock
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -q -j 2 $(VENV)/lib >/dev/null || true  # some packages ship templates
	@touch $(TESTS)

# Resolves the newest versions that pyproject.toml allows; needs uv on the path.
locks:
	printf 'hatchling\neditables\n' | $(LOCK) pyproject.toml - | $(call WITHOUT_TORCH,What ingot and `make train` need beside torch) > requirements.lock
	$(LOCK) pyproject.toml --extra dev -c requirements.lock | $(call WITHOUT_TORCH,What `make test` needs) > requirements-test.lock
	echo 'mlx[cpu] ; sys_platform == "linux" or sys_platform == "darwin"' | $(LOCK) - | $(call WITHOUT_TORCH,MLX for the tests of its backend) > requirements-mlx.lock

# The original gpt-simple, which tests run beside ours; without its dependencies, in a folder of its own.
$(ORIGINAL)/.ready: $(TESTS) tests/compat/gpt_simple/requirements.txt
	rm -rf $(ORIGINAL)
	$(PIP) --no-deps --target $(ORIGINAL) -r tests/compat/gpt_simple/requirements.txt
	@touch $@

# Tried once: where there is no wheel (glibc older than 2.35, a Mac without Apple silicon), the tests of MLX are skipped.
$(MLX): $(TESTS) requirements-mlx.lock
	@$(PIP) --require-hashes --only-binary :all: -r requirements-mlx.lock 2>/dev/null || echo "mlx does not install here: the tests of the MLX backend are skipped"
	@touch $(MLX)
