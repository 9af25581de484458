"""Token files that other programs made, read as they lie: nanoGPT's folder, folders of shards and of gpt-simple's buckets.

Nobody recorded their documents, their text or their checksums: documents are found by the mark of the tokenizer, and where it has
none, packing, redrawing and document masks need `ingot data convert`. The fingerprint covers names, sizes and both ends of every
file: enough to notice other data, and quick for a hundred files. Nor did anybody record the tokenizer, and a wrong one gives
wrong bits per byte: a few places of every file are held against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.data import SPLITS
from ingot.data.formats.manifest import paired_tokenizer
from ingot.data.store.dataset import Dataset, Manifest, ShardRecord, Split, SplitRecord, TokenizerRecord
from ingot.data.store.shards import open_plain, open_shard
from ingot.data.store.stream import OpenTokens
from ingot.data.tokenizers import Tokenizer, digest, open_tokenizer
from ingot.data.tokenizers.matching import round_trips
from ingot.errors import DataError, Setting
from ingot.runtime.files import open_to_read

TOKENIZER = Setting("data.tokenizer")
ENDS = 4096  # bytes of a file's start and of its end that the fingerprint covers
OTHER = "the tokenizer; name the one that made them with {0}"
GUESSED = "GPT-2's tokenizer, which is taken without a meta.pkl; put that file beside them, or name what made them with {0}"
PLACES, LOOKED_AT = 32, 4096  # looked at in all, at least 2 of every file, and tokens of each
NANOGPT = {split: f"{split}.bin" for split in SPLITS}


class NoTokenizer(DataError):
    """Tokens that do not say which tokenizer made them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} holds tokens and does not say their tokenizer; name it with {{0}}", TOKENIZER)


def open_foreign(folder: Path, tokenizer: str | None, trust_tokens: bool = False) -> Dataset | None:
    """The data of a folder that nanoGPT, gpt-simple or a writer of shards made; None where it is none of them.

    `trust_tokens`: whether the tokenizer made the tokens is not asked.
    """
    if (folder / NANOGPT["train"]).is_file():
        return _open_nanogpt(folder, tokenizer, trust_tokens)
    splits = {split: shard_files(folder, split) for split in SPLITS}
    if not splits["train"] and not splits["val"]:
        from ingot.data.formats.buckets import open_buckets

        return open_buckets(folder, tokenizer, trust_tokens)
    if (tokenizer := tokenizer or paired_tokenizer(folder)) is None:
        raise NoTokenizer(folder)
    return _dataset(folder, splits, open_tokenizer(tokenizer), open_shard, trust_tokens)


def shard_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split in the order of their names; files with byte counts beside them are not tokens."""
    return sorted(path for path in folder.glob(f"*_{split}_*.bin") if path.is_file() and "_bytes_" not in path.name)


def _open_nanogpt(folder: Path, tokenizer: str | None, trust_tokens: bool) -> Dataset:
    from ingot.data.formats.nanogpt import META, nanogpt_tokenizer

    files = {split: [folder / name] for split, name in NANOGPT.items() if (folder / name).is_file()}
    which = OTHER if tokenizer or (folder / META).is_file() else GUESSED
    return _dataset(folder, {"val": [], **files}, nanogpt_tokenizer(folder, tokenizer), open_plain, trust_tokens, which)


def _dataset(
    folder: Path, splits: dict[str, list[Path]], tokenizer: Tokenizer, open_tokens: OpenTokens, trust: bool, which: str = OTHER
) -> Dataset:
    """The data of a folder; `which` says what tokenizer is meant, and what to do if it is another."""
    records = {split: _split(paths, open_tokens) for split, paths in splits.items()}
    check_tokens([path for paths in splits.values() for path in paths], tokenizer, open_tokens, trust, which)
    known = TokenizerRecord.of(tokenizer)
    ends = {split: [[path.name, both_ends(path)] for path in paths] for split, paths in splits.items()}
    fingerprint = digest({"tokenizer": known.fingerprint, "files": ends})
    manifest = Manifest(tokenizer=known, splits=records, fingerprint=fingerprint, source=str(folder))
    found = {
        split: Split(folder, record, open_tokens, dtype=tokenizer.dtype, mark=tokenizer.bos) for split, record in records.items()
    }
    return Dataset(folder, manifest, tokenizer, found)


def check_tokens(paths: Sequence[Path], tokenizer: Tokenizer, open_tokens: OpenTokens, trust: bool, which: str = OTHER) -> None:
    """Refuse a tokenizer that did not make the tokens of some files, as far as a few places of each tell."""
    samples = []
    for path in paths:
        tokens = open_tokens(path)
        for place in np.linspace(0, max(0, len(tokens) - LOOKED_AT), max(2, PLACES // len(paths))).astype(int):
            part = tokens[place : place + LOOKED_AT]
            if (largest := part.max(initial=0)) >= tokenizer.vocab_size:
                raise DataError(f"{path} holds token {largest}, outside the {tokenizer.vocab_size:,} ids of {which}", TOKENIZER)
            samples.append(part)
    if not round_trips(tokenizer, samples, trust).fit:
        raise DataError(
            f"the tokens of {paths[0].parent} are not those that their text has in {which}",
            TOKENIZER,
            Setting("data.trust_tokens"),
            advice="if that is on purpose, set {1}",
        )


def _split(paths: Sequence[Path], open_tokens: OpenTokens) -> SplitRecord:
    shards = [
        ShardRecord.model_construct(file=path.name, tokens=len(open_tokens(path)), documents=0, bytes=0, sha256="")
        for path in paths
    ]
    return SplitRecord.model_construct(
        documents=0, tokens=sum(shard.tokens for shard in shards), bytes=0, piece_bytes=None, shards=shards, document_index=""
    )


def both_ends(path: Path) -> str:
    """A checksum of a file's size, start and end."""
    with open_to_read(path) as file:
        start = file.read(ENDS)
        size = file.seek(0, 2)
        file.seek(max(0, size - ENDS))
        return hashlib.sha256(start + file.read() + str(size).encode()).hexdigest()
