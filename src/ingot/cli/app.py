"""The command line that typer makes of the verbs: their options, their help, and usage errors as errors of ours.

Verb files import nothing heavy at their top, so that `ingot --help` answers at once and without torch.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from ingot.cli.main import MODULES, VERBS
from ingot.cli.verbs import app
from ingot.errors import ConfigError
from ingot.runtime.machine import made_by

UsageError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException, wherever this version of typer keeps click


def _print_version(wanted: bool) -> None:
    if wanted:
        print(made_by())
        raise typer.Exit


def _install_completion(wanted: bool) -> None:
    if wanted:
        from ingot.cli.completion import install

        print(f"written: {', '.join(map(str, install()))}; completion begins with the next shell")
        raise typer.Exit


def _show_completion(wanted: bool) -> None:
    if wanted:
        from ingot.cli.completion import script

        print(script()[1], end="")
        raise typer.Exit


@app.callback()
def ingot(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    install: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            callback=_install_completion,
            is_eager=True,
            help="Let this shell complete verbs and settings.",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show-completion", callback=_show_completion, is_eager=True, help="Print the lines that do so."),
    ] = False,
) -> None:
    """Pre-train small GPTs to the lowest bits per byte a budget allows."""


for _verb in (verb for verbs in VERBS.values() for verb in verbs):
    import_module(f"ingot.cli.{MODULES.get(_verb, _verb)}")  # which adds itself


# What verbs are called elsewhere.
ELSEWHERE = {
    "sample": "generate",
    "predict": "generate",
    "evaluate": "eval",
    "score": "eval",
    "test": "eval",
    "fit": "train",
    "resume": "train",
    "pretrain": "train",
    "finetune": "train",
    "list": "runs",
    "ls": "runs",
    "draw": "plot",
    "chart": "plot",
    "prepare": "data prepare",
    "download": "data download",
    "verify": "data verify",
    "convert": "data convert",
}


def _meant(word: str) -> str:
    """What is said of a verb that there is not."""
    verbs = [verb for names in VERBS.values() for verb in names]
    close = ELSEWHERE.get(word) or next(iter(get_close_matches(word, verbs, n=1)), None)
    return f"there is no verb {word!r}; {f'did you mean ingot {close}?' if close else 'ingot --help lists them'}"


def _meant_of(group: typer.Context, word: str) -> str:
    """The same of a verb that begins with a word of its group, such as `ingot data`."""
    verbs = group.command.list_commands(group)  # type: ignore[attr-defined]
    close = next(iter(get_close_matches(word, verbs, n=1)), None)
    known = f"did you mean {group.command_path} {close}?" if close else f"it has {', '.join(verbs)}"
    return f"there is no verb {word!r} of {group.command_path}; {known}"


def command_line() -> Any:
    """The whole command line with its verbs."""
    return typer.main.get_command(app)


def call(args: list[str]) -> int:
    """Run a verb and return its exit code."""
    command = command_line()
    try:
        with command.make_context("ingot", args) as context:
            code = command.invoke(context)
        return code if isinstance(code, int) else 0
    except typer.Exit as exit:
        return exit.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except UsageError as error:
        said = error.format_message()
        if said.startswith("Usage:"):  # a bare `ingot` gets the whole help
            print(said, file=sys.stderr)
            return int(error.exit_code)
        if said.startswith("No such command") and args[0] not in MODULES:
            said = _meant(args[0]) if error.ctx is None or error.ctx.parent is None else _meant_of(error.ctx, said.split("'")[1])
        mistake = ConfigError(said)
        mistake.exit_code = error.exit_code
        raise mistake from None
