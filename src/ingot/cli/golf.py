"""`ingot golf pack`: build a submission to the golf challenge from finished runs."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ingot.cli.arguments import AsJson
from ingot.console.entry import warn
from ingot.console.output import print_columns, print_json

golf_commands = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build a submission to the golf challenge from runs of train_gpt.py, or of ingot train with the family frontier.",
    short_help="Build a submission from golf runs.",
)


@golf_commands.callback()
def _group() -> None:
    """Keep `pack` a subcommand; without this, typer would merge the only command into its group."""


@golf_commands.command("pack")
def golf_pack(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders (logs/RUN_ID), one for each seed.")],
    output: Annotated[Path | None, Option("--output", "-o", metavar="DIR", help="Folder. Default: records/DATE_NAME.")] = None,
    name: Annotated[str | None, Option(metavar="TEXT", help="Title of the submission. Default: the first RUN's name.")] = None,
    author: Annotated[str, Option(metavar="TEXT", help="Name of the submission's author.")] = "",
    github_id: Annotated[str, Option(metavar="NAME", help="GitHub account of the author.")] = "",
    blurb: Annotated[str, Option(metavar="TEXT", help="One or two sentences on what is new in the submission.")] = "",
    reference: Annotated[float, Option(metavar="BPB", help="Bits per byte to beat, used for the p-value.", min=0)] = 1.2244,
    force: Annotated[bool, Option("--force", help="Replace the files of an existing submission, but no others.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a records folder (README.md, submission.json, logs, code, artifacts) from finished runs with several seeds."""
    from ingot.compat.golf.pack import pack

    title = name or runs[0].resolve().name
    folder = output or Path("records") / f"{datetime.now(UTC):%Y-%m-%d}_{re.sub(r'[^A-Za-z0-9]+', '_', title).strip('_')}"
    submission = pack(runs, folder, name=title, author=author, github_id=github_id, blurb=blurb, reference=reference, force=force)
    if not author:
        warn("the submission names no author; give --author and --github-id")
    if as_json:
        print_json({"output": str(folder), **submission})
        return
    results = submission["seed_results"].items()
    rows = [(seed, f"{result['val_bpb']:.8f}", f"{result['bytes_total']:,}") for seed, result in results]
    print_columns([("seed", "val_bpb", "bytes"), *rows])
    spread = "" if submission["std"] is None else f" +- {submission['std']:.5f}, p {submission['p']:.2g} against {reference:g}"
    print(f"{folder}: val_bpb {submission['val_bpb']:.5f}{spread}")
