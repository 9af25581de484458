"""Words on a command line, in any door: settings, `--section.key value`, and what argparse has to say of its options."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from ingot.errors import ConfigError


class Parser(ArgumentParser):
    """An ArgumentParser whose complaint is an error of ours, and so one line that can be read."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def split_overrides(args: Sequence[str], options: Sequence[str] = ()) -> dict[str, str | bool]:
    """`--section.key value`, `--section.key=value` and bare `--section.key` (true) by dotted path; the last of equals wins.

    `options` are the verb's own, which a mistyped word without a dot is compared with.
    """
    found: dict[str, str | bool] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"unexpected {word!r} on the command line; a setting is written --section.key value")
        close = [] if "." in name else get_close_matches(name, options, n=1, cutoff=0.75)
        if close:
            raise ConfigError(f"unknown option {name}; did you mean {close[0]}?")
        takes_next = not equals and bool(rest) and not rest[0].startswith("--")
        found[name.removeprefix("--")] = value if equals else rest.pop(0) if takes_next else True
    return found
