"""The data scripts of golf, word for word: their options and variables, our downloader and export, errors and exit codes."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.golf.data import PREFIX, PREFIX_VARIABLE, REPO, REPO_VARIABLE
from ingot.console.entry import explained, warn
from ingot.console.output import Parser, print_json
from ingot.console.progress import work_line
from ingot.data import SHARD_TOKENS
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.compat.golf.data.download import Downloaded, Progress
    from ingot.compat.golf.data.export import Exported

QUIET_SECONDS = 30.0  # without a terminal, a slow file is heard of this often
THREADS, BATCH = "MATCHED_FINEWEB_TOKENIZER_THREADS", "MATCHED_FINEWEB_SP_BATCH_SIZE"
TIKTOKEN_THREADS, DECODE_BATCH = "MATCHED_FINEWEB_TIKTOKEN_THREADS", "MATCHED_FINEWEB_GPT2_DECODE_BATCH_SIZE"
CONTINUES = "interrupted; the same command continues"
VARIABLES = f"""variables:
  {REPO_VARIABLE}, {PREFIX_VARIABLE}
                        the repository and its folder, where the options do not say
  {THREADS}
                        processes that encode (one for each processor)
  {TIKTOKEN_THREADS}
                        the same for the kind tiktoken
  {BATCH}
                        documents encoded at once (1024)
  {DECODE_BATCH}
                        documents of GPT-2 shards decoded at once (512); if it is set and the repository has no documents,
                        those of OUTPUT/datasets/fineweb10B_gpt2 are taken
"""


def cached_challenge_fineweb(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Download golf's shards and tokenizer into a folder; returns the exit code."""
    name = "cached_challenge_fineweb.py"
    parser = Parser(name, description="Download the challenge's FineWeb shards and their tokenizer.")
    parser.add_argument("positional", nargs="?", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--train-shards", type=int, default=80, metavar="N", help="train shards to download (80)")
    parser.add_argument("--variant", default="sp1024", help="sp1024, byte260 or another that the repository has (sp1024)")
    parser.add_argument("--skip-manifest", action="store_true", help="use the manifest.json that is here")
    parser.add_argument("--with-docs", action="store_true", help="download docs_selected.jsonl and what it was made of")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    with explained(name, interrupted=CONTINUES) as outcome:
        given = parser.parse_args(list(argv))
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
    return outcome.code


def download_and_print(output: Path, as_json: bool, repo: str, **request: Any) -> None:
    """Download, showing how far it is on stderr and what it came to on stdout."""
    from ingot.compat.golf.data.download import download
    from ingot.data.hub import Hub

    def tell(progress: Progress) -> None:
        assert show is not None
        show("downloading", progress.bytes, progress.of_bytes, f"{progress.files} of {progress.of_files} files")

    with work_line("asking the hub", "bytes") as (notify, show):
        result = download(output, Hub(repo, notify=notify), notify=notify, progress=tell if show else _Lines(), **request)
    if as_json:
        print_json(result)
    else:
        print(_summary(result))


def _summary(result: Downloaded) -> str:
    def shards(count: int, split: str, tokens: int) -> str:
        return f"{count:,} {split} {'shard' if count == 1 else 'shards'} of {tokens:,} tokens"

    train = shards(result.train_shards, "train", result.train_tokens)
    val = shards(result.val_shards, "validation", result.val_tokens)
    commit = f"at {result.commit[:12]}" if result.commit else "at an unknown commit"
    fetched = f"{result.fetched_files:,} fetched now ({result.fetched_bytes / 1e6:,.1f} MB)"
    return (
        f"{result.dataset}: {train}, {val}\n"
        f"tokenizer: {', '.join(result.tokenizer)}\n"
        f"{result.repo} {commit}: {result.files:,} files, {fetched}, all checked, {result.seconds:.1f} s\n"
        f"train on it with: ingot train --recipe demo --data.path {shlex.quote(result.dataset)}"
    )


class _Lines:
    """A line for every file that arrives, and now and then one for a file that takes long."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if progress.fetched is None and time.monotonic() - self._last < QUIET_SECONDS:
            return
        self._last = time.monotonic()
        amount = (
            f"{progress.files:,} of {progress.of_files:,} files, {progress.bytes / 1e6:,.1f} of {progress.of_bytes / 1e6:,.1f} MB"
        )
        warn(f"{progress.fetched or 'downloading'} ({amount})")


def download_hf_docs_and_tokenize(argv: Sequence[str], folder: Path = Path("data")) -> int:
    """Download golf's documents and export them as shards of the tokenizers in a spec file; returns the exit code."""
    name = "download_hf_docs_and_tokenize.py"
    with explained(name, interrupted=CONTINUES) as outcome:
        given = _export_parser(name, folder).parse_args(list(argv))
        from ingot.compat.golf.data.export import Settings, export
        from ingot.compat.golf.data.specs import load_specs
        from ingot.data.hub import Hub

        specs = load_specs(
            given.tokenizer_config,
            skip_byte=given.skip_byte,
            train_documents=given.tokenizer_train_docs,
            reuse=given.reuse_sp_model,
        )
        threads, tiktoken, batch, decode = map(_number, (THREADS, TIKTOKEN_THREADS, BATCH, DECODE_BATCH))
        with work_line("asking the hub", "bytes") as (notify, show):
            result = export(
                given.output_root,
                specs,
                Hub(given.repo_id, notify=notify),
                given.remote_root,
                val_documents=given.num_val_docs,
                chunk_tokens=given.chunk_tokens,
                gpt2_shards=given.from_gpt2_shards,
                settings=Settings(threads, tiktoken, batch or Settings.batch, decode),
                notify=notify,
                progress=show or (lambda what, done, total: None),
            )
        if given.json:
            print_json(result)
        else:
            _print(result)
    return outcome.code


def _export_parser(name: str, folder: Path) -> Parser:
    about = "Download the challenge's documents and export them as shards of one or more tokenizers."
    parser = Parser(name, description=about, epilog=VARIABLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, repo, prefix = parser.add_argument, os.environ.get(REPO_VARIABLE, REPO), os.environ.get(PREFIX_VARIABLE, PREFIX)
    add("--repo-id", default=repo, metavar="ID", help=f"dataset repository on the Hugging Face hub ({repo})")
    add("--remote-root", default=prefix, metavar="DIR", help=f"folder in it that has docs_selected.jsonl ({prefix})")
    add("--output-root", type=Path, required=True, metavar="DIR", help="folder to fill: datasets/, tokenizers/, manifest.json")
    specs = folder / "tokenizer_specs.json"
    add("--tokenizer-config", type=Path, default=specs, metavar="FILE", help=f"JSON file that lists tokenizers ({specs})")
    add("--num-val-docs", type=int, metavar="N", help="the first N documents are validation (what the documents say, or 50000)")
    add("--chunk-tokens", type=int, default=SHARD_TOKENS, metavar="N", help=f"tokens in one shard ({SHARD_TOKENS})")
    add("--tokenizer-train-docs", type=int, metavar="N", help="learn vocabularies from the first N documents (all)")
    add("--skip-byte", action="store_true", help="leave byte tokenizers out")
    add(
        "--reuse-sp-model",
        action="append",
        default=[],
        metavar="VOCAB=MODEL",
        help="take this .model for the SentencePiece vocabulary of this size instead of training one; may be given again",
    )
    add(
        "--from-gpt2-shards",
        type=Path,
        metavar="DIR",
        help="make docs_selected.jsonl of these shards of GPT-2 tokens instead of downloading it; their validation comes first",
    )
    add("--json", action="store_true", help="print the result as JSON")
    return parser


def _number(variable: str) -> int | None:
    """The number that a variable sets, at least 1; None if it sets none."""
    if not (text := os.environ.get(variable, "").strip()):
        return None
    try:
        return max(1, int(text))
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a whole number") from None


def _print(result: Exported) -> None:
    for entry in result.manifest["datasets"]:
        stats, kept = entry["stats"], " (was complete)" if entry["name"] in result.kept else ""
        print(f"{result.folder}/{entry['path']}: {entry['vocab_size']:,} ids, {stats['docs_total']:,} documents{kept}")
        for split, name in (("train", "train"), ("val", "validation")):
            files, tokens, documents = (stats[f"{what}_{split}"] for what in ("files", "tokens", "docs"))
            print(f"  {name}: {documents:,} documents, {tokens:,} tokens, {files:,} {'shard' if files == 1 else 'shards'}")
    print(f"{result.folder}/manifest.json lists them, {result.seconds:.1f} s")
