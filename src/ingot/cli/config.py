"""`ingot config`: the settings a run would have, and what settings there are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ingot.cli.options import AsJson, ConfigFile, OutputFile, RecipeName, SettingsCommand, given_settings
from ingot.cli.verbs import app
from ingot.console.entry import warn
from ingot.console.output import print_columns, print_json, write_file

verbs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(verbs, name="config", help="Show the settings of a run and where they come from.")


@verbs.command("show", cls=SettingsCommand)
def show(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from their defaults.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print every setting, its value and where the value came from."""
    from ingot.cli.configs import resolve
    from ingot.config.fields import leaf_values
    from ingot.config.text import format_value

    resolved = resolve(recipe, config, given_settings(ctx), told=warn)
    leaves = [(path, value, resolved.origins[".".join(path)]) for path, value in leaf_values(resolved.config)]
    leaves = [leaf for leaf in leaves if not changed or leaf[2] != "default"]
    if as_json:
        tree: dict[str, Any] = {}
        for path, value, _ in leaves:
            branch = tree
            for key in path[:-1]:
                branch = branch.setdefault(key, {})
            branch[path[-1]] = value
        print_json({"recipe": resolved.recipe, "config": tree, "origins": {".".join(path): origin for path, _, origin in leaves}})
        return
    rows: list[tuple[str, ...]] = []
    for path, value, origin in leaves:
        if (path[0],) not in rows:
            rows.append((path[0],))
        rows.append(("  " + ".".join(path[1:]), format_value(value), origin))
    print_columns(rows)


@verbs.command("schema")
def schema() -> None:
    """Print the JSON schema of config files, for editors."""
    from ingot.config.render import json_schema

    print_json(json_schema())


@verbs.command("docs")
def docs(output: OutputFile = None) -> None:
    """Print docs/configuration.md, made from the schema."""
    from ingot.config.render import markdown

    if output is None:
        print(markdown(), end="")
    else:
        write_file(output, markdown(), force=True)
