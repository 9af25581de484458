"""`ingot data`: text into a folder that training reads, and tokenizers of one's own; its other verbs are data_*.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ingot.data import SHARD_TOKENS
from ingot.doors.cli.data_convert import convert_command
from ingot.doors.cli.data_download import download_command
from ingot.doors.cli.data_inspect import inspect_command
from ingot.doors.cli.data_verify import print_splits, verify_command
from ingot.doors.cli.options import AsJson
from ingot.doors.cli.verbs import app
from ingot.doors.display import progress_bar
from ingot.doors.output import print_json
from ingot.errors import ConfigError, DataError

if TYPE_CHECKING:
    from ingot.data.prepare.pipeline import Summary
    from ingot.data.text.buckets import Buckets


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
    from ingot.data.text.buckets import find_buckets
    from ingot.data.text.files import is_text

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

    from ingot.data.tokenizers.training import train_tokenizer

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
