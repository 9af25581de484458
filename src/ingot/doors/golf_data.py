"""The data scripts of golf, word for word: their options and variables, our downloader, errors and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.doors.cli.data_download import PREFIX_VARIABLE, REPO_VARIABLE, download_and_print
from ingot.errors import INTERRUPTED, IngotError


def cached_challenge_fineweb(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Download golf's shards and tokenizer into a folder; returns the exit code."""
    from ingot.data.download import PREFIX, REPO

    name = "cached_challenge_fineweb.py"
    parser = argparse.ArgumentParser(name, description="Download the challenge's FineWeb shards and their tokenizer.")
    parser.add_argument("positional", nargs="?", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--train-shards", type=int, default=80, metavar="N", help="train shards to download (80)")
    parser.add_argument("--variant", default="sp1024", help="sp1024, byte260 or another that the repository has (sp1024)")
    parser.add_argument("--skip-manifest", action="store_true", help="use the manifest.json that is here")
    parser.add_argument("--with-docs", action="store_true", help="download docs_selected.jsonl and what it was made of")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(list(argv))
    try:
        download_and_print(
            folder,
            given.json,
            variant=given.variant,
            train_shards=given.train_shards if given.positional is None else given.positional,
            repo=os.environ.get(REPO_VARIABLE, REPO),
            prefix=os.environ.get(PREFIX_VARIABLE, PREFIX),
            with_docs=given.with_docs,
            skip_manifest=given.skip_manifest,
        )
    except IngotError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command continues", file=sys.stderr)
        return INTERRUPTED
    return 0
