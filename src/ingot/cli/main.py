"""The `ingot` command: its table of commands, and its exit codes.

A command's module is imported only when the command is used, and no module has heavy top-level imports, so that `ingot --help`
answers in a fraction of a second without loading torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ingot.cli.arguments import SettingsCommand, TwoSides
from ingot.console.entry import explained, stop_exit_code
from ingot.console.output import json_printed, print_json
from ingot.errors import NO_RESTART, ConfigError, NotFinite
from ingot.runtime.machine import made_by
from ingot.runtime.signals import listening_early

# Maps each command to its module in ingot.cli and its function, or a group of commands to its module and its typer app.
GROUPS = {
    "Train and use a model": {
        "train": "train.train",
        "sweep": "train.sweep",
        "validate": "train.validate",
        "plan": "plan.plan",
        "eval": "use.evaluate",
        "generate": "use.generate",
        "serve": "use.serve",
        "export": "export.export",
        "import": "export.import_weights",
    },
    "Inspect runs": {
        "status": "status.status",
        "stop": "status.stop",
        "ui": "status.ui",
        "plot": "status.plot",
        "report": "report.report",
        "compare": "status.compare",
    },
    "Prepare text": {"data": "data.commands"},
    "Compete": {"golf": "golf.golf_commands"},
    "Settings": {"recipes": "recipes.recipe_commands", "config": "recipes.config_commands", "init": "recipes.init"},
}
COMMANDS = {name: place for commands in GROUPS.values() for name, place in commands.items()}
WITH_SETTINGS = ("train", "sweep", "validate", "plan", "init")
WITH_DEVICE_OPTION = ("eval", "generate", "serve", "export", "ui")  # their error messages name --device, not training.device
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
UsageError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException, which some versions of typer bundle


class CommandGroup(TyperGroup):
    """The top-level command group: imports each command when it is first used, and lists all commands by topic."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *(name for name in self.commands if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module, _, attribute = COMMANDS[cmd_name].partition(".")
            command = getattr(import_module(f"ingot.cli.{module}"), attribute)
            if not isinstance(command, typer.Typer):
                single = typer.Typer(add_completion=False, rich_markup_mode=None)
                kind = SettingsCommand if cmd_name in WITH_SETTINGS else TwoSides if cmd_name == "compare" else None
                single.command(cmd_name, cls=kind, context_settings=CONTEXT)(command)
                command = single
            self.commands[cmd_name] = typer.main.get_command(command)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.get_command(ctx, name).get_short_help_str(1000)) for name in names])


CONTEXT = {"max_content_width": 110, "help_option_names": ["--help", "-h"]}
app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=CONTEXT,
    epilog="Start with `ingot train --recipe demo`. `ingot COMMAND --help` explains a command.",
)


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
    """Run the command line `args` (default: sys.argv) and exit with the command's exit code."""
    args = list(sys.argv[1:] if args is None else args)

    def setting_name(setting: str) -> str:
        return "--device" if setting == "training.device" and args[0] in WITH_DEVICE_OPTION else setting

    json_printed.set(False)

    def advice(words: str) -> str:
        own = "undo the changes, resume the run with its saved settings (ingot train RUN) or choose another {0}"
        return own if words == "undo the changes or choose another {0}" else words

    stopped = stop_exit_code(args)
    ending = explained("ingot", setting_name, advice, interrupted="error: interrupted", every_rank=True, stopped=stopped)
    with ending as outcome, listening_early(args[:1] == ["train"]):
        outcome.code = call(args)
    code = NO_RESTART if isinstance(outcome.error, NotFinite) and "TORCHELASTIC_RUN_ID" in os.environ else outcome.code
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    # --json promises exactly one document: the result, or the error if there is no result.
    reported = "--json" not in args or json_printed.get() or (restarts and code == 1)
    if outcome.error is not None and not reported and os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print_json({"error": outcome.error.render(setting_name, advice), "exit_code": outcome.code})
    sys.exit(code)


def call(args: list[str]) -> int:
    """Run a command and return its exit code; raise usage errors as ConfigError."""
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
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
        if message.startswith("Usage:"):  # `ingot` without arguments prints the full help
            print(message, file=sys.stderr)
            return int(error.exit_code)
        if message.startswith("No such command"):
            word, path = message.split("'")[1], error.ctx.command_path
            close = COMMAND_BY_FOREIGN_NAME.get(word) if path == "ingot" else None
            close = close or next(iter(get_close_matches(word, error.ctx.command.list_commands(error.ctx), n=1)), None)
            hint = f"did you mean '{path} {close}'?" if close else f"{path} --help lists all commands"
            message = f"unknown command {word!r}{'' if path == 'ingot' else f' of {path}'}; {hint}"
        mistake = ConfigError(message)
        mistake.exit_code = error.exit_code
        raise mistake from None
