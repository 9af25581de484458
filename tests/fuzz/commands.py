"""The programs as functions of words, and how a scenario of each is made: which settings, flags and variables it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ingot
from ingot.cli.main import run
from ingot.compat.gpt_simple.main import main as gpt_simple
from ingot.compat.nanogpt.prepare import openwebtext, shakespeare_char
from ingot.errors import shown

from . import knobs
from .knobs import Knob

Main = Callable[[list[str]], int | None]


@dataclass(frozen=True)
class Scenario:
    """A command that works."""

    program: str
    main: Main
    words: tuple[str, ...]
    files: tuple[str, ...]  # of the world, which the case gets a copy of
    variables: dict[str, str] = field(default_factory=dict)
    settings: tuple[Knob, ...] = ()  # given as --name=value
    flags: tuple[Knob, ...] = ()
    environment: tuple[Knob, ...] = ()
    writes: tuple[str, ...] = ()  # what is there before and may be changed
    at: str = "."  # the folder it runs in
    told: tuple[int, ...] = ()  # exit codes that come with a report on stdout instead of an error
    code: int = 0  # its exit code with nothing made different
    weight: int = 1

    @property
    def name(self) -> str:
        """What it is called in reports."""
        bare = [word for word in self.words if not word.startswith("-")]
        return " ".join([self.program, *bare[:2]])


def _as_variable(setting: Knob) -> Knob:
    return replace(setting, name=f"INGOT_{setting.name.upper().replace('.', '__')}")


SETTINGS = knobs.ingot_settings()
ENVIRONMENT = tuple(map(_as_variable, SETTINGS))


def of_ingot(given: str, *files: str, **more: Any) -> Scenario:
    """A verb of `ingot`."""
    named = tuple(given.split())
    flags = next((flags for verb, flags in knobs.ingot_flags().items() if named[: len(verb)] == verb), ())
    return Scenario("ingot", run, named, files, flags=flags, **more)


def with_settings(given: str, *files: str, then: tuple[str, ...] = (), **more: Any) -> Scenario:
    """A verb of `ingot` that takes settings; `then` are words that may have spaces."""
    found = of_ingot(given, *files, settings=SETTINGS, environment=ENVIRONMENT, **more)
    return replace(found, words=(*found.words, *then))


def of_gpt_simple(given: str, *files: str, keys: bool = False, **more: Any) -> Scenario:
    """A command of `gpt-simple`, in the first of its folders."""
    named = tuple(given.split())
    settings = knobs.gpt_simple_keys() if keys else ()
    flags = knobs.gpt_simple_flags()[named[:1]]
    return Scenario("gpt-simple", gpt_simple, named, files, settings=settings, flags=flags, at=files[0], **more)


def of_nanogpt(program: str, main: Main, given: tuple[str, ...], *files: str, at: str = "nanogpt", **more: Any) -> Scenario:
    """One of nanoGPT's programs, in a folder that has data/."""
    return Scenario(program, main, given, (at, "preset.py", *files), settings=knobs.nanogpt_keys(program), at=at, **more)


def of_golf(program: str, main: Main, variables: dict[str, str], at: str = "golf", **more: Any) -> Scenario:
    """One of the challenge's scripts, in a folder that has data/."""
    return Scenario(program, main, (), (at, "mine.py"), variables, environment=knobs.golf_variables(program), at=at, **more)


def prepare_characters(given: list[str]) -> int:
    """data/shakespeare_char/prepare.py."""
    return shakespeare_char(Path("new"), given)


def prepare_documents(given: list[str]) -> int:
    """data/openwebtext/prepare.py."""
    return openwebtext(Path("new"), given)


def python_train(given: list[str]) -> int:
    """`ingot.train` with the settings as a dict of sections."""
    sections: dict[str, dict[str, object]] = {}
    for word in given:
        name, _, value = word.removeprefix("--").partition("=")
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    return _raised(lambda: ingot.train(sections, quiet=True))


def python_generate(given: list[str]) -> int:
    """`ingot.load` and `generate`."""
    path, prompt = [*given, "", ""][:2]
    return _raised(lambda: ingot.load(path, device="cpu").generate(prompt, tokens=3))


def _raised(call: Callable[[], object]) -> int:
    """What a mistake is to Python: one of our errors, or the disk's."""
    try:
        call()
    except (ingot.IngotError, OSError) as error:
        print(f"python: error: {shown(str(error)[:1000])}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0
