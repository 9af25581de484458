"""`ingot validate`: what is wrong with a run, before it waits in a queue or trains for hours."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.options import AsJson, ConfigFile, RecipeName, SettingsCommand, given_settings
from ingot.cli.verbs import app
from ingot.console.entry import process_start, warn
from ingot.console.output import print_json


@app.command("validate", cls=SettingsCommand)
def validate(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    world_size: Annotated[int, typer.Option("--world-size", metavar="N", help="Ranks that will train together.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also take one step on this machine, which leaves nothing behind.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Check the settings, data, plan and folder of a run. Exit code 0: nothing or notes, 2: warnings, 1: it cannot start."""
    from ingot.cli.configs import resolve
    from ingot.errors import ConfigError
    from ingot.preflight.findings import BLOCKED, exit_code
    from ingot.preflight.validate import report_lines, report_record
    from ingot.preflight.validate import validate as check
    from ingot.runtime.ranks import ranks_from_environment

    try:
        resolved = resolve(recipe, config, given_settings(ctx), max(1, world_size), warn)
    except ConfigError as error:
        error.exit_code = BLOCKED  # of an instance: a config that cannot be read is a run that cannot start
        raise
    report = check(resolved.config, world_size, began=process_start())
    if probe and not report.findings.blocked:
        from ingot.preflight.validate import add_probe

        add_probe(report)
    if ranks_from_environment().first:
        print_json(report_record(report, strict)) if as_json else print("\n".join(report_lines(report)))
    return exit_code(report.findings, strict)
