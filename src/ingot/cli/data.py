"""`ingot data`: text into a folder that training reads, and tokenizers of one's own; its other verbs are data_*.py."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.compat.golf.data import PREFIX, PREFIX_VARIABLE, REPO, REPO_VARIABLE
from ingot.console.output import print_columns, print_json
from ingot.console.progress import progress_bar
from ingot.data import SHARD_TOKENS
from ingot.errors import ConfigError, DataError, shown

if TYPE_CHECKING:
    from ingot.data.prepare.pipeline import Summary
    from ingot.data.text.text_files import Buckets
    from ingot.data.verify.audit import Report
    from ingot.data.verify.inspect import Lengths, SplitInspection, Vocabulary


# `ingot data convert`: token data of other programs into ours, and ours into theirs.

TokenFormat = Literal["ingot", "nanogpt", "gpt-simple", "shards"]


def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A folder or file of tokens: ours or another program's.")],
    to: Annotated[
        TokenFormat,
        typer.Option(
            help="ingot: what training reads. nanogpt: train.bin, val.bin, meta.pkl. gpt-simple: .bin and .idx in buckets. "
            "shards: files with a header, for golf, modded-nanogpt and llm.c."
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the tokens were made with, where the source does not say: gpt2, a file."),
    ] = None,
    from_format: Annotated[
        TokenFormat | None, typer.Option("--from", help="What the source is, where it cannot be told.")
    ] = None,
    mark: Annotated[
        int | None, typer.Option(metavar="ID", help="The id between documents, where the tokenizer does not say.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Shards: what files begin with (fineweb). gpt-simple: the bucket (main).")
    ] = None,
    shard_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens in one file; nanogpt has one file.")] = SHARD_TOKENS,
    max_length: Annotated[int, typer.Option(metavar="N", help="gpt-simple: tokens in a window.")] = 3072,
    overlap: Annotated[int, typer.Option(metavar="N", help="gpt-simple: tokens that a window repeats.")] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it is token data.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn tokens of one format into another."""
    from ingot.data.formats.convert import Layout, convert
    from ingot.data.formats.detect import open_source

    opened = open_source(source, from_format)
    print(f"{source}: {opened.format}: {opened.about}", file=sys.stderr)
    with progress_bar("converting", in_bytes=True) as progress:
        summary = convert(
            opened,
            output,
            to,
            tokenizer=tokenizer,
            mark=mark,
            layout=Layout(name, shard_tokens, max_length, overlap),
            overwrite=force,
            progress=progress,
        )
    if as_json:
        print_json(summary)
        return
    kind = f", {summary.tokenizer} tokenizer" if summary.tokenizer else ""
    print(f"{output}: {summary.format}{kind}, {summary.seconds:.1f} s")
    print(f"{'split':<6}{'documents':>12}{'tokens':>18}{'bytes':>18}")
    for split, counts in summary.splits.items():
        size = "-" if counts.bytes is None else f"{counts.bytes:,}"
        print(f"{split:<6}{counts.documents:>12,}{counts.tokens:>18,}{size:>18}")
    if summary.format == "ingot":
        print(f"train on it with: ingot train --recipe demo --data.path {shlex.quote(str(output))}")


# `ingot data download`: published shards from the Hugging Face hub, with a bar on a terminal and lines anywhere else.


def download_command(
    variant: Annotated[
        str, typer.Option(metavar="NAME", help="byte260, or sp and the size of a vocabulary; the repository must have it.")
    ] = "sp1024",
    train_shards: Annotated[
        int | None, typer.Option(metavar="N", help="The first N train shards; without it 80, or all if there are fewer.")
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder to fill: datasets/, tokenizers/, manifest.json.")
    ] = Path("data"),
    repo: Annotated[
        str, typer.Option(metavar="ID", envvar=REPO_VARIABLE, help="The dataset repository on the Hugging Face hub.")
    ] = REPO,
    prefix: Annotated[
        str, typer.Option(metavar="DIR", envvar=PREFIX_VARIABLE, help="The folder in the repository that has manifest.json.")
    ] = PREFIX,
    revision: Annotated[str | None, typer.Option(metavar="REV", help="A branch, tag or commit of the repository.")] = None,
    with_docs: Annotated[bool, typer.Option("--with-docs", help="Fetch the text the shards were made of too.")] = False,
    skip_manifest: Annotated[bool, typer.Option("--skip-manifest", help="Use the manifest.json that is in the folder.")] = False,
    workers: Annotated[int, typer.Option(metavar="N", help="Files fetched at once.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Download published shards and their tokenizer: all of validation, and as many train shards as asked for."""
    from ingot.compat.golf.data.scripts import download_and_print

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
        workers=workers,
    )


# `ingot data inspect`: what is in a folder of tokens, in numbers, a histogram and a few lines of text.

BAR = 40  # characters of the longest


def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder, or a folder of shards.")],
    split: Annotated[Literal["train", "val"] | None, typer.Option(help="One split alone.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="What made the tokens of bare shards.")] = None,
    top: Annotated[int, typer.Option(metavar="N", min=0, help="The most frequent ids to list.")] = 10,
    documents: Annotated[int, typer.Option(metavar="N", help="The documents to show the beginning of.")] = 5,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the lengths of documents, as .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a folder of tokens holds."""
    from ingot.data.verify.inspect import PLOT, inspect
    from ingot.data.verify.inspect import plot as draw
    from ingot.runtime.files import check_picture

    if plot:
        check_picture(plot, PLOT)
    with progress_bar("reading", in_bytes=True) as progress:
        found = inspect(folder, split, tokenizer=tokenizer, top=top, beginnings=documents, progress=progress)
    if plot:
        draw(found, plot)
    if as_json:
        print_json(found)
        return
    print(f"{folder}: {found.tokenizer} tokenizer")
    for name, one in found.splits.items():
        print()
        _print_split(name, one)


def _print_split(name: str, split: SplitInspection) -> None:
    rows = [(name, ""), ("documents", f"{split.documents:,}"), ("tokens", f"{split.tokens:,}")]
    if split.bytes is not None:
        rows.append(("bytes of text", f"{split.bytes:,}"))
    if split.bytes != split.piece_bytes:
        rows.append(("piece bytes", f"{split.piece_bytes:,}"))
    if split.bytes_per_token is not None:
        rows.append(("bytes per token", f"{split.bytes_per_token:.4f}"))
    vocabulary = split.vocabulary
    rows.append(("vocabulary", f"{vocabulary.size:,} ids, {vocabulary.used:,} used, {vocabulary.never_used:,} never"))
    print_columns(rows)
    _print_ids(vocabulary)
    if split.lengths:
        _print_lengths(split.lengths)
    for one in split.beginnings:
        print(f"document {one.document:,}, {one.tokens:,} tokens: {shown(one.text, kept='')}")


def _print_ids(vocabulary: Vocabulary) -> None:
    print("most frequent ids")
    for use in vocabulary.most_frequent:
        text = "(special)" if use.text is None else f"'{shown(use.text, kept='')}'"
        print(f"{use.id:>8}  {text:<16}{use.count:>16,}{use.share:>8.2%}")


def _print_lengths(lengths: Lengths) -> None:
    print(
        f"tokens in a document: {lengths.shortest:,} to {lengths.longest:,}, "
        f"median {lengths.median:,.0f}, mean {lengths.mean:,.1f}"
    )
    most = max(bin.documents for bin in lengths.histogram)
    for bin in lengths.histogram:
        bar = "#" * -(-BAR * bin.documents // most)
        print(f"{bin.low:>12,} to {bin.high:<12,}{bin.documents:>12,} {bar}".rstrip())


# `ingot data verify`: everything that is wrong with a folder of tokens, one line each.

LISTED = 20  # findings of one kind that are shown to people


def verify_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder, or a folder of shards.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="TRAIN", help="Look for validation documents in the train split of this folder too."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What made the tokens: needed for bare shards, compared for a prepared folder."),
    ] = None,
    ngram_words: Annotated[int, typer.Option(metavar="N", help="Words in a row that are looked for in train.")] = 13,
    overlap_share: Annotated[
        float, typer.Option(metavar="PART", help="A document with a larger part of its runs of words in train is a finding.")
    ] = 0.5,
    byte_gap: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="How far the bytes of tokens and of the text may be apart. Default: 0.005, or 0.05 where the tokenizer's own "
            "preparation counted the same.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a folder of tokens and list what is wrong; the exit code is 3 if anything is."""
    from ingot.data.verify.audit import Limits, audit

    limits = Limits(byte_gap=byte_gap, ngram_words=ngram_words, overlap_share=overlap_share)
    with progress_bar("verifying", in_bytes=True) as progress:
        report = audit(folder, tokenizer=tokenizer, against=against, limits=limits, progress=progress)
    if as_json:
        print_json({**vars(report), "ok": report.ok})
    else:
        _print(report, ngram_words)
    if not report.ok:
        raise typer.Exit(DataError.exit_code)


def _print(report: Report, ngram_words: int) -> None:
    number = len(report.findings)
    state = "whole" if report.ok else f"{number:,} finding{'s' * (number > 1)}"
    kind = f"; {report.tokenizer} tokenizer, {report.vocab_size:,} ids" if report.tokenizer else ""
    print(f"{report.folder}: {state}{kind}")
    print_splits(report.splits)
    for one in report.comparisons:
        print(
            f"of {one.documents:,} validation documents {one.copied:,} are copied from the train split of {one.against} and "
            f"{one.similar:,} are much like one there; {one.share:.2%} of the runs of {ngram_words} words are in it"
        )
    shown: Counter[str] = Counter()
    for finding in report.findings:
        shown[finding.code] += 1
        if shown[finding.code] <= LISTED:
            print(finding.line)
    for code, count in shown.items():
        if count > LISTED:
            print(f"{code}: {count - LISTED:,} more; --json lists them all")


def print_splits(splits: Mapping[str, Any]) -> bool:
    """Print the counts of every split; piece bytes only where they are not those of the text, and whether that is so."""
    folded = any(split.piece_bytes not in (None, split.bytes) for split in splits.values())
    rows = [["split", "documents", "tokens", "bytes", "bytes/token", "piece bytes"]]
    for name, split in splits.items():
        ratio = "-" if split.bytes_per_token is None else f"{split.bytes_per_token:.4f}"
        counts = [_number(value) for value in (split.documents, split.tokens, split.bytes)]
        rows.append([name, *counts, ratio, _number(split.piece_bytes)])
    width = max(6, *(len(row[0]) + 1 for row in rows))  # of a name: a bucket's is longer than a split's
    for name, documents, tokens, size, ratio, pieces in rows:
        print(f"{name:<{width}}{documents:>12}{tokens:>18}{size:>18}{ratio:>14}{pieces if folded else '':>18}".rstrip())
    return folded


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


TOKENIZER = (
    "byte: any text, 260 ids. char: an id for each character there is. bpe:N: N ids learned from the training text. gpt2: "
    "GPT-2's 50,257. Or a file (.model, tokenizer.json), a folder with one, or a name on the Hugging Face hub."
)
Inputs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="PATH",
        show_default=False,
        help="Files (.txt, .md, .jsonl, .json, .csv, .tsv, also packed with .gz, .xz or .zst; .parquet), folders of them, or "
        "hf:ORG/NAME.",
    ),
]
MoreInputs = Annotated[
    list[Path] | None, typer.Option("--input", metavar="PATH", help="The same as an option; may be given again.")
]
Engine = Annotated[Literal["local", "ray"], typer.Option(help="local: processes of this machine. ray: a Ray cluster.")]
RayAddress = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="The cluster; auto: the one that runs here; not given: a new one, here.")
]
TextField = Annotated[str, typer.Option(metavar="NAME", help="The field or column that holds the text.")]
LARGE_VOCABULARY = 8192  # ids from which a step of the demo takes seconds on a CPU: with 50,257, 3 s on two cores
GPT2_TOKENS = 100_000_000  # enough text for the 124M parameters of the recipe gpt2 to learn more than to recite it


def prepare_command(
    files: Inputs = None,
    more: MoreInputs = None,
    tokenizer: Annotated[str, typer.Option(metavar="NAME", help=TOKENIZER)] = "byte",
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to make. Default: data/NAME.")] = None,
    val_inputs: Annotated[
        list[Path] | None, typer.Option("--val-input", metavar="PATH", help="Text that is validation; may be given again.")
    ] = None,
    val_documents: Annotated[int | None, typer.Option(metavar="N", help="The first N documents are validation.")] = None,
    val_fraction: Annotated[
        float | None,
        typer.Option(
            metavar="PART",
            help="This part is (0.1 unless said): of up to 20 documents the end of each, of more whole ones, evenly spread.",
        ),
    ] = None,
    buckets: Annotated[
        bool, typer.Option("--buckets", help="The input is a folder with train/NAME/ and val/NAME/, which stay apart as buckets.")
    ] = False,
    bos: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="What starts a document, where a tokenizer.json does not say so; empty: nothing."),
    ] = None,
    text_field: TextField = "text",
    shard_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens in one file.")] = SHARD_TOKENS,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that encode, by default one for each processor; no output differs.")
    ] = None,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it is a dataset.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn text into a folder of tokens that training reads. If it is killed, the same command continues."""
    from ingot.data.prepare.pipeline import prepare

    inputs = _inputs(more, files)
    with progress_bar("preparing", in_bytes=True) as progress:
        summary = prepare(
            inputs,
            output or _named_after(inputs),
            tokenizer,
            bos=bos,
            val_fraction=val_fraction,
            val_inputs=val_inputs or None,
            val_documents=val_documents,
            buckets=_buckets(inputs) if buckets else None,
            text_field=text_field,
            shard_tokens=shard_tokens,
            overwrite=force,
            workers=workers,
            engine=engine,
            ray_address=ray_address,
            progress=progress,
        )
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary)


def _buckets(inputs: list[Path]) -> Buckets:
    from ingot.data.text.text_files import find_buckets, is_text

    if len(inputs) != 1:
        raise ConfigError("--buckets takes one PATH, a folder with train/NAME/ and val/NAME/")
    if not (found := find_buckets(inputs[0], is_text)):
        raise DataError(f"{inputs[0]} holds no text files in train/NAME/ and val/NAME/, which --buckets asks for")
    return found


def _print_summary(summary: Summary) -> None:
    print(f"{summary.folder}: {summary.tokenizer} tokenizer, {summary.vocab_size:,} ids, {summary.seconds:.1f} s")
    if print_splits(summary.splits):
        print(
            "bytes are those of the text, piece bytes those its tokens stand for: this tokenizer changes text, white space often"
        )
    if summary.continued_documents:
        print(f"{summary.continued_documents:,} documents were there already, from a run that had been stopped")
    if summary.empty_documents:
        print(f"{summary.empty_documents:,} empty documents were left out")
    print("\n".join(next_command(summary)))


def next_command(summary: Summary) -> list[str]:
    """How to train on a prepared folder, by a recipe that fits its tokenizer, and what to know before."""
    large = summary.vocab_size >= LARGE_VOCABULARY
    recipe = "gpt2" if large and summary.splits["train"].tokens >= GPT2_TOKENS else "demo"
    blind = "" if summary.splits["val"].tokens else " --evaluation.every 0 --evaluation.at_start false"
    lines = [f"train on it with: ingot train --recipe {recipe} --data.path {shlex.quote(str(summary.folder))}{blind}"]
    if large:
        lines.append(
            f"on a GPU, that is: with {summary.vocab_size:,} ids a step takes seconds on a CPU; there use --recipe demo on text "
            "prepared with --tokenizer byte, or with a small one of your own (ingot data train-tokenizer)"
        )
    return lines


def train_tokenizer_command(
    *,
    files: Inputs = None,
    more: MoreInputs = None,
    kind: Annotated[
        Literal["sentencepiece", "bpe"],
        typer.Option(help="sentencepiece: BPE that folds white space, as golf has it. bpe: bytes, as GPT-2 has it."),
    ],
    vocab_size: Annotated[int, typer.Option(metavar="N", help="Ids in all, 257 to 65,536.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The file to write: .model for sentencepiece, .json for bpe.")],
    documents: Annotated[int | None, typer.Option(metavar="N", help="Learn from the first N documents only.")] = None,
    mark_capitals: Annotated[
        bool,
        typer.Option("--mark-capitals", help="sentencepiece: learn small letters alone, with marks in front of capitals."),
    ] = False,
    text_field: TextField = "text",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Learn a tokenizer from text."""
    import time

    from ingot.data.tokenizers.learn_vocabulary import train_tokenizer

    inputs = _inputs(more, files)
    started = time.monotonic()
    with progress_bar("reading", in_bytes=True) as progress:
        tokenizer = train_tokenizer(
            inputs,
            output,
            kind,
            vocab_size,
            documents=documents,
            text_field=text_field,
            mark_capitals=mark_capitals,
            overwrite=force,
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


def _inputs(options: list[Path] | None, words: list[Path] | None) -> list[Path]:
    """The inputs of a command: those of --input, then the bare words, which a shell also makes of --input *.jsonl."""
    found = [*(options or ()), *(words or ())]
    if not found:
        raise ConfigError("there is nothing to read; name a file or folder, such as: ingot data prepare book.txt")
    return found


def _named_after(inputs: list[Path]) -> Path:
    """The folder for what is prepared from one file or folder, where none is named."""
    if len(inputs) > 1 or str(inputs[0]).startswith("hf:"):
        raise ConfigError("say where the tokens go with --output DIR")
    name = inputs[0].resolve().name
    return Path("data") / (name.partition(".")[0] or name)


verbs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
verbs.command("prepare")(prepare_command)
verbs.command("verify")(verify_command)
verbs.command("inspect")(inspect_command)
verbs.command("train-tokenizer")(train_tokenizer_command)
verbs.command("convert")(convert_command)
verbs.command("download")(download_command)
app.add_typer(verbs, name="data", help="Download, prepare, check and convert data for training; train a tokenizer.")
