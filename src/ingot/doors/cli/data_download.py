"""`ingot data download`: published shards from the Hugging Face hub, with a bar on a terminal and lines anywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingot.doors.cli.options import AsJson
from ingot.doors.golf.data import PREFIX, PREFIX_VARIABLE, REPO, REPO_VARIABLE


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
    from ingot.doors.golf.data.scripts import download_and_print

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
