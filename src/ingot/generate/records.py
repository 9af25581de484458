"""Prompts in JSON lines: an object per line with a `prompt`; what else it has comes back with its text.

`ingot generate` gives all of them to one model. For `ingot batch-generate` an object may name its own `model` and `generation`.
Everything that can be wrong with them is found before a model is opened, and all of it is told together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, DataError
from ingot.generate.sampling import DTYPES, GenerationOptions, merged
from ingot.runtime.files import is_utf8, open_to_read, readable

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
    """A model as it is named: by a checkpoint, a run folder or an artifact."""

    path: str
    dtype: str
    tokenizer: str | None


@dataclass(frozen=True)
class Request:
    """A text that is asked for."""

    place: str  # its file and line
    given: Mapping[str, Any]  # comes back with the text
    model: ModelReference
    options: GenerationOptions

    @property
    def prompt(self) -> str:
        return str(self.given["prompt"])

    def answer(self, **found: str) -> dict[str, Any]:
        """The line of output: what was given, the text or the error, and how it was drawn."""
        return {**self.given, **found, "generation": self.options.record()}


def expand(path: str) -> str:
    """A path with its ~ and $VARIABLES put in."""
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, each with a prompt; ConfigError tells all that are not."""
    problems: list[str] = []
    found = [given for place, given in _objects(path, problems) if _has_prompt(place, given, problems)]
    if problems:
        raise ConfigError("; ".join(problems))
    if not found:
        raise ConfigError(f"{path} holds no prompts; it needs an object with a prompt on each line")
    return found


def read_requests(path: Path, model: str | None, dtype: str, tokenizer: str | None, options: GenerationOptions) -> list[Request]:
    """What a file asks for, with these for all that its lines do not say; Problems tells all that is wrong."""
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
    """All that is wrong with a file, a line for each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def _objects(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with readable(path, DataError), open_to_read(path) as file:
        lines = file.read().decode("utf-8-sig").split("\n")  # a text may have other ends of lines in it
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
