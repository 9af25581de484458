"""Many texts by one or several models: each is opened once, one at a time, and the answers come in the order asked for."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.errors import IngotError
from ingot.generate.records import ModelReference, Problems, Request
from ingot.generate.sampling import GenerationOptions
from ingot.trained.model import LoadedModel

Locate = Callable[[str], Path]  # where the model lies that a reference means; an error says that there is none
Open = Callable[[Path, str | None, str], LoadedModel]  # opens a path, with a tokenizer and a dtype
Say = Callable[[str], None]


@dataclass
class Load:
    """A model that is opened once, and what it is asked for, by the number of the request."""

    path: Path
    dtype: str
    tokenizer: str | None
    references: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)


def plan_loads(requests: Sequence[Request], locate: Locate) -> list[Load]:
    """Which models are opened for which requests: references that mean the same model are one. Reads no weights."""
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
    """The lines of output, in the order asked for. What goes wrong with a text is the `error` of its line."""
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
        del model  # before the next is opened: never two at once
    return [answers[number] for number in range(len(requests))]


def _by_options(asked: dict[int, Request]) -> dict[GenerationOptions, list[int]]:
    """The requests that can be written side by side: all but the seed is the same."""
    groups: dict[GenerationOptions, list[int]] = {}
    for number, request in asked.items():
        groups.setdefault(replace(request.options, seed=None), []).append(number)
    return groups


def _answer(model: LoadedModel, asked: dict[int, Request], options: GenerationOptions, say: Say) -> dict[int, dict[str, Any]]:
    """The answers to requests of one kind; if one of them fails, each is tried alone, so that only that one has an error."""
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
