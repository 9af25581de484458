"""Which tokenizer is advised to those who have no data yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.config.loading import load_config
from ingot.errors import DataError
from ingot.plan.validate import check_before_training
from ingot.train.start import open_data


@pytest.mark.parametrize(
    ("recipe", "tokenizer"),
    [("gpt2", "gpt2"), ("golf/baseline", "./data/tokenizers/fineweb_1024_bpe.model"), ("demo", "byte")],
)
def test_the_advice_for_missing_data_names_a_tokenizer_that_fits_the_recipe(
    recipe: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = load_config(recipe=recipe, python={"data": {"path": "nowhere"}}, environment={}).config
    advice = f"prepare it with: ingot data prepare --input FILE --tokenizer {tokenizer} --output nowhere"
    with pytest.raises(DataError, match=advice):
        open_data(config, 1)
    with pytest.raises(DataError, match=advice):
        check_before_training(config, 1, lambda line: None)
