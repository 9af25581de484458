"""Texts for programs: an answer per line of JSON on stdout or in a file, and everything else on stderr.

`generate` gives prompts to one model, `batch-generate` lets every line name its own; two doors have them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.backends.sampling import GenerationOptions
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.inference.batch import Problems, expand, read_prompts, read_requests
from ingot.runtime.files import is_utf8, readable, write_atomically, writing_output

Say = Callable[[str], None]
# What gpt-simple's commands ask for unless they are told otherwise; a prompt there is its own ids and no start of a document.
DEFAULTS = GenerationOptions(max_new_tokens=100, temperature=0.8, top_k=50, top_p=0.95, start_mark=False)
DTYPE = "bf16"


def read_prompt(prompt: str | None, file: Path | None) -> str | None:
    """The prompt as it is given, from stdin for `-`, or from a file; the line end that echo and editors add is left out."""
    if prompt is not None and file is not None:
        raise ConfigError("give --prompt TEXT or --prompt-file FILE; one of them")
    if file is None and prompt != "-":
        if prompt is not None and not is_utf8(prompt):
            raise DataError("--prompt is not UTF-8 text; give it as UTF-8")
        return prompt
    with readable(file or Path("stdin"), DataError):
        text = (_stdin() if file is None else file.read_bytes()).decode("utf-8-sig")  # no line end is translated
    return text.removesuffix("\n").removesuffix("\r")


def _stdin() -> bytes:
    if sys.stdin is None:
        raise ConfigError("--prompt - reads stdin, which is closed; give the text itself")
    return sys.stdin.buffer.read()


def prompts_of(prompt: str | None, prompts_file: Path | None) -> list[dict[str, Any]]:
    """The prompts of a command: one, or those of a file."""
    if (prompt is None) == (prompts_file is None):
        raise ConfigError("give --prompt TEXT or --prompts-file FILE; one of them")
    return read_prompts(prompts_file) if prompts_file is not None else [{"prompt": prompt}]


def generate_records(
    model: Any, given: Sequence[Mapping[str, Any]], options: GenerationOptions, output: Path | None, stream: bool, say: Say
) -> None:
    """Continue prompts with a model and write a line for each; with `stream`, first a line for every piece as it is written."""
    prompts = [str(one["prompt"]) for one in given]
    if stream:
        written = [prompt if options.return_full_text else "" for prompt in prompts]
        for number, piece in model.stream_batch(prompts, options):
            written[number] += piece
            print_line({"index": number, "piece": piece})
    else:
        written = model.generate_batch(prompts, options)
    told = [options.alone(number).record() for number in range(len(given))]
    answers = [{**one, "completion": text, "generation": how} for one, text, how in zip(given, written, told, strict=True)]
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
    """Answer a file of requests, or only say what would be done; problems are told together, before a model is opened."""
    from ingot.inference.batch import answer_all, plan_loads

    try:
        requests = read_requests(file, model, dtype, tokenizer, options)
        loads = plan_loads(requests, _locate)
    except Problems as found:
        for problem in found.problems:
            say(problem)
        raise ConfigError(f"{file}: {len(found.problems)} problems, which are told above; nothing was opened") from None
    if as_json and dry_run:
        plan = [
            {"model": str(one.path), "dtype": one.dtype, "named": one.references, "texts": len(one.requests)} for one in loads
        ]
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
    """The model that a command names by one of its two flags."""
    if checkpoint is not None and output_dir is not None:
        raise ConfigError("give --checkpoint DIR or --output-dir RUN; one of them")
    found = checkpoint if checkpoint is not None else output_dir
    return None if found is None else expand(found)


def write_lines(records: Iterable[Mapping[str, Any]], output: Path | None, say: Say) -> None:
    """Write a line per record, to stdout or into a file that is there whole or not at all."""
    if output is None:
        for record in records:
            print_line(record)
        return
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    with writing_output(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        # Half a surrogate pair in a field that only comes back is written as it was, \ud800.
        write_atomically(output.resolve(), "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
    say(f"{output}: {len(lines)} texts")


def print_line(record: Mapping[str, Any]) -> None:
    """A line of JSON on stdout, at once."""
    sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def _locate(path: str) -> Path:
    """Where the model of a reference lies; one of gpt-simple's that was written from one of ours beside it is that one."""
    from ingot.artifact.gpt_simple import is_checkpoint, read_saved
    from ingot.inference.model import locate_weights
    from ingot.runs.checkpoints import open_index
    from ingot.runs.folder import saved_steps

    found = locate_weights(Path(path))
    with suppress(CheckpointError):
        saved = read_saved(found) if is_checkpoint(found) else None
        ours = saved_steps(found.parent).get(saved.step) if saved is not None else None
        if saved is not None and ours is not None and open_index(ours).progress["tokens"] == saved.state.get("tokens_trained"):
            return ours
    return found
