"""What verbs print and write: JSON or aligned columns on stdout, and files that are whole or not there."""

from __future__ import annotations

import os
import sys
import unicodedata
from argparse import ArgumentParser
from collections.abc import Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ingot.errors import ConfigError, shown
from ingot.runtime.files import replace_users_file, to_json, writing_output

json_printed = ContextVar("json_printed", default=False)  # whether stdout has the result of this command as JSON


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    json_printed.set(True)
    print(to_json(value, indent=2, escape=False))


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with their columns aligned; a row of one cell is a heading."""
    for line in columns(rows):
        print(line)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with their columns aligned; a row of one cell is a heading."""
    rows = [[shown(cell) for cell in row] for row in rows]
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows)
    return ["  ".join(cells).rstrip() if len(row) > 1 else row[0] for row, cells in zip(rows, padded, strict=True)]


def write_file(path: Path, text: str, force: bool = False) -> None:
    """Write a file at once; an existing file is kept unless forced."""
    check_target(path, False, force)
    with writing_output(path), replace_users_file(path.resolve()) as file:
        file.write(text.encode())


def check_target(target: Path, folder: bool, force: bool) -> None:
    """Refuse a path where no file, or no folder, can or should be written."""
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be written: there is no folder {target.parent}; make it first")
    if target.is_dir() and not folder:
        raise ConfigError(f"{target} is a folder; give the name of a file in it")
    exists = os.path.lexists(target)  # also a link that leads nowhere
    if exists and not force:
        raise ConfigError(f"{target} exists; --force replaces it, --output writes elsewhere")
    if exists and not (target.is_dir() if folder else target.is_file()):
        raise ConfigError(f"{target} is not a {'folder' if folder else 'file'} and is not replaced")


def visible(text: str) -> str:
    """A text as a terminal may get it: characters that would steer the terminal are written out, such as \\x1b."""
    return "".join(f"\\x{ord(one):02x}" if one not in "\n\t" and _steers(one) else one for one in text)


def for_reader(text: str) -> str:
    """A text for stdout: as it is, and on a terminal visible."""
    return visible(text) if sys.stdout.isatty() else text


def _steers(character: str) -> bool:
    """Whether a character moves the cursor, rings, or turns the direction of the text."""
    return unicodedata.category(character) == "Cc" or character in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


# Words on a command line, in any door: settings, `--section.key value`, and what argparse has to say of its options.


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
