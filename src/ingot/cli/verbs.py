"""The app to which every verb adds itself: `@app.command("NAME")` above the function of a file that app.py imports."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ingot.cli.main import VERBS


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
    context_settings={"max_content_width": 110, "help_option_names": ["--help", "-h"]},
    epilog="Start with `ingot train --recipe demo`. Each verb explains itself with --help.",
)
