"""Completions as JSON lines, on stdout or in a file, with everything else on stderr.

`ingot generate` and `gpt-simple generate` use one model for all prompts; each `gpt-simple batch-generate` request names a model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.backends.sampling import GenerationOptions
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import is_utf8, readable, write_atomically, writing_output

Say = Callable[[str], None]


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """Return the given prompt, or read it from stdin (`-`) or a file and drop its final line break."""
    if prompt is not None and file is not None:
        raise ConfigError("give either --prompt TEXT or --prompt-file FILE, not both")
    if file is None and prompt != "-":
        if prompt is not None and not is_utf8(prompt):
            raise DataError("--prompt is not valid UTF-8; encode it as UTF-8")
        return prompt
    if file is None and sys.stdin is None:
        raise ConfigError("--prompt - reads stdin, which is closed; give the text itself")
    with readable(file or Path("stdin"), DataError):
        text = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8-sig")  # binary mode keeps \r\n
    return text.removesuffix("\n").removesuffix("\r")


def generate_records(
    model: Any, records: Sequence[Mapping[str, Any]], options: GenerationOptions, output: Path | None, stream: bool, say: Say
) -> None:
    """Generate completions and write a JSON line for each; with `stream`, also print a line for every chunk of text."""
    prompts = [str(record["prompt"]) for record in records]
    if stream:
        completions = [prompt if options.return_full_text else "" for prompt in prompts]
        for number, piece in model.stream_batch(prompts, options):
            completions[number] += piece
            print(json.dumps({"index": number, "piece": piece}, ensure_ascii=False), flush=True)
    else:
        completions = model.generate_batch(prompts, options)
    answers = [
        {**record, "completion": text, "generation": options.alone(number).record()}
        for number, (record, text) in enumerate(zip(records, completions, strict=True))
    ]
    write_lines(answers, output, say)


def write_lines(records: Sequence[Mapping[str, Any]], output: Path | None, say: Say) -> None:
    """Write records as JSON lines to stdout or, atomically, to a file."""
    lines = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
    if output is None:
        print(lines, end="", flush=True)
        return
    with writing_output(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        # A lone surrogate, which a JSON request can contain as \ud800, is written as \ud800 again.
        write_atomically(output.resolve(), lines.encode(errors="backslashreplace"))
    say(f"{output}: {len(records)} texts")
