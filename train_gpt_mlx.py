"""The golf challenge's script for Macs on Ingot's engine: `VARIABLE=value ... python train_gpt_mlx.py`; see docs/mlx.md."""

import sys

try:
    from ingot.compat.golf.mlx_script import main
except ModuleNotFoundError as error:
    sys.exit(f"train_gpt_mlx.py needs {error.name}; set up with `make` and use .venv/bin/python, or `pip install -e .`")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
