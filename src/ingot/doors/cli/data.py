"""`ingot data`: text into a folder that training reads, and a check that such a folder is whole."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.doors.cli.options import AsJson
from ingot.doors.cli.output import print_json
from ingot.doors.cli.progress import progress_bar

if TYPE_CHECKING:
    from ingot.data.prepare import SplitSummary


class TokenizerKind(StrEnum):
    """The tokenizers that can be made from nothing but text."""

    byte = "byte"
    char = "char"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    data.command("prepare")(prepare_command)
    data.command("verify")(verify_command)
    app.add_typer(data, name="data", help="Prepare text for training and check prepared data.")


def prepare_command(
    inputs: Annotated[
        list[Path], typer.Option("--input", metavar="PATH", help="A .txt or .jsonl file or a folder of them; may be given again.")
    ],
    tokenizer: Annotated[TokenizerKind, typer.Option(help="byte: any text, 260 ids. char: an id for each character there is.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make.")],
    val_inputs: Annotated[
        list[Path] | None, typer.Option("--val-input", metavar="PATH", help="Text that is validation; may be given again.")
    ] = None,
    val_documents: Annotated[int | None, typer.Option(metavar="N", help="The first N documents are validation.")] = None,
    val_fraction: Annotated[
        float,
        typer.Option(
            metavar="PART",
            help="Otherwise this part is: of up to 20 documents the end of each, of more whole ones, evenly spread.",
        ),
    ] = 0.1,
    text_field: Annotated[str, typer.Option(metavar="NAME", help="The field of a .jsonl line that holds the text.")] = "text",
    shard_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens in one file.")] = 100_000_000,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it is a dataset.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn text into a folder of tokens that training reads."""
    from ingot.data.prepare import prepare

    with progress_bar("preparing", in_bytes=True) as progress:
        summary = prepare(
            inputs,
            output,
            tokenizer.value,
            val_fraction=val_fraction,
            val_inputs=val_inputs or None,
            val_documents=val_documents,
            text_field=text_field,
            shard_tokens=shard_tokens,
            overwrite=force,
            progress=progress,
        )
    if as_json:
        print_json(summary.as_dict())
        return
    print(f"{output}: {summary.tokenizer} tokenizer, {summary.vocab_size} ids, {summary.seconds:.1f} s")
    _print_splits(summary.splits)
    if summary.empty_documents:
        print(f"{summary.empty_documents:,} empty documents were left out")
    print(f"train on it with: ingot train --recipe demo --data.path {shlex.quote(str(output))}")


def verify_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `ingot data prepare` made.")],
    as_json: AsJson = False,
) -> None:
    """Read every byte of a prepared folder and say whether it is whole."""
    from dataclasses import asdict

    from ingot.data.dataset import Dataset
    from ingot.data.prepare import summarise

    dataset = Dataset.open(folder)
    with progress_bar("verifying", in_bytes=True) as progress:
        dataset.verify(progress)
    splits = summarise(dataset.manifest)
    if as_json:
        result = {
            "folder": str(folder),
            "ok": True,
            "tokenizer": dataset.tokenizer.kind,
            "vocab_size": dataset.tokenizer.vocab_size,
        }
        counts = {name: asdict(split) for name, split in splits.items()}
        print_json({**result, "splits": counts, "fingerprint": dataset.fingerprint})
        return
    print(f"{folder}: whole; {dataset.tokenizer.kind} tokenizer, {dataset.tokenizer.vocab_size} ids")
    _print_splits(splits)


def _print_splits(splits: Mapping[str, SplitSummary]) -> None:
    print(f"{'split':<6}{'documents':>12}{'tokens':>18}{'bytes':>18}{'bytes/token':>14}")
    for name, split in splits.items():
        ratio = "-" if split.bytes_per_token is None else f"{split.bytes_per_token:.4f}"
        print(f"{name:<6}{split.documents:>12,}{split.tokens:>18,}{split.bytes:>18,}{ratio:>14}")
