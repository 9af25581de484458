"""Golf's documents as shards of your own tokenizers: `python data/download_hf_docs_and_tokenize.py --output-root mine`."""

import sys
from pathlib import Path

from ingot.doors.golf_data import download_hf_docs_and_tokenize

if __name__ == "__main__":
    sys.exit(download_hf_docs_and_tokenize(sys.argv[1:], Path(__file__).resolve().parent))
