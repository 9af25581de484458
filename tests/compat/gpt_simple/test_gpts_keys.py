"""gpt-simple's keys: its names and defaults, values as people write them, and every mistake told with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from original import TheirRun

from ingot.compat.gpt_simple.config import (
    KEYS_OF_SETTINGS,
    CurriculumPhase,
    DataConfig,
    GptSimpleConfig,
    ModelConfig,
    TrainingConfig,
    all_keys,
    is_gpt_simple,
    read_config,
    template,
)
from ingot.compat.gpt_simple.translate import translate
from ingot.config.fields import settings
from ingot.errors import ConfigError


def written(folder: Path, text: str, name: str = "c.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_there_are_the_59_keys_and_each_is_said_to_become_something() -> None:
    assert len(all_keys()) == 59
    # What is read, how `validate` judges the plan, and what has no effect: these are not settings of a run.
    no_setting = ["data.format", "data.num_workers", "data.allow_budget_mismatch"]
    assert sorted(all_keys()) == sorted([*KEYS_OF_SETTINGS.values(), *no_setting])
    known = settings("llama")
    assert [path for path in KEYS_OF_SETTINGS if path not in known] == []


def test_keys_and_defaults_are_the_originals(their_run: TheirRun) -> None:
    assert GptSimpleConfig().to_dict() == their_run.settings


def test_numbers_words_and_empty_sections_are_read_as_people_write_them(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
model:
data: {path: 123, max_length: 2_048}
optimizer:
  learning_rate: 3e-4
  weight_decay: 1
training:
  max_steps: 1e3
  mixed_precision: no
  compile: off
  max_eval_batches: null
  keep_last_k: ~
""",
    )
    config = read_config(file)
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay, config.training.max_steps) == (3e-4, 1.0, 1000)
    assert (config.training.mixed_precision, config.training.compile, config.training.keep_last_k) == ("no", False, None)
    assert (config.data.path, config.data.max_length, config.model) == ("123", 2048, ModelConfig())


def test_aliases_and_merged_mappings_are_read_as_yaml_means_them(tmp_path: Path) -> None:
    text = """
data:
  curriculum:
    - {duration_tokens: 100, mix: &even {a: 1, b: 1}}
    - {duration_tokens: 200, mix: *even}
    - {duration_tokens: 300, mix: {<<: *even, b: 3}}
"""
    phases = read_config(written(tmp_path, text)).data.curriculum
    assert phases is not None
    assert [phase.mix for phase in phases] == [{"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}]
    with pytest.raises(ConfigError, match="recursive"):
        read_config(written(tmp_path, "data: &a {path: *a}"))


@pytest.mark.parametrize("word", ["no", "False", '"no"', "off"])
def test_no_mixed_precision_is_said_in_any_way(word: str, tmp_path: Path) -> None:
    assert read_config(written(tmp_path, f"training: {{mixed_precision: {word}}}")).training.mixed_precision == "no"


def test_json_is_read_by_its_suffix_and_a_saved_config_is_the_same_again(tmp_path: Path) -> None:
    config = GptSimpleConfig(data=DataConfig(curriculum=[CurriculumPhase(100, {"a": 3, "b": 1})]), model=ModelConfig(n_layer=3))
    config.save(tmp_path / "c.json")
    assert GptSimpleConfig.from_file(tmp_path / "c.json") == config
    assert json.loads((tmp_path / "c.json").read_text())["data"]["curriculum"][0]["mix"] == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model: {n_layers: 3}", "unknown key model.n_layers (in FILE); did you mean model.n_layer?"),
        ("model: {width: 64}", "unknown key model.width (in FILE); did you mean model.n_embd?"),
        ("training: {learning_rate: 1}", "unknown key training.learning_rate (in FILE); did you mean optimizer.learning_rate?"),
        ("trainin: {seed: 1}", "unknown section trainin (in FILE); the sections are model"),
        ("model: {norm: foo}", "model.norm=foo must be rmsnorm or layernorm (in FILE)"),
        ("model: {rope_scaling_type: yarn}", "model.rope_scaling_type=yarn must be linear, ntk or null (in FILE)"),
        ("optimizer: {learning_rate: 0}", "optimizer.learning_rate=0 must be a number > 0 (in FILE)"),
        ("optimizer: {max_grad_norm: 0}", "optimizer.max_grad_norm=0 must be a number > 0 (in FILE)"),
        ("optimizer: {beta2: 1}", "optimizer.beta2=1 must be a number >= 0 and < 1 (in FILE)"),
        ("training: {eval_steps: 0}", "training.eval_steps=0 must be a whole number >= 1 (in FILE)"),
        ("training: {keep_last_k: 0}", "training.keep_last_k=0 must be a whole number >= 1 or null (in FILE)"),
        ("training: {max_steps: many}", "training.max_steps=many must be a whole number >= 1 (in FILE)"),
        ("training: {compile: 3}", "training.compile=3 must be true or false (in FILE)"),
        ("data: {format: foo}", "data.format=foo must be pretokenized or jsonl (in FILE)"),
        (
            "data: {overlap_size: 1500}",
            "data.overlap_size=1500 is more than half of data.max_length=2048; set it to 1024 or less",
        ),
        ("data: {format: jsonl, max_length: 256}", "data.overlap_size=256 is more than half of data.max_length=256"),
        ("model: {n_embd: 100}", "model.n_head=12 must divide model.n_embd=100; try 10"),
        (f"model: {{n_embd: {10**30}}}", f"model.n_head=12 must divide model.n_embd={10**30}; try 10"),
        ("optimizer: {warmup_steps: 1000}", "optimizer.warmup_steps=1000 must be less than training.max_steps=1000"),
        ("data: {curriculum: [{mix: {a: 1}}]}", "data.curriculum.0: a key is missing or unknown"),
        ("data: {curriculum: [{duration_tokens: 5, mix: {a: 0}}]}", "at least one bucket with a positive weight"),
        ("data: {curriculum: [{duration_tokens: -5, mix: {a: 1}}]}", "duration_tokens=-5 must be a whole number >= 1"),
        ("data: {curriculum: [{duration_tokens: 5, mix: {}}]}", "at least one bucket"),
        (
            "data: {format: jsonl, curriculum: [{duration_tokens: 5, mix: {a: 1}}]}",
            "data.curriculum requires data.format=pretokenized",
        ),
        ("- 3", "is not a config: it needs sections"),
        ("model: [", "is not valid YAML"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_to_do(text: str, told: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_config(file)
    assert told.replace("FILE", str(file)) in str(error.value)


def test_an_overlap_that_nobody_set_is_no_mistake_where_windows_were_made_before(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, "data: {path: tokens, max_length: 256}")).data.max_length == 256


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"n_layers.*norm=foo.*seed=-1"):
        read_config(written(tmp_path, "model: {n_layers: 3, norm: foo}"), {"training.seed": "-1"})


def test_overrides_are_checked_together_with_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "training: {max_steps: 5000}")
    assert read_config(file, {"optimizer.warmup_steps": "7"}).optimizer.warmup_steps == 7
    with pytest.raises(ConfigError, match=r"warmup_steps=100 .*training.max_steps=50; lower it, for example to 5"):
        read_config(file, {"training.max_steps": "50"})


def test_what_python_sets_later_is_checked_before_it_is_used() -> None:
    config = GptSimpleConfig()
    config.training.max_steps = 50
    with pytest.raises(ConfigError, match="warmup_steps=100"):
        config.check()
    config.training.max_steps, config.model.norm = 5000, "foo"
    with pytest.raises(ConfigError, match=r"model\.norm=foo"):
        config.check()
    with pytest.raises(ConfigError, match="keep_last_k=0"):
        TrainingConfig(keep_last_k=0)


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("model: {n_embd: 64}", True),
        ("training: {per_device_batch_size: 2}", True),
        ("training: {max_steps: 3}", False),  # a name that both have
        ("training: {tokens_per_step: 256}", False),
        ("base: demo", False),
        ("", False),
    ],
)
def test_a_file_is_known_by_the_keys_that_only_one_of_the_two_has(text: str, theirs: bool, tmp_path: Path) -> None:
    assert is_gpt_simple(written(tmp_path, text)) is theirs


@pytest.mark.parametrize("mistake", [(-5, {"a": 1}), (0, {"a": 1}), (5, {}), (5, {"a": 0}), (5, {"a": -1, "b": 2})])
def test_a_phase_made_in_python_is_checked_too(mistake: tuple[int, dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match=r"duration_tokens=|mix"):
        CurriculumPhase(*mistake)


@pytest.mark.parametrize(("preset", "shape"), [(None, (768, 12, 12)), ("medium", (1024, 24, 16)), ("large", (2048, 24, 32))])
def test_the_template_explains_every_key_and_loads_to_the_defaults(
    preset: str | None, shape: tuple[Any, ...], tmp_path: Path
) -> None:
    text = template(preset)
    config = read_config(written(tmp_path, text))
    assert (config.model.n_embd, config.model.n_layer, config.model.n_head) == shape
    config.model.n_embd, config.model.n_layer, config.model.n_head, config.data.path = 768, 12, 12, ""
    assert config == GptSimpleConfig()
    assert "training.compile" not in config.given
    assert [key.name for key in all_keys().values() if f" {key.name.partition('.')[2]}: " not in text] == []


def test_a_file_may_trust_its_tokens_as_the_error_about_them_advises(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, "data: {trust_tokens: true}"))
    assert translate(config).config.data.trust_tokens is True
