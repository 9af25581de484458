"""In place of ingot.data.loading.data_path: folders of tokens, and no text that comes along."""

from __future__ import annotations

from pathlib import Path

from ingot.data.formats.foreign import open_foreign, shard_files
from ingot.data.store.dataset import MANIFEST, Dataset
from ingot.data.tokenizers import open_tokenizer
from ingot.errors import DataError, Setting


def open_dataset(path: str, tokenizer: str | None, trust_tokens: bool = False, fitting: str = "") -> Dataset:
    """The tokens of a folder; where it says which tokenizer made them, it must be this one."""
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        if not shard_files(folder, "val"):
            raise DataError(f"no files found for {folder / 'fineweb_val_*.bin'}; set {{0}}", Setting("data.path"))
        foreign = open_foreign(folder, tokenizer, trust_tokens)
        assert foreign is not None
        return foreign
    dataset = Dataset.open(folder)
    if tokenizer is not None and dataset.tokenizer.fingerprint() != open_tokenizer(tokenizer).fingerprint():
        raise DataError(f"{path} was prepared with another tokenizer than {tokenizer}")
    return dataset
