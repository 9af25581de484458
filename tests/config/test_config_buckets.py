"""Buckets, mixes and phases in a config: what is taken and what does not go together."""

from typing import Any

import pytest

from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.errors import ConfigError

ROWS = {"data.seq_len": 64, "training.tokens_per_step": 640, "training.max_steps": 10}
PHASES = [{"tokens": 1000, "mix": {"web": 3, "books": "1e-1"}}, {"tokens": 500, "mix": {"books": 1}}]


def config_of(**given: Any) -> Config:
    return load_config(
        python={**ROWS, **{name.replace("__", "."): value for name, value in given.items()}}, environment={}
    ).config


def test_phases_and_mixes_are_read_as_they_are_written() -> None:
    first, second = config_of(data__phases=PHASES).data.phases
    assert (first.tokens, first.mix, second.mix) == (1000, {"web": 3.0, "books": 0.1}, {"books": 1.0})
    assert config_of(data__mix={"web": 1, "books": 2}).data.mix == {"web": 1.0, "books": 2.0}
    assert load_config(overrides={**ROWS, "data.mix.web": "0.5"}, environment={}).config.data.mix == {"web": 0.5}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data__mix": {"web": 0}}, r"data\.mix gives no bucket a weight above 0"),
        ({"data__mix": {"web": -1}}, r"data\.mix"),
        ({"data__phases": [{"tokens": 10, "mix": {}}]}, r"data\.phases\.0\.mix gives no bucket a weight"),
        ({"data__phases": [{"mix": {"web": 1}}]}, r"data\.phases\.0\.tokens is not set"),
        ({"data__phases": [{"tokens": 10, "mixture": {}}]}, r"unknown setting data\.phases\.0\.mixture; did you mean mix\?"),
        ({"data__phases": PHASES, "data__mix": {"web": 1}}, r"data\.mix and data\.phases are both set"),
        ({"data__mix": {"web": 1}, "data__sampling": "stream"}, r"data\.sampling=stream"),
        ({"data__sampling": "random", "data__epochs": 1}, r"data\.sampling=random draws with replacement"),
        ({"data__sampling": "pack", "data__overlap": 33}, r"data\.overlap=33 is more than half of data\.seq_len=64"),
        ({"data__overlap": 8}, r"data\.overlap=8 works only with data\.sampling=pack or document"),
        (
            {"data__phases": PHASES, "training__stages": [{"steps": 5, "seq_len": 32}, {"steps": 5}]},
            r"data\.phases cannot be combined with training\.stages",
        ),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**given)
