"""Configs and the schema as text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as drawn
from hypothesis import strategies as st

from ingot.config.fields import known, settings
from ingot.config.loading import load_config
from ingot.config.render import commented_yaml, dump_yaml, json_schema, markdown
from ingot.config.schema import Config
from ingot.config.text import format_value, parse_yaml, plain_data

ROOT = Path(__file__).parents[2]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["null", "None", "1e3", "true", "a: b", "#", "- x", "~"]
)
DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=6,
)


def load_text(text: str, folder: Path) -> Config:
    file = folder / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file=file, environment={}).config


def config_of(**sections: dict[str, Any]) -> Config:
    return load_config(python={"training": {"max_steps": 5}, **sections}, environment={}).config


@given(DATA)
def test_any_value_survives_being_written_and_read(value: Any) -> None:
    assert plain_data(parse_yaml(format_value(value), "text")) == value


@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.long)])
def test_written_configs_load_back_equal(tmp_path: Path, examples: int) -> None:
    @drawn(max_examples=examples)
    @given(
        layers=st.integers(1, 99),
        rate=st.floats(0, 1e9),
        prompt=TEXT,
        output=st.none() | TEXT.filter(lambda text: "\0" not in text),
        mine=st.none() | st.dictionaries(TEXT, DATA, max_size=3),
    )
    def load_back_equal(layers: int, rate: float, prompt: str, output: str | None, mine: dict[str, Any] | None) -> None:
        config = config_of(
            model={"layers": layers} if mine is None else {"layers": layers, "file": "mine.py", "settings": mine},
            optimizer={"learning_rate": rate},
            evaluation={"sample_prompt": prompt},
            training={"max_steps": 5, "output_dir": output},
        )
        assert load_text(dump_yaml(config), tmp_path) == config
        assert load_text(commented_yaml(config, "A heading."), tmp_path) == config

    load_back_equal()


def test_the_yaml_of_a_run_names_the_origin_of_every_value(tmp_path: Path) -> None:
    words = {"model.file": "mine.py", "model.settings.depth": "3"}
    resolved = load_config("demo", overrides=words, environment={"INGOT_DATA__SEED": "7"})
    text = dump_yaml(resolved.config, resolved.origins)
    assert "    depth: 3  # command line\n" in text
    assert "  seed: 7  # environment INGOT_DATA__SEED\n" in text
    assert text.count("  # ") == len(resolved.origins)
    assert load_text(text, tmp_path) == resolved.config


def test_an_origin_cannot_break_the_file_it_is_written_into(tmp_path: Path) -> None:
    config = config_of()
    assert load_text(dump_yaml(config, {"data.seed": "file a\nmodel: 3\x07"}), tmp_path) == config


def test_other_yaml_readers_see_the_same_numbers() -> None:
    config = config_of(optimizer={"epsilon": 1e-12, "learning_rate": 1e22})
    assert yaml.safe_load(dump_yaml(config)) == config.model_dump()


def test_the_commented_yaml_explains_every_setting_and_stays_narrow() -> None:
    text = commented_yaml(config_of(), "A heading.")
    flat = " ".join(line.strip().removeprefix("# ") for line in text.splitlines())
    for setting in settings().values():
        assert (
            f"{setting.description} ({setting.allowed}; default {format_value(setting.default)}) {setting.path.split('.')[1]}: "
            in flat
        )
    assert max(map(len, text.splitlines())) <= 100


def test_the_json_schema_names_every_setting_and_base() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["properties"]["base"]["type"] == "string" and schema["additionalProperties"] is False
    described = {name for part in schema["$defs"].values() for name, value in part["properties"].items() if value["description"]}
    in_lists = {name for setting in settings().values() for name in setting.items}
    assert described == {path.partition(".")[2] for path in known()} | in_lists


def test_every_setting_is_described_and_its_default_is_finite() -> None:
    for family in ("gpt2", "file"):
        for setting in settings(family).values():
            assert setting.description.endswith("."), setting.path
            assert not isinstance(setting.default, float) or math.isfinite(setting.default)


def test_the_committed_configuration_page_is_up_to_date() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == markdown(), "run: ingot config docs -o docs/configuration.md"
