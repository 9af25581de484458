"""What is said of a config and data that may be run together and were probably not meant to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config.loading import load_config
from ingot.data.loading.open import open_dataset
from ingot.errors import DataError
from ingot.train.fitting import unfit
from ingot.train.start import open_data


def test_gpt2_on_bytes_is_warned_about_its_idle_rows_and_its_passes():
    config = load_config(recipe="gpt2", python={"data": {"path": "sample:shakespeare"}}, environment={}).config
    rows, passes = unfit(config, open_dataset("sample:shakespeare"))
    assert rows.startswith(
        "warning: model.vocab_size=50,304 and the data has 260 ids: 50,044 rows of the embedding can never be used; "
    )
    assert rows.endswith("set model.vocab_size=null or prepare the text with --tokenizer gpt2")
    assert passes.startswith("warning: training.max_steps=600,000 reads the ") and " times; lower it" in passes


@pytest.mark.parametrize("recipe", ["demo", "shakespeare-char"])
def test_recipes_for_their_data_are_not_warned_about(recipe: str):
    config = load_config(recipe=recipe, environment={}).config
    assert unfit(config, open_dataset(config.data.path, config.data.tokenizer)) == []


@pytest.mark.parametrize(
    ("recipe", "tokenizer"),
    [("gpt2", "gpt2"), ("golf/baseline", "./data/tokenizers/fineweb_1024_bpe.model"), ("demo", "byte")],
)
def test_the_advice_for_missing_data_names_a_tokenizer_that_fits_the_recipe(
    recipe: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe=recipe, python={"data": {"path": "nowhere"}}, environment={}).config
    with pytest.raises(
        DataError, match=f"prepare it with: ingot data prepare --input FILE --tokenizer {tokenizer} --output nowhere"
    ):
        open_data(config, 1)
