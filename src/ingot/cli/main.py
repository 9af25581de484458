"""The `ingot` command: its table of commands, and how it ends.

Files of commands import nothing heavy at their top, so `ingot --help` answers in a fraction of a second and without torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ingot.cli import data, export, inspect, settings, train, use
from ingot.cli.import_weights import import_weights
from ingot.cli.options import SettingsCommand
from ingot.console.entry import explained, stop_exit_code
from ingot.console.output import json_printed, print_json
from ingot.errors import ConfigError
from ingot.runtime.machine import made_by
from ingot.runtime.signals import listening_early

GROUPS: dict[str, dict[str, Callable[..., Any] | typer.Typer]] = {
    "Train and use a model": {
        "train": train.train,
        "sweep": train.sweep,
        "validate": train.validate,
        "eval": use.evaluate,
        "generate": use.generate,
        "serve": use.serve,
        "export": export.export,
        "import": import_weights,
    },
    "Inspect runs": {
        "status": inspect.status,
        "stop": inspect.stop,
        "ui": inspect.ui,
        "plot": inspect.plot,
        "report": inspect.report,
        "compare": inspect.compare,
    },
    "Prepare text": {"data": data.commands},
    "Compete": {"golf": export.golf_commands},
    "Settings": {"recipes": settings.recipe_commands, "config": settings.config_commands, "init": settings.init},
}
CLASSES: dict[str, type[TyperCommand]] = {
    **dict.fromkeys(("train", "sweep", "validate", "init"), SettingsCommand),
    "compare": inspect.TwoSides,
}
COMMANDS = [name for commands in GROUPS.values() for name in commands]
WITH_DEVICE_OPTION = ("eval", "generate", "serve", "export", "ui")  # errors about training.device name --device there
COMMAND_BY_FOREIGN_NAME = {
    **dict.fromkeys(("sample", "predict"), "generate"),
    **dict.fromkeys(("evaluate", "score", "test"), "eval"),
    **dict.fromkeys(("fit", "resume", "pretrain", "finetune"), "train"),
    **dict.fromkeys(("list", "ls", "runs"), "status"),
    "watch": "status --watch",
    **dict.fromkeys(("draw", "chart"), "plot"),
    **{name: f"data {name}" for name in ("prepare", "download", "verify", "convert")},
    "tokenize": "data prepare",
    "batch-generate": "generate --input",
}
UsageError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException, wherever this version of typer keeps click


class CommandGroup(TyperGroup):
    """The top-level command, whose help lists the commands in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in names])


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110, "help_option_names": ["--help", "-h"]},
    epilog="Start with `ingot train --recipe demo`. Each command explains itself with --help.",
)
for _commands in GROUPS.values():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name, cls=CLASSES.get(_name))(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(made_by())
        raise typer.Exit


@app.callback()
def ingot(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pre-train small GPTs to the lowest bits per byte a budget allows."""


def run(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    args = list(sys.argv[1:] if args is None else args)
    setting_name = _option_name if args[:1] and args[0] in WITH_DEVICE_OPTION else str
    json_printed.set(False)
    ending = explained("ingot", setting_name, interrupted="error: interrupted", every_rank=True, stopped=stop_exit_code(args))
    with ending as outcome, listening_early(args[:1] == ["train"]):
        outcome.code = call(args)
    # --json promises one document: the result, or the error where there is none.
    reported = "--json" not in args or json_printed.get()
    if outcome.error is not None and not reported and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print_json({"error": outcome.error.render(setting_name), "exit_code": outcome.code})
    sys.exit(outcome.code)


def call(args: list[str]) -> int:
    """Run a command and return its exit code."""
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    options = {word for word in args[1:] if word.startswith("-")}
    if args[:1] == ["status"] and options <= {"--watch", "--json"}:
        # Typer loads pydantic to parse arguments: 0.3 of 0.5 seconds of a command that scripts call often.
        folders = [Path(word) for word in args[1:] if word not in options]
        inspect.status(folders, "--watch" in options, "--json" in options)
        return 0
    command = typer.main.get_command(app)
    if "_INGOT_COMPLETE" in os.environ:
        command(prog_name="ingot")
    try:
        with command.make_context("ingot", args) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else 0
    except typer.Exit as exit:
        return exit.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except UsageError as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # a bare `ingot` gets the whole help
            print(message, file=sys.stderr)
            return int(error.exit_code)
        if message.startswith("No such command") and args[0] not in COMMANDS:
            message = _unknown_command(args[0])
        elif message.startswith("No such command"):
            message = _unknown_subcommand(error.ctx, message.split("'")[1])
        mistake = ConfigError(message)
        mistake.exit_code = error.exit_code
        raise mistake from None


def _option_name(setting: str) -> str:
    return "--device" if setting == "training.device" else setting


def _unknown_command(word: str) -> str:
    """Return the error message for an unknown command."""
    close = COMMAND_BY_FOREIGN_NAME.get(word) or next(iter(get_close_matches(word, COMMANDS, n=1)), None)
    return f"unknown command {word!r}; " + (f"did you mean 'ingot {close}'?" if close else "ingot --help lists all commands")


def _unknown_subcommand(group: Any, word: str) -> str:
    """Return the error message for an unknown command of a group such as `ingot data`."""
    names = group.command.list_commands(group)
    close = next(iter(get_close_matches(word, names, n=1)), None)
    hint = f"did you mean '{group.command_path} {close}'?" if close else f"choose one of {', '.join(names)}"
    return f"unknown command {word!r} of {group.command_path}; {hint}"
