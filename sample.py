"""nanoGPT's sample.py: `python sample.py --out_dir=out-shakespeare-char`; --help lists every key."""

import sys

try:
    from ingot.compat.nanogpt.sample import main
except ModuleNotFoundError as missing:
    sys.exit(
        f"sample.py: {missing.name} is not installed here: run `make train` once and use .venv/bin/python, or pip install -e ."
    )

if __name__ == "__main__":
    sys.exit(main())
