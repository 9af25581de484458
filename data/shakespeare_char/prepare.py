"""Shakespeare by characters, into this folder: `python data/shakespeare_char/prepare.py`; --help says what else it takes."""

import sys
from pathlib import Path

try:
    from ingot.compat.nanogpt.prepare import shakespeare_char
except ModuleNotFoundError as missing:
    sys.exit(
        f"prepare.py: {missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(shakespeare_char(Path(__file__).resolve().parent, sys.argv[1:]))
