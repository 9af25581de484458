"""`ingot golf`: what belongs to the golf challenge and is not training."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_columns, print_json

Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, logs/RUN_ID, or logs, logs/RUN_ID.txt.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="The folder to make. Default: records/DATE_NAME.")
]
Name = Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the submission. Default: the first RUN's.")]
Author = Annotated[str, typer.Option(metavar="TEXT", help="Who submits it.")]
GithubId = Annotated[str, typer.Option(metavar="NAME", help="Account that submits it.")]
Blurb = Annotated[str, typer.Option(metavar="TEXT", help="What is new in it, in a sentence or two.")]
Reference = Annotated[float, typer.Option(metavar="BPB", help="Score to be better than; p is counted against it.", min=0)]
Force = Annotated[bool, typer.Option("--force", help="Replace the files of a submission that is there; other files stay.")]


verbs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
verbs.callback(help="Make a submission of golf runs; the runs themselves are made by train_gpt.py.")(lambda: None)
app.add_typer(verbs, name="golf", help="Make a submission of golf runs.")


@verbs.command("pack")
def pack_command(
    runs: Runs,
    output: Output = None,
    name: Name = None,
    author: Author = "",
    github_id: GithubId = "",
    blurb: Blurb = "",
    reference: Reference = 1.2244,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a records folder of finished runs that differ by their seed: README.md, submission.json, logs, code, artifacts."""
    from ingot.compat.golf.pack import About, pack

    title = name or re.sub(r"\.txt$", "", runs[0].resolve().name)
    folder = output or Path("records") / f"{datetime.now(UTC):%Y-%m-%d}_{re.sub(r'[^A-Za-z0-9]+', '_', title).strip('_')}"
    found = pack(runs, folder, About(title, author, github_id, blurb, reference), force)
    if not author:
        print("the submission names no author; give --author and --github-id", file=sys.stderr)
    if as_json:
        print_json({"output": str(folder), **found})
        return
    rows = [(str(seed), f"{one['val_bpb']:.8f}", f"{one['bytes_total']:,}") for seed, one in found["seed_results"].items()]
    print_columns([("seed", "val_bpb", "bytes"), *rows])
    spread = "" if found["std"] is None else f" +- {found['std']:.5f}, p {found['p']:.2g} against {reference:g}"
    print(f"{folder}: val_bpb {found['val_bpb']:.5f}{spread}")
