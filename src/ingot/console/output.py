"""Output of commands: JSON or aligned columns on stdout, and atomically written files."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import unicodedata
from argparse import ArgumentParser
from collections.abc import Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ingot.errors import ConfigError, shown
from ingot.runtime.files import replace_file, to_json, writing_output

TEXT_DIRECTION = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # characters that change the text direction
json_printed = ContextVar("json_printed", default=False)  # True once this command has printed its result


def print_json(value: Any) -> None:
    json_printed.set(True)
    print(to_json(value, indent=2, escape=False))


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns; a row with one cell is a heading. On a terminal, long last cells are wrapped."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for line, row in zip(columns(rows), rows, strict=True):
        indent = " " * (len(line) - len(shown(row[-1])))
        fits = len(line) <= width or len(indent) > width // 2
        print(line if fits else textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns; a row with one cell is a heading."""
    rows = [[shown(cell) for cell in row] for row in rows]
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] for row in rows)
    return ["  ".join(cells).rstrip() if len(row) > 1 else row[0] for row, cells in zip(rows, padded, strict=True)]


def write_file(path: Path, text: str, force: bool = False) -> None:
    """Write a file atomically; raise an error if it exists, unless `force` is set."""
    check_target(path, False, force)
    with writing_output(path), replace_file(path.resolve()) as file:
        file.write(text.encode())


def check_target(target: Path, folder: bool, force: bool) -> None:
    """Raise an error if a file or folder cannot be written at this path, or would replace an existing one without `force`."""
    if not target.parent.is_dir():
        raise ConfigError(f"{target} cannot be written: the folder {target.parent} does not exist; create it first")
    if target.is_dir() and not folder:
        raise ConfigError(f"{target} is a folder; give the name of a file in it")
    exists = os.path.lexists(target)  # unlike Path.exists, True for a broken link
    if exists and not force:
        raise ConfigError(f"{target} exists; --force replaces it, --output writes elsewhere")
    if exists and not (target.is_dir() if folder else target.is_file()):
        raise ConfigError(f"{target} is not a {'folder' if folder else 'file'}, so it is not replaced")


def visible(text: str) -> str:
    """Escape control characters other than newline and tab, and characters that change the text direction."""
    controls = {c for c in set(text) - set("\n\t") if unicodedata.category(c) == "Cc" or c in TEXT_DIRECTION}
    return "".join(f"\\x{ord(character):02x}" if character in controls else character for character in text)


def for_reader(text: str) -> str:
    """Return `text` as it should be written to stdout: control characters are escaped on a terminal and unchanged elsewhere."""
    return visible(text) if sys.stdout.isatty() else text


class Parser(ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing usage, so that the error is one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def split_overrides(args: Sequence[str], options: Sequence[str] = ()) -> dict[str, str | bool]:
    """Parse `--section.key value`, `--section.key=value` and bare `--section.key` (true) into settings by dotted path.

    If a setting is repeated, the last one wins. The error for an unknown option without a dot suggests one of `options`.
    """
    settings: dict[str, str | bool] = {}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"unexpected {word!r} on the command line; write a setting as --section.key value")
        close = [] if "." in name else get_close_matches(name, options, n=1, cutoff=0.75)
        if close:
            raise ConfigError(f"unknown option {name}; did you mean {close[0]}?")
        takes_next = not equals and bool(rest) and not rest[0].startswith("--")
        settings[name.removeprefix("--")] = value if equals else rest.pop(0) if takes_next else True
    return settings
