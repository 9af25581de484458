"""Token files that other programs made, read as they lie: nanoGPT's folder and folders of shards.

Nobody recorded their documents, their text or their checksums, so packing and document masks need `ingot data convert`. The
fingerprint covers names, sizes and both ends of every file: enough to notice other data, and quick for a hundred files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data.dataset import SPLITS, Dataset, Manifest, OpenTokens, ShardRecord, SplitRecord, TokenizerRecord
from ingot.data.shards import open_shard
from ingot.data.tokenizers import Tokenizer, digest, open_tokenizer
from ingot.errors import DataError

ENDS = 4096  # bytes of a file's start and of its end that the fingerprint covers
NANOGPT = {split: f"{split}.bin" for split in SPLITS}


def open_foreign(folder: Path, tokenizer: str | None) -> Dataset | None:
    """The data of a folder that nanoGPT or a writer of shards made; None where there is neither."""
    if (folder / NANOGPT["train"]).is_file():
        return _open_nanogpt(folder, tokenizer)
    splits = {split: shard_files(folder, split) for split in SPLITS}
    if not splits["train"] and not splits["val"]:
        return None
    if tokenizer is None:
        raise DataError(f"{folder} holds shards and does not say their tokenizer; name it with data.tokenizer")
    return _dataset(folder, splits, open_tokenizer(tokenizer), open_shard)


def shard_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split in the order of their names; files with byte counts beside them are not tokens."""
    return sorted(path for path in folder.glob(f"*_{split}_*.bin") if path.is_file() and "_bytes_" not in path.name)


def open_plain(path: Path) -> NDArray[np.uint16]:
    """The tokens of a file without a header, mapped from the disk."""
    try:
        size = path.stat().st_size
        if size % 2:
            raise DataError(f"{path} has {size:,} bytes, an odd number, and tokens have two each; it is cut short")
        return np.memmap(path, dtype="<u2", mode="r", shape=(size // 2,)) if size else np.empty(0, np.uint16)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _open_nanogpt(folder: Path, tokenizer: str | None) -> Dataset:
    from ingot.data.formats.meta import META, char_tokenizer

    found = char_tokenizer(folder / META) if (folder / META).is_file() else None
    built = found or open_tokenizer(tokenizer or "gpt2")
    if found is not None and tokenizer not in (None, "char"):
        raise DataError(f"data.tokenizer is {tokenizer} and {folder} has characters, as its {META} says; leave it out")
    files = {split: [folder / name] for split, name in NANOGPT.items() if (folder / name).is_file()}
    return _dataset(folder, {"val": [], **files}, built, open_plain)


def _dataset(folder: Path, splits: dict[str, list[Path]], tokenizer: Tokenizer, open_tokens: OpenTokens) -> Dataset:
    records = {split: _split(paths, open_tokens) for split, paths in splits.items()}
    known = TokenizerRecord(
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        fingerprint=tokenizer.fingerprint(),
        spec=tokenizer.spec(),
    )
    ends = {split: [[path.name, _ends(path)] for path in paths] for split, paths in splits.items()}
    fingerprint = digest({"tokenizer": known.fingerprint, "files": ends})
    manifest = Manifest(tokenizer=known, splits=records, fingerprint=fingerprint, source=str(folder))
    return Dataset(folder, manifest, tokenizer, open_tokens)


def _split(paths: Sequence[Path], open_tokens: OpenTokens) -> SplitRecord:
    shards = [
        ShardRecord.model_construct(file=path.name, tokens=len(open_tokens(path)), documents=0, bytes=0, sha256="")
        for path in paths
    ]
    return SplitRecord.model_construct(
        documents=0, tokens=sum(shard.tokens for shard in shards), bytes=0, piece_bytes=None, shards=shards, document_index=""
    )


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(ENDS)
        size = file.seek(0, 2)
        file.seek(max(0, size - ENDS))
        return hashlib.sha256(start + file.read() + str(size).encode()).hexdigest()
