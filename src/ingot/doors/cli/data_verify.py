"""`ingot data verify`: everything that is wrong with a folder of tokens, one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.doors.cli.options import AsJson
from ingot.doors.display import progress_bar
from ingot.doors.output import print_json
from ingot.errors import DataError

if TYPE_CHECKING:
    from ingot.data.verify.audit import Report

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
