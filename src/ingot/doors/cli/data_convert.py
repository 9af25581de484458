"""`ingot data convert`: token data of other programs into ours, and ours into theirs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ingot.data import SHARD_TOKENS
from ingot.doors.cli.options import AsJson
from ingot.doors.display import progress_bar
from ingot.doors.output import print_json

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
    from ingot.data.formats.open import open_source

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
