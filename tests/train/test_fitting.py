"""Which tokenizer is advised to those who have no data yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config.loading import load_config
from ingot.errors import DataError
from ingot.preflight.validate import check_before_training
from ingot.train.start import open_data


@pytest.mark.parametrize(
    ("recipe", "tokenizer"),
    [("gpt2", "gpt2"), ("golf/baseline", "./data/tokenizers/fineweb_1024_bpe.model"), ("demo", None)],
)
def test_the_advice_for_missing_data_names_a_tokenizer_that_fits_the_recipe(
    recipe: str, tokenizer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe=recipe, python={"data": {"path": "nowhere"}}, environment={}).config
    option = f"--tokenizer {tokenizer} " if tokenizer else ""  # without it, the command chooses one
    advice = f"prepare it with: ingot data prepare --input FILE {option}--output nowhere"
    with pytest.raises(DataError, match=advice):
        open_data(config, 1)
    with pytest.raises(DataError, match=advice):
        check_before_training(config, 1, lambda line: None)


@pytest.mark.parametrize(("recipe", "variant"), [("golf/baseline", "sp1024"), ("frontier", "sp8192")])
def test_published_data_that_is_missing_with_its_tokenizer_is_to_be_downloaded(
    recipe: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe=recipe, environment={}).config
    with pytest.raises(DataError, match=f"with: ingot data download --variant {variant} --output data$"):
        check_before_training(config, 1, lambda line: None)
    assert config.data.tokenizer is not None
    Path(config.data.tokenizer).parent.mkdir(parents=True)
    Path(config.data.tokenizer).touch()
    with pytest.raises(DataError, match="prepare it with: ingot data prepare --input FILE"):
        check_before_training(config, 1, lambda line: None)
