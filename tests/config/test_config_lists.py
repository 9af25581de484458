"""Lists of mappings in a config, stages and groups: how they are given, shown and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config.loading import load_config
from ingot.config.render import commented_yaml, dump_yaml
from ingot.config.schema import Config
from ingot.errors import ConfigError

ROWS = {"data.seq_len": 64, "training.tokens_per_step": 256, "training.max_steps": 30}
STAGES = "[{steps: 10, seq_len: 32, rate: 5e-1, model: {window: 64}}, "
STAGES += "{steps: 20, tokens_per_step: 512, rates: {matrix: 1e-1}, model: {window: 128}}]"


def config_of(**given: Any) -> Config:
    return load_config(
        python={**ROWS, **{name.replace("__", "."): value for name, value in given.items()}}, environment={}
    ).config


def check(config: Config) -> None:
    first, second = config.training.stages
    assert (first.steps, first.seq_len, first.rate, first.share) == (10, 32, 0.5, None)
    assert (second.tokens_per_step, second.rates, second.model) == (512, {"matrix": 0.1}, {"window": 128})
    assert isinstance(second.model["window"], int)


def test_stages_may_come_from_the_command_line_the_environment_and_a_file(tmp_path: Path) -> None:
    check(load_config(python=ROWS, overrides={"training.stages": STAGES}, environment={}).config)
    check(load_config(python=ROWS, environment={"INGOT_TRAINING__STAGES": STAGES}).config)
    file = tmp_path / "c.yaml"
    file.write_text(
        "training:\n  stages:\n    - steps: 10\n      seq_len: 32\n      rate: 0.5\n      model: {window: 64}\n"
        "    - steps: 20\n      tokens_per_step: 512\n      rates:\n        matrix: 0.1\n      model: {window: 128}\n"
    )
    check(load_config(file=file, python=ROWS, environment={}).config)


def test_a_later_place_gives_the_whole_list(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"training: {{stages: {STAGES}}}\n")
    resolved = load_config(file=file, python=ROWS, overrides={"training.stages": "[{share: 1}]"}, environment={})
    assert [stage.share for stage in resolved.config.training.stages] == [1.0]
    assert resolved.origins["training.stages"] == "command line"
    emptied = load_config(file=file, python=ROWS, overrides={"training.stages": "[]"}, environment={})
    assert emptied.config.training.stages == []


def test_a_word_in_a_list_means_what_its_setting_makes_of_it() -> None:
    groups = "[{name: 1, match: 12, learning_rate: 1e-3, weight_decay: null}]"
    (group,) = load_config(python=ROWS, overrides={"optimizer.groups": groups}, environment={}).config.optimizer.groups
    assert (group.name, group.match, group.learning_rate, group.weight_decay) == ("1", "12", 1e-3, None)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8) | st.sampled_from(
    ["null", "1e3", "true", "a: b"]
)


@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.long)])
def test_written_lists_load_back_equal(tmp_path: Path, examples: int) -> None:
    file = tmp_path / "lists.yaml"

    @settings(max_examples=examples)
    @given(
        names=st.lists(NAMES, max_size=3, unique=True),
        rate=st.floats(0, 1e6),
        numbers=st.dictionaries(NAMES, st.integers() | st.floats(-9, 9)),
    )
    def load_back_equal(names: list[str], rate: float, numbers: dict[str, float]) -> None:
        groups = [{"name": name, "match": f"*{name}", "learning_rate": rate} for name in names]
        config = Config(
            optimizer={"groups": groups},
            data={"seq_len": 64},
            training={"max_steps": 9, "stages": [{"share": 1.0, "rates": dict.fromkeys(names, rate), "model": numbers}]},
        )
        for text in (dump_yaml(config, {"training.stages": "recipe x"}), commented_yaml(config, "A heading.")):
            file.write_text(text, encoding="utf-8")
            assert load_config(file=file, environment={}).config == config

    load_back_equal()


def test_a_list_is_written_an_entry_a_line_with_its_origin() -> None:
    resolved = load_config(python=ROWS, overrides={"training.stages": STAGES}, environment={})
    text = dump_yaml(resolved.config, resolved.origins)
    first = "  stages:  # command line\n    - {steps: 10, seq_len: 32, rate: 0.5, model: {window: 64}}\n"
    assert f"{first}    - {{steps: 20, tokens_per_step: 512, " in text


STAGE_MISTAKES = [
    ("[{share: 1, steps: 3}]", "training.stages.0 has both share and steps"),
    ("[{steps: 3}, {seq_len: 32}]", "training.stages.1 has neither share nor steps"),
    ("[{share: 0.5}, {share: 0.4}]", "the shares add up to 0.9, not to 1"),
    ("[{share: 0.5}, {steps: 4}]", "some stages have a share and some have steps"),
    ("[{steps: 10}, {steps: 21}]", "the stages have 31 steps, but training.max_steps=30"),
    ("[{share: 1, rates: {gates: 1}}]", "training.stages.0.rates.gates: unknown group; the groups are embedding, head"),
    ("[{share: 1, tokens_per_step: 100}]", "training.stages.0.tokens_per_step=100 is not a multiple of data.seq_len=64"),
    ("[{share: 1, seq_len: 24}]", "training.stages.0.seq_len=24 does not divide data.seq_len=64"),
    ("[{share: 1, seq_len: 128}]", "training.stages.0.seq_len=128 is longer than data.seq_len=64"),
    ("[{share: 1, seq_len: 32}]", "the longest rows have 32 tokens, but data.seq_len=64"),
    ("[{share: 1, sep_len: 32}]", "unknown setting training.stages.0.sep_len; did you mean seq_len?"),
    ("[{share: true}]", "training.stages.0.share=true: must be a number > 0 and <= 1 or null"),
    ("[{share: 2}]", "training.stages.0.share=2 (command line): must be at most 1"),
    ("[{share: 1, rates: {matrix: much}}]", "training.stages.0.rates={matrix: much} (command line): must be a mapping of names"),
    ("[{share: 1, model: {window: wide}}]", "training.stages.0.model={window: wide}"),
    ("[{share: 0.5}, {share: 0.5, model: {window: 3}}]", "training.stages.1.model: window is set in some stages and not in"),
    ("[1]", "must be a list of mappings"),
    ("3", "training.stages=3 (command line): must be a list of mappings"),
    ("[{share: 1", "training.stages (command line) is not valid YAML"),
]  # fmt: skip
GROUP_MISTAKES = [
    ("[{name: gates}]", "optimizer.groups.0.match is not set"),
    ("[{match: '*'}]", "optimizer.groups.0.name is not set"),
    ("[{name: a, match: x}, {name: a, match: y}]", "optimizer.groups.0.name=a is used by two groups"),
    ("[{name: matrix, match: x}]", "optimizer.groups.0.name=matrix is used by a built-in group"),
    ("[{name: a, match: x, momentum: 0.9}]", "optimizer.groups.0.momentum is a setting of muon"),
    ("[{name: a, match: x, optimizer: muon, beta2: 0.9}]", "optimizer.groups.0.beta2 is a setting of adamw"),
    ("[{name: a, match: x, optimizer: sgd}]", "optimizer.groups.0.optimizer=sgd (command line): must be adamw or muon"),
]


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [("training.stages", *case) for case in STAGE_MISTAKES] + [("optimizer.groups", *case) for case in GROUP_MISTAKES],
)
def test_a_mistake_in_a_list_is_one_line_that_names_it(setting: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config(python=ROWS, overrides={setting: value}, environment={})
    assert said in str(found.value) and "\n" not in str(found.value)


def test_stages_refuse_the_stream() -> None:
    with pytest.raises(ConfigError, match=r"training\.stages cannot be combined with data.sampling=stream"):
        config_of(data__sampling="stream", training__stages=[{"share": 1.0}])


def test_the_rest_is_a_group_where_muon_takes_the_matrices() -> None:
    config_of(optimizer__name="muon", training__stages=[{"share": 1.0, "rates": {"rest": 0.5}}])
    with pytest.raises(ConfigError, match=r"rates\.rest: unknown group"):
        config_of(optimizer__name="adamw", training__stages=[{"share": 1.0, "rates": {"rest": 0.5}}])


def test_a_number_or_a_list_of_numbers_may_come_from_the_command_line_and_loads_back_equal(tmp_path: Path) -> None:
    stream = {**ROWS, "data.sampling": "stream"}
    config = load_config(python=stream, overrides={"data.spans": "[3, 1]"}, environment={}).config
    assert config.data.spans == [3, 1]
    (tmp_path / "c.yaml").write_text(dump_yaml(config))
    assert load_config(file=tmp_path / "c.yaml", environment={}).config == config
    assert load_config(python=stream, overrides={"data.spans": "2"}, environment={}).config.data.spans == 2


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ("[]", "data.spans=[] (command line): must be an integer >= 1 or list of numbers"),
        ("[2, 0]", "must be an integer >= 1 or list of numbers"),
        ("[2, 1]", "data.spans=[2, 1], 3 rows in all, does not divide the 4 rows of a step"),
    ],
)
def test_spans_that_do_not_fill_a_step_are_refused(spans: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(python={**ROWS, "data.sampling": "stream"}, overrides={"data.spans": spans}, environment={})
    assert said in str(refused.value)
