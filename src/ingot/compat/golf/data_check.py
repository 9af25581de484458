"""Check a golf run's data before training: the files, the tokenizer, and that they match."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ingot.compat.golf.log import RunLog
from ingot.data.formats.shard_folder import read_listing, shard_files
from ingot.data.loading.data_path import open_dataset
from ingot.data.store.dataset import MANIFEST
from ingot.errors import ConfigError, DataError

COUNT_TOKENS = 1 << 22  # tokens read at a time when counting documents and bytes


def check_data(values: Mapping[str, Any], run_log: RunLog, first: bool, lines: Callable[..., list[str]]) -> dict[str, Any]:
    """Raise an error for invalid data. The first rank also logs the result of `lines` and gets a summary of the data."""
    path, tokenizer = Path(values["DATA_PATH"]), Path(values["TOKENIZER_PATH"])
    if not (path / MANIFEST).is_file():
        for split in ("val", "train"):  # the validation split first, as in golf's script
            files = shard_files(path, split)
            if not files:
                raise DataError(f"no files found for {pattern(values, split)}; run `ingot data download` or set DATA_PATH")
            if others := [file.name for file in files if not file.name.startswith("fineweb_")]:
                raise DataError(f"{path} also has {others[0]}, which does not match {pattern(values, split)}; move it elsewhere")
    if not tokenizer.is_file():
        raise DataError(f"there is no tokenizer {tokenizer}; run `ingot data download` or set TOKENIZER_PATH")
    listed = listed_counts(path, tokenizer)
    dataset = open_dataset(str(path), str(tokenizer), values["TRUST_TOKENS"])
    if (vocab_size := dataset.tokenizer.vocab_size) != values["VOCAB_SIZE"]:
        raise ConfigError(f"VOCAB_SIZE={values['VOCAB_SIZE']} does not match the tokenizer's vocab_size={vocab_size}")
    val, length = dataset.split("val"), values["TRAIN_SEQ_LEN"]
    usable = (val.tokens - 1) // length * length
    if usable <= 0:
        raise DataError(f"the validation split has {val.tokens} tokens, but it needs more than TRAIN_SEQ_LEN={length}")
    if not first:
        return {}
    shards = len(dataset.split("train").paths)
    name = Path(os.path.abspath(path)).name  # noqa: PTH100 (keeps the name of a symbolic link)
    for line in lines(name, shards, listed.get("files_train"), usable):
        run_log.line(line)
    documents, size = 0, 0  # size: bytes of the scored targets
    for begin in range(0, val.tokens, COUNT_TOKENS):
        ids = val.read(begin, min(begin + COUNT_TOKENS + 1, val.tokens)).astype(np.int32)
        documents += int(np.count_nonzero(ids[:COUNT_TOKENS] == dataset.tokenizer.bos))
        targets = ids[1 : max(0, usable - begin) + 1]
        size += int(dataset.tokenizer.target_bytes(ids[: len(targets)], targets).sum())
    validation = (
        f"validation: {val.tokens} tokens in {documents} documents; scored: {usable} tokens, {size} bytes, "
        f"{size / usable:.6f} bytes per token"
    )
    run_log.note(validation)
    for what, count, expected in (
        ("tokens", val.tokens, listed.get("tokens_val")),
        ("documents", documents, listed.get("docs_val")),
    ):
        if expected not in (None, count):
            raise DataError(
                f"the validation split in {path} has {count} {what}, but its manifest lists {expected}; it is truncated or "
                "from another dataset: download it again"
            )
    return {"dataset": name, "train_shards": shards, "scored_tokens": usable, "validation": validation}


def listed_counts(dataset: Path, tokenizer: Path) -> dict[str, int]:
    """Return the counts in the dataset's manifest; raise DataError for a wrong tokenizer or more train shards than listed."""
    if (listing := read_listing(dataset)) is None:
        return {}
    where, expected = listing.where, PurePosixPath(listing.file).name
    if expected and tokenizer.name != expected:
        raise DataError(
            f"DATA_PATH={dataset} was made with the tokenizer {expected} according to {where}, not TOKENIZER_PATH={tokenizer}"
        )
    counts = {key: count for key, count in listing.stats.items() if isinstance(count, int)}
    here = len(list(dataset.glob("fineweb_train_*.bin")))
    if here > counts.get("files_train", here):
        raise DataError(
            f"DATA_PATH={dataset} has {here:,} train shards, but {where} lists {counts['files_train']:,}; remove the shards of "
            "other datasets"
        )
    return counts


def pattern(values: Mapping[str, Any], split: str) -> str:
    """Return the glob pattern for the shards of a split: that of golf or, if it wrote the shards, of `ingot data prepare`."""
    name = "" if any(Path(values["DATA_PATH"]).glob(f"{split}_*.bin")) else "fineweb_"
    return os.path.join(values["DATA_PATH"], f"{name}{split}_*.bin")  # noqa: PTH118 (the log shows what the user wrote)
