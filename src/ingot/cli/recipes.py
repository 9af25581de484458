"""`ingot recipes`: the recipes inside the package."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_columns, print_json

verbs = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(verbs, name="recipes", help="List the recipes, or show one.")


@verbs.callback()
def list_all(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the recipes, or show one."""
    if ctx.invoked_subcommand is not None:
        return
    from ingot.config.loading import list_recipes

    recipes = list_recipes()
    if as_json:
        print_json([{"name": recipe.name, "description": recipe.description, "path": str(recipe.path)} for recipe in recipes])
    else:
        print_columns([(recipe.name, recipe.description) for recipe in recipes])


@verbs.command("show")
def show(name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a recipe.")], as_json: AsJson = False) -> None:
    """Print the YAML of a recipe."""
    from ingot.config.loading import find_recipe

    recipe = find_recipe(name)
    text = recipe.path.read_text(encoding="utf-8")
    if as_json:
        print_json({"name": recipe.name, "description": recipe.description, "path": str(recipe.path), "yaml": text})
    else:
        print(text, end="")
