"""`ingot tokenize`: JSON lines to gpt-simple's .bin and .idx, a pair for every file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_columns, print_json
from ingot.console.progress import progress_bar


@app.command("tokenize")
def tokenize(
    input_dir: Annotated[
        Path, typer.Option("--input-dir", "--input_dir", metavar="DIR", help="Folder of .jsonl or .jsonl.gz files.")
    ],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "--output_dir", metavar="DIR", help="Where pairs of .bin and .idx go.")
    ],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "--tokenizer_path", metavar="NAME", help="gpt2, byte, a file, a folder or a hub name.")
    ] = "gpt2",
    max_length: Annotated[
        int, typer.Option("--max-length", "--max_length", metavar="N", help="Tokens in a window, its end mark included.")
    ] = 3072,
    overlap: Annotated[
        int, typer.Option("--overlap", "--overlap_size", metavar="N", help="Tokens that a window repeats of the one before.")
    ] = 256,
    by_chance: Annotated[
        bool, typer.Option("--probabilistic-overlap", "--probabilistic_overlap", help="Only some documents' windows overlap.")
    ] = False,
    probability: Annotated[
        float, typer.Option("--overlap-probability", "--overlap_probability", metavar="P", help="How many of them.")
    ] = 0.7,
    least_characters: Annotated[
        int, typer.Option("--min-text-length", "--min_text_length", metavar="N", help="Leave out texts with fewer characters.")
    ] = 200,
    workers: Annotated[int, typer.Option("--workers", "--num_workers", metavar="N", help="Files at once.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Turn JSON lines into gpt-simple's files of tokens; buckets and splits are folders: one call for each train/BUCKET."""
    from ingot.data.formats.tokenize_jsonl import Windows, refuse_failed
    from ingot.data.formats.tokenize_jsonl import tokenize as make

    windows = Windows(max_length, overlap, probability if by_chance else 1.0, least_characters)
    with progress_bar("tokenizing", unit="files") as progress:
        found = make(input_dir, output_dir, tokenizer, windows, workers, progress)
    if as_json:
        print_json(found)
    else:
        rows: list[tuple[str, ...]] = [("file", "documents", "windows", "tokens", "short", "bad lines", "empty")]
        for one in found:
            counts = (one.documents, one.windows, one.tokens, one.short, one.bad_lines, one.empty)
            rows.append((one.file, *(f"{count:,}" for count in counts)))
        print_columns(rows)
    refuse_failed(found)
