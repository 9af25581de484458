"""nanoGPT's train.py: `python train.py config/train_shakespeare_char.py`; --help lists every key."""

import sys

try:
    from ingot.compat.nanogpt.train import main
except ModuleNotFoundError as missing:
    sys.exit(
        f"train.py: {missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(main())
