"""`ingot init`: a config file with every setting, its meaning and a recipe's value."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.options import AsJson, OutputFile, SettingsCommand, given_settings
from ingot.cli.verbs import app
from ingot.console.output import print_json, write_file


@app.command("init", cls=SettingsCommand)
def init(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Recipe whose values are written.")] = "demo",
    output: OutputFile = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a config file with every setting explained."""
    from ingot.config.loading import load_config
    from ingot.config.render import commented_yaml

    config = load_config(recipe, None, given_settings(ctx), environment={}).config
    text = commented_yaml(
        config, f"Every setting of a run, with the values of the recipe {recipe}. Train with it: ingot train --config FILE"
    )
    if output is not None:
        write_file(output, text, force)
    if as_json:
        print_json({"recipe": recipe, "path": str(output) if output else None, "config": config.model_dump()})
    else:
        print(
            text if output is None else f"{output}: every setting, with the values of the recipe {recipe}",
            end="" if output is None else "\n",
        )
