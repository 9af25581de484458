"""Settings as options: any `--section.key value` that a verb does not know itself is a setting of the config.

A verb takes them by being registered with `cls=SettingsCommand` and reading `given_settings(ctx)`.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ingot.console.output import split_overrides
from ingot.errors import ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings.")]
RecipeName = Annotated[str | None, typer.Option("--recipe", metavar="NAME", help="Recipe to start from, see `ingot recipes`.")]
OutputFile = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead of printing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StopExitCode = Annotated[
    int,
    typer.Option(
        "--stop-exit-code", metavar="N", min=0, max=255, help="Exit code of a run that was stopped and is to be continued."
    ),
]
ScoreOption = Annotated[
    Literal["val_bpb", "artifact_bpb", "val_loss"], typer.Option("--score", help="Which score of the runs is compared.")
]


# Short names of other programs, and the settings that they mean.
MEANT = {
    "lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "steps": "training.max_steps",
    "iters": "training.max_steps",
    "max_iters": "training.max_steps",
    "batch_size": "training.tokens_per_step",
    "block_size": "data.seq_len",
    "data": "data.path",
    "model": "model.family",
    "output": "training.output_dir",
    "out_dir": "training.output_dir",
    "seed": "training.seed",
    "time": "budget.seconds",
}


class SettingsCommand(TyperCommand):
    """A verb that takes dotted settings besides its options, and lists them at the end of its help."""

    allow_extra_args = True
    ignore_unknown_options = True

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{settings_help()}\n")


def given_settings(ctx: typer.Context, skip: int = 0) -> dict[str, str | bool]:
    """The settings among the words after a verb, without the first ones."""
    _hint(ctx.args[skip:])
    return split_overrides(ctx.args[skip:], [name for option in ctx.command.params for name in option.opts])


def first_word(ctx: typer.Context) -> str | None:
    """What stands before the settings, if it is not one itself."""
    return ctx.args[0] if ctx.args and not ctx.args[0].startswith("-") else None


def _hint(args: list[str]) -> None:
    """Answer the words that people bring from other programs with the ones that are meant here."""
    from ingot.config.fields import known
    from ingot.config.loading import list_recipes

    if args and not args[0].startswith("-"):
        if args[0] in [recipe.name for recipe in list_recipes()]:
            raise ConfigError(f"unexpected {args[0]!r} on the command line; did you mean --recipe {args[0]}?")
        if args[0].endswith((".yaml", ".yml")):
            raise ConfigError(f"unexpected {args[0]!r} on the command line; did you mean --config {args[0]}?")
    for word in args:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if not word.startswith("--") or "." in name:
            continue
        found = [MEANT[name]] if name in MEANT else [path for path in known() if path.rpartition(".")[2] == name]
        if len(found) == 1:
            raise ConfigError(f"unknown option {word.partition('=')[0]}; did you mean --{found[0]}?")


def settings_help() -> str:
    """The names of all settings by section, for the end of a verb's help."""
    from ingot.config.fields import known, sections

    lines = ["Settings, given as --section.key value, for example --training.max_steps 100:"]
    for section in sections():
        names = ", ".join(path.partition(".")[2] for path in known() if path.startswith(f"{section}."))
        lines.append(fill(names, 108, initial_indent=f"  {section:<12}", subsequent_indent=" " * 14))
    return "\n".join([*lines, "`ingot init` explains each of them, `ingot config show` shows their values."])
