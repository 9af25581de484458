"""The recipes inside the package: YAML files that set what differs from the defaults, named by their path below recipes/."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

from ingot.errors import ConfigError


@dataclass(frozen=True)
class Recipe:
    """A recipe: its name, the one line its file begins with, and the file."""

    name: str
    description: str
    path: Path


def list_recipes() -> list[Recipe]:
    """Every recipe, by name."""
    root = Path(str(resources.files("ingot.config") / "recipes"))
    found = []
    for path in root.rglob("*.yaml"):
        first_line = path.read_text(encoding="utf-8").partition("\n")[0]
        found.append(Recipe(path.relative_to(root).with_suffix("").as_posix(), first_line.strip().lstrip("# "), path))
    return sorted(found, key=lambda recipe: recipe.name)


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; an unknown name is an error that lists them."""
    recipes = {recipe.name: recipe for recipe in list_recipes()}
    if name in recipes:
        return recipes[name]
    close = get_close_matches(name, recipes, n=1)
    meant = f"; did you mean {close[0]}?" if close else ";"
    if name.endswith((".yaml", ".yml")):
        meant = f"; a file of your own is given with --config {name};"
    raise ConfigError(f"unknown recipe {name}{meant} there are {', '.join(recipes)}")
