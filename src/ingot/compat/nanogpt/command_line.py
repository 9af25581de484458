"""The command line of `train.py`: presets and `--key=value`, in any order and number, from left to right; later ones win."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap

from ingot.compat.nanogpt.keys import BENCH, SAMPLE, TRAIN, Key, Value, defaults, key_name
from ingot.compat.nanogpt.presets import read_preset
from ingot.console.entry import explained, say
from ingot.errors import ConfigError
from ingot.runtime.ranks import ranks_from_environment
from ingot.runtime.signals import listening_early

HELP = ("--help", "-h")
ABOUT = {
    "train.py": "Train a GPT, or continue, or evaluate one.",
    "sample.py": "Let a GPT write.",
    "bench.py": "Measure how long a training step takes.",
}
KEYS: dict[str, dict[str, Key]] = {"train.py": TRAIN, "sample.py": SAMPLE, "bench.py": BENCH}


@dataclass(frozen=True)
class Given:
    """The value of every key, and where those came from that are not defaults."""

    values: dict[str, Value]
    origins: dict[str, str]


def enter(program: str, body: Callable[[Given], None], arguments: Sequence[str] | None = None) -> int:
    """Read the arguments of a program and let `body` do its work; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with explained(program, key_name) as outcome, listening_early(program == "train.py"):
        if any(word in HELP for word in given):
            say(help_text(program))
        else:
            first = ranks_from_environment().first
            body(read_arguments(program, given, say if first else lambda line: None))
    return outcome.code


def read_arguments(program: str, arguments: Sequence[str], say: Callable[[str], None] = print) -> Given:
    """The settings that arguments describe; `say` is told what they override, as nanoGPT does."""
    keys = KEYS[program]
    values, origins = defaults(keys), dict[str, str]()
    for argument, following in zip_longest(arguments, arguments[1:]):
        if _is_preset(argument):
            text, found = read_preset(Path(argument), values)
            say(f"Overriding config with {argument}:")
            say(text)
            used = {helper for name, _, _, names in found if _is_key(name) for helper in names}
            for name, value, where, _ in found:
                if (key := _preset_key(name, keys, where, used)) is not None:
                    values[name], origins[name] = key.of(value, where), where
        else:
            name, value = _read_flag(argument, following, keys)
            say(f"Overriding: {name} = {value}")
            values[name], origins[name] = value, "command line"
    return Given(values, origins)


def help_text(program: str) -> str:
    """What `--help` prints: every key with its type, default and meaning."""
    lines = [
        f"usage: python {program} [PRESET.py ...] [--key=value ...]",
        "",
        ABOUT[program],
        "",
        "Presets and keys are taken from left to right; later ones win. The keys and their defaults:",
        "",
    ]
    for key in KEYS[program].values():
        head = f"  --{key.name}={key.default!r}"
        body = wrap(f"{key.meaning} ({key.allowed}{', new here' if key.ours else ''})", 76)
        lines += [
            f"{head:<34}{body[0]}" if len(head) < 34 else f"{head}\n{'':34}{body[0]}",
            *(f"{'':34}{line}" for line in body[1:]),
        ]
    return "\n".join(lines)


def _is_preset(argument: str) -> bool:
    return not argument.startswith("-") and ("=" not in argument or (argument.endswith(".py") and Path(argument).is_file()))


def _read_flag(argument: str, following: str | None, keys: Mapping[str, Key]) -> tuple[str, Value]:
    flag, equals, text = argument.partition("=")
    name = flag.removeprefix("--")
    if not flag.startswith("--"):
        raise ConfigError(f"{argument}: keys begin with two dashes: --{argument.lstrip('-')}")
    if name not in keys:
        raise ConfigError(f"unknown key {name} in {argument}; {_hint(name, keys)}")
    if not equals:
        value = _example(keys[name]) if following is None or _stands_alone(following) else shlex.quote(following)
        raise ConfigError(f"{argument} has no value; write --{name}={value}")
    return name, parse(keys[name], text, "command line")


def _stands_alone(argument: str) -> bool:
    return argument.startswith("-") or "=" in argument or argument.endswith(".py")


def parse(key: Key, text: str, where: str) -> Value:
    """The value that a text stands for: a Python literal where it is one; true and false do for True and False."""
    if key.type is not str and text.lower() in ("true", "false"):
        return key.of(text.lower() == "true", where)
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = text
    if key.type is str and not isinstance(value, str) and not (value is None and key.optional):
        value = text  # --out_dir=123
    return key.of(value, where)


def _preset_key(name: str, keys: Mapping[str, Key], where: str, used: Collection[str]) -> Key | None:
    """The key that a preset sets; None for names of its own and for keys that only another of the programs has."""
    if name in keys:
        return keys[name]
    if name.startswith("_") or name in used or _is_key(name):
        return None
    raise ConfigError(f"{where}: unknown key {name}; {_hint(name, keys)} (a name of your own is one that a key below uses)")


def _is_key(name: str) -> bool:
    return any(name in keys for keys in KEYS.values())


def _hint(name: str, keys: Mapping[str, Key]) -> str:
    close = get_close_matches(name.replace("-", "_").lower(), keys, n=1)
    return f"did you mean {close[0]}?" if close else "--help lists them"


def _example(key: Key) -> str:
    kind = {bool: "True", int: "N", float: "X", str: "TEXT"}[key.type]
    return kind if key.default is None or key.type is bool else str(key.default)
