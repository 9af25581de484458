"""Golf's shards and tokenizer into this folder: `python data/cached_challenge_fineweb.py --train-shards 10`."""

import sys
from pathlib import Path

try:
    from ingot.compat.golf.download import cached_challenge_fineweb
except ModuleNotFoundError as missing:
    sys.exit(
        f"cached_challenge_fineweb.py: {missing.name} is not installed here: "
        "run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(cached_challenge_fineweb(sys.argv[1:], Path(__file__).resolve().parent))
