"""Commands about settings: `ingot recipes`, `ingot config` and `ingot init`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ingot.cli.arguments import (
    AsJson,
    CommandList,
    ConfigFile,
    OutputFile,
    RecipeName,
    SettingsCommand,
    given_settings,
    resolve_config,
)
from ingot.console.entry import warn
from ingot.console.output import print_columns, print_json, write_file

config_commands = typer.Typer(
    cls=CommandList, no_args_is_help=True, rich_markup_mode=None, help="Show the settings of a run and where they come from."
)
recipe_commands = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@config_commands.command("show", cls=SettingsCommand)
def show_config(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    changed: Annotated[bool, typer.Option("--changed", help="Hide settings that are left at their defaults.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print every setting, its value and where the value came from."""
    from ingot.config.fields import leaf_values
    from ingot.config.text import format_value

    resolved = resolve_config(recipe, config, given_settings(ctx), warn=warn)
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
        rows += [(path[0],)] if (path[0],) not in rows else []
        rows.append(("  " + ".".join(path[1:]), format_value(value), origin))
    print_columns(rows)


@config_commands.command("schema")
def print_schema() -> None:
    """Print the JSON schema of config files, for editors."""
    from ingot.config.render import json_schema

    print_json(json_schema())


@config_commands.command("docs")
def print_docs(output: OutputFile = None) -> None:
    """Print docs/configuration.md, generated from the schema."""
    from ingot.config.render import markdown

    print(markdown(), end="") if output is None else write_file(output, markdown(), force=True)


@recipe_commands.callback()
def list_recipes(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the recipes, or print the YAML of one."""
    if ctx.invoked_subcommand is not None:
        return
    from ingot.config.loading import list_recipes

    recipes = list_recipes()
    print_json(recipes) if as_json else print_columns([(recipe.name, recipe.description) for recipe in recipes])


@recipe_commands.command("show")
def show_recipe(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a recipe.")], as_json: AsJson = False) -> None:
    """Print the YAML of a recipe."""
    from ingot.config.loading import find_recipe

    recipe = find_recipe(name)
    text = recipe.path.read_text(encoding="utf-8")
    print_json({**vars(recipe), "yaml": text}) if as_json else print(text, end="")


def init(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Recipe to take the values from.")] = "demo",
    output: OutputFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a config file that explains every setting."""
    from ingot.config.loading import load_config
    from ingot.config.render import commented_yaml

    config = load_config(recipe, None, given_settings(ctx), environment={}).config
    heading = f"Every setting of a run, with the values of the recipe {recipe}. Train with it: ingot train --config FILE"
    text = commented_yaml(config, heading)
    if output is not None:
        write_file(output, text, force)
    if as_json:
        print_json({"recipe": recipe, "path": output, "config": config.model_dump()})
    elif output is None:
        print(text, end="")
    else:
        print(f"{output}: every setting, with the values of the recipe {recipe}")
