"""`ingot data`: download, prepare, inspect, verify and convert token data, and train tokenizers."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from ingot.cli.arguments import AsJson, CommandList
from ingot.compat.golf import PREFIX, PREFIX_VARIABLE, REPO, REPO_VARIABLE
from ingot.console.output import check_target, print_columns, print_json
from ingot.console.progress import progress_bar
from ingot.data import SHARD_TOKENS
from ingot.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    from ingot.data.prepare.pipeline import Prepared


commands = typer.Typer(
    cls=CommandList,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Download, prepare, inspect, verify and convert data for training; train a tokenizer.",
)
BAR_CHARACTERS = 40  # length of the longest histogram bar
MAX_LISTED_FINDINGS = 20  # findings printed per kind; --json lists all
TokenFormat = Literal["ingot", "nanogpt", "gpt-simple", "shards"]


@commands.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder or file of tokens in any supported format.")],
    to: Annotated[
        TokenFormat,
        Option(
            help="Format to write. ingot: a prepared folder. nanogpt: train.bin, val.bin and meta.pkl. gpt-simple: .bin and "
            ".idx files in SPLIT/BUCKET/. shards: .bin files with a header, for golf, modded-nanogpt and llm.c."
        ),
    ],
    output: Annotated[Path, Option(metavar="DIR", help="The folder to write.")],
    tokenizer: Annotated[str | None, Option(metavar="NAME", help="Tokenizer of SOURCE, if its files do not name one.")] = None,
    from_format: Annotated[TokenFormat | None, Option("--from", help="Format of SOURCE, if it cannot be detected.")] = None,
    mark: Annotated[int | None, Option(metavar="ID", help="Id of the token between documents, if no tokenizer sets it.")] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="File name prefix (shards) or bucket name (gpt-simple).")] = None,
    shard_tokens: Annotated[int, Option(metavar="N", help="Tokens per file (nanogpt: only one file per split).")] = SHARD_TOKENS,
    max_length: Annotated[int, Option(metavar="N", help="Tokens per window of a gpt-simple bucket.")] = 3072,
    overlap: Annotated[int, Option(metavar="N", help="Tokens that neighbouring gpt-simple windows share.")] = 256,
    force: Annotated[bool, Option("--force", help="Replace the output folder if it holds token data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert token data from one format to another."""
    from ingot.data.formats.convert import FileLayout, convert
    from ingot.data.formats.opener import open_tokens

    opened = open_tokens(source, from_format)
    print(f"{source}: {opened.format}: {opened.about}", file=sys.stderr)
    layout = FileLayout(name, shard_tokens, max_length, overlap)
    with progress_bar("converting", in_bytes=True) as progress:
        summary = convert(opened, output, to, tokenizer=tokenizer, mark=mark, layout=layout, overwrite=force, progress=progress)
    if as_json:
        print_json(summary)
        return
    kind = f", {summary.tokenizer} tokenizer" if summary.tokenizer else ""
    print(f"{output}: {summary.format}{kind}, {summary.seconds:.1f} s")
    print_splits(summary.splits)
    if summary.format == "ingot":
        print(f"train on it with: ingot train --recipe demo --data.path {shlex.quote(str(output))}")


@commands.command("download")
def download_command(
    variant: Annotated[str, Option(metavar="NAME", help="Vocabulary: byte260, or spN (SentencePiece with N ids).")] = "sp1024",
    train_shards: Annotated[
        int | None, Option(metavar="N", help="Download the first N training shards. Default: 80, or all if there are fewer.")
    ] = None,
    output: Annotated[Path, Option(metavar="DIR", help="Folder for datasets/, tokenizers/ and manifest.json.")] = Path("data"),
    repo: Annotated[str, Option(metavar="ID", envvar=REPO_VARIABLE, help="Dataset repository on the Hugging Face hub.")] = REPO,
    prefix: Annotated[
        str, Option(metavar="DIR", envvar=PREFIX_VARIABLE, help="Repository folder that contains manifest.json.")
    ] = PREFIX,
    revision: Annotated[str | None, Option(metavar="REV", help="Branch, tag or commit to download.")] = None,
    with_docs: Annotated[bool, Option("--with-docs", help="Also download the original text of the shards.")] = False,
    skip_manifest: Annotated[bool, Option("--skip-manifest", help="Use the existing manifest.json; do not download it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download tokenized text (default: the golf challenge's): tokenizer, whole validation split, first training shards."""
    from ingot.compat.golf.download import download_and_print

    download_and_print(
        output,
        as_json,
        variant=variant,
        train_shards=train_shards,
        repo=repo,
        prefix=prefix,
        revision=revision,
        with_docs=with_docs,
        skip_manifest=skip_manifest,
    )


@commands.command("inspect")
def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder made by `ingot data prepare`, or folder of shards.")],
    split: Annotated[Literal["train", "val"] | None, Option(help="Inspect only this split.")] = None,
    tokenizer: Annotated[str | None, Option(metavar="NAME", help="Tokenizer of the shards, if they do not name one.")] = None,
    top: Annotated[int, Option(metavar="N", min=0, help="Number of most frequent token ids to list.")] = 10,
    documents: Annotated[int, Option(metavar="N", help="Number of documents whose beginning is shown.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Describe a folder of tokens: counts, most frequent ids, document lengths and the beginnings of some documents."""
    from ingot.data.verify.audit import inspect

    inspection = inspect(folder, split, tokenizer=tokenizer, top=top, beginnings=documents)
    if as_json:
        print_json(inspection)
        return
    print(f"{folder}: {inspection.tokenizer} tokenizer")
    for name, split_counts in inspection.splits.items():
        print()
        rows = [(name, ""), ("documents", f"{split_counts.documents:,}"), ("tokens", f"{split_counts.tokens:,}")]
        rows += [("bytes of text", f"{split_counts.bytes:,}")] if split_counts.bytes is not None else []
        rows += [("piece bytes", f"{split_counts.piece_bytes:,}")] if split_counts.bytes != split_counts.piece_bytes else []
        ratio = split_counts.bytes_per_token
        rows += [("bytes per token", f"{ratio:.4f}")] if ratio is not None else []
        vocabulary = split_counts.vocabulary
        rows.append(("vocabulary", "{size:,} ids, {used:,} used, {never_used:,} never used".format(**vocabulary)))
        print_columns(rows)
        print("most frequent ids")
        for use in vocabulary["most_frequent"]:
            text = "(special)" if use["text"] is None else f"'{shown(use['text'], kept='')}'"
            print(f"{use['id']:>8}  {text:<16}{use['count']:>16,}{use['share']:>8.2%}")
        if lengths := split_counts.lengths:
            text = "tokens in a document: {shortest:,} to {longest:,}, median {median:,.0f}, mean {mean:,.1f}"
            print(text.format(**lengths))
            most = max(bin["documents"] for bin in lengths["histogram"])
            for bin in lengths["histogram"]:
                bar = "#" * -(-BAR_CHARACTERS * bin["documents"] // most)
                print(f"{bin['low']:>12,} to {bin['high']:<12,}{bin['documents']:>12,} {bar}".rstrip())
        for beginning in split_counts.beginnings:
            print(f"document {beginning['document']:,}, {beginning['tokens']:,} tokens: {shown(beginning['text'], kept='')}")


@commands.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder made by `ingot data prepare`, or folder of shards.")],
    against: Annotated[Path | None, Option(metavar="DIR", help="Also search the train split of DIR for validation text.")] = None,
    tokenizer: Annotated[str | None, Option(metavar="NAME", help="Tokenizer of the shards, if they do not name one.")] = None,
    ngram_words: Annotated[int, Option(metavar="N", help="Length in words of the n-grams used to compare splits.")] = 13,
    overlap_share: Annotated[
        float, Option(metavar="PART", help="Report a validation document if more than this fraction of its n-grams is in train.")
    ] = 0.5,
    byte_gap: Annotated[
        float | None,
        Option(
            metavar="PART",
            help="Allowed relative difference in size between the decoded tokens and the original text. Default: 0.005, or 0.05 "
            "if the decoded size equals the one recorded when the data was prepared.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check every byte of a folder of tokens and list all problems. The exit code is 3 if problems are found."""
    from ingot.data.verify.audit import audit

    with progress_bar("verifying", in_bytes=True) as progress:
        report = audit(
            folder,
            tokenizer=tokenizer,
            against=against,
            byte_gap=byte_gap,
            ngram_words=ngram_words,
            overlap_share=overlap_share,
            progress=progress,
        )
    if as_json:
        print_json({**vars(report), "ok": report.ok})
        raise typer.Exit(0 if report.ok else DataError.exit_code)
    number = len(report.findings)
    state = "whole" if report.ok else f"{number:,} finding{'s' * (number > 1)}"
    kind = f"; {report.tokenizer} tokenizer, {report.vocab_size:,} ids" if report.tokenizer else ""
    print(f"{report.folder}: {state}{kind}")
    print_splits(report.splits)
    for comparison in report.comparisons:
        print(
            f"of {comparison.documents:,} validation documents, {comparison.copied:,} are copies of documents in the train split "
            f"of {comparison.against}, and in {comparison.similar:,} more, over {overlap_share:.0%} of the {ngram_words}-word "
            f"n-grams occur in that split; of the n-grams of all validation documents, {comparison.share:.2%} do"
        )
    counts: Counter[str] = Counter()
    for finding in report.findings:
        counts[finding.code] += 1
        if counts[finding.code] <= MAX_LISTED_FINDINGS:
            print(finding.line)
    for code, count in (counts - Counter(dict.fromkeys(counts, MAX_LISTED_FINDINGS))).items():
        print(f"{code}: {count:,} more findings; --json lists all")
    if not report.ok:
        raise typer.Exit(DataError.exit_code)


def print_splits(splits: Mapping[str, Any]) -> bool:
    """Print a table of the counts of each split. If decoded tokens and text differ in size, print both sizes and return True."""
    with_pieces = any(split.piece_bytes not in (None, split.bytes) for split in splits.values())
    titles = {"documents": "documents", "tokens": "tokens", "bytes": "bytes", "bytes_per_token": "bytes/token"}
    titles |= {"piece_bytes": "piece bytes"} if with_pieces else {}
    rows = [["split", *titles.values()]]
    for split_name, split in splits.items():
        values = [(getattr(split, name), ".4f" if name == "bytes_per_token" else ",") for name in titles]
        rows.append([split_name, *("-" if value is None else format(value, form) for value, form in values)])
    width = max(6, *(len(row[0]) + 1 for row in rows))
    for split_name, *cells in rows:
        aligned = [cell.rjust(size) for cell, size in zip(cells, (12, 18, 18, 14, 18), strict=False)]
        print(f"{split_name:<{width}}{''.join(aligned)}")
    return with_pieces


TOKENIZER = (
    "byte: one id per byte, 260 in all. char: one id per character of the text. bpe:N: N ids learned from the training text. "
    "gpt2: GPT-2's 50,257 ids. Also a file (.model, tokenizer.json), a folder with one, or a name on the Hugging Face hub. "
    "Default: bpe:2048 for more than 512 KB of text, byte for less."
)
Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="Text: .txt, .md, .jsonl, .json, .csv, .tsv (also as .gz, .xz or .zst) or .parquet files, folders, or hf:ORG/NAME.",
    ),
]
MoreInputs = Annotated[list[Path] | None, Option("--input", metavar="PATH", help="Same as PATH; may be repeated.")]
TextField = Annotated[str, Option(metavar="NAME", help="Field or column that contains the text.")]
LARGE_VOCABULARY = 8192  # with this many ids or more, a step of the recipe demo takes seconds on a CPU: 3 s with 50,257 ids
GPT2_TOKENS = 100_000_000  # the recipe gpt2 (124M parameters) would memorise a smaller dataset


@commands.command("prepare")
def prepare_command(
    files: Inputs = None,
    more: MoreInputs = None,
    tokenizer: Annotated[str | None, Option(metavar="NAME", help=TOKENIZER)] = None,
    output: Annotated[Path | None, Option(metavar="DIR", help="Folder to write. Default: data/ plus the stem of PATH.")] = None,
    val_inputs: Annotated[list[Path] | None, Option("--val-input", metavar="PATH", help="Validation text (repeatable).")] = None,
    val_documents: Annotated[int | None, Option(metavar="N", help="Use the first N documents for validation.", min=0)] = None,
    val_fraction: Annotated[
        float | None,
        Option(
            metavar="PART",
            min=0,
            max=1,
            help="Fraction of the text to use for validation: the end of each document if there are at most 20 documents, "
            "otherwise whole documents, evenly spaced. Default: 0.1.",
        ),
    ] = None,
    buckets: Annotated[bool, Option("--buckets", help="Read PATH/train/NAME/ and PATH/val/NAME/ as the bucket NAME.")] = False,
    bos: Annotated[str | None, Option(metavar="TOKEN", help="BOS token of a tokenizer.json; an empty TOKEN means none.")] = None,
    text_field: TextField = "text",
    encoding: Annotated[str, Option(metavar="NAME", help="Encoding of the input files, such as latin-1.")] = "utf-8",
    skip_unreadable: Annotated[bool, Option("--skip-unreadable", help="Skip files that --encoding cannot decode.")] = False,
    shard_tokens: Annotated[int, Option(metavar="N", help="Tokens per output file.", min=1, max=2**31 - 1)] = SHARD_TOKENS,
    workers: Annotated[int | None, Option(metavar="N", help="Number of processes to use. Default: one per CPU.", min=1)] = None,
    force: Annotated[bool, Option("--force", help="Replace the output folder if it holds a dataset.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tokenize text into a folder that training reads. Repeat the command to continue after an interruption."""
    from ingot.data.prepare.pipeline import prepare
    from ingot.data.text.text_files import find_buckets, kind_of

    inputs = _inputs(more, files)
    if output is None:
        if len(inputs) > 1 or str(inputs[0]).startswith("hf:"):
            raise ConfigError("name the output folder with --output DIR")
        name = inputs[0].resolve().name
        output = Path("data") / (name.partition(".")[0] or name)
    folders = find_buckets(inputs[0], kind_of) if buckets else None
    if folders is not None and (len(inputs) > 1 or not folders):
        raise DataError(f"--buckets needs a single PATH with text files in train/NAME/ and val/NAME/; check {inputs[0]}")
    with progress_bar("preparing", in_bytes=True) as progress:
        summary = prepare(
            inputs,
            output,
            tokenizer,
            bos=bos,
            val_fraction=val_fraction,
            val_inputs=val_inputs or None,
            val_documents=val_documents,
            buckets=folders,
            text_field=text_field,
            encoding=encoding,
            skip_unreadable=skip_unreadable,
            shard_tokens=shard_tokens,
            overwrite=force,
            workers=workers,
            progress=progress,
        )
    if as_json:
        print_json(summary)
        return
    print(f"{summary.folder}: {summary.tokenizer} tokenizer, {summary.vocab_size:,} ids, {summary.seconds:.1f} s")
    if print_splits(summary.splits):
        print(
            "piece bytes (the size of the decoded tokens) differ from bytes (the size of the text): this tokenizer alters text, "
            "usually white space"
        )
    if summary.continued_documents:
        print(f"{summary.continued_documents:,} documents had already been tokenized by an interrupted run")
    if summary.empty_documents:
        print(f"{summary.empty_documents:,} empty documents were left out")
    print("\n".join(next_command(summary)))


def next_command(summary: Prepared) -> list[str]:
    """Return lines that show how to train on a prepared folder, with a recipe that suits its vocabulary and size."""
    large = summary.vocab_size >= LARGE_VOCABULARY
    recipe = "gpt2" if large and summary.splits["train"].tokens >= GPT2_TOKENS else "demo"
    no_val = "" if summary.splits["val"].tokens else " --evaluation.every 0 --evaluation.points 0 --evaluation.at_start false"
    lines = [f"train on it with: ingot train --recipe {recipe} --data.path {shlex.quote(str(summary.folder))}{no_val}"]
    if large:
        lines.append(
            f"this needs a GPU, because with {summary.vocab_size:,} ids a step takes seconds on a CPU; to train on a CPU, use "
            "--recipe demo and prepare the text with --tokenizer byte or a small tokenizer (ingot data train-tokenizer)"
        )
    return lines


@commands.command("train-tokenizer")
def train_tokenizer_command(
    *,
    files: Inputs = None,
    more: MoreInputs = None,
    kind: Annotated[
        Literal["sentencepiece", "bpe"],
        Option(help="sentencepiece: BPE of characters, with bytes for rare ones. bpe: BPE of bytes, as in GPT-2."),
    ],
    vocab_size: Annotated[int, Option(metavar="N", help="Size of the vocabulary, 257 to 65,536.", min=257, max=1 << 16)],
    output: Annotated[Path, Option(metavar="FILE", help="The file to write: .model for sentencepiece, .json for bpe.")],
    documents: Annotated[int | None, Option(metavar="N", help="Train on the first N documents only.", min=1, max=10**12)] = None,
    mark_capitals: Annotated[
        bool, Option("--mark-capitals", help="With --kind sentencepiece, encode a capital as a marker and its lower-case letter.")
    ] = False,
    text_field: TextField = "text",
    force: Annotated[bool, Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a tokenizer on text."""
    from ingot.data.tokenizers.learn_vocabulary import train_tokenizer

    check_target(output, False, force)
    inputs, started = _inputs(more, files), time.monotonic()
    with progress_bar("reading", in_bytes=True) as progress:
        tokenizer = train_tokenizer(
            inputs,
            output,
            kind,
            vocab_size,
            documents=documents,
            text_field=text_field,
            mark_capitals=mark_capitals,
            progress=progress,
        )
    seconds = time.monotonic() - started
    if as_json:
        facts = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint()}
        print_json({"file": str(output), **facts, "seconds": seconds})
        return
    print(f"{output}: {tokenizer.kind} tokenizer, {tokenizer.vocab_size:,} ids, {seconds:.1f} s")
    words = " ".join(shlex.quote(str(path)) for path in inputs)
    print(f"use it with: ingot data prepare {words} --tokenizer {shlex.quote(str(output))} --output DIR")


def _inputs(options: list[Path] | None, arguments: list[Path] | None) -> list[Path]:
    """Return the --input paths and then the positional paths, because shells expand `--input *.txt` to `--input a.txt b.txt`."""
    inputs = [*(options or ()), *(arguments or ())]
    if not inputs:
        raise ConfigError("no input is given; name a file or folder, for example: ingot data prepare book.txt")
    return inputs
