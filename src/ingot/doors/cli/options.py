"""Settings as options: any `--section.key value` that a verb does not know itself is a setting of the config.

A verb takes them by being registered with `cls=SettingsCommand` and reading `given_settings(ctx)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ingot.errors import ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings.")]
RecipeName = Annotated[str | None, typer.Option("--recipe", metavar="NAME", help="Recipe to start from, see `ingot recipes`.")]
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead of printing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class SettingsCommand(TyperCommand):
    """A verb that takes dotted settings besides its options, and lists them at the end of its help."""

    allow_extra_args = True
    ignore_unknown_options = True

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{settings_help()}\n")


def given_settings(ctx: typer.Context) -> dict[str, str | bool]:
    """The settings among the words after a verb."""
    return split_overrides(ctx.args, [name for option in ctx.command.params for name in option.opts])


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


def settings_help() -> str:
    """The names of all settings by section, for the end of a verb's help."""
    from ingot.config.fields import known, sections

    lines = ["Settings, given as --section.key value, for example --training.max_steps 100:"]
    for section in sections():
        names = ", ".join(path.partition(".")[2] for path in known() if path.startswith(f"{section}."))
        lines.append(fill(names, 108, initial_indent=f"  {section:<12}", subsequent_indent=" " * 14))
    return "\n".join([*lines, "`ingot init` explains each of them, `ingot config show` shows their values."])
