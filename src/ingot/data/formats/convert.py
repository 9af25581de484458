"""Convert token data from one format into another, document by document.

Formats differ in the marks around documents: before (ours, shards), after (nanoGPT, gpt-simple), none (characters). Marks are
removed on reading and added on writing, so a document keeps its tokens and nothing is tokenized again.
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
from ingot.data.formats.gpt_simple_folder import WIDE, PairWriter, token_width
from ingot.data.formats.nanogpt_folder import check_meta_size, nanogpt_writer, write_meta
from ingot.data.formats.opener import OPENERS
from ingot.data.formats.shard_folder import shard_writer
from ingot.data.formats.token_writers import ByteCounter, FolderWriter, TokenWriter
from ingot.data.store.dataset import Dataset
from ingot.data.store.documents import Marks, marks_of
from ingot.data.store.shards import MAX_TOKENS, TOKEN_BYTES
from ingot.data.store.staging import check_output, staged
from ingot.data.store.writer import write_manifest
from ingot.data.tokenizers import MAX_VOCABULARY, Tokenizer, open_tokenizer
from ingot.data.tokenizers.by_name import HEAD, round_trips
from ingot.data.tokenizers.tokenizer_base import NARROW
from ingot.errors import ConfigError, DataError

log = logging.getLogger(__name__)

FORMATS = tuple(OPENERS)
NAMES = {"shards": "fineweb", "gpt-simple": "main"}  # the file name that golf's scripts expect, and the default bucket
PROGRESS_TOKENS = 1 << 20
SAMPLED = 32  # documents per split used to check the tokenizer
Progress = Callable[[int, int], None]  # bytes done, bytes in total


@dataclass(frozen=True)
class WrittenCounts:
    """Counts of a written split; `bytes` is the size of the text its tokens stand for, None without a tokenizer."""

    documents: int
    tokens: int
    bytes: int | None


@dataclass(frozen=True)
class Summary:
    """The result of a conversion."""

    source: Path
    found: str
    folder: Path
    format: str
    tokenizer: str | None
    splits: dict[str, WrittenCounts]
    seconds: float


@dataclass(frozen=True)
class Layout:
    """The layout of the output files."""

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
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Write a dataset to the folder `output` in the format `to`. `mark` separates documents if no tokenizer defines one."""
    started = time.monotonic()
    _check(source, output, to, mark, layout)
    check_output(output, overwrite)
    opened = _tokenizer(source, tokenizer, to)
    written_marks = marks_of(opened) if opened else Marks(mark, mark)
    read_marks = written_marks if mark is None else Marks(mark, mark)
    if read_marks == Marks() and source.format in ("nanogpt", "shards") and opened is None:
        log.warning("nothing says where documents begin, so each split is one; give --tokenizer, or --mark ID")
    if opened and source.known_tokenizer is None:
        _check_tokenizer(source, opened, read_marks)
    with staged(output, overwrite) as stage, ExitStack() as files:
        make = partial(_writer, stage.folder, to, written_marks, opened, layout, files, source)
        writers = {split: make(split) for split in SPLITS if split in source.tokens or to == "ingot"}
        _copy(source, writers, read_marks, progress)
        if to in ("nanogpt", "shards") and len(names := _bucket_names(source)) > 1:
            log.warning("%s has no buckets, so %s are one now", to, ", ".join(names))
        if not writers.get("train") or not writers["train"].documents:
            raise DataError(f"{source.folder} has nothing to train on: no training documents")
        if opened and to == "nanogpt":
            write_meta(stage.folder, opened)
        if opened and to == "ingot":
            splits = {name: w.record for name, w in writers.items() if isinstance(w, FolderWriter) and w.record}
            origin = {"converted_from": source.format, "input": str(source.folder), "bytes": "those that the tokens stand for"}
            write_manifest(stage.folder, opened, splits, origin)
    counts = {split: WrittenCounts(writer.documents, writer.tokens, writer.bytes) for split, writer in writers.items()}
    if to in ("nanogpt", "gpt-simple") and "val" not in writers:
        log.warning("%s has no validation data, which %s needs", source.folder, to)
    if opened and not opened.lossless and to == "ingot":
        log.warning(
            "bytes are those that the tokens stand for; the text itself, of which %s may lose some, is not there", opened.kind
        )
    kind = opened.kind if opened else None
    return Summary(source.folder, source.format, output, to, kind, counts, time.monotonic() - started)


def _bucket_names(source: Dataset) -> list[str]:
    return sorted({bucket.name for split in source.splits.values() for bucket in split.record.buckets})


def _check(source: Dataset, output: Path, to: str, mark: int | None, layout: Layout) -> None:
    if to not in FORMATS:
        raise ConfigError(f"unknown format {to!r}; known are {', '.join(FORMATS)}")
    if source.format == to == "ingot":
        raise ConfigError(f"{source.folder} is a prepared folder already")
    if mark is not None and not 0 <= mark < MAX_VOCABULARY:
        raise ConfigError(f"--mark {mark} is not a token id; give 0 to {MAX_VOCABULARY - 1:,}")
    if not 1 <= layout.shard_tokens <= MAX_TOKENS:
        raise ConfigError(f"--shard-tokens {layout.shard_tokens:,} is out of range; give 1 to {MAX_TOKENS:,}")
    if layout.name is not None and not re.fullmatch(r"\w[\w.-]*", layout.name):
        raise ConfigError(f"--name {layout.name!r} is not a name for files; use letters, digits, dots, - and _")
    if output.resolve() in (source.folder.resolve(), *source.folder.resolve().parents):
        raise ConfigError(f"output {output} is where the source is; give another folder")


def _tokenizer(source: Dataset, name: str | None, to: str) -> Tokenizer | None:
    if source.known_tokenizer is not None:
        if name not in (None, source.known_tokenizer.kind):
            raise ConfigError(
                f"{source.folder} names its own tokenizer, {source.known_tokenizer.kind}; leave --tokenizer {name} out"
            )
        return source.known_tokenizer
    if name is None and to == "ingot":
        raise ConfigError(
            f"{source.folder} does not say what its tokens stand for; give --tokenizer (gpt2, a .model, tokenizer.json)"
        )
    return None if name is None else open_tokenizer(name)


def _check_tokenizer(source: Dataset, tokenizer: Tokenizer, marks: Marks) -> None:
    """Refuse a tokenizer that did not make the tokens, as far as the first documents of each split tell."""
    if source.format == "nanogpt":
        check_meta_size(source.folder if source.folder.is_dir() else source.folder.parent, tokenizer)
    documents = chain.from_iterable(islice(source.documents(split, marks), SAMPLED) for split in source.splits)
    heads = [np.concatenate(document)[:HEAD] for parts in documents if (document := [part[:HEAD] for part in parts[:8]])]
    result = round_trips(tokenizer, (head for head in heads if head.max() < tokenizer.vocab_size))
    if not result.fit:
        raise DataError(
            f"the {tokenizer.kind} tokenizer did not make the tokens of {source.folder}: it makes other tokens of the text of "
            f"{len(result.wrong)} of {result.tried} documents; give the one that made them"
        )


def _writer(
    folder: Path,
    to: str,
    marks: Marks,
    tokenizer: Tokenizer | None,
    layout: Layout,
    files: ExitStack,
    source: Dataset,
    split: str,
) -> TokenWriter:
    counter = ByteCounter(tokenizer, str(source.folder)) if tokenizer else None
    wide = tokenizer.vocab_size > NARROW if tokenizer else _is_wide(source) or (marks.eos or 0) >= NARROW
    name = layout.name or NAMES.get(to, "")
    if to == "nanogpt":
        return nanogpt_writer(folder, split, marks, counter, files)
    if to == "shards":
        return shard_writer(folder, split, marks, counter, files, name, layout.shard_tokens, wide)
    if to == "gpt-simple":
        return PairWriter(
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


def _copy(source: Dataset, writers: dict[str, TokenWriter], marks: Marks, progress: Progress | None) -> None:
    done, reported, total = 0, 0, sum(source.tokens.values())
    keep_buckets = _bucket_names(source) != [NAMES["gpt-simple"]]  # gpt-simple's name for data without buckets
    for split, writer in writers.items():
        for bucket, documents in source.split(split).bucket_documents(marks) if split in source.tokens else ():
            if bucket is not None and keep_buckets:
                writer.begin_bucket(bucket)
            for document in documents:
                writer.add(document)
                done += sum(map(len, document))
                if progress and done - reported >= PROGRESS_TOKENS:
                    reported = done
                    progress(2 * done, 2 * total)
        writer.close()
    if progress:
        progress(2 * total, 2 * total)


def _is_wide(source: Dataset) -> bool:
    return any(split.dtype.itemsize > TOKEN_BYTES for split in source.splits.values())
