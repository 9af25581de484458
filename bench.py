"""nanoGPT's bench.py: `python bench.py --real_data=False`; --help lists every key."""

import sys

try:
    from ingot.compat.nanogpt.bench import main
except ModuleNotFoundError as missing:
    sys.exit(
        f"bench.py: {missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(main())
