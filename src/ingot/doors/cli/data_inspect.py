"""`ingot data inspect`: what is in a folder of tokens, in numbers, a histogram and a few lines of text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ingot.doors.cli.options import AsJson
from ingot.doors.display import progress_bar
from ingot.doors.output import print_columns, print_json
from ingot.errors import shown

if TYPE_CHECKING:
    from ingot.data.verify.inspect import Lengths, SplitInspection, Vocabulary

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
    from ingot.runtime.pictures import check_picture

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
