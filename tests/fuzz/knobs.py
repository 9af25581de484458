"""What can be set at a program, and to which value: sound ones, those at the bounds, and wrong ones.

Nothing is listed here. Settings come from the schema, flags from typer and argparse, variables and keys from the tables of the
programs, so what is added there is tried here.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ingot.cli.main import COMMANDS
from ingot.compat.golf.variables import MLX_VARIABLES, VARIABLES
from ingot.compat.gpt_simple.config import all_keys
from ingot.compat.gpt_simple.main import make_parser
from ingot.compat.nanogpt.keys import PROGRAMS
from ingot.config.fields import settings
from ingot.config.schema import FAMILIES

from .values import HUGE, any_word, number_word, path_word

PATH_NAMES = ("path", "dir", "file", "input", "output", "tokenizer", "weights", "resume", "checkpoint", "config", "data", "read")
# A process or a compilation takes seconds, so they are hardly asked for here; tests/cli has tests of them.
FEW = ("workers", "num_workers", "threads")
NEVER_TRUE = ("compile", "score")
NEVER = ("--nproc-per-node", "--nproc_per_node", "--nnodes", "--score", "--probe")
LARGE = 1000
SOUND = {
    "integer": ("1", "2", "3", "4", "8", "16", "32"),
    "number": ("0.0", "0.01", "0.5", "0.9", "1.0", "2"),
    "boolean": ("true", "false"),
    "object": ("{}", "{a: 1}", "{web: 1, books: 2}", "{matrix: 0.5}"),
    "array": ("[]", "[1, 2]", "[{share: 1.0}]", "[{steps: 1, rate: 0.5}, {steps: 1}]", "[{tokens: 64, mix: {web: 1}}]"),
}


@dataclass(frozen=True)
class Knob:
    """Something that can be set: its name, the kinds of value it takes, as JSON schemas call them, and its words and bounds."""

    name: str
    kinds: tuple[str, ...]
    choices: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    flag: bool = False  # takes no value

    @property
    def last(self) -> str:
        """Its name without dashes and section."""
        return self.name.lstrip("-").replace("__", ".").rpartition(".")[2].lower().replace("-", "_")

    def draw(self, draw: random.Random) -> str:
        """A value as text: half of the time one that is likely to be sound."""
        if self.last.startswith("wandb"):
            return "null"
        if self.last in FEW:
            return draw.choice(("0", "-1", "1", "2", "x", "1.5", ""))
        if self.last in NEVER_TRUE:
            return draw.choice(("false", "False", "0", "x", "", "null", "2"))
        if draw.random() < 0.5:
            return self.sound(draw)
        match draw.randrange(4):
            case 0 if self.bounds:
                bound = draw.choice(self.bounds)
                at = (bound, bound - 1, -bound) if bound <= LARGE else ()  # a million texts are allowed, and take an hour
                return str(draw.choice((bound + 1, *at)))
            case 1 if "integer" in self.kinds:
                return str(draw.choice((0, -1, *HUGE)))
            case 2 if self.is_path:
                return path_word(draw)
            case 2 if {"integer", "number"} & set(self.kinds):
                return number_word(draw)
        return any_word(draw)

    def sound(self, draw: random.Random) -> str:
        """A value of one of its kinds, small enough to be worked with."""
        words = [*self.choices, *(word for kind in self.kinds for word in SOUND.get(kind, ()))]
        if self.is_path and (not words or draw.random() < 0.5):
            return path_word(draw)
        return draw.choice(words or ["x", "byte", "auto", "1"])

    @property
    def is_path(self) -> bool:
        """Whether its value is likely the name of a file."""
        free = "string" in self.kinds and not set(self.choices) - {"null", "None"}
        return free and any(name in self.last for name in PATH_NAMES)


@cache
def ingot_settings() -> tuple[Knob, ...]:
    """Every setting of every model family."""
    found = {}
    for family in FAMILIES:
        for path, setting in settings(family).items():
            parts = setting.schema.get("anyOf", [setting.schema])
            names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            bounds = tuple(part[name] for part in parts for name in names if name in part)
            kinds = tuple(sorted(setting.types)) or ("string",)
            choices = tuple(map(str, setting.choices)) + (("null",) if "null" in kinds else ())
            found[path] = Knob(path, kinds, choices, bounds)
    return tuple(found.values())


@cache
def ingot_flags() -> dict[tuple[str, ...], tuple[Knob, ...]]:
    """The options of every verb of `ingot`, by the words that call it."""
    verbs = typer.Typer()
    for name, (module, _, function) in ((name, place.partition(".")) for name, place in COMMANDS.items()):
        verb = getattr(import_module(f"ingot.cli.{module}"), function)
        verbs.add_typer(verb, name=name) if isinstance(verb, typer.Typer) else verbs.command(name)(verb)
    return dict(_verbs((), verbs))


def _verbs(words: tuple[str, ...], verbs: typer.Typer) -> Iterator[tuple[tuple[str, ...], tuple[Knob, ...]]]:
    for group in verbs.registered_groups:
        yield from _verbs((*words, str(group.name)), group.typer_instance)
    for command in verbs.registered_commands:
        hints = get_type_hints(command.callback, include_extras=True)
        noted = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}
        yield (*words, str(command.name)), tuple(knob for name, parts in noted.items() for knob in _options(name, *parts))


def _options(name: str, kind: Any, info: Any, *_: Any) -> Iterator[Knob]:
    """The spellings of one option, by its annotation."""
    if not isinstance(info, typer.models.OptionInfo):
        return
    if get_origin(kind) is not Literal and get_args(kind):  # int | None, list[Path]
        kind = get_args(kind)[0]
    choices = get_args(kind) if get_origin(kind) is Literal else _metavar(info.metavar)
    bounds = tuple(bound for bound in (info.min, info.max) if bound is not None)
    kinds = ({int: "integer", float: "number"}.get(kind, "string"),)
    given = [*([info.default] if isinstance(info.default, str) else []), *(info.param_decls or ())]
    for one in "/".join(given or [f"--{name.replace('_', '-')}"]).split("/"):
        if one not in NEVER:
            yield Knob(one, kinds, choices, bounds, kind is bool)


def _metavar(text: str | None) -> tuple[str, ...]:
    return tuple(text.split("|")) if text and "|" in text and text.islower() else ()


@cache
def gpt_simple_flags() -> dict[tuple[str, ...], tuple[Knob, ...]]:
    """The flags of every command of `gpt-simple`."""
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    kinds = {int: "integer", float: "number"}
    return {
        (name,): tuple(
            Knob(flag, (kinds.get(action.type, "string"),), tuple(action.choices or ()), (), action.nargs == 0)
            for action in parser._actions
            for flag in action.option_strings
            if flag not in ("-h", "--help", *NEVER)
        )
        for name, parser in commands.choices.items()
    }


@cache
def gpt_simple_keys() -> tuple[Knob, ...]:
    """The keys of gpt-simple's YAML."""
    kinds = {"int": "integer", "float": "number", "bool": "boolean", "list": "array"}
    found = []
    for path, key in all_keys().items():
        bounds = tuple(b for b in (key.low, key.above, key.high, key.below) if b is not None)
        found.append(Knob(path, (kinds.get(key.kind, "string"),), key.choices + (("null",) if key.null else ()), bounds))
    return tuple(found)


@cache
def nanogpt_keys(program: str) -> tuple[Knob, ...]:
    """The keys of train.py, sample.py or bench.py."""
    kinds = {"int": "integer", "float": "number", "bool": "boolean"}
    keys = PROGRAMS[program][1].values()
    return tuple(Knob(key.name, (kinds.get(key.kind, "string"),), ("None",) if key.null else ()) for key in keys)


@cache
def golf_variables(program: str) -> tuple[Knob, ...]:
    """The variables of train_gpt.py or train_gpt_mlx.py."""
    kinds = {"int": "integer", "float": "number", "flag": "integer"}
    table = VARIABLES if program == "train_gpt.py" else MLX_VARIABLES
    return tuple(Knob(name, (kinds.get(one.kind, "string"),), one.choices) for name, one in table.items())
