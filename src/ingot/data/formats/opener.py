"""Open token data of any format: detect the format of a folder, and check that the named tokenizer produced the tokens.

Data of every format is opened as a `Dataset`. An unrecognised format is an error: files are never assumed to be token data. Most
other programs do not record the tokenizer, and a wrong one gives wrong bits per byte, so the tokenizer is checked by decoding and
re-encoding samples of every file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ingot.data.formats.gpt_simple_folder import find_pairs, open_gpt_simple
from ingot.data.formats.nanogpt_folder import FILES, META, nanogpt_tokenizer, open_nanogpt
from ingot.data.formats.shard_folder import open_shards, paired_tokenizer, shard_files
from ingot.data.store.dataset import MANIFEST, Dataset, NoTokenizer, prepare_command
from ingot.data.store.shards import has_header
from ingot.data.text.text_files import kind_of
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import round_trips
from ingot.errors import ConfigError, DataError, Setting
from ingot.runtime.files import allow_open_files, reading

OPENERS: dict[str, Callable[[Path, bool], Dataset]] = {
    "ingot": lambda path, strict: Dataset.open(path, strict=strict),
    "nanogpt": open_nanogpt,
    "gpt-simple": open_gpt_simple,
    "shards": open_shards,
}
LOOKED_FOR = f"{MANIFEST}, train.bin, .bin files with .idx files, or shards with a header"
TOKENIZER = Setting("data.tokenizer")
SAMPLES, SAMPLE_TOKENS = 32, 4096  # total number of samples (at least 2 from each file), and tokens per sample


def open_tokens(path: Path, format: str | None = None, strict: bool = True) -> Dataset:
    """Open the token data at `path`; if `format` is None, the format is detected.

    With `strict` the first damaged file raises an error; otherwise defects are collected in the dataset's `problems`.
    """
    if format is not None and format not in OPENERS:
        raise ConfigError(f"unknown format {format!r}; choose one of {', '.join(OPENERS)}")
    allow_open_files()
    with reading(path):
        if not path.exists():
            raise DataError(f"no data at {path}: there is no such file or folder; give a path to {LOOKED_FOR}")
        if (format := format or detect(path)) is not None:
            return OPENERS[format](path, strict)
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if text := next((file for file in files if kind_of(file)), None):
            advice = f"prepare it with: {prepare_command(path, 'DIR')}"
            raise DataError(f"{path} holds text ({text.name}) and no tokens", advice=advice)
        raise DataError(f"no token data at {path}; looked for {LOOKED_FOR}; for data without a header give --from nanogpt")


def detect(path: Path) -> str | None:
    """Return the format of the token data at `path`; None if it is not recognised."""
    if not path.is_dir():
        if any(find_pairs(path).values()):
            return "gpt-simple"
        if path.suffix == ".bin" and has_header(path):
            return "shards"
        return "nanogpt" if path.name in FILES.values() else None
    if (path / MANIFEST).is_file():
        return "ingot"
    if shard_files(path, "train") or shard_files(path, "val"):
        return "shards"
    if find_pairs(path):
        return "gpt-simple"
    if any(has_header(file) for file in path.glob("*.bin") if file.is_file()):
        return "shards"
    return "nanogpt" if any((path / name).is_file() for name in FILES.values()) else None


def open_foreign(folder: Path, tokenizer: str | None, trust_tokens: bool = False) -> Dataset | None:
    """Open a nanoGPT, gpt-simple or shard folder for training; return None if the folder is in none of these formats.

    `trust_tokens` skips the check that the tokenizer produced the tokens.
    """
    format = detect(folder) if folder.is_dir() else None
    if format in (None, "ingot"):
        return None
    dataset, advice = open_tokens(folder, format), "set {0} to the tokenizer that made the tokens"
    if format == "nanogpt":
        opened = nanogpt_tokenizer(folder, tokenizer)
        if tokenizer is None and not (folder / META).is_file():
            advice = f"without a {META}, GPT-2's tokenizer is the default; add the {META} or {advice}"
    else:
        tokenizer = tokenizer or (paired_tokenizer(folder) if format == "shards" else None)
        if tokenizer is None:
            raise NoTokenizer(folder)
        train, val = dataset.buckets("train"), dataset.buckets("val")
        for name in sorted(train.keys() ^ val.keys()):  # every bucket needs files in both splits
            has, lacks = ("train", "val") if name in train else ("val", "train")
            raise DataError(f"{folder / has / name} has files but {folder / lacks / name} has none; add files to the latter")
        opened = open_tokenizer(tokenizer)
    if problem := tokenizer_mismatch(dataset, opened, trust_tokens):
        advice = f"{advice}; if the difference is intended, set {{1}}"
        raise DataError(problem, TOKENIZER, Setting("data.trust_tokens"), advice=advice)
    dataset.use_tokenizer(opened)
    return dataset


def tokenizer_mismatch(dataset: Dataset, tokenizer: Tokenizer, trust_tokens: bool = False) -> str | None:
    """Return a message if samples of the files show that a different tokenizer produced the tokens, else None.

    With `trust_tokens` the sampled tokens only have to be in the vocabulary.
    """
    samples, files = [], sum(len(split.paths) for split in dataset.splits.values())
    for split in dataset.splits.values():
        for path in split.paths:
            tokens = split.open_file(path)  # not kept open: a run memory-maps each file on first use
            last = max(0, len(tokens) - SAMPLE_TOKENS)
            for start in np.linspace(0, last, max(2, SAMPLES // files)).astype(int):
                part = tokens[start : start + SAMPLE_TOKENS]
                if (largest := part.max(initial=0)) >= tokenizer.vocab_size:
                    return f"{path} holds token {largest:,}, outside the {tokenizer.vocab_size:,} ids of {tokenizer.kind}"
                samples.append(part)
    if trust_tokens or round_trips(tokenizer, samples).fit:
        return None
    return f"the {tokenizer.kind} tokenizer did not make the tokens of {dataset.folder}: it encodes their text differently"
