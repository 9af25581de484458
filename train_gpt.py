"""The golf challenge's script on Ingot's engine: `VARIABLE=value ... python train_gpt.py`, or with torchrun; see docs/golf.md."""

import sys

try:
    from ingot.compat.golf.main import main
except ModuleNotFoundError as error:
    sys.exit(f"train_gpt.py needs {error.name}; set up with `make` and use .venv/bin/python, or `pip install -e .`")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
