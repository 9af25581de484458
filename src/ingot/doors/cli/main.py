"""The `ingot` command: its verbs, its help, and how errors become one line and an exit code.

Verb files import nothing heavy at their top, so that `ingot --help` answers at once and without torch.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ingot.errors import INTERRUPTED, IngotError, PeerLost

VERBS = {
    "Train and use a model": ("train", "eval", "generate", "export", "import"),
    "Prepare text": ("data",),
    "Compete": ("golf",),
    "Settings": ("recipes", "config", "init"),
}
MODULES = {"import": "imports"}  # a verb that is a word of Python has another name as a file
PATIENCE_SECONDS = 10
BROKEN_PIPE = 141  # what shells report when a reader such as `head` has left
UsageError: type[Any] = typer.BadParameter.__mro__[2]  # click's ClickException, wherever this version of typer keeps click


class VerbGroup(TyperGroup):
    """The list of verbs in `ingot --help`, in groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in VERBS.items():
            rows = [(name, self.commands[name].get_short_help_str(100)) for name in names if name in self.commands]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


app = typer.Typer(
    cls=VerbGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
    epilog="Start with `ingot train --recipe demo`. Each verb explains itself with --help.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"ingot {version('ingot')}")
        except PackageNotFoundError:
            print("ingot, not installed as a package")
        raise typer.Exit


@app.callback()
def ingot(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pre-train small GPTs to the lowest bits per byte a budget allows."""


for _verb in (verb for verbs in VERBS.values() for verb in verbs):
    import_module(f"ingot.doors.cli.{MODULES.get(_verb, _verb)}").register(app)


def run(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to fail
    try:
        code = _call(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it closes stdout
        code = BROKEN_PIPE if error.errno == errno.EPIPE else _fail(str(error.strerror), 1)
    sys.exit(code)


def _call(args: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("ingot", args) as context:
            outcome = command.invoke(context)
        return outcome if isinstance(outcome, int) else 0
    except typer.Exit as exit:
        return exit.exit_code
    except PeerLost as error:
        time.sleep(PATIENCE_SECONDS)  # the rank that knows why speaks first; whoever started the ranks then ends this one
        return error.exit_code
    except IngotError as error:
        return _fail(str(error), error.exit_code)
    except UsageError as error:
        return _fail(error.format_message(), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)


def _fail(message: str, code: int) -> int:
    asked_nothing = message.startswith("Usage:")  # a bare `ingot` gets the whole help
    print(message if asked_nothing else f"ingot: error: {' '.join(message.split())}", file=sys.stderr)
    return code
