"""Complete many prompts with one or several models. Models are opened one at a time; the output keeps the order of the input.

Prompts are JSON lines: one object with a `prompt` per line. The object's other fields are copied to the output line.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.backends.sampling import DTYPES, GenerationOptions
from ingot.errors import ConfigError, DataError, IngotError
from ingot.inference.model import LoadedModel
from ingot.runtime.files import is_utf8, open_to_read, readable

MODEL_KEYS = ("checkpoint", "output_dir", "dtype", "tokenizer")
GENERATION_KEYS = (
    "max_new_tokens", "temperature", "top_k", "top_p", "greedy", "repetition_penalty", "seed", "return_full_text",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A completion requested by a line of a prompt file."""

    line: str  # file and line number of the request
    fields: Mapping[str, Any]  # fields of the line, which are copied to the output
    model: str  # a checkpoint, a run folder or an artifact
    dtype: str
    tokenizer: str | None
    options: GenerationOptions

    def answer(self, **result: str) -> dict[str, Any]:
        """Return the output line: the request's fields, the completion or error, and the sampling settings."""
        return {**self.fields, **result, "generation": self.options.record()}


class Problems(ConfigError):
    """An error that lists all problems found in a prompt file."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def expand(path: str) -> str:
    """Expand ~ and $VARIABLES in a path."""
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def read_requests(path: Path, model: str | None, dtype: str, tokenizer: str | None, options: GenerationOptions) -> list[Request]:
    """Read a file of requests, with the other arguments as defaults for omitted fields; raise Problems listing all errors."""
    requests: list[Request] = []

    def add(line: str, fields: dict[str, Any]) -> list[str]:
        problems = []
        for name, keys in ("model", MODEL_KEYS), ("generation", GENERATION_KEYS):
            block = fields.get(name)
            if not isinstance(block, dict | None):
                problems.append(f"{name} must be an object")
            else:
                problems += [f"{name}.{key} is unknown; choose from {', '.join(keys)}" for key in block or {} if key not in keys]
        if problems:
            return problems
        chosen, overrides = fields.get("model") or {}, fields.get("generation") or {}
        if problems := [f"model.{key} must be a string" for key, value in chosen.items() if not isinstance(value, str | None)]:
            return problems
        reference = chosen.get("checkpoint") or chosen.get("output_dir") or model
        line_dtype, line_options = chosen.get("dtype") or dtype, replace(options, **overrides)
        if chosen.get("checkpoint") and chosen.get("output_dir"):
            problems.append("model must not have both checkpoint and output_dir; give only one of them")
        if line_dtype not in DTYPES:
            problems.append(f"model.dtype must be one of {', '.join(DTYPES)}, not {line_dtype!r}")
        if reference is None:
            problems.append("no model is given; add one to this line, or set one for all lines with --checkpoint or --output-dir")
        problems += [f"generation.{problem}" for problem in line_options.problems()]
        if not problems:
            own = chosen.get("tokenizer") or tokenizer
            tokenizer_path = None if own is None else expand(own)
            requests.append(Request(line, fields, expand(str(reference)), DTYPES[line_dtype], tokenizer_path, line_options))
        return problems

    read_prompts(path, add)
    return requests


def read_prompts(
    path: Path, check: Callable[[str, dict[str, Any]], Sequence[str]] = lambda line, fields: ()
) -> list[dict[str, Any]]:
    """Read a file of JSON objects, each with a prompt; raise Problems listing all errors, including those from `check`."""
    with readable(path, DataError), open_to_read(path) as file:
        lines = file.read().decode("utf-8-sig").split("\n")  # split at \n only: a prompt may contain other line separators
    records, problems = [], []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        line = f"{path}:{number}"
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            problems.append(f"{line}: this is not JSON ({error})")
            continue
        if not isinstance(fields, dict):
            problems.append(f"{line}: this is not a JSON object")
            continue
        prompt = fields.get("prompt")
        wrong = [] if isinstance(prompt, str) and is_utf8(prompt) else ["prompt is missing or is not UTF-8 text"]
        problems += [f"{line}: {problem}" for problem in [*wrong, *check(line, fields)]]
        records.append(fields)
    if not records and not problems:
        problems = [f"{path} contains no prompts; each line must be a JSON object with a prompt"]
    if problems:
        raise Problems(problems)
    return records


@dataclass
class Load:
    """A model to open, with the indices of its requests."""

    path: Path
    dtype: str
    tokenizer: str | None
    references: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)


def plan_loads(requests: Sequence[Request], locate: Callable[[str], Path]) -> list[Load]:
    """Group requests by model, dtype and tokenizer, so that each combination is opened only once. No weights are read here."""
    paths: dict[str, Path] = {}
    problems: list[str] = []
    for name in dict.fromkeys(request.model for request in requests):
        try:
            paths[name] = locate(name)
        except IngotError as error:
            problems.append(f"model {name}: {error}")
    if problems:
        raise Problems(problems)
    loads: dict[tuple[Path, str, str | None], Load] = {}
    for number, request in enumerate(requests):
        key = (paths[request.model], request.dtype, request.tokenizer)
        load = loads.setdefault(key, Load(*key))
        load.requests.append(number)
        if request.model not in load.references:
            load.references.append(request.model)
    return list(loads.values())


def answer_all(
    requests: Sequence[Request],
    loads: Sequence[Load],
    open_path: Callable[[Path, str | None, str], LoadedModel],  # arguments: path, tokenizer, dtype
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Complete all requests and return their output lines in order; the line of a failed completion has an `error`."""
    answers: dict[int, dict[str, Any]] = {}
    for load in loads:
        say(f"opening {load.path} as {load.dtype} for {len(load.requests)} prompts")
        try:
            model = open_path(load.path, load.tokenizer, load.dtype)
        except IngotError as error:
            say(f"{load.path} cannot be opened: {error}")
            answers |= {number: requests[number].answer(error=str(error)) for number in load.requests}
            continue
        batches: dict[GenerationOptions, dict[int, Request]] = {}  # requests whose settings differ only in the seed share a batch
        for number in load.requests:
            batches.setdefault(replace(requests[number].options, seed=None), {})[number] = requests[number]
        for options, batch in batches.items():
            answers |= _answer(model, batch, options, say)
        del model  # free the model before opening the next one
    return [answers[number] for number in range(len(requests))]


def _answer(
    model: LoadedModel, batch: dict[int, Request], options: GenerationOptions, say: Callable[[str], None]
) -> dict[int, dict[str, Any]]:
    """Complete requests with equal settings; if the batch fails, retry one by one, so that only failing requests get an error."""
    seeds = [secrets.randbits(31) if r.options.seed is None else r.options.seed for r in batch.values()]
    try:
        texts = model.generate_batch([request.fields["prompt"] for request in batch.values()], options, seeds)
    except IngotError as error:
        if len(batch) > 1:
            return {n: a for number, r in batch.items() for n, a in _answer(model, {number: r}, options, say).items()}
        [(number, request)] = batch.items()
        say(f"{request.line}: {error}")
        return {number: request.answer(error=str(error))}
    return {number: request.answer(completion=text) for (number, request), text in zip(batch.items(), texts, strict=True)}
