"""OpenWebText with GPT-2's tokens, into this folder: `python data/openwebtext/prepare.py`; --help says what else it takes."""

import sys
from pathlib import Path

try:
    from ingot.compat.nanogpt.prepare import openwebtext
except ModuleNotFoundError as missing:
    sys.exit(
        f"prepare.py: {missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(openwebtext(Path(__file__).resolve().parent, sys.argv[1:]))
