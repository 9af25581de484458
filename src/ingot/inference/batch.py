"""Answer many prompts with one or several models. Each model is opened once, one at a time; answers keep the requested order."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.backends.sampling import DTYPES, GenerationOptions, merged
from ingot.errors import ConfigError, DataError, IngotError
from ingot.inference.model import LoadedModel
from ingot.runtime.files import is_utf8, open_to_read, readable

# Prompts in JSON lines: one object per line with a `prompt`; its other fields are returned with the completion.

MODEL_KEYS = ("checkpoint", "output_dir", "dtype", "tokenizer")
GENERATION_KEYS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "greedy",
    "repetition_penalty",
    "seed",
    "return_full_text",
)


@dataclass(frozen=True)
class ModelReference:
    """A reference to a model: a checkpoint, a run folder or an artifact."""

    path: str
    dtype: str
    tokenizer: str | None


@dataclass(frozen=True)
class Request:
    """A requested completion."""

    place: str  # file and line of the request
    given: Mapping[str, Any]  # fields that are returned with the completion
    model: ModelReference
    options: GenerationOptions

    @property
    def prompt(self) -> str:
        return str(self.given["prompt"])

    def answer(self, **found: str) -> dict[str, Any]:
        """Return the output line: the given fields, the completion or the error, and the sampling settings."""
        return {**self.given, **found, "generation": self.options.record()}


def expand(path: str) -> str:
    """Expand ~ and $VARIABLES in a path."""
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file, each with a prompt; ConfigError lists every line that has none."""
    problems: list[str] = []
    found = [given for place, given in _objects(path, problems) if _has_prompt(place, given, problems)]
    if problems:
        raise ConfigError("; ".join(problems))
    if not found:
        raise ConfigError(f"{path} holds no prompts; it needs an object with a prompt on each line")
    return found


def read_requests(path: Path, model: str | None, dtype: str, tokenizer: str | None, options: GenerationOptions) -> list[Request]:
    """Read the requests of a file, with these defaults for fields a line omits; Problems lists everything that is wrong."""
    problems: list[str] = []
    requests = []
    for place, given in _objects(path, problems):
        wrong = len(problems)
        _has_prompt(place, given, problems)
        reference = _reference(place, given.get("model"), model, dtype, tokenizer, problems)
        asked = _options(place, given.get("generation"), options, problems)
        if reference is not None and asked is not None and len(problems) == wrong:
            requests.append(Request(place, given, reference, asked))
    if not requests and not problems:
        problems.append(f"{path} holds no prompts; it needs an object with a prompt on each line")
    if problems:
        raise Problems(problems)
    return requests


class Problems(ConfigError):
    """All problems of a file, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def _objects(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with readable(path, DataError), open_to_read(path) as file:
        lines = file.read().decode("utf-8-sig").split("\n")  # split at \n only: a prompt may contain other line separators
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{place}: this is not JSON ({error})")
            continue
        if not isinstance(value, dict):
            problems.append(f"{place}: this is not a JSON object")
            continue
        yield place, value


def _has_prompt(place: str, given: Mapping[str, Any], problems: list[str]) -> bool:
    found = len(problems)
    if not isinstance(prompt := given.get("prompt"), str):
        problems.append(f"{place}: prompt {'must be a text' if 'prompt' in given else 'is missing'}")
    elif not is_utf8(prompt):
        problems.append(f"{place}: prompt holds half a surrogate pair, which is not a character")
    return len(problems) == found


def _reference(
    place: str, block: object, model: str | None, dtype: str, tokenizer: str | None, problems: list[str]
) -> ModelReference | None:
    given = _block(place, "model", block, MODEL_KEYS, problems)
    named = [given[name] for name in ("checkpoint", "output_dir") if given.get(name) is not None]
    if len(named) > 1:
        problems.append(f"{place}: model has a checkpoint and an output_dir; give one of them")
    for name in ("checkpoint", "output_dir", "tokenizer"):
        if given.get(name) is not None and not isinstance(given[name], str):
            problems.append(f"{place}: model.{name} must be a path")
    path, word = named[0] if named else model, given.get("dtype", dtype)
    if not isinstance(word, str) or word not in DTYPES:
        problems.append(f"{place}: model.dtype must be one of {', '.join(DTYPES)}, not {word!r}")
        return None
    if path is None:
        problems.append(f"{place}: no model is named; give it one, or one for all with --checkpoint or --output-dir")
        return None
    return ModelReference(expand(str(path)), DTYPES[word], _expanded(given.get("tokenizer") or tokenizer))


def _options(place: str, block: object, options: GenerationOptions, problems: list[str]) -> GenerationOptions | None:
    given = _block(place, "generation", block, GENERATION_KEYS, problems)
    asked = merged(options, {name: given[name] for name in GENERATION_KEYS if name in given})
    found = asked.problems()
    problems += [f"{place}: generation.{problem}" for problem in found]
    return None if found else asked


def _block(place: str, name: str, block: object, known: tuple[str, ...], problems: list[str]) -> dict[str, Any]:
    if block is None:
        return {}
    if not isinstance(block, dict):
        problems.append(f"{place}: {name} must be an object")
        return {}
    problems += [f"{place}: {name}.{key} is not known; there are {', '.join(known)}" for key in block if key not in known]
    return block


def _expanded(path: object) -> str | None:
    return None if path is None else expand(str(path))


Locate = Callable[[str], Path]  # resolves a model reference to its path, or raises
Open = Callable[[Path, str | None, str], LoadedModel]  # opens a path, with a tokenizer and a dtype
Say = Callable[[str], None]


@dataclass
class Load:
    """A model that is opened once, with its requests by number."""

    path: Path
    dtype: str
    tokenizer: str | None
    references: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)


def plan_loads(requests: Sequence[Request], locate: Locate) -> list[Load]:
    """Group requests by the model to open: references to the same model share one load. Reads no weights."""
    found: dict[ModelReference, Path] = {}
    problems: dict[ModelReference, str] = {}
    loads: dict[tuple[Path, str, str | None], Load] = {}
    for number, request in enumerate(requests):
        asked = request.model
        if asked not in found and asked not in problems:
            try:
                found[asked] = locate(asked.path)
            except IngotError as error:
                problems[asked] = f"model {asked.path}: {error}"
        if asked in found:
            key = (found[asked], asked.dtype, asked.tokenizer)
            load = loads.setdefault(key, Load(*key))
            load.requests.append(number)
            if asked.path not in load.references:
                load.references.append(asked.path)
    if problems:
        raise Problems(list(dict.fromkeys(problems.values())))
    return list(loads.values())


def answer_all(requests: Sequence[Request], loads: Sequence[Load], open_path: Open, say: Say) -> list[dict[str, Any]]:
    """Return the output lines in the requested order. A failed completion has an `error` in its line."""
    answers: dict[int, dict[str, Any]] = {}
    for load in loads:
        say(f"opening {load.path} as {load.dtype} for {len(load.requests)} texts")
        asked = {number: requests[number] for number in load.requests}
        try:
            model = open_path(load.path, load.tokenizer, load.dtype)
        except IngotError as error:
            say(f"{load.path} cannot be opened: {error}")
            answers |= {number: request.answer(error=str(error)) for number, request in asked.items()}
            continue
        for options, numbers in _by_options(asked).items():
            answers |= _answer(model, {number: asked[number] for number in numbers}, options, say)
        del model  # free the model before the next is opened, so that memory never holds two
    return [answers[number] for number in range(len(requests))]


def _by_options(asked: dict[int, Request]) -> dict[GenerationOptions, list[int]]:
    """Group the requests that can share a batch: all settings but the seed are equal."""
    groups: dict[GenerationOptions, list[int]] = {}
    for number, request in asked.items():
        groups.setdefault(replace(request.options, seed=None), []).append(number)
    return groups


def _answer(model: LoadedModel, asked: dict[int, Request], options: GenerationOptions, say: Say) -> dict[int, dict[str, Any]]:
    """Answer requests with equal settings; if the batch fails, try each alone, so that only the failing one has an error."""
    seeds = [secrets.randbits(31) if one.options.seed is None else one.options.seed for one in asked.values()]
    try:
        texts = model.write_texts([request.prompt for request in asked.values()], options, seeds)
    except IngotError as error:
        if len(asked) > 1:
            return {n: a for number, one in asked.items() for n, a in _answer(model, {number: one}, options, say).items()}
        [(number, request)] = asked.items()
        say(f"{request.place}: {error}")
        return {number: request.answer(error=str(error))}
    return {number: request.answer(completion=text) for (number, request), text in zip(asked.items(), texts, strict=True)}
