"""The arms of the frontier's ablation: each is a run that can begin, and each leaves something out."""

from pathlib import Path

from ingot.backends.open import open_backend
from ingot.config.loading import load_config
from ingot.experiments.sweep import make_arms
from ingot.runtime.ranks import Ranks

ARMS = Path(__file__).parents[2] / "benchmarks" / "frontier-ablations.yaml"
SMALL = {"model.width": 32, "model.layers": 4, "model.heads": 4, "training.device": "cpu"}


def test_every_arm_is_the_recipe_without_something_and_can_begin():
    seen = {}
    for name_of_arm, settings in make_arms([], ARMS).items():
        python = {}
        for name, value in {**SMALL, **settings}.items():
            section, _, key = name.partition(".")
            python.setdefault(section, {})[key] = value
        config = load_config(recipe="golf/frontier", python=python, environment={}).config
        open_backend(config, 64, Ranks()).close()
        seen[name_of_arm] = config.model_dump_json()
    assert next(iter(seen)) == "frontier" and len(set(seen.values())) == len(seen) >= 14
