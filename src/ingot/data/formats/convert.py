"""Convert token data from one format into another, document by document.

Formats differ in their document separators: a BOS token before each document (prepared folders, shards), an EOS token after each
document (nanoGPT, gpt-simple), or no separator (nanoGPT's character data). Separators, which the code calls marks, are removed
on reading and added on writing, so a document keeps its tokens and nothing is re-tokenized.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.data import SHARD_TOKENS, SPLITS
from ingot.data.formats.gpt_simple_folder import DTYPES, check_windows, cut_windows, index_bytes, token_width
from ingot.data.formats.nanogpt_folder import FILES, META, check_meta_size, meta_bytes
from ingot.data.formats.opener import OPENERS, tokenizer_mismatch
from ingot.data.store.dataset import Dataset, SplitCounts, SplitRecord
from ingot.data.store.documents import Document, Marks, marks_of
from ingot.data.store.shards import CHUNK_TOKENS, MAX_TOKENS, TOKEN_BYTES, TokenWriter
from ingot.data.store.staging import check_output, staged
from ingot.data.store.writer import SavedSplit, SplitWriter, write_manifest
from ingot.data.text.text_files import Progress, adding_up
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.data.tokenizers.tokenizer_base import MAX_VOCABULARY, NARROW, OUTSIDE, id_type
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import write_atomically

log = logging.getLogger(__name__)

NAMES = {"shards": "fineweb", "gpt-simple": "main"}  # default prefix of shard file names (as golf expects) and default bucket


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion; a split's `bytes` is the size of its decoded text, or None if the tokenizer is unknown."""

    source: Path
    found: str
    folder: Path
    format: str
    tokenizer: str | None
    splits: dict[str, SplitCounts]
    seconds: float


@dataclass(frozen=True)
class FileLayout:
    """The name and size of the output files and, for gpt-simple, the length and overlap of its windows in tokens."""

    name: str | None = None
    shard_tokens: int = SHARD_TOKENS
    max_length: int = 3072
    overlap: int = 256


def convert(
    source: Dataset,
    output: Path,
    to: str,
    *,
    tokenizer: str | None = None,
    mark: int | None = None,
    layout: FileLayout = FileLayout(),  # noqa: B008 (frozen)
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a dataset to the folder `output` in the format `to`; `mark` is the id that separates documents in the source."""
    started = time.monotonic()
    _check(source, output, to, mark, layout)
    check_output(output, overwrite)
    opened = _tokenizer(source, tokenizer, to)
    marks = marks_of(opened) if opened else Marks(mark, mark)
    read_marks = marks if mark is None else Marks(mark, mark)
    if read_marks == Marks() and source.format in ("nanogpt", "shards") and opened is None:
        log.warning("document boundaries are unknown, so each split becomes one document; give --tokenizer or --mark ID")
    written_marks = {"ingot": Marks(bos=opened.bos if opened else None), "shards": Marks(bos=marks.bos)}.get(
        to, Marks(eos=marks.eos)
    )
    wide = opened.vocab_size > NARROW if opened else any(split.dtype.itemsize > TOKEN_BYTES for split in source.splits.values())
    wide = wide or (opened is None and (marks.eos or 0) >= NARROW)
    buckets = sorted({bucket.name for split in source.splits.values() for bucket in split.record.buckets})
    counts: dict[str, SplitCounts] = {}
    records: dict[str, SplitRecord] = {}
    advance = adding_up(progress, TOKEN_BYTES * sum(source.tokens.values()))
    with staged(output, overwrite) as stage, ExitStack() as files:
        for split in SPLITS if to == "ingot" else source.tokens:
            writer = _writer(stage.folder, split, to, opened, layout, wide, files)
            text_bytes = 0
            for bucket, documents in source.split(split).bucket_documents(read_marks) if split in source.tokens else ():
                if bucket is not None and buckets != [NAMES["gpt-simple"]]:  # a single bucket "main" means data without buckets
                    writer.begin_bucket(bucket)
                for document in documents:
                    if opened:
                        text_bytes += _text_bytes(document, opened, source.folder)
                    writer.add_document(with_marks(document, written_marks))
                    advance(TOKEN_BYTES * sum(map(len, document)))
            if (record := writer.close()) is not None:
                records[split] = record
            counts[split] = SplitCounts(writer.state.documents, writer.state.tokens, text_bytes if opened else None, None)
        if "train" not in counts or not counts["train"].documents:
            raise DataError(f"{source.folder} has nothing to train on: it contains no training documents")
        if opened and to == "nanogpt" and opened.kind != "gpt2":  # without a meta.pkl nanoGPT assumes GPT-2's vocabulary
            write_atomically(stage.folder / META, meta_bytes(opened))
        if opened and to == "ingot":
            counted = "byte counts are those of the decoded tokens, not of the original text"
            origin = {"converted_from": source.format, "input": str(source.folder), "bytes": counted}
            write_manifest(stage.folder, opened, records, origin)
    if to in ("nanogpt", "shards") and len(buckets) > 1:
        log.warning("the format %s has no buckets, so the buckets %s are merged", to, ", ".join(buckets))
    if to in ("nanogpt", "gpt-simple") and "val" not in counts:
        log.warning("%s has no validation data, which %s needs", source.folder, to)
    kind = opened.kind if opened else None
    return Conversion(source.folder, source.format, output, to, kind, counts, time.monotonic() - started)


def _check(source: Dataset, output: Path, to: str, mark: int | None, layout: FileLayout) -> None:
    if to not in OPENERS:
        raise ConfigError(f"unknown format {to!r}; choose one of {', '.join(OPENERS)}")
    if source.format == to == "ingot":
        raise ConfigError(f"{source.folder} is already a prepared folder")
    if mark is not None and not 0 <= mark < MAX_VOCABULARY:
        raise ConfigError(f"--mark {mark} is not a token id; give a number from 0 to {MAX_VOCABULARY - 1:,}")
    if not 1 <= layout.shard_tokens <= MAX_TOKENS:
        raise ConfigError(f"--shard-tokens {layout.shard_tokens:,} is out of range; give a number from 1 to {MAX_TOKENS:,}")
    if layout.name is not None and not re.fullmatch(r"\w[\w.-]*", layout.name):
        raise ConfigError(f"--name {layout.name!r} is not a valid file name; use letters, digits, dots, - and _")
    if output.resolve() in (source.folder.resolve(), *source.folder.resolve().parents):
        raise ConfigError(f"output folder {output} must not be the source {source.folder} or contain it; choose another")


def _tokenizer(source: Dataset, name: str | None, to: str) -> Tokenizer | None:
    """Return the tokenizer recorded in the source, else the tokenizer `name` after checking it against the tokens, else None."""
    if (own := source.known_tokenizer) is not None:
        if name not in (None, own.kind):
            raise ConfigError(f"{source.folder} already names its tokenizer, {own.kind}; leave out --tokenizer {name}")
        return own
    if name is None and to == "ingot":
        raise ConfigError(f"{source.folder} does not name its tokenizer; name it with --tokenizer (gpt2, a .model or .json file)")
    if name is None:
        return None
    opened = open_tokenizer(name)
    if source.format == "nanogpt":
        check_meta_size(source.folder if source.folder.is_dir() else source.folder.parent, opened)
    if problem := tokenizer_mismatch(source, opened):
        raise DataError(f"{problem}; give the tokenizer that made the tokens")
    return opened


def _text_bytes(document: Document, tokenizer: Tokenizer, name: Path) -> int:
    """Return the size in bytes of a document's decoded text, after checking that all its tokens are in the vocabulary."""
    total, previous = 0, OUTSIDE
    for ids in document:
        if (largest := int(ids.max())) >= tokenizer.vocab_size:
            vocabulary = f"the {tokenizer.kind} vocabulary of {tokenizer.vocab_size:,} ids"
            raise DataError(f"{name} holds token {largest:,}, outside {vocabulary}; give the tokenizer that made the tokens")
        wide = ids.astype(np.int32)
        total += int(tokenizer.target_bytes(np.append(np.int32(previous), wide[:-1]), wide).sum())
        previous = int(wide[-1])
    return total


def with_marks(document: Document, marks: Marks) -> Document:
    """Add separators to a document; the parts of a short document are joined, which is faster than writing them one by one."""
    before, after = ([] if mark is None else [np.array([mark], id_type(mark + 1))] for mark in (marks.bos, marks.eos))
    parts = [*before, *document, *after]
    return [np.concatenate(parts)] if len(parts) > 1 and sum(map(len, parts)) <= CHUNK_TOKENS else parts


def _writer(
    folder: Path, split: str, to: str, tokenizer: Tokenizer | None, layout: FileLayout, wide: bool, files: ExitStack
) -> SplitWriter | StreamWriter | PairWriter:
    name, limit, dtype = layout.name or NAMES.get(to, ""), layout.shard_tokens, DTYPES[4 if wide else 2]
    if to == "nanogpt":
        return StreamWriter(1 << 62, lambda number: TokenWriter(folder / FILES[split], files))
    if to == "shards":
        return StreamWriter(limit, lambda n: TokenWriter(folder / f"{name}_{split}_{n:06d}.bin", files, dtype, header=True))
    if to == "gpt-simple":
        return PairWriter(folder / split / name, files, layout, token_width(tokenizer.vocab_size if tokenizer else wide << 16))
    assert tokenizer
    return SplitWriter(folder, split, tokenizer, limit, files)


class StreamWriter:
    """Writes documents into files of at most `limit` tokens; a document may continue in the next file.

    `state` counts documents and tokens, including separators.
    """

    def __init__(self, limit: int, open_file: Callable[[int], TokenWriter]) -> None:
        self.state = SavedSplit()  # only its fields `documents` and `tokens` are used
        self._limit, self._open, self._files = limit, open_file, 0
        self._file: TokenWriter | None = None

    def begin_bucket(self, name: str) -> None:
        """Do nothing: nanoGPT data and shards have no buckets."""

    def add_document(self, parts: Document) -> None:
        self.state.documents += any(map(len, parts))
        for part in parts:
            self.state.tokens += len(part)
            while len(part):
                if self._file is None:
                    self._file, self._files = self._open(self._files), self._files + 1
                here = part[: self._limit - self._file.tokens]
                self._file.append(here)
                part = part[len(here) :]
                if self._file.tokens == self._limit:
                    self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class PairWriter:
    """Writes SPLIT/BUCKET/NUMBER.bin and .idx; a file is closed after the document that brings it to `shard_tokens` tokens."""

    def __init__(self, folder: Path, files: ExitStack, layout: FileLayout, width: int = 2) -> None:
        check_windows(layout.max_length, layout.overlap)
        self.state = SavedSplit()  # only its fields `documents` and `tokens` are used
        self._folder, self._files, self._layout, self._width, self._number = folder, files, layout, width, 0
        self._file: TokenWriter | None = None
        self._offsets: list[int] = []
        self._repeats: list[int] = []

    def begin_bucket(self, name: str) -> None:
        self.close()
        self._folder, self._number = self._folder.with_name(name), 0

    def add_document(self, parts: Document) -> None:
        if not parts:
            return
        tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = TokenWriter(self._folder / f"{self._number:05d}.bin", self._files, DTYPES[self._width])
            self._number, self._offsets, self._repeats = self._number + 1, [0], []
        for start, stop, repeats in cut_windows(len(tokens), self._layout.max_length, self._layout.overlap):
            self._file.append(tokens[start:stop])
            self._offsets.append(self._file.tokens)
            self._repeats.append(repeats)
            self.state.tokens += stop - start
        self.state.documents += 1
        if self._file.tokens >= self._layout.shard_tokens:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            write_atomically(self._file.path.with_suffix(".idx"), index_bytes(self._offsets, self._repeats, self._width))
            self._file = None
