"""`ingot batch-generate`: texts by a file of requests, each of which may name its model and how its text is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.backends.sampling import DTYPES, GenerationOptions
from ingot.cli.generate import (
    DeviceName,
    Dtype,
    FullText,
    Greedy,
    Output,
    OutputDir,
    Penalty,
    Seed,
    Temperature,
    TokenizerName,
    TopK,
    TopP,
    check_options,
    open_any,
)
from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.entry import warn
from ingot.errors import ConfigError


@app.command("batch-generate")
def batch_generate(
    requests: Annotated[
        Path, typer.Option("--input", metavar="FILE", help="Lines of JSON: a prompt and, where wanted, model and generation.")
    ],
    output: Output = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="DIR", help="The model of lines that name none.")
    ] = None,
    output_dir: OutputDir = None,
    tokenizer: TokenizerName = None,
    device: DeviceName = "auto",
    dtype: Dtype = None,
    tokens: Annotated[int, typer.Option("--max-new-tokens", metavar="N", help="Tokens to write.")] = 100,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 0.95,
    greedy: Greedy = False,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    return_full_text: FullText = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be done, and open nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the texts that a file asks for: each model is opened once, and the answers keep the order of the file."""
    from ingot.console.completions import DTYPE, generate_requests, model_path

    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype} is not known; there are {', '.join(DTYPES)}")
    options = GenerationOptions(
        tokens, temperature, top_k, top_p, greedy, repetition_penalty, seed, return_full_text=return_full_text, start_mark=False
    )
    check_options(options)

    def open_path(path: Path, tokenizer: str | None, dtype: str) -> Any:
        return open_any(path, device, tokenizer, dtype)

    generate_requests(
        requests,
        output,
        model_path(checkpoint, output_dir),
        dtype or DTYPE,
        tokenizer,
        options,
        open_path=open_path,
        dry_run=dry_run,
        as_json=as_json,
        say=warn,
    )
