"""Golf's shards and tokenizer into this folder: `python data/cached_challenge_fineweb.py --train-shards 10`."""

import sys
from pathlib import Path

from ingot.doors.golf_data import cached_challenge_fineweb

if __name__ == "__main__":
    sys.exit(cached_challenge_fineweb(sys.argv[1:], Path(__file__).resolve().parent))
