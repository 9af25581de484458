"""Golf's documents as shards of your own tokenizers: `python data/download_hf_docs_and_tokenize.py --output-root mine`."""

import sys
from pathlib import Path

try:
    from ingot.compat.golf.export_shards import download_hf_docs_and_tokenize
except ModuleNotFoundError as missing:
    sys.exit(
        f"download_hf_docs_and_tokenize.py: {missing.name} is not installed here: "
        "run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(download_hf_docs_and_tokenize(sys.argv[1:], Path(__file__).resolve().parent))
