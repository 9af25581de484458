"""`ingot data download`: published shards from the Hugging Face hub, with a bar on a terminal and lines anywhere else."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.doors.cli.options import AsJson
from ingot.doors.output import print_json
from ingot.doors.status_line import StatusLine, Work, fit, is_terminal

if TYPE_CHECKING:
    from ingot.doors.golf.data.download import Downloaded, Progress

REPO_VARIABLE, PREFIX_VARIABLE = "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
QUIET_SECONDS = 30.0  # without a terminal, a slow file is heard of this often


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
    ] = "willdepueoai/parameter-golf",
    prefix: Annotated[
        str, typer.Option(metavar="DIR", envvar=PREFIX_VARIABLE, help="The folder in the repository that has manifest.json.")
    ] = "datasets",
    revision: Annotated[str | None, typer.Option(metavar="REV", help="A branch, tag or commit of the repository.")] = None,
    with_docs: Annotated[bool, typer.Option("--with-docs", help="Fetch the text the shards were made of too.")] = False,
    skip_manifest: Annotated[bool, typer.Option("--skip-manifest", help="Use the manifest.json that is in the folder.")] = False,
    workers: Annotated[int, typer.Option(metavar="N", help="Files fetched at once.")] = 4,
    as_json: AsJson = False,
) -> None:
    """Download published shards and their tokenizer: all of validation, and as many train shards as asked for."""
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


def download_and_print(output: Path, as_json: bool, **request: Any) -> None:
    """Download, showing how far it is on stderr and what it came to on stdout."""
    from ingot.doors.golf.data.download import download

    with _display() as (notify, progress):
        result = download(output, notify=notify, progress=progress, **request)
    if as_json:
        print_json(result.as_dict())
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


@contextmanager
def _display() -> Iterator[tuple[Callable[[str], None], Callable[[Progress], None]]]:
    """Where lines and progress go: a bar with lines above it, or lines alone."""
    if not is_terminal(sys.stderr):
        yield _say, _Lines()
        return
    work = Work("asking the hub", "bytes")
    with StatusLine(lambda width: fit(work.parts(width), width)) as line:

        def show(progress: Progress) -> None:
            often = work.total > 0 and progress.fetched is None
            work.what = f"{progress.files} of {progress.of_files} files"
            work.update(progress.bytes, progress.of_bytes)
            line.draw(often)

        yield lambda text: line.above(f"{text}\n"), show


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
        _say(f"{progress.fetched or 'downloading'} ({amount})")


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # whoever read the lines may have left
        print(line, file=sys.stderr, flush=True)
