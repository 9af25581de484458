"""Completions as JSON lines, on stdout or in a file, with everything else on stderr.

`ingot generate` and `gpt-simple generate` give all prompts to one model; in `gpt-simple batch-generate` every line names its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.backends.sampling import GenerationOptions
from ingot.errors import ConfigError, DataError
from ingot.inference.prompt_files import Problems, expand, read_prompts, read_requests
from ingot.runtime.files import is_utf8, readable, write_atomically, writing_output

Say = Callable[[str], None]


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """Return the prompt as given, from stdin for `-`, or from a file; the final line end is dropped."""
    if prompt is not None and file is not None:
        raise ConfigError("give --prompt TEXT or --prompt-file FILE; one of them")
    if file is None and prompt != "-":
        if prompt is not None and not is_utf8(prompt):
            raise DataError("--prompt is not UTF-8 text; give it as UTF-8")
        return prompt
    if file is None and sys.stdin is None:
        raise ConfigError("--prompt - reads stdin, which is closed; give the text itself")
    with readable(file or Path("stdin"), DataError):
        text = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8-sig")  # line ends stay as they are
    return text.removesuffix("\n").removesuffix("\r")


def prompts_of(prompt: str | None, prompts_file: Path | None) -> list[dict[str, Any]]:
    """Return the one prompt of a command, or those of a file."""
    if (prompt is None) == (prompts_file is None):
        raise ConfigError("give --prompt TEXT or --prompts-file FILE; one of them")
    return read_prompts(prompts_file) if prompts_file is not None else [{"prompt": prompt}]


def generate_records(
    model: Any, records: Sequence[Mapping[str, Any]], options: GenerationOptions, output: Path | None, stream: bool, say: Say
) -> None:
    """Continue prompts with a model and write a line for each; with `stream`, first print a line for every piece of text."""
    prompts = [str(record["prompt"]) for record in records]
    if stream:
        completions = [prompt if options.return_full_text else "" for prompt in prompts]
        for number, piece in model.stream_batch(prompts, options):
            completions[number] += piece
            print_line({"index": number, "piece": piece})
    else:
        completions = model.generate_batch(prompts, options)
    answers = [
        {**record, "completion": text, "generation": options.alone(number).record()}
        for number, (record, text) in enumerate(zip(records, completions, strict=True))
    ]
    write_lines(answers, output, say)


def generate_requests(
    file: Path,
    output: Path | None,
    model: str | None,
    dtype: str,
    tokenizer: str | None,
    options: GenerationOptions,
    *,
    open_path: Callable[[Path, str | None, str], Any],
    dry_run: bool,
    as_json: bool,
    say: Say,
) -> None:
    """Answer a file of requests, or with `dry_run` only report the plan; all problems are reported before a model is opened."""
    from ingot.inference.model import locate_weights
    from ingot.inference.prompt_files import answer_all, plan_loads

    try:
        requests = read_requests(file, model, dtype, tokenizer, options)
        loads = plan_loads(requests, lambda path: locate_weights(Path(path)))
    except Problems as error:
        for problem in error.problems:
            say(problem)
        raise ConfigError(f"{file}: {len(error.problems)} problems, listed above; nothing was opened") from None
    if as_json and dry_run:
        names = [{"model": str(load.path), "dtype": load.dtype, "named": load.references} for load in loads]
        plan = [{**model, "texts": len(load.requests)} for model, load in zip(names, loads, strict=True)]
        print_line({"requests": len(requests), "models": plan})
    for load in loads:
        named = "" if load.references == [str(load.path)] else f", named {', '.join(load.references)}"
        say(f"{load.path} as {load.dtype}: {len(load.requests)} texts{named}")
    if dry_run:
        say(f"{file}: {len(requests)} texts by {len(loads)} models; nothing is wrong and nothing was opened")
        return

    answers = answer_all(requests, loads, open_path, say)
    failed = sum("error" in answer for answer in answers)
    write_lines(answers, output, say)
    if failed:
        say(f"{failed} of {len(answers)} texts could not be written; their lines say why")


def model_path(checkpoint: str | None, output_dir: str | None) -> str | None:
    """Return the model that --checkpoint or --output-dir names; a parser has refused both together."""
    path = checkpoint if checkpoint is not None else output_dir
    return None if path is None else expand(path)


def write_lines(records: Iterable[Mapping[str, Any]], output: Path | None, say: Say) -> None:
    """Write a line per record, to stdout or to a file that is written whole or not at all."""
    if output is None:
        for record in records:
            print_line(record)
        return
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    with writing_output(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        # Half a surrogate pair in a field of the request is written as it was read, \ud800.
        write_atomically(output.resolve(), "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
    say(f"{output}: {len(lines)} texts")


def print_line(record: Mapping[str, Any]) -> None:
    """Print a JSON line and flush it."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
    sys.stdout.flush()
