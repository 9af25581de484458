"""The recipes inside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config import loading as recipes
from ingot.config.loading import find_recipe, list_recipes, load_config
from ingot.errors import ConfigError


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_every_recipe_loads_and_has_one_line_of_description(recipe: recipes.Recipe) -> None:
    assert load_config(recipe.name, environment={}).recipe == recipe.name
    assert recipe.description.endswith(".") and len(recipe.description) <= 110


def test_the_first_recipes_are_there_by_name() -> None:
    assert {"demo", "gpt2", "shakespeare-char"} <= {recipe.name for recipe in list_recipes()}


def test_an_unknown_recipe_suggests_the_nearest_and_lists_all() -> None:
    with pytest.raises(
        ConfigError,
        match=r"did you mean shakespeare-char\? .* auto, demo, frontier, golf",
    ):
        find_recipe("shakespear-char")
    with pytest.raises(ConfigError, match=r"--config mine\.yaml"):
        find_recipe("mine.yaml")
    with pytest.raises(ConfigError, match="unknown recipe"):
        find_recipe("../recipes/demo")


def test_recipes_in_folders_are_named_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes" / "golf").mkdir(parents=True)
    (tmp_path / "recipes" / "golf" / "small.yaml").write_text("# A small one.\nbase: golf/large\nmodel: {layers: 2}\n")
    (tmp_path / "recipes" / "golf" / "large.yaml").write_text("# A large one.\ntraining: {max_steps: 7}\n")
    monkeypatch.setattr(recipes.resources, "files", lambda package: tmp_path)
    assert [(recipe.name, recipe.description) for recipe in list_recipes()] == [
        ("golf/large", "A large one."),
        ("golf/small", "A small one."),
    ]
    resolved = load_config("golf/small", environment={})
    assert (resolved.config.model.layers, resolved.config.training.max_steps) == (2, 7)
    assert resolved.origins["training.max_steps"] == "recipe golf/large"


def test_the_gpt2_recipe_has_the_published_shape_and_schedule() -> None:
    config = load_config("gpt2", environment={}).config
    assert (config.model.layers, config.model.heads, config.model.width, config.model.vocab_size) == (12, 12, 768, 50304)
    assert (config.rows_per_step, config.data.seq_len, config.training.max_steps) == (480, 1024, 600000)


def test_the_character_recipe_takes_64_rows_a_step() -> None:
    assert load_config("shakespeare-char", environment={}).config.rows_per_step == 64


@pytest.mark.parametrize("name", ["demo", "auto"])
def test_short_recipes_evaluate_six_times_in_their_budget(name: str) -> None:
    config = load_config(name, environment={}).config
    assert (config.evaluation.points, config.evaluation.every) == (6, 0) and config.budget.seconds
