"""`gpt-simple generate` and `gpt-simple batch-generate`: a line of JSON for each text, and nothing else on stdout."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from ingot.backends.sampling import GenerationOptions
from ingot.compat.gpt_simple.log import Log
from ingot.console.completions import generate_records, generate_requests, model_path, prompts_of
from ingot.errors import ConfigError


def generate(options: Namespace, log: Log) -> int:
    """Continue one prompt or those of a file."""
    asked = _asked(options)
    if problems := asked.problems():
        raise ConfigError("; ".join(problems))
    given = prompts_of(options.prompt, options.prompts_file)
    path = model_path(options.checkpoint, options.output_dir)
    assert path is not None  # the parser insists on it
    model = _open(Path(path), options.device, options.tokenizer, options.dtype)
    generate_records(model, given, asked, options.output, options.stream, log.info)
    return 0


def batch_generate(options: Namespace, log: Log) -> int:
    """Answer a file of requests, each of which may name its own model."""
    generate_requests(
        options.input,
        options.output,
        model_path(options.checkpoint, options.output_dir),
        options.dtype,
        options.tokenizer,
        _asked(options),
        open_path=lambda path, tokenizer, dtype: _open(path, options.device, tokenizer, dtype),
        dry_run=options.dry_run,
        as_json=options.json,
        say=log.warn,
    )
    return 0


def _asked(options: Namespace) -> GenerationOptions:
    return GenerationOptions(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        greedy=options.greedy,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        return_full_text=options.return_full_text,
        start_mark=False,
    )


def _open(path: Path, device: str, tokenizer: str | None, dtype: str) -> Any:
    from ingot.api import load

    return load(path, device=device, tokenizer=tokenizer, dtype=dtype)
