"""Token data from one format into another, document by document.

Formats differ in the marks around documents: in front (ours, shards), after (nanoGPT, gpt-simple), none (characters). Marks are
taken off where data is read and put on where it is written, so a document keeps its tokens and nothing is tokenized again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from ingot.data import SHARD_TOKENS, SPLITS
from ingot.data.formats.detect import SOURCES
from ingot.data.formats.documents import ByteCounter, Document, Marks, TokenSource, TokenWriter, marks_of, with_marks
from ingot.data.formats.gpt_simple_folder import WIDE, IndexedWriter, token_width
from ingot.data.formats.nanogpt_folder import nanogpt_writer, write_meta
from ingot.data.formats.shard_folder import shard_writer
from ingot.data.store.dataset import SplitRecord
from ingot.data.store.shards import MAX_TOKENS
from ingot.data.store.staging import check_output, staged
from ingot.data.store.writer import SplitWriter, write_manifest
from ingot.data.tokenizers import MAX_VOCABULARY, Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import HEAD, round_trips
from ingot.data.tokenizers.tokenizer_base import NARROW
from ingot.errors import ConfigError, DataError

log = logging.getLogger(__name__)

FORMATS = tuple(SOURCES)
NAMES = {"shards": "fineweb", "gpt-simple": "main"}  # the name that golf's and modded-nanogpt's scripts look for; a bucket
PROGRESS_TOKENS = 1 << 20
SAMPLED = 32  # documents of a split by which a tokenizer is judged
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class SplitCounts:
    """What was written of a split; `bytes` is the text that its tokens stand for, where a tokenizer tells."""

    documents: int
    tokens: int
    bytes: int | None


@dataclass(frozen=True)
class Summary:
    """What was converted."""

    source: Path
    found: str
    folder: Path
    format: str
    tokenizer: str | None
    splits: dict[str, SplitCounts]
    seconds: float


@dataclass(frozen=True)
class Layout:
    """How the output is cut into files."""

    name: str | None = None
    shard_tokens: int = SHARD_TOKENS
    max_length: int = 3072
    overlap: int = 256


def convert(
    source: TokenSource,
    output: Path,
    to: str,
    *,
    tokenizer: str | None = None,
    mark: int | None = None,
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Writes the folder `output` in the format `to`. `mark` is the id between documents, where no tokenizer says it."""
    started = time.monotonic()
    _check(source, output, to, mark, layout)
    check_output(output, overwrite)
    opened = _tokenizer(source, tokenizer, to)
    known = marks_of(opened) if opened else Marks(mark, mark)
    reading = known if mark is None else Marks(mark, mark)
    if reading == Marks() and source.format in ("nanogpt", "shards") and opened is None:
        log.warning("nothing says where documents begin, so each split is one; give --tokenizer, or --mark ID")
    if opened and source.tokenizer is None:
        _check_tokenizer(source, opened, reading)
    with staged(output, overwrite) as stage, ExitStack() as files:
        make = partial(_writer, stage.folder, to, known, opened, layout, files, source)
        writers = {split: make(split) for split in SPLITS if split in source.tokens or to == "ingot"}
        _copy(source, writers, reading, progress)
        if to in ("nanogpt", "shards") and len(names := bucket_names(source)) > 1:
            log.warning("%s has no buckets, so %s are one now", to, ", ".join(names))
        if not writers.get("train") or not writers["train"].documents:
            raise DataError(f"{source.path} has nothing to train on: no training documents")
        if opened and to == "nanogpt":
            write_meta(stage.folder, opened)
        if opened and to == "ingot":
            splits = {name: one.record for name, one in writers.items() if isinstance(one, FolderWriter) and one.record}
            origin = {"converted_from": source.format, "input": str(source.path), "bytes": "those that the tokens stand for"}
            write_manifest(stage.folder, opened, splits, origin)
    counts = {split: SplitCounts(writer.documents, writer.tokens, writer.bytes) for split, writer in writers.items()}
    if to in ("nanogpt", "gpt-simple") and "val" not in writers:
        log.warning("%s has no validation data, which %s needs", source.path, to)
    if opened and not opened.lossless and to == "ingot":
        log.warning(
            "bytes are those that the tokens stand for; the text itself, of which %s may lose some, is not there", opened.kind
        )
    kind = opened.kind if opened else None
    return Summary(source.path, source.format, output, to, kind, counts, time.monotonic() - started)


def bucket_names(source: TokenSource) -> list[str]:
    """The buckets of some data, by name."""
    named = {name for split in source.tokens for name, _ in source.buckets(split, Marks())}
    return sorted(name for name in named if name is not None)


class FolderWriter(TokenWriter):
    """A split of a prepared folder, whose writer counts bytes itself: those that the tokens stand for."""

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, counter: ByteCounter, limit: int, files: ExitStack
    ) -> None:
        super().__init__(Marks(tokenizer.bos, None), counter)
        self._writer, self._check = SplitWriter(folder, split, tokenizer, limit, files), counter.check
        self.record: SplitRecord | None = None

    @property
    def tokens(self) -> int:
        return self._writer.tokens

    @property
    def bytes(self) -> int:
        return self._writer.bytes

    def begin_bucket(self, name: str) -> None:
        self._writer.begin_bucket(name)

    def add(self, document: Document) -> None:
        self._writer.add_document(map(self._check, with_marks(document, self.marks)))
        self.documents = self._writer.documents

    def close(self) -> None:
        self.record = self._writer.close()


def _check(source: TokenSource, output: Path, to: str, mark: int | None, layout: Layout) -> None:
    if to not in FORMATS:
        raise ConfigError(f"unknown format {to!r}; known are {', '.join(FORMATS)}")
    if source.format == to == "ingot":
        raise ConfigError(f"{source.path} is a prepared folder already")
    if mark is not None and not 0 <= mark < MAX_VOCABULARY:
        raise ConfigError(f"--mark {mark} is not a token id; give 0 to {MAX_VOCABULARY - 1:,}")
    if not 1 <= layout.shard_tokens <= MAX_TOKENS:
        raise ConfigError(f"--shard-tokens {layout.shard_tokens:,} is out of range; give 1 to {MAX_TOKENS:,}")
    if layout.name is not None and not re.fullmatch(r"\w[\w.-]*", layout.name):
        raise ConfigError(f"--name {layout.name!r} is not a name for files; use letters, digits, dots, - and _")
    if output.resolve() in (source.path.resolve(), *source.path.resolve().parents):
        raise ConfigError(f"output {output} is where the source lies; give another folder")


def _tokenizer(source: TokenSource, name: str | None, to: str) -> Tokenizer | None:
    if source.tokenizer is not None:
        if name not in (None, source.tokenizer.kind):
            raise ConfigError(
                f"{source.path} says itself that its tokenizer is {source.tokenizer.kind}; leave --tokenizer {name} out"
            )
        return source.tokenizer
    if name is None and to == "ingot":
        raise ConfigError(
            f"{source.path} does not say what its tokens stand for; give --tokenizer (gpt2, a .model, tokenizer.json)"
        )
    return None if name is None else open_tokenizer(name)


def _check_tokenizer(source: TokenSource, tokenizer: Tokenizer, marks: Marks) -> None:
    """Refuse a tokenizer that did not make the tokens, as far as the first documents of each split tell."""
    source.check_tokenizer(tokenizer)
    documents = chain.from_iterable(islice(source.documents(split, marks), SAMPLED) for split in source.tokens)
    heads = [np.concatenate(document)[:HEAD] for parts in documents if (document := [part[:HEAD] for part in parts[:8]])]
    found = round_trips(tokenizer, (head for head in heads if head.max() < tokenizer.vocab_size))
    if not found.fit:
        raise DataError(
            f"the {tokenizer.kind} tokenizer did not make the tokens of {source.path}: it makes other tokens of the text of "
            f"{len(found.wrong)} of {found.tried} documents; give the one that made them"
        )


def _writer(
    folder: Path,
    to: str,
    marks: Marks,
    tokenizer: Tokenizer | None,
    layout: Layout,
    files: ExitStack,
    source: TokenSource,
    split: str,
) -> TokenWriter:
    counter = ByteCounter(tokenizer, str(source.path)) if tokenizer else None
    wide = tokenizer.vocab_size > NARROW if tokenizer else source.wide or (marks.eos or 0) >= NARROW
    name = layout.name or NAMES.get(to, "")
    if to == "nanogpt":
        return nanogpt_writer(folder, split, marks, counter, files)
    if to == "shards":
        return shard_writer(folder, split, marks, counter, files, name, layout.shard_tokens, wide)
    if to == "gpt-simple":
        return IndexedWriter(
            folder / split / name,
            marks,
            counter,
            files,
            limit=layout.shard_tokens,
            max_length=layout.max_length,
            overlap=layout.overlap,
            width=token_width(tokenizer.vocab_size) if tokenizer else WIDE if wide else 2,
        )
    assert tokenizer and counter
    return FolderWriter(folder, split, tokenizer, counter, layout.shard_tokens, files)


def _copy(source: TokenSource, writers: dict[str, TokenWriter], marks: Marks, progress: Progress | None) -> None:
    done, told, total = 0, 0, sum(source.tokens.values())
    apart = bucket_names(source) != [NAMES["gpt-simple"]]  # which is what data without buckets is called there
    for split, writer in writers.items():
        for bucket, documents in source.buckets(split, marks) if split in source.tokens else ():
            if bucket is not None and apart:
                writer.begin_bucket(bucket)
            for document in documents:
                writer.add(document)
                done += sum(map(len, document))
                if progress and done - told >= PROGRESS_TOKENS:
                    told = done
                    progress(2 * done, 2 * total)
        writer.close()
    if progress:
        progress(2 * total, 2 * total)
